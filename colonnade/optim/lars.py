"""LARS: momentum SGD with a local learning rate for each parameter."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from colonnade.optim.placement import add_up
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options


class Lars(WholeParameterOptimizer):
    """LARS (You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1).

    λ = η ‖w‖ / (‖g‖ + β ‖w‖);  v ← m v + lr λ (g + β w);  w ← w − v,  the norms being those of the logical parameter. Where
    ‖w‖ or ‖g‖ is 0, λ is 1. As in the paper the learning rate is inside of the momentum; where it changes, this differs
    from implementations that multiply by it afterwards.

    State: `step`, and `momentum_buffer` of the local shape where momentum is not 0.

    Traffic: two numbers for each split parameter, all of them in one all-reduce over each axis that splits parameters
        (one for each `batch_elements` logical entries).

    Args:
        lr: the global learning rate.
        momentum: m.
        weight_decay: β.
        trust_coefficient: η.
        eps: added to the denominator of λ.
        adapt: False for λ = 1, which makes it SGD; usual for the group of biases and norms.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        *,
        adapt: bool = True,
    ) -> None:
        check_options(
            "Lars",
            lr=(lr, lr >= 0, "≥ 0"),
            momentum=(momentum, 0 <= momentum < 1, "of 0 ≤ m < 1"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
            trust_coefficient=(trust_coefficient, trust_coefficient > 0, "> 0"),
            eps=(eps, eps >= 0, "≥ 0"),
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def update(self, items: list[Item]) -> None:
        adapted = [item for item in items if item.group["adapt"]]
        shares = [item.placement.square(item.wide()) for item in adapted]
        shares += [item.placement.square(item.grad) for item in adapted]
        squares = add_up(shares)
        norms = {id(item): (squares[n].sqrt(), squares[len(adapted) + n].sqrt()) for n, item in enumerate(adapted)}
        for item in items:
            self._apply(item, norms.get(id(item)))

    @staticmethod
    def _apply(item: Item, norms: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        group = item.group
        item.count()
        change = item.grad.add(item.wide(), alpha=group["weight_decay"])
        if norms is not None:
            weight, grad = norms
            ratio = group["trust_coefficient"] * weight / (grad + group["weight_decay"] * weight + group["eps"])
            change.mul_(torch.where((weight > 0) & (grad > 0), ratio, 1.0))
        change.mul_(group["lr"])
        if group["momentum"]:
            change = item.moment("momentum_buffer").mul_(group["momentum"]).add_(change)
        item.value.sub_(change)
