"""Whether a model cut into stages computes what it computes whole: tried on a small one, all stages in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colonnade.pipeline.cut import Cut
from colonnade.pipeline.stage import StagedModel, as_input

TOLERANCE = 1e-10  # of the largest entry, in float64: the same operations in another order


def difference(model: nn.Module, cut: Cut, inputs: Mapping[str, Any], loss_of: Callable[[Any], torch.Tensor]) -> str:
    """In which number the cut model differs from the whole one, in words; empty where in none.

    Args:
        model: whole; it is not changed. It has to compute the same at each call (no dropout).
        cut: of a chain of this model.
        inputs: of one forward, in the model's format.
        loss_of: the loss in a model's output.

    Raises:
        whatever the model raises.
    """
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    shadow = copy.deepcopy(cut.chain.shadow).to(next(model.parameters()).dtype)
    cut = replace(cut, chain=replace(cut.chain, shadow=shadow))
    wanted = loss_of(whole(**inputs))
    wanted.backward()
    found = run_all_stages(StagedModel(parts, cut, range(cut.num_stages)), inputs, loss_of)
    if not _close(found, wanted):
        return f"the loss is {float(found):.9g} and not {float(wanted):.9g}"
    for (name, one), other in zip(whole.named_parameters(), parts.parameters()):
        if (one.grad is None) != (other.grad is None):
            return f"{name} has {'no' if other.grad is None else 'a'} gradient"
        if one.grad is not None and other.grad is not None and not _close(other.grad, one.grad):
            return f"the gradient of {name} is another"
    return ""


def run_all_stages(
    staged: StagedModel, inputs: Mapping[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Forward and backward of one batch through all stages, one after the other."""
    received: tuple[torch.Tensor, ...] = ()
    passes: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    output = None
    for stage in range(staged.cut.num_stages):
        result = staged.forward(stage, received, lambda: staged.model(**inputs))
        passes.append((received, result.sent))
        received, output = tuple(as_input(t) for t in result.sent), result.output
    loss = loss_of(output)
    loss.backward()
    gradients: list[torch.Tensor | None] = []
    for received, sent in reversed(passes):
        pairs = [(t, g) for t, g in zip(sent, gradients) if t.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        gradients = [t.grad for t in received]
    return loss.detach()


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1e-30))
        if wanted.numel()
        else True
    )
