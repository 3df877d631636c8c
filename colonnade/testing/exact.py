"""One training step in fp64, split and in one piece: for models of which a comparison in fp32 says nothing.

Some models amplify rounding: one process in fp32 is further from its own fp64 run than the tolerance allows two runs to be
apart, or would be if the weights had been rounded another way. What a layout does wrong is as wrong in fp64, where rounding
is a billion times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from colonnade.booster import Booster
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.policy import Policy
from colonnade.testing.logical import LogicalTensor, canonical_names, gather_parameters
from colonnade.testing.parity import Tolerance, well_conditioned_adamw
from colonnade.testing.parity_report import ParityReport, compare_tensors, relative
from colonnade.testing.single import SingleProcess

UNSURE = 0.5  # the part of the tolerance from which on rounding alone may explain that two runs in fp32 differ
LAST_BIT = 2.0**-24  # by how much a number in fp32 may be off, relatively
SAMPLES = 8


def why_fp32_is_unsure(report: ParityReport, model_fn: Callable[[], nn.Module], batch: Mapping[str, Any]) -> str:
    """Why a comparison in fp32 that has failed says nothing; empty where it has not failed, or says that something is wrong.

    Args:
        report: the comparison.
        model_fn, batch: as of `compare_in_fp64`.
    """
    if report.ok:
        return ""
    limit, own = UNSURE * Tolerance().gradient, max(report.rounding.values())
    if own > limit:
        return f"one process in fp32 is off from it by {own:.0e}"
    moved = sensitivity(model_fn, batch)
    return f"the last bit of the weights moves the gradients by {moved:.0e}" if moved > limit else ""


def sensitivity(model_fn: Callable[[], nn.Module], batch: Mapping[str, Any]) -> float:
    """The largest relative difference that a change of every weight by its last bit in fp32 makes to a gradient.

    Computed in fp64 by one process, so that nothing but the change itself counts; the same at every call.
    """
    exact = SingleProcess(model_fn(), well_conditioned_adamw, torch.float64).step([dict(batch)]).gradients
    worst = 0.0
    for seed in range(SAMPLES):
        model, generator = model_fn().double(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) - 1
                parameter.mul_(1 + LAST_BIT * signs.to(parameter.device))
        moved = SingleProcess(model, well_conditioned_adamw, torch.float64).step([dict(batch)]).gradients
        found = {name: LogicalTensor(gradient, 0, 0.0) for name, gradient in moved.items()}
        worst = max(worst, compare_tensors("gradients", found, exact, math.inf).worst)
    return worst


def compare_in_fp64(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    axis: Axis,
    policy_fn: Callable[[nn.Module], Policy | None] | None = None,
) -> dict[str, float]:
    """Largest relative differences of loss and gradients, the same on every rank; called by every rank of the axis.

    Args:
        model_fn: builds the unmodified model, with the same weights at every call and on every rank.
        batch: of which every rank computes all rows.
        axis: over which the model is split.
        policy_fn: the policy for a model; by default, or where it gives None, the model's own.
    """
    one = SingleProcess(model_fn(), well_conditioned_adamw, torch.float64)
    names, wanted = canonical_names(one.model), one.step([dict(batch)])
    policy = policy_fn(model_fn()) if policy_fn is not None else None
    model, _ = ShardFormer(ShardConfig(axis)).optimize(model_fn().double().to(current_device()), policy)
    moved = {key: _moved(value) for key, value in batch.items()}
    with in_double():
        loss = model(**moved).loss
        loss.backward()
    gradients = gather_parameters(model, lambda parameter: parameter.grad, names, axis)
    found = compare_tensors("gradients", gradients, wanted.gradients, Tolerance().gradient)
    losses = all_gather_object(relative(loss.item(), wanted.losses[0]), axis)
    return {"loss": max(losses), "gradients": found.worst}


def compare_pipeline_in_fp64(
    model_fn: Callable[[], nn.Module], batch: Mapping[str, Any], plugin: Any
) -> dict[str, float]:
    """As `compare_in_fp64`, of a training step through a pipeline's own micro-batches; called by every rank.

    Args:
        plugin: a fresh `HybridParallelPlugin` in fp32 and without ZeRO, whose only axes are tp and pp.
    """
    one = SingleProcess(model_fn(), well_conditioned_adamw, torch.float64)
    names, wanted, world = canonical_names(one.model), one.step([dict(batch)]), Axis.of(None, "world")
    plain = model_fn()
    booster = Booster(plugin=plugin)
    model: Any
    model, optimizer, *_ = booster.boost(plain, well_conditioned_adamw(plain))
    model.unwrap().double()
    model.pipeline.plan.cut.chain.shadow.double()
    moved = {key: _moved(value) for key, value in batch.items()}
    with in_double():
        loss = booster.execute_pipeline(iter([moved]), model, None, optimizer)["loss"]
    gradients = gather_parameters(model.unwrap(), lambda parameter: parameter.grad, names, world)
    found = compare_tensors("gradients", gradients, wanted.gradients, Tolerance().gradient)
    losses = all_gather_object(relative(loss.item(), wanted.losses[0]), world)
    return {"loss": max(losses), "gradients": found.worst}


def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(current_device(), torch.float64 if value.is_floating_point() else value.dtype)
