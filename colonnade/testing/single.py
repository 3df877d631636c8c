"""The reference: plain PyTorch training in one process, on the whole global batch, without this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.device import current_device
from colonnade.shardformer.inference.check import in_double

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """One step: the loss of each accumulated batch, the gradient norm and the gradients before clipping."""

    losses: list[float]
    norm: float
    gradients: Tensors


class SingleProcess:
    """An unmodified model and its optimizer, trained in this process.

    Args:
        model: the model; moved to this process's device and to `dtype`.
        optimizer_fn: makes the optimizer from the model.
        max_norm: clip the gradients to this norm; 0 does not clip.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[nn.Module], Optimizer],
        dtype: torch.dtype = torch.float32,
        max_norm: float = 0.0,
    ) -> None:
        self.dtype = dtype
        self.model = model.to(current_device(), dtype)
        self.optimizer = optimizer_fn(self.model)
        self.max_norm = max_norm

    def step(self, batches: Sequence[dict[str, Any]]) -> StepResult:
        """Accumulate the mean gradient of the batches, clip, and step."""
        self.optimizer.zero_grad()
        # what is recomputed in the backward pass is computed outside of any mode, and has to be the same
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        exact = self.dtype == torch.float64 and not recomputes
        losses = []
        for batch in batches:
            with in_double() if exact else nullcontext():
                loss = self.model(**{key: self._moved(value) for key, value in batch.items()}).loss
                (loss / len(batches)).backward()
            losses.append(loss.item())
        gradients = {n: p.grad.detach().cpu().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm or float("inf")).item()
        self.optimizer.step()
        return StepResult(losses, norm, gradients)

    def weights(self) -> Tensors:
        """A copy of every parameter, on the CPU."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}

    def _moved(self, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        return value.to(current_device(), self.dtype if value.is_floating_point() else value.dtype)
