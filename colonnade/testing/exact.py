"""One training step in fp64, split and in one piece: for models of which a comparison in fp32 says nothing.

Some models amplify rounding: one process in fp32 is further from its own fp64 run than the tolerance allows two runs to be
apart. What a layout does wrong is as wrong in fp64, where rounding is a billion times smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.policy import Policy
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import Tolerance, well_conditioned_adamw
from colonnade.testing.parity_report import ParityReport, compare_tensors, relative
from colonnade.testing.single import SingleProcess

# One process's own error in fp32, as a part of the tolerance, from which on fp32 cannot say whether two runs are the same:
# adding up in another order makes an error of the same kind, not of the same size.
UNSURE = 0.25


def fp32_is_unsure(report: ParityReport) -> bool:
    """Whether a comparison in fp32 fails where one process's own rounding is of the size of the tolerance."""
    return not report.ok and max(report.rounding.values()) > UNSURE * Tolerance().gradient


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


def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(current_device(), torch.float64 if value.is_floating_point() else value.dtype)
