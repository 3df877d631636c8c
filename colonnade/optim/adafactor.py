"""Adafactor: second moments by row and by column only."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from colonnade.optim.placement import Part, add_up
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options


class Adafactor(WholeParameterOptimizer):
    """Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4, 5).

    Arguments, and what they do, are those of `torch.optim.Adafactor`: the relative step size ρ = min(lr, 1/√t) of section
    8, update clipping (section 6), and decoupled weight decay. Row and column means, and the root mean squares of
    parameter and update, are those of the logical parameter; a fused weight is one matrix, as in one process.

    State: `step`; for parameters of two dims and more `row_var` (…, r, 1) and `col_var` (…, 1, c), of the rows and columns
        that this rank holds (all columns where both dims are split); for others `variance` of the local shape.

    Traffic: two all-reduces over each axis that splits parameters (for each `batch_elements` logical entries). The first
        has one number for each split parameter, and as many as a split matrix has columns if its rows are split, and as
        it has rows if its columns are; the second has one number for each split parameter.

    Args:
        lr: the largest relative step size, and the rate of weight decay.
        beta2_decay: τ of β₂ = 1 − t^τ.
        eps: (ε₁ of the second moment, by default the machine epsilon of the parameter; ε₂, the least size of a parameter).
        d: clipping threshold of the update's root mean square.
        weight_decay: decoupled from the gradient.

    Raises:
        ConfigError: an option is out of range.
    """

    statistics = {"row_var": -1, "col_var": -2}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_options(
            "Adafactor",
            lr=(lr, lr >= 0, "≥ 0"),
            beta2_decay=(beta2_decay, beta2_decay <= 0, "≤ 0"),
            eps=(eps, (eps[0] is None or eps[0] >= 0) and eps[1] >= 0, "of None or a number ≥ 0, and a number ≥ 0"),
            d=(d, d >= 1, "≥ 1"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
        )
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def update(self, items: list[Item]) -> None:
        matrices = [item for item in items if item.is_matrix]
        shares = [item.placement.square(item.wide()) for item in items]
        shares += [item.placement.square_along(item.grad, dim) for item in matrices for dim in (-1, -2)]
        sums = add_up(shares)
        by_row, by_column = sums[len(items) :: 2], sums[len(items) + 1 :: 2]
        steps = [item.count() for item in items]
        for item, row_sum, column_sum in zip(matrices, by_row, by_column):
            rows, columns = item.placement.shape[-2:]
            weight = _weight(item)
            item.statistic("row_var", -1).lerp_(row_sum / columns, weight)
            item.statistic("col_var", -2).lerp_(column_sum / rows, weight)
        updates = [_factored(item) if item.is_matrix else _unfactored(item) for item in items]
        squares = add_up([item.placement.square(update) for item, update in zip(items, updates)])
        for item, step, of_weight, update, of_update in zip(items, steps, sums, updates, squares):
            group, size = item.group, item.placement.numel**0.5
            alpha = (of_weight.sqrt() / size).clamp_(min=group["eps"][1]) * min(group["lr"], step**-0.5)
            if group["weight_decay"]:
                item.value.mul_(1 - group["lr"] * group["weight_decay"])
            clip = (of_update.sqrt() / (size * group["d"])).clamp_(min=1.0)
            item.value.sub_(update.mul_(alpha / clip))


def _weight(item: Item) -> float:
    """How much the new gradient weighs in the second moment: 1 − β₂."""
    return float(item.state["step"]) ** item.group["beta2_decay"]


def _least(item: Item) -> float:
    eps1 = item.group["eps"][0]
    return torch.finfo(item.value.dtype).eps if eps1 is None else eps1


def _factored(item: Item) -> torch.Tensor:
    row_var, col_var, eps1 = item.state["row_var"], item.state["col_var"], _least(item)
    mean = item.placement.mean(row_var, col_var).clamp_(min=eps1)

    def update(part: Part) -> torch.Tensor:
        variance = row_var[part.without(-1)] * col_var[part.without(-2)]
        variance.div_(mean[part.without(-1, -2)]).clamp_(min=eps1 * eps1)
        return variance.rsqrt_().mul_(item.grad[part.local])

    return item.placement.assemble(item.grad, update)


def _unfactored(item: Item) -> torch.Tensor:
    variance = item.moment("variance").lerp_(item.grad.square(), _weight(item))
    return variance.clamp(min=_least(item) ** 2).rsqrt_().mul_(item.grad)
