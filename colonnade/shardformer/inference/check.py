"""The numeric check that an inferred policy has to pass: a tiny twin of the model, split and not, gives the same numbers.

[Note: a check by itself]
The ranks of the check are threads of this process, which exchange tensors in memory (`comm.threads`). So a policy can be
checked before a job exists, and a candidate whose code fails on one rank only cannot leave the other ranks waiting.

[Note: in double precision]
What a wrong policy does is far above rounding in double precision, and far from it in single. Models cast to float32
here and there; within the check those casts are to float64.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from colonnade.cluster.mesh import Axis
from colonnade.comm.threads import run_as_ranks
from colonnade.errors import ColonnadeError
from colonnade.model.layout import layout_of
from colonnade.shardformer.inference.probe import loss_of, probe_inputs
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.shard.shard_config import ShardConfig
from colonnade.shardformer.shard.sharder import ModelSharder

PADDED = 3  # tokens
TOLERANCE = 1e-5  # relative, as of every layout


class Twin:
    """A small model with weights, and what one training step of it in one piece gives.

    Args:
        model: taken over, and turned to float64.
        ranks: over which it is to be split.

    Raises:
        whatever the model raises where it cannot be trained on what `probe_inputs` makes.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model.double().train().requires_grad_(True), ranks
        with in_double():
            # a copy: some models change in their first forward (BigBird gives short sequences another attention)
            inputs = probe_inputs(copy.deepcopy(self.model), torch.device("cpu"))
            for self.inputs in (_padded(inputs), inputs):
                whole = copy.deepcopy(self.model)
                self.loss = _step(whole, self.inputs)
                self.gradients = {name: p.grad for name, p in whole.named_parameters()}
                if all(t.isfinite().all() for t in (self.loss, *self.gradients.values()) if t is not None):
                    break  # some models return no numbers for padding
        found = [grad.abs().max() for grad in self.gradients.values() if grad is not None]
        self.largest = max(found, default=torch.zeros(()))

    def difference(self, policy: Policy) -> str:
        """How the twin split by a policy differs from the one in one piece, or how it fails; empty where it does not."""
        copies = [copy.deepcopy(self.model) for _ in range(self.ranks)]

        def compare(axis: Axis) -> str:
            split = copies[axis.rank]
            with in_double(), torch.enable_grad():
                ModelSharder(split, copy.copy(policy), ShardConfig(axis)).shard()
                loss = _step(split, self.inputs)
            return self._compare(split, loss)

        try:
            found = run_as_ranks(self.ranks, compare)
        except Exception as error:  # whatever a model's own code raises on meeting its shards: the policy does not fit
            return said(error)
        return next((text for text in found if text), "")

    def _compare(self, split: nn.Module, loss: torch.Tensor) -> str:
        if not _close(loss, self.loss, abs(self.loss)):
            return f"the loss is {loss.item():.8f} instead of {self.loss.item():.8f}"
        for name, param in split.named_parameters():
            grad = self.gradients[name]
            if (grad is None) != (param.grad is None):
                return f"{name} has a gradient only {'split' if grad is None else 'in one piece'}"
            if grad is not None:
                share, own_grad = layout_of(param).extract(grad), param.grad
                if own_grad is None or not _close(
                    own_grad, share, torch.maximum(grad.abs().max(), 1e-2 * self.largest)
                ):
                    return f"the gradient of {name} differs"
        return ""


class in_double(TorchFunctionMode):  # noqa: N801 - used as `with in_double():`
    """Within it, what torch functions are asked to make in float32 is made in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if function is torch.full:  # the least number of float64 does not fit the type it has by default
            kwargs = {"dtype": torch.float64 if isinstance(args[1:] and args[1], float) else None} | (kwargs or {})
        made = function(*map(_widened, args), **{key: _widened(value) for key, value in (kwargs or {}).items()})
        return made.double() if isinstance(made, torch.Tensor) and made.dtype == torch.float32 else made


def _padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with padding at the end of the first row, so that no two rows have the same mask."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or "decoder_input_ids" in inputs:
        return inputs
    mask = mask.clone()
    mask[0, -PADDED:] = 0
    return inputs | {"attention_mask": mask}


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def said(error: BaseException) -> str:
    """The first line of an error, and the lines that explain it where it is one of ours."""
    text = " ".join(str(error).split()) if isinstance(error, ColonnadeError) else str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _step(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach()


def _close(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * scale + 1e-12)
