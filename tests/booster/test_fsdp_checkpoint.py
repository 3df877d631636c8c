"""TorchFSDPPlugin: models on the meta device, saving, loading; META-1."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_models import Odd, odd_batches
from parity_runs import build, rows
from torch import nn
from torch.optim import AdamW

from colonnade import checkpoint
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import CheckpointError, UsageError
from colonnade.model.layout import local_of
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import rows_of, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_config, tiny_model

NAMES = ["LL", "LT", "G2", "MX"]


def boost(model, optimizer_fn=well_conditioned_adamw, **options):
    booster = Booster(plugin=TorchFSDPPlugin(**{"precision": "fp32"} | options))
    model, optimizer, *_ = booster.boost(model, optimizer_fn(model))
    return booster, model, optimizer


def step(booster, model, optimizer, seed=0):
    batch = rows_of(rows(6)[seed], dist.get_rank(), dist.get_world_size())
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights(model):
    found = gather_parameters(model.unwrap(), lambda p: p, {}, Axis.of(None, "world"))
    assert all(t.missing == 0 and t.spread == 0 for t in found.values())
    return {name: t.value for name, t in found.items()}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


def save_train_load(folder, name, options):
    """Save after a step, go on, load, and be back; also after a forward that has left parameters gathered."""
    booster, model, optimizer = boost(build(name), **options)
    step(booster, model, optimizer)
    before = weights(model)
    batch = rows(1)[0]
    with torch.no_grad():
        model(**batch)
    model(**batch)  # without a backward
    booster.save_model(model, folder, size_per_shard="40KB")
    step(booster, model, optimizer)
    model(**batch)
    booster.load_model(model, folder)
    same(weights(model), before)
    optimizer.zero_grad()
    logits = model(**batch).logits.detach()
    return before, logits


@pytest.mark.parametrize(
    "ranks, options", [(2, {}), (3, {"reshard_after_forward": False}), (2, {"reshard_after_forward": None})]
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_loads_in_transformers_and_here(tmp_path, name, ranks, options):
    for before, logits in run_on_ranks(ranks, save_train_load, str(tmp_path / "model"), name, options):
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert plain.config.architectures == [type(build(name)).__name__]
        same({n: p.detach() for n, p in plain.named_parameters()}, before)
        assert (plain(**rows(1)[0]).logits - logits).abs().max() < 1e-5


def load_elsewhere(folder, plugin_class, options):
    booster = Booster(plugin=plugin_class(precision="fp32", **options))
    model, *_ = booster.boost(tiny_model("LT", vocab_size=67, num_hidden_layers=2, noise_seed=4))
    booster.load_model(model, folder)
    return weights(model)


def test_a_folder_goes_from_fsdp_to_every_other_plugin(tmp_path):
    folder = str(tmp_path / "model")
    before, _ = run_on_ranks(3, save_train_load, folder, "LT", {})[0]
    for plugin_class, options in ((TorchDDPPlugin, {}), (HybridParallelPlugin, {"tp_size": 2}), (TorchFSDPPlugin, {})):
        same(run_on_ranks(2, load_elsewhere, folder, plugin_class, options)[0], before)


def read_share(folder):
    _booster, model, _ = boost(build("LL"))
    report = checkpoint.load_model(model.unwrap(), folder, _booster.plugin.mesh)
    own = sum(local_of(p.detach()).numel() for p in model.unwrap().parameters())
    return report.bytes_read, own


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_reads_its_own_rows_only(tmp_path, ranks):
    build("LL").save_pretrained(tmp_path)
    results = run_on_ranks(ranks, read_share, str(tmp_path))
    assert all(read == 4 * own for read, own in results)
    assert sum(own for _, own in results) == sum(p.numel() for p in build("LL").parameters())


def poison():
    """Leave NaN behind in memory that is allocated next."""
    for size in (16, 64, 1024, 1 << 20):
        blocks = [torch.full((size,), float("nan")) for _ in range(8)]
        del blocks


def on_meta(name, folder, precision, options):
    config = tiny_config(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    poison()
    booster, model, optimizer = boost(
        model, lambda m: AdamW(m.parameters(), lr=1e-2, eps=1e-3), precision=precision, **options
    )
    user = model.unwrap()
    with pytest.raises(UsageError, match=r"(?s)have no weights yet.*load_model"):
        model(input_ids=ids(4, 16), labels=ids(4, 16))
    booster.load_model(model, folder)
    assert not [n for n, t in [*user.named_parameters(), *user.named_buffers()] if t.is_meta]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(user.parameters()))
    buffers = {n: b.clone() for n, b in user.named_buffers()}
    share = rows_of({"input_ids": ids(4, 16), "labels": ids(4, 16)}, dist.get_rank(), dist.get_world_size())
    losses = []
    for _ in range(2):
        loss = model(**share).loss
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses, buffers


def trained_in_one_process(name):
    model = tiny_model(name)
    optimizer, losses = AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    for _ in range(2):
        loss = model(input_ids=ids(4, 16), labels=ids(4, 16)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_buffers())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["LL", "LT", "G2", "OP"])
@pytest.mark.parametrize("ranks, options", [(2, {}), (3, {"cpu_offload": True})])
def test_a_model_on_the_meta_device_is_loaded_and_its_buffers_are_computed(tmp_path, name, precision, ranks, options):
    tiny_model(name).save_pretrained(tmp_path)
    wanted, buffers = trained_in_one_process(name)
    for losses, found in run_on_ranks(ranks, on_meta, name, str(tmp_path), precision, options):
        same(found, buffers)
        assert losses == pytest.approx(wanted, abs=1e-5 if precision == "fp32" else 0.03)
        if name == "LL":
            for buffer in ("inv_freq", "original_inv_freq"):
                value = found[f"model.rotary_emb.{buffer}"]
                assert value.dtype is torch.float32
                assert (value - torch.tensor([1.0, 0.1, 0.01, 0.001])).abs().max() <= 1e-8
            if precision == "fp32":
                assert losses[0] == pytest.approx(4.494046, abs=1e-5)


class Counted(nn.Module):
    """A plain module with a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.steps


def refuse_meta():
    with torch.device("meta"):
        model = Counted()
    with pytest.raises(UsageError, match=r"(?s)nothing computes 1 buffers.*steps"):
        boost(model)
    model = Counted()
    model.linear.bias = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(UsageError, match=r"1 parameters .* on the meta device, 1 are not"):
        boost(model)


def test_meta_models_that_cannot_work_are_refused():
    run_on_ranks(2, refuse_meta)


def save_odd(folder):
    booster, model, _ = boost(Odd(), lambda m: AdamW(m.parameters(), lr=0.1))
    before = weights(model)
    booster.save_model(model, folder)
    with torch.no_grad():
        for p in model.unwrap().parameters():
            local_of(p.detach()).zero_()
    booster.load_model(model, folder)
    same(weights(model), before)
    batch = rows_of(odd_batches(0)[0], dist.get_rank(), dist.get_world_size())
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_with_fewer_rows_than_ranks_and_without_dims_are_saved_and_loaded(tmp_path, ranks):
    run_on_ranks(ranks, save_odd, str(tmp_path / "odd"))


def fail_to_save(folder):
    booster, model, _ = boost(build("LL"))
    Path(folder).write_text("a file is in the way") if dist.get_rank() == 0 else None
    with pytest.raises(CheckpointError):
        booster.save_model(model, folder)
    with pytest.raises(UsageError, match="booster.save_model"):
        model.save_pretrained(folder + "x")


def test_a_save_that_fails_fails_on_every_rank(tmp_path):
    run_on_ranks(2, fail_to_save, str(tmp_path / "model"))
