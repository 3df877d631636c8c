"""Whether a model cut into stages computes what it computes whole: tried on a small one, all stages in this process.

[Note: a copy for each stage]
Each stage runs in a copy of the model that has the parameters of this stage only, as on ranks of their own, and gets inputs
of its own. So what a block leaves in an attribute, a cache or a tensor that it was given is not there for later stages, and
a model that counts on it is found out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colonnade.model.adapters import plain_model
from colonnade.pipeline.cut import Cut
from colonnade.pipeline.stage import StagedModel, as_input, hollow

TOLERANCE = 1e-10  # of the largest entry, in float64: the same operations in another order
NEGLIGIBLE = 1e-4  # of the largest gradient of all; entries below are rounding errors where the true gradient is zero


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
    whole = copy.deepcopy(model)
    shadow = copy.deepcopy(cut.chain.shadow).to(next(model.parameters()).dtype)
    cut = replace(cut, chain=replace(cut.chain, shadow=shadow))
    stages = [one_stage(model, cut, stage) for stage in range(cut.num_stages)]
    wanted = loss_of(whole(**copy.deepcopy(dict(inputs))))
    wanted.backward()
    wanted = wanted.detach()
    found = run_all_stages(stages, inputs, loss_of)
    if not _close(found, wanted, wanted):
        return f"the loss is {float(found):.9g} and not {float(wanted):.9g}"
    return _other_gradient(whole, stages)


def one_stage(model: nn.Module, cut: Cut, stage: int) -> StagedModel:
    """A copy of a model for one stage, with what this stage needs."""
    part = copy.deepcopy(model)
    staged = StagedModel(part, cut, (stage,))
    plain = plain_model(part)
    everywhere = {p for name, p in plain.named_parameters() if name in cut.chain.everywhere}
    own, every = cut.paths_of((stage,)), {call.path for call in cut.chain.calls}
    for path in every - own:
        hollow(plain.get_submodule(path), everywhere)
    return staged


def run_all_stages(
    stages: list[StagedModel], inputs: Mapping[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Forward and backward of one batch through all stages, one after the other; the loss.

    Args:
        stages: for each stage the model that runs it.
    """
    received: tuple[torch.Tensor, ...] = ()
    passes: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    output = None
    for stage, staged in enumerate(stages):
        own_inputs = copy.deepcopy(dict(inputs))
        result = staged.forward(stage, received, lambda: staged.model(**own_inputs))  # noqa: B023 - called at once
        passes.append((received, result.sent))
        received, output = tuple(as_input(t.clone()) for t in result.sent), result.output
    loss = loss_of(output)
    loss.backward()
    gradients: list[torch.Tensor | None] = []
    for received, sent in reversed(passes):
        pairs = [(t, g) for t, g in zip(sent, gradients) if t.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        gradients = [t.grad for t in received]
    return loss.detach()


def _other_gradient(whole: nn.Module, stages: list[StagedModel]) -> str:
    """Which gradient differs, that of a parameter on several stages being the sum; empty where none does."""
    wanted = dict(plain_model(whole).named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, torch.Tensor] = {}
    for staged in stages:
        counted = set()
        for name, parameter in staged.model.named_parameters(remove_duplicate=False):
            if parameter.grad is not None and parameter not in counted:
                counted.add(parameter)
                found[wanted[name]] = found.get(wanted[name], 0) + parameter.grad
    names = {parameter: name for name, parameter in wanted.items()}
    largest = max((p.grad.abs().max() for p in names if p.grad is not None and p.numel()), default=torch.zeros(()))
    for parameter, name in names.items():
        if (parameter.grad is None) != (parameter not in found):
            return f"{name} has {'no' if parameter not in found else 'a'} gradient"
        if parameter.grad is not None and not _close(found[parameter], parameter.grad, NEGLIGIBLE * largest):
            return f"the gradient of {name} is another"
    return ""


def _close(found: torch.Tensor, wanted: torch.Tensor, least: torch.Tensor) -> bool:
    if not wanted.numel():
        return True
    scale = torch.maximum(wanted.abs().max(), least.abs().clamp(min=1e-30))
    return bool((found - wanted).abs().max() <= TOLERANCE * scale)
