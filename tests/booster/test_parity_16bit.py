"""bf16 and fp16: training over ranks follows one process that has the same master weights, within their rounding.

bf16 keeps 8 bits and fp16 11, so one rounding is off by at most 2⁻⁹ or 2⁻¹² of a number. Layouts add in another order and
round elsewhere; over one rank nothing differs, and there the numbers must be the same bits.
"""

import math

import pytest
import torch
from parity_runs import VOCAB, unequal
from torch.optim import SGD, AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.model.layout import layout_of, set_layout
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

STEPS = 5
EPS = {"bf16": 2**-8, "fp16": 2**-11}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2.0**10  # stays where it is: with growth the steps themselves would not change, but what underflows would
OFF = {"bf16": 0.06, "fp16": 0.01}  # how far the weights may be off, in what they have moved

# name: (ranks, plugin, options)
ENGINES = {
    "ddp 2": (2, TorchDDPPlugin, {}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "tp 2 × dp 2": (4, HybridParallelPlugin, {"tp_size": 2}),
    "zero 1": (2, LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "zero 2, small buckets": (2, LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 4 << 10}),
    "zero 2, reduced in fp32": (2, LowLevelZeroPlugin, {"stage": 2, "communication_dtype": torch.float32}),
    "zero 1, offloaded": (2, LowLevelZeroPlugin, {"stage": 1, "cpu_offload": True}),
    "tp 2 × dp 2, zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "tp 2 × dp 2, zero 2": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 2}),
    "fsdp 2": (2, TorchFSDPPlugin, {}),
    "pp 2": (2, HybridParallelPlugin, {"pp_size": 2}),
    "pp 2 × tp 2": (4, HybridParallelPlugin, {"tp_size": 2, "pp_size": 2}),
    "pp 2 × dp 2, zero 1": (4, HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1}),
}
ALONE = [name for name, (_, _, options) in ENGINES.items() if not {"tp_size", "pp_size"} & options.keys()]


def small(name):
    return tiny_model(name, vocab_size=VOCAB, num_hidden_layers=2)


def adamw(model, fused=None):
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3, fused=fused)


def momentum(model, fused=None):
    return SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)


class MasterReference:
    """Plain PyTorch: a model in 16 bits, and a float32 copy of its weights on which the optimizer steps.

    Args:
        fused: step by torch's fused kernel, as ZeRO does.
    """

    def __init__(self, name, precision="bf16", optimizer_fn=adamw, fused=None):
        self.master = small(name)
        self.optimizer = optimizer_fn(self.master, fused)
        self.model, self.scale = small(name), SCALE if precision == "fp16" else 1.0
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(DTYPES[precision])

    def step(self, batch):
        loss = self.model(**batch).loss
        (loss * self.scale).backward()
        for master, parameter in zip(self.master.parameters(), self.model.parameters()):
            master.grad, parameter.grad = parameter.grad.float() / self.scale, None
        self.norm = torch.cat([p.grad.double().flatten() for p in self.master.parameters()]).norm().item()
        self.optimizer.step()
        for master, parameter in zip(self.master.parameters(), self.model.parameters()):
            parameter.data.copy_(master.data)
        return loss.item()


def master_of(optimizer, dtype):
    """A function from a parameter to its float32 weights, as much of them as the rank's model holds."""
    stepped = optimizer.stepped
    if hasattr(stepped, "master"):
        return stepped.master.get
    if not hasattr(stepped, "units"):
        return lambda param: param  # FSDP: the parameters themselves are the masters
    masters = {p: torch.zeros(p.shape) for units in stepped.units for u in units for p in u.bucket.params}
    for unit in (unit for units in stepped.units for unit in units):
        assert unit.tensor.dtype is torch.float32
        assert unit.model_part().equal(unit.tensor.view(-1).to(dtype)), "the model computes with the rounded master"
        for piece in unit.pieces:
            first = piece.offset - unit.start
            piece.of(masters[piece.param]).copy_(
                unit.tensor.detach().view(-1)[first : first + piece.stop - piece.start]
            )
    for param, master in masters.items():
        if stepped.axis.size > 1:
            torch.distributed.all_reduce(master, group=stepped.axis.group)  # every entry has one owner
        set_layout(master, layout_of(param))
        assert param.data.equal(master.to(dtype)), "and gets that of all owners"
    return masters.get


def train(engine, name, precision, optimizer_fn=adamw):
    """Losses and norms over ranks and in one process, and how far the master weights are from those of one process,
    measured by how far they have moved (both as Euclidean norms over all weights).
    """
    _, plugin_class, options = ENGINES[engine]
    plugin = plugin_class(**options, precision=precision, loss_scale=LossScale(initial=SCALE, growth_interval=0))
    zero = plugin_class is LowLevelZeroPlugin or "zero_stage" in options
    booster, model = Booster(plugin=plugin), small(name)
    reference = MasterReference(name, precision, optimizer_fn, fused=True if zero and optimizer_fn is adamw else None)
    start = {key: p.detach().clone() for key, p in reference.master.named_parameters()}
    names = canonical_names(model)
    model, optimizer, *_ = booster.boost(model, optimizer_fn(model))
    losses, wanted, norms, wanted_norms = [], [], [], []
    for number in range(STEPS):
        batch = unequal()[number % 2]
        share = rows_of(batch, plugin.mesh.rank("dp"), plugin.mesh.size("dp"))
        if "pp_size" in options:
            loss = booster.execute_pipeline(iter([share]), model, None, optimizer)["loss"]
        else:
            loss = model(**share).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(optimizer.grad_norm)
        wanted.append(reference.step(batch))
        wanted_norms.append(reference.norm)
    assert optimizer.loss_scale == (SCALE if precision == "fp16" else 1)
    for parameter, master in getattr(optimizer.stepped, "master", {}).items():
        assert parameter.dtype is DTYPES[precision] and master.dtype is torch.float32
        assert parameter.data.equal(master.to(DTYPES[precision])), "what the model computes with is the rounded master"
    masters = gather_parameters(model.unwrap(), master_of(optimizer, DTYPES[precision]), names, plugin.mesh.world)
    end = {key: p.detach() for key, p in reference.master.named_parameters()}
    assert masters.keys() == end.keys()
    for key, master in masters.items():
        assert master.missing == 0, key
        assert master.spread == 0.0, f"ranks have drifted apart in {key}, by {master.spread:.1e}"
    off = sum((masters[key].value - end[key]).square().sum() for key in end).sqrt()
    moved = sum((start[key] - end[key]).square().sum() for key in end).sqrt()
    worst_norm = max(abs(a - b) / b for a, b in zip(norms, wanted_norms))
    return losses, wanted, float(off / moved), worst_norm


@pytest.mark.sample("*-bf16-adamw", "*-fp16-momentum")
@pytest.mark.parametrize("optimizer_fn", [adamw, momentum])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("engine", ALONE)
def test_over_one_rank_it_is_the_same_bits(engine, precision, optimizer_fn):
    for name in ("LT", "G2"):
        losses, wanted, off, norm = run_on_ranks(1, train, engine, name, precision, optimizer_fn)[0]
        assert losses == wanted
        assert off == 0.0
        assert norm <= 1e-6  # added up in another order


@pytest.mark.sample("LT-*-bf16", "G2-*zero*-fp16", "G2-pp 2-fp16")
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["LT", "G2", "qwen3"])
def test_over_several_ranks_it_is_the_same_within_rounding(engine, name, precision):
    results = run_on_ranks(ENGINES[engine][0], train, engine, name, precision)
    assert all(result == results[0] for result in results), "every rank reports the same numbers"
    losses, wanted, off, norm = results[0]
    print(
        f"{engine}, {name}, {precision}: loss",
        f"{max(abs(a / b - 1) for a, b in zip(losses, wanted)):.1e}",
        f"weights {off:.1e} norm {norm:.1e}",
    )
    assert wanted[-1] < wanted[0] - 0.5, "the reference has learned"
    for number, (loss, target) in enumerate(zip(losses, wanted)):
        assert math.isclose(loss, target, rel_tol=2 * EPS[precision]), f"step {number}"
    assert off <= OFF[precision]
    assert norm <= 16 * EPS[precision]
