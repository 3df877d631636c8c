"""The numeric check that an inferred policy has to pass: a tiny twin of the model, split and not, gives the same numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.model.layout import layout_of
from colonnade.shardformer.inference.probe import probe_inputs
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.shard.shard_config import ShardConfig
from colonnade.shardformer.shard.sharder import ModelSharder

TOLERANCE = 1e-5  # relative, as of every layout; the twin runs in float64, so that rounding is far below it


def difference_on_twin(twin: nn.Module, policy: Policy, axis: Axis) -> str:
    """Train step of a twin in one piece against the same split by the policy. Called by every rank of the axis.

    Args:
        twin: a small model with weights, the same on every rank; it is not changed.

    Returns:
        What differs, or how the split twin failed; empty where nothing does. The same on every rank.
    """
    # two copies: some models change in their first forward (BigBird gives short sequences another attention)
    whole, split = copy.deepcopy(twin).double(), copy.deepcopy(twin).double()
    inputs = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in probe_inputs(whole, torch.device("cpu")).items()
    }
    try:
        ModelSharder(split, policy, ShardConfig(axis)).shard()
        found = _compare(whole, split, inputs)
    except Exception as error:  # whatever a model's own code raises on meeting its shards: the policy does not fit
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
    return next((text for text in all_gather_object(found, axis) if text), "")


def _compare(whole: nn.Module, split: nn.Module, inputs: dict[str, Any]) -> str:
    wanted, found = _step(whole, inputs), _step(split, inputs)
    if not _close(found, wanted, abs(wanted)):
        return f"the loss is {found.item():.8f} instead of {wanted.item():.8f}"
    largest = max((p.grad.abs().max() for p in whole.parameters() if p.grad is not None), default=torch.zeros(()))
    own = dict(whole.named_parameters())
    for name, param in split.named_parameters():
        grad = own[name].grad
        if (grad is None) != (param.grad is None):
            return f"{name} has a gradient only {'split' if grad is None else 'in one piece'}"
        if grad is not None:
            share, own_grad = layout_of(param).extract(grad), param.grad
            if own_grad is None or not _close(own_grad, share, torch.maximum(grad.abs().max(), 1e-2 * largest)):
                return f"the gradient of {name} differs"
    return ""


def _step(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    model.train()
    model.zero_grad()
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        first = output[0] if not isinstance(output, torch.Tensor) else output
        weights = torch.linspace(0.1, 1.0, math.prod(first.shape), dtype=first.dtype).view(first.shape)
        loss = (first * weights).square().mean()
    loss.backward()
    return loss.detach()


def _close(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * scale + 1e-12)
