"""Adam's moments, shared by the optimizers that build on it."""

from __future__ import annotations

import torch

from colonnade.optim.whole_parameter import Item


def adam_direction(
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    step: int,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool = True,
) -> torch.Tensor:
    """Advance both moments, and return the direction m̂ / (√v̂ + ε) (Kingma and Ba 2015, algorithm 1).

    Args:
        exp_avg, exp_avg_sq: the moments; changed in place.
        step: number of this step, 1 for the first.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    denominator = (exp_avg_sq / corrections[1]).sqrt_().add_(eps)
    return torch.div(exp_avg, denominator, out=denominator).div_(corrections[0])


def adamw_update(item: Item) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, algorithm 2) with the lr, betas, eps, weight_decay of the group."""
    group, step = item.group, item.count()
    direction = adam_direction(
        item.moment("exp_avg"), item.moment("exp_avg_sq"), item.grad, step, group["betas"], group["eps"]
    )
    if group["weight_decay"]:
        direction.add_(item.wide(), alpha=group["weight_decay"])
    item.value.add_(direction, alpha=-group["lr"])
