"""LAMB: Adam with a trust ratio for each parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from colonnade.optim.adam import adam_direction
from colonnade.optim.placement import add_up
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options


class Lamb(WholeParameterOptimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2).

    r = m̂ / (√v̂ + ε) + λ w;  w ← w − lr · φ(‖w‖) / ‖r‖ · r,  the norms being those of the logical parameter. Where a norm
    is 0 the ratio is 1.

    State: `step`, `exp_avg` and `exp_avg_sq` of the local shape.

    Traffic: two numbers for each split parameter, all of them in one all-reduce over each axis that splits parameters
        (one for each `batch_elements` logical entries).

    Args:
        lr, betas, eps: as Adam's.
        weight_decay: λ, added to the direction before its norm is taken.
        bias_correction: divide the moments by 1 − β^t, as in algorithm 2; version 3 of the paper's text does without.
        norm_range: φ limits ‖w‖ to this range (section 3); by default not at all.
        adapt: False for the ratio 1, which makes it Adam; usual for the group of biases and norms.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        norm_range: tuple[float, float] = (0.0, math.inf),
        adapt: bool = True,
    ) -> None:
        check_options(
            "Lamb",
            lr=(lr, lr >= 0, "≥ 0"),
            betas=(betas, all(0 <= b < 1 for b in betas), "of 0 ≤ β < 1"),
            eps=(eps, eps >= 0, "≥ 0"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
            norm_range=(norm_range, 0 <= norm_range[0] <= norm_range[1], "of two numbers ≥ 0, the smaller one first"),
        )
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "norm_range": norm_range,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def update(self, items: list[Item]) -> None:
        directions = [self._direction(item) for item in items]
        adapted = [i for i, item in enumerate(items) if item.group["adapt"]]
        shares = [items[i].placement.square(items[i].wide()) for i in adapted]
        shares += [items[i].placement.square(directions[i]) for i in adapted]
        squares = add_up(shares)
        for n, i in enumerate(adapted):
            weight, update = squares[n].sqrt(), squares[len(adapted) + n].sqrt()
            ratio = weight.clamp(*items[i].group["norm_range"]) / update
            directions[i].mul_(torch.where((weight > 0) & (update > 0), ratio, 1.0))
        for item, direction in zip(items, directions):
            item.value.add_(direction, alpha=-item.group["lr"])

    @staticmethod
    def _direction(item: Item) -> torch.Tensor:
        group, step = item.group, item.count()
        moments = item.moment("exp_avg"), item.moment("exp_avg_sq")
        direction = adam_direction(*moments, item.grad, step, group["betas"], group["eps"], group["bias_correction"])
        if group["weight_decay"]:
            direction.add_(item.wide(), alpha=group["weight_decay"])
        return direction
