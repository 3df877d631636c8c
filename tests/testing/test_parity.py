"""The parity check itself: it passes a right data-parallel trainer, and finds each fault planted in one.

The trainer here is a few lines of plain PyTorch behind the names of the public surface, so that what is tested is the
check and not the library.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.cluster.mesh import ParallelMesh
from colonnade.testing import parity
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


class PlainPlugin:
    """Data parallelism by hand: the gradients of token-weighted losses are summed over the ranks."""

    def __init__(self, max_norm=0.0, fault=None):
        self.mesh, self.max_norm, self.fault = ParallelMesh(), max_norm, fault
        self.synchronize, self.reduced = True, False


class PlainModel(nn.Module):
    def __init__(self, module, plugin):
        super().__init__()
        self.module, self.plugin = module, plugin

    def unwrap(self):
        return self.module

    def forward(self, **batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(tokens)
        loss = self.module(**batch, num_items_in_batch=tokens).loss
        if self.plugin.fault == "mean of means":
            loss = self.module(**batch).loss / dist.get_world_size()
        if self.plugin.fault == "local loss":
            return SimpleNamespace(loss=loss)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return SimpleNamespace(loss=loss + (total - loss.detach()))


class PlainOptimizer:
    def __init__(self, inner, model, plugin):
        self.inner, self.model, self.plugin, self.grad_norm = inner, model, plugin, None

    def zero_grad(self):
        self.inner.zero_grad()
        self.plugin.reduced = False

    def step(self):
        fault, max_norm = self.plugin.fault, self.plugin.max_norm
        if fault == "hidden gradient":
            for parameter in self.model.parameters():
                parameter.grad = parameter.hidden
        named = [(n, p) for n, p in self.model.named_parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_([p for _, p in named], float("inf") if fault == "no clip" else max_norm or 1e9)
        self.grad_norm = norm * 1.001 if fault == "norm" else norm
        for name, parameter in named:
            if fault == "one gradient doubled later" and name.endswith("1.mlp.up_proj.weight"):
                parameter.grad *= 2
        self.inner.step()
        with torch.no_grad():
            if fault == "drift" and dist.get_rank() == 1:
                named[3][1].view(-1)[0] += 1e-7
            if fault == "decays frozen":
                self.model.module.model.embed_tokens.weight.mul_(1 - 1e-7)


class PlainBooster:
    def __init__(self, plugin):
        self.plugin = plugin

    def boost(self, model, optimizer, criterion=None, dataloader=None, lr_scheduler=None):
        wrapped = PlainModel(model, self.plugin)
        return wrapped, PlainOptimizer(optimizer, wrapped, self.plugin), criterion, dataloader, lr_scheduler

    def backward(self, loss, optimizer):
        fault = self.plugin.fault
        if fault == "last micro-step only":
            optimizer.zero_grad()
        trained = [(n, p) for n, p in optimizer.model.named_parameters() if p.requires_grad]
        if self.plugin.reduced:  # the reduction below adds up what every rank has, and this all of them have already
            for _, parameter in trained:
                parameter.grad /= dist.get_world_size()
        loss.backward()
        if self.plugin.synchronize:
            for name, parameter in trained:
                if fault != "not reduced" or not name.endswith("layers.0.input_layernorm.weight"):
                    dist.all_reduce(parameter.grad)
                if fault == "hidden gradient":
                    parameter.hidden, parameter.grad = parameter.grad, None
            self.plugin.reduced = True

    @contextmanager
    def no_sync(self, model, optimizer):
        self.plugin.synchronize = False
        yield
        self.plugin.synchronize = True

    def execute_pipeline(self, data_iter, model, criterion, optimizer, return_loss=True):
        batch = next(data_iter)
        outputs = model(**batch)
        loss = outputs.loss if criterion is None else criterion(outputs, batch)
        self.backward(loss, optimizer)
        return {"loss": loss.detach(), "outputs": None}


def llama():
    return tiny_model("LL", num_hidden_layers=2)


def gpt2():
    return tiny_model("G2")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3}], lr=1e-2, eps=1e-3
    )


def whole_batches():
    return [{"input_ids": ids(4, 16, seed), "labels": ids(4, 16, seed)} for seed in (7, 8, 9)]


def ragged_batches():
    """6 targets for the first of two ranks, 30 for the second."""
    batches = whole_batches()
    for batch in batches:
        batch["labels"][:2, 4:] = -100
    return batches


def embeddings(name):
    return "embed_tokens" in name


def check(fault=None, model_fn=llama, batches_fn=whole_batches, **options):
    parity.Booster = PlainBooster
    options = {"steps": 2} | options
    max_norm = options.get("max_norm", 0.0)
    return assert_same_as_single(model_fn, batches_fn(), lambda: PlainPlugin(max_norm, fault), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 1.0},
        {"batches_fn": ragged_batches},
        {"accumulate": 3},
        {"accumulate": 3, "no_sync": True},
        {"accumulate": 2, "through": "execute_pipeline"},
        {"through": "execute_pipeline"},
        {"optimizer_fn": two_groups},
        {"frozen": embeddings},
        {"model_fn": gpt2, "steps": 5},
    ],
)
def test_a_right_trainer_passes(options):
    reports = run_on_ranks(2, check, **options)
    assert str(reports[0]) == str(reports[1])
    report = reports[0]
    assert report.ok
    assert not report.undetermined
    assert report["gradients"].worst < 2e-6
    assert report["weights"].worst < 2e-6
    assert report["replicas"].worst == 0.0


@pytest.mark.parametrize(
    "fault, kind, says, options",
    [
        ("mean of means", "gradients", "weight", {"batches_fn": ragged_batches}),
        ("local loss", "loss", "step 0 on rank 0", {}),
        ("not reduced", "gradients", "layers.0.input_layernorm.weight", {}),
        ("not reduced", "replicas", "layers.0.input_layernorm.weight", {}),
        ("norm", "gradient norm", "step 0 on rank 0", {}),
        ("no clip", "weights", "weight", {"max_norm": 1.0, "optimizer_fn": sgd}),
        ("one gradient doubled later", "weights", "1.mlp.up_proj.weight", {}),
        ("drift", "replicas", "weight", {}),
        ("decays frozen", "weights", "embed_tokens.weight: frozen", {"frozen": embeddings, "optimizer_fn": sgd}),
        ("last micro-step only", "gradients", "weight", {"accumulate": 3, "no_sync": True}),
    ],
)
def test_a_fault_is_found_and_named(fault, kind, says, options):
    for text in run_on_ranks(2, the_report_that_is_raised, fault, **options):
        assert "NOT the numbers of one process" in text
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"  {kind}"))
        assert ">" in lines[start]
        assert says in lines[start] or says in lines[start + 1]


def the_report_that_is_raised(fault, **options):
    with pytest.raises(AssertionError) as caught:
        check(fault, **options)
    return str(caught.value)


def test_gradients_that_are_not_on_the_parameters_are_probed():
    for options in ({}, {"max_norm": 1.0}):
        report = run_on_ranks(2, check, "hidden gradient", **options)[0]
        assert 0 < report["gradients"].worst < 2e-6


def test_entries_that_rounding_decides_are_counted_and_not_compared():
    """The key bias of GPT-2 has no gradient: the usual Adam moves it by rounding errors divided by themselves."""
    report = run_on_ranks(2, check, model_fn=gpt2, optimizer_fn=adamw, steps=5)[0]
    assert report.ok
    assert 32 <= report.undetermined["transformer.h.0.attn.c_attn.bias"] < 48
    assert sum(report.undetermined.values()) < 200
    assert f"{sum(report.undetermined.values())} of 29568 entries, most in transformer.h." in str(report)


@on_ranks(1)
def test_one_rank_is_compared_too():
    report = check(steps=1)
    assert report["loss"].worst == 0.0


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="neither"):
        parity.Training(llama, whole_batches(), through="pipeline")
    with pytest.raises(ValueError, match="at least one batch"):
        parity.Training(llama, [])
