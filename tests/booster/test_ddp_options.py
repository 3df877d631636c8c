"""TorchDDPPlugin's options: they reach torch's DistributedDataParallel, and with each training is that of one process."""

import warnings

import pytest
import torch
from parity_runs import build, plain, unequal
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import ModelOutput

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import TorchDDPPlugin, torch_ddp_plugin
from colonnade.errors import ConfigError
from colonnade.testing.parity import assert_same_as_single, well_conditioned_adamw
from colonnade.testing.ranks import on_ranks, run_on_ranks

OPTIONS = {
    "broadcast_buffers": False,
    "bucket_cap_mb": 0.01,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb_list": [1, 2],
    "skip_all_reduce_unused_params": True,
    "batched_grad_copy": True,
}


def boost(model, **options):
    """(booster, boosted model, optimizer) under TorchDDPPlugin in fp32."""
    booster = Booster(plugin=TorchDDPPlugin(precision="fp32", **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return booster, model, optimizer


# -------------------------------------------------------------------------------------------------------- they arrive


@on_ranks(2)
def test_options_reach_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing deprecated is passed on
        ddp = boost(nn.Linear(4, 4), **OPTIONS)[1].module
        assert boost(nn.Linear(4, 4), static_graph=True)[1].module.static_graph
        plain_ddp = boost(nn.Linear(4, 4))[1].module
    assert isinstance(ddp, DistributedDataParallel)
    assert ddp.bucket_bytes_cap_list == [1 << 20, 2 << 20]
    for name, value in OPTIONS.items():
        if name not in ("check_reduction", "bucket_cap_mb", "bucket_cap_mb_list"):
            assert getattr(ddp, name) == value, name
            assert getattr(plain_ddp, name) != value, name
    assert (plain_ddp.bucket_bytes_cap, plain_ddp.bucket_bytes_cap_list) == (25 << 20, [])
    assert boost(nn.Linear(4, 4), bucket_cap_mb=2)[1].module.bucket_bytes_cap == 2 << 20


@on_ranks(2)
def test_options_can_be_given_by_position_in_the_order_of_torch():
    plugin = TorchDDPPlugin(False, 2, True, False, True, True)
    names = (
        "forward_sync_buffers",
        "bucket_cap_mb",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
    )
    assert [plugin.ddp_options[name] for name in names] == [False, 2, True, True, True]


@on_ranks(1)
def test_an_option_of_a_newer_torch_is_refused_by_name():
    known = torch_ddp_plugin._DDP_OPTIONS
    torch_ddp_plugin._DDP_OPTIONS = {name: p for name, p in known.items() if name != "batched_grad_copy"}
    try:
        TorchDDPPlugin()
        with pytest.raises(ConfigError, match="has no batched_grad_copy in its DistributedDataParallel"):
            TorchDDPPlugin(batched_grad_copy=True)
    finally:
        torch_ddp_plugin._DDP_OPTIONS = known


@on_ranks(1)
def test_a_static_graph_has_no_micro_batches():
    for micro in ({"num_microbatches": 2}, {"microbatch_size": 1}):
        with pytest.raises(ConfigError, match="static_graph=True cannot be used with micro-batches"):
            TorchDDPPlugin(static_graph=True, **micro)
    TorchDDPPlugin(static_graph=True, num_microbatches=1)


# -------------------------------------------------------------------------------------------- the numbers of one process


class Spare(nn.Module):
    """A Llama beside a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.inner = build("LL")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.spare = nn.Linear(8, 8)

    def forward(self, **inputs):
        return self.inner(**inputs)


def tied():
    return build("LT")


def recomputed():
    model = build("LL")
    model.gradient_checkpointing_enable()
    return model


def recomputed_reentrant():
    model = build("LL")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


WAYS = {
    "clipped": {"max_norm": 1.0},
    "accumulated": {"accumulate": 3},
    "accumulated, no_sync": {"accumulate": 3, "no_sync": True},
    "execute_pipeline": {"through": "execute_pipeline"},
}


def train_each_way(model_fn, options):
    for way, training in WAYS.items():
        micro = {"num_microbatches": 2} if way == "execute_pipeline" and not options.get("static_graph") else {}
        plugin_options = options | micro | {"max_norm": training.get("max_norm", 0.0), "precision": "fp32"}
        try:
            assert_same_as_single(
                model_fn, unequal(), lambda o=plugin_options: TorchDDPPlugin(**o), steps=3, **training
            )
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{options}, {way}: {error}") from error


@pytest.mark.sample("*-2")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "model_fn, options",
    [
        (Spare, {"find_unused_parameters": True}),
        (Spare, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
        (Spare, {"static_graph": True}),
        (tied, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
        (tied, {"batched_grad_copy": True, "gradient_as_bucket_view": True}),
        (tied, {"static_graph": True}),
        (recomputed, {"static_graph": True}),
        (recomputed_reentrant, {"static_graph": True, "gradient_as_bucket_view": True}),
        (recomputed, {"bucket_cap_mb_list": [1, 2], "batched_grad_copy": True, "check_reduction": True}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value),
)
def test_training_with_an_option_is_that_of_one_process(model_fn, options, world):
    run_on_ranks(world, train_each_way, model_fn, options)


def elements_of_micro_steps(options):
    """What each of three micro-steps all-reduces over dp, the first two under no_sync; two steps."""
    booster, model, optimizer = boost(build("LL"), **options)
    batch, sent = plain()[0], []
    for _ in range(2):
        optimizer.zero_grad()
        for micro_step in range(3):
            with colonnade.ledger() as ledger:
                if micro_step < 2:
                    with booster.no_sync(model, optimizer):
                        booster.backward(model(**batch).loss / 3, optimizer)
                else:
                    booster.backward(model(**batch).loss / 3, optimizer)
            sent.append(ledger.elements["all_reduce", "dp"])
        optimizer.step()
    return sent, sum(p.numel() for p in model.parameters())


def test_a_static_graph_is_learned_in_one_backward_that_reduces():
    """torch breaks where the first backward of a static graph is under no_sync, so that one reduces; the numbers are the same."""
    for sent, parameters in run_on_ranks(2, elements_of_micro_steps, {}):
        assert sent == [0, 0, parameters] * 2
    for sent, parameters in run_on_ranks(2, elements_of_micro_steps, {"static_graph": True}):
        assert sent == [parameters, 0, parameters, 0, 0, parameters]


# ----------------------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    """Layers with a BatchNorm, which keeps running statistics in buffers, and takes away what a bias before it adds."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first, self.norm, self.last = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x, target):
        out = self.last(torch.tanh(self.norm(self.first(x))))
        return ModelOutput(loss=F.mse_loss(out, target), out=out)


def rows(number, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(number, 8, generator=generator), "target": torch.randn(number, 4, generator=generator)}


def twice(batch):
    """The same rows for two ranks: a BatchNorm sees its own rank's only, here as many as one process sees."""
    return {key: torch.cat([value, value]) for key, value in batch.items()}


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_model_with_batch_norm_trains_as_one_process(broadcast):
    run_on_ranks(2, train_normed, broadcast)


def train_normed(broadcast):
    assert_same_as_single(
        Normed,
        [twice(rows(6, seed)) for seed in (1, 2)],
        lambda: TorchDDPPlugin(broadcast_buffers=broadcast, precision="fp32", max_norm=1.0),
        well_conditioned_adamw,
        max_norm=1.0,
    )


def running_means(broadcast):
    """The running mean at the start, after a step and before the next one's own update, by this rank's rows."""
    booster, model, optimizer = boost(Normed(), broadcast_buffers=broadcast)
    rank = torch.distributed.get_rank()
    seen = [model.norm.running_mean.clone()]
    model.unwrap().first.register_forward_hook(lambda *_: seen.append(model.norm.running_mean.clone()))
    for step in range(2):
        booster.backward(model(**rows(6, 10 * step + rank)).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_buffers_are_those_of_the_first_rank_or_each_ranks_own():
    for broadcast in (True, False):
        first, second = run_on_ranks(2, running_means, broadcast)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
        assert torch.equal(first[2], second[2]) == broadcast
        assert not torch.equal(first[2], first[1])


def buffers_of_ranks_that_differ(broadcast):
    model = Normed()
    model.norm.running_mean += torch.distributed.get_rank()
    return boost(model, broadcast_buffers=broadcast)[1].norm.running_mean


def test_all_ranks_start_with_the_buffers_of_the_first():
    for broadcast in (True, False):
        for found in run_on_ranks(2, buffers_of_ranks_that_differ, broadcast):
            assert torch.equal(found, torch.zeros(8))
