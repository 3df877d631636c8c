"""The check that everything here rests on: a parallel layout computes what one process computes.

[Note: relative difference]
Two tensors differ by  max|a − b| / max(max|b|, FLOOR · M),  b being the one-process tensor and M the largest |b| over all
tensors of that kind (all gradients, all weights). The floor is there for gradients that are zero in exact arithmetic, such
as that of a key bias without rotary positions: what fp32 leaves of them is rounding, of the size of M · 1e-8. Losses and
gradient norms differ by |a − b| / |b|.

[Note: Adam and rounding]
Adam divides a gradient by its own size: where |g| is about eps, a rounding error of 1e-9 moves the weight by lr · 1e-9 / eps,
a tenth of lr at the usual eps = 1e-8. Measured on tiny models, one process in fp32 misses its own fp64 run by 2e-4 that way
in single entries, and by 7e-3 in key biases. Two things follow. The optimizer used by default has eps = 1e-3: still every
part of Adam, but well conditioned, and sensitive to a wrong scale of the gradient, which Adam with a small eps hides; every
weight is compared. And one process is run in fp64 too: where fp32 misses it by half of the tolerance anywhere, rounding
decides some weights, whatever the layout. Entries that miss it by a tenth after any step are then counted in the report and
not compared (their gradients are). No tolerance moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from colonnade.booster import Booster
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.model.layout import deal
from colonnade.testing.logical import LogicalTensor, canonical_names, gather_parameters, largest
from colonnade.testing.parity_report import Difference, ParityReport, compare_numbers, compare_tensors, relative
from colonnade.testing.single import SingleProcess, Tensors

Batch = dict[str, Any]
_PROBE_LR = 1024.0  # a power of two that dwarfs the weights: (before − after) / lr then rounds like the gradient itself


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences (see [Note: relative difference]) that count as the same numbers, in fp32."""

    loss: float = 1e-5
    grad_norm: float = 1e-5
    gradient: float = 1e-5
    weight: float = 1e-5


def well_conditioned_adamw(model: nn.Module) -> Optimizer:
    """AdamW over the trainable parameters with lr 1e-2, weight decay 0.1 and eps 1e-3; see [Note: Adam and rounding]."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3)


@dataclass(frozen=True)
class Training:
    """What is trained, and how; the same for one process and for the parallel run. See `assert_same_as_single`."""

    model_fn: Callable[[], nn.Module]
    batches: Sequence[Batch]
    optimizer_fn: Callable[[nn.Module], Optimizer] = well_conditioned_adamw
    steps: int = 5
    max_norm: float = 0.0
    accumulate: int = 1
    no_sync: bool = False
    through: Literal["loop", "execute_pipeline"] = "loop"
    frozen: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.through not in ("loop", "execute_pipeline"):
            raise ValueError(f'through={self.through!r} is neither "loop" nor "execute_pipeline"')
        if not self.batches or self.steps < 1 or self.accumulate < 1:
            raise ValueError("at least one batch, one step and accumulate=1 are needed")

    def model(self) -> nn.Module:
        """A fresh model with the frozen parameters frozen."""
        model = self.model_fn()
        for name, parameter in model.named_parameters():
            if self.frozen is not None and self.frozen(name):
                parameter.requires_grad_(False)
        return model

    def micro_batches(self, step: int) -> list[Batch]:
        """The global batches whose gradients are accumulated in a step; the given ones, over and over."""
        first = step * self.accumulate
        return [self.batches[i % len(self.batches)] for i in range(first, first + self.accumulate)]


def assert_same_as_single(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Batch],
    plugin_fn: Callable[[], Any],
    optimizer_fn: Callable[[nn.Module], Optimizer] = well_conditioned_adamw,
    *,
    steps: int = 5,
    max_norm: float = 0.0,
    accumulate: int = 1,
    no_sync: bool = False,
    through: Literal["loop", "execute_pipeline"] = "loop",
    frozen: Callable[[str], bool] | None = None,
    tolerance: Tolerance | None = None,
) -> ParityReport:
    """Train a model in one process and in parallel, and fail where the numbers differ. Call it on every rank.

    Compared are the loss of every (micro-)step and the gradient norm of every step, each on every rank, all gradients of
    the first step, all weights after the last, and that all ranks holding the same entry hold the same bits.

    Args:
        model_fn: builds the unmodified model, with the same weights at every call and on every rank.
        batches: *global* batches as keyword arguments of the model, tensors with the batch first; labels of −100 are no
            targets. Each data-parallel rank gets its rows of them. Used over and over when there are too few.
        plugin_fn: builds the plugin, with precision "fp32" and this `max_norm`.
        optimizer_fn: makes the optimizer from the model, parameter groups included.
        max_norm: clip to this gradient norm; 0 does not clip.
        accumulate: global batches per step; the loss of each is divided by it.
        no_sync: put all but the last of these into `booster.no_sync`.
        through: "loop" for model, `booster.backward`, or `booster.execute_pipeline`.
        frozen: parameters for whose names this holds are frozen before boosting, and must keep their bits.
        tolerance: by default 1e-5 for everything.

    Returns:
        The worst difference of each kind and where it is.

    Raises:
        AssertionError: with the report, the same on every rank.
    """
    training = Training(model_fn, batches, optimizer_fn, steps, max_norm, accumulate, no_sync, through, frozen)
    report = compare_with_single(training, plugin_fn, tolerance)
    if not report.ok:
        raise AssertionError(str(report))
    return report


def compare_with_single(
    training: Training, plugin_fn: Callable[[], Any], tolerance: Tolerance | None = None
) -> ParityReport:
    """As `assert_same_as_single`, but differences are reported and not raised."""
    tolerance = tolerance or Tolerance()
    one = _train_single(training, tolerance)
    plugin = plugin_fn()
    many = _train_parallel(training, plugin, one.names)
    gradients = many.gradients
    wanted = one.gradients
    if any(name not in gradients or gradients[name].missing for name in wanted):
        probed = _probe_gradients(training, plugin_fn(), one.names)
        gradients = {name: g for name, g in probed.items() if name in wanted or largest(g.value) > 0}
        wanted = {name: g * one.clip_factor for name, g in wanted.items()}
    frozen = {name for name, parameter in training.model().named_parameters() if not parameter.requires_grad}
    differences = (
        compare_numbers("loss", many.losses, one.losses, tolerance.loss),
        compare_numbers("gradient norm", many.norms, one.norms, tolerance.grad_norm, optional=training.max_norm == 0),
        compare_tensors("gradients", gradients, wanted, tolerance.gradient),
        compare_tensors("weights", many.weights, one.weights, tolerance.weight, one.undetermined, exact=frozen),
        _compare_replicas(many.weights),
    )
    return ParityReport(
        layout=str(plugin.mesh),
        steps=training.steps,
        differences=differences,
        rounding=one.rounding,
        undetermined={name: int(mask.sum()) for name, mask in one.undetermined.items() if mask.any()},
        num_weights=sum(weight.numel() for weight in one.weights.values()),
    )


@dataclass
class _One:
    """What one process computed, and what rounding does to it."""

    names: dict[str, str]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    undetermined: dict[str, torch.Tensor] = field(default_factory=dict)  # masks of entries that rounding decides
    rounding: dict[str, float] = field(default_factory=dict)  # by kind, fp32 against fp64
    clip_factor: float = 1.0


def _train_single(training: Training, tolerance: Tolerance) -> _One:
    """Plain PyTorch in one process, in fp32 and in fp64 side by side."""
    fp32, fp64 = (
        SingleProcess(training.model(), training.optimizer_fn, dtype, training.max_norm)
        for dtype in (torch.float32, torch.float64)
    )
    one = _One(
        canonical_names(fp32.model), undetermined={n: torch.zeros_like(w) > 0 for n, w in fp32.weights().items()}
    )
    rounding = dict.fromkeys(("loss", "gradient norm", "gradients", "weights"), 0.0)
    for step in range(training.steps):
        micro_batches = training.micro_batches(step)
        result, exact = fp32.step(micro_batches), fp64.step(micro_batches)
        one.losses += result.losses
        one.norms.append(result.norm)
        rounding["loss"] = max(rounding["loss"], *(relative(a, b) for a, b in zip(result.losses, exact.losses)))
        rounding["gradient norm"] = max(rounding["gradient norm"], relative(result.norm, exact.norm))
        if step == 0:
            one.gradients = result.gradients
            rounding["gradients"] = _rounding(result.gradients, exact.gradients)
            if training.max_norm > 0:
                one.clip_factor = min(1.0, training.max_norm / (result.norm + 1e-6))
        one.weights, exact_weights = fp32.weights(), fp64.weights()
        rounding["weights"] = max(rounding["weights"], _rounding(one.weights, exact_weights))
        for name, weight in one.weights.items():
            limit = 0.1 * tolerance.weight * largest(exact_weights[name])
            one.undetermined[name] |= (weight - exact_weights[name]).abs() > limit
    if rounding["weights"] <= 0.5 * tolerance.weight:  # a well conditioned optimizer: every entry is compared
        one.undetermined = {}
    one.rounding = rounding
    return one


def _rounding(fp32: Tensors, fp64: Tensors) -> float:
    return compare_tensors("", {n: LogicalTensor(t.double(), 0, 0.0) for n, t in fp32.items()}, fp64, math.inf).worst


@dataclass
class _Many:
    """What the ranks computed, put together; the same on every rank."""

    losses: list[list[float | None]]  # by rank, then by (micro-)step
    norms: list[list[float | None]]  # by rank, then by step; None where the plugin reports none
    gradients: dict[str, LogicalTensor]
    weights: dict[str, LogicalTensor]


def _train_parallel(training: Training, plugin: Any, names: dict[str, str]) -> _Many:
    world = Axis.of(None, "world")
    booster, model, optimizer, criterion = _boost(training, plugin, training.optimizer_fn)
    losses: list[float] = []
    norms: list[float | None] = []
    gradients: dict[str, LogicalTensor] = {}
    for step in range(training.steps):
        optimizer.zero_grad()
        losses += _backward(training, step, plugin, booster, model, optimizer, criterion)
        if step == 0:
            gradients = gather_parameters(model.unwrap(), _reduced_gradient, names, world)
        optimizer.step()
        norms.append(None if optimizer.grad_norm is None else float(optimizer.grad_norm))
    weights = gather_parameters(model.unwrap(), lambda parameter: parameter, names, world)
    of_ranks = all_gather_object((losses, norms), world)
    return _Many([losses for losses, _ in of_ranks], [norms for _, norms in of_ranks], gradients, weights)


def _boost(
    training: Training, plugin: Any, optimizer_fn: Callable[[nn.Module], Optimizer]
) -> tuple[Any, Any, Any, Any]:
    booster = Booster(plugin=plugin)
    model = training.model()
    criterion = _Share(training.accumulate) if training.accumulate > 1 else None
    model, optimizer, criterion, *_ = booster.boost(model, optimizer_fn(model), criterion)
    if hasattr(optimizer, "check_replicas"):
        optimizer.check_replicas = False  # here they are compared entry by entry, and the report names them
    return booster, model, optimizer, criterion


class _Share:
    """Criterion for `execute_pipeline`: the model's own loss, divided by the number of batches accumulated."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss / self.accumulate


def _backward(
    training: Training, step: int, plugin: Any, booster: Any, model: Any, optimizer: Any, criterion: Any
) -> Iterator[float]:
    """Forward and backward of one step on this rank's rows; the loss of each global batch, as this rank sees it."""
    last = training.accumulate - 1
    for i, batch in enumerate(training.micro_batches(step)):
        share = rows_of(batch, plugin.mesh.rank("dp"), plugin.mesh.size("dp"))
        with booster.no_sync(model, optimizer) if training.no_sync and i < last else nullcontext():
            if training.through == "loop":
                loss = model(**share).loss
                booster.backward(loss / training.accumulate, optimizer)
                yield loss.item()
            else:
                out = booster.execute_pipeline(iter([share]), model, criterion, optimizer, return_loss=True)
                yield out["loss"].item() * training.accumulate


def rows_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """A data-parallel rank's rows of a global batch, on this process's device; what is no tensor goes to every rank."""
    size = max((value.shape[0] for value in batch.values() if torch.is_tensor(value)), default=0)
    start, stop = deal(size, ranks)[rank]
    return {k: v[start:stop].to(current_device()) if torch.is_tensor(v) else v for k, v in batch.items()}


def _reduced_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient where the plugin leaves it on the parameter: after backward it is then the reduced one, as large as
    the parameter. ZeRO and its like keep it elsewhere.
    """
    gradient = parameter.grad
    return gradient if gradient is not None and gradient.shape == parameter.shape else None


def _probe_gradients(training: Training, plugin: Any, names: dict[str, str]) -> dict[str, LogicalTensor]:
    """The gradients of the first step from what a step of SGD does to the weights; works for every plugin."""
    world = Axis.of(None, "world")

    def sgd(model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=_PROBE_LR)

    booster, model, optimizer, criterion = _boost(training, plugin, sgd)
    before = gather_parameters(model.unwrap(), lambda p: p if p.requires_grad else None, names, world)
    for _ in _backward(training, 0, plugin, booster, model, optimizer, criterion):
        pass
    optimizer.step()
    after = gather_parameters(model.unwrap(), lambda p: p if p.requires_grad else None, names, world)
    return {
        name: LogicalTensor((before[name].value - weight.value) / _PROBE_LR, weight.missing, weight.spread)
        for name, weight in after.items()
    }


def _compare_replicas(weights: dict[str, LogicalTensor]) -> Difference:
    """Ranks that hold the same entry must hold the same bits, or they drift apart."""
    spreads = sorted(((tensor.spread, name) for name, tensor in weights.items()), key=lambda spread: -spread[0])
    worst, where = spreads[0]
    return Difference("replicas", worst, where if worst else "", 0.0, tuple(s for s in spreads if s[0] > 0))
