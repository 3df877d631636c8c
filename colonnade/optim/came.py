"""CAME: Adafactor's memory, with a confidence in the update."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from colonnade.optim.placement import Part, add_up
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options


class CAME(WholeParameterOptimizer):
    """CAME (Luo et al. 2023, "CAME: Confidence-guided Adaptive Memory Efficient Optimization", algorithm 2).

    u = g / √(row- and column-factored second moment), clipped to a root mean square; m its running average; S the row- and
    column-factored running average of (u − m)² + ε₂; w ← w − lr · m / √S. Parameters of one dim are not factored, and have
    no confidence: w ← w − lr · m. All means are those of the logical parameter; a fused weight is one matrix.

    State: `step`; `exp_avg` of the local shape; for parameters of two dims and more `exp_avg_sq_row` and `exp_avg_res_row`
        (…, r, 1), `exp_avg_sq_col` and `exp_avg_res_col` (…, 1, c), of the rows and columns that this rank holds (all
        columns where both dims are split); for others `exp_avg_sq` of the local shape.

    Traffic: three all-reduces over each axis that splits parameters (for each `batch_elements` logical entries): of the
        second moment, of the update's square, of the instability. The first and the third have as many numbers as a split
        matrix has columns if its rows are split, and as it has rows if its columns are; the second has one number for each
        split parameter.

    Args:
        lr: learning rate.
        eps: (ε₁ added to the squared gradient, ε₂ added to the instability).
        clip_threshold: of the update's root mean square.
        betas: of the update, of the second moment, of the instability.
        weight_decay: decoupled from the gradient.

    Raises:
        ConfigError: an option is out of range.
    """

    statistics = {
        "exp_avg_sq_row": -1,
        "exp_avg_sq_col": -2,
        "exp_avg_res_row": -1,
        "exp_avg_res_col": -2,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        check_options(
            "CAME",
            lr=(lr, lr >= 0, "≥ 0"),
            eps=(eps, min(eps) > 0, "> 0"),
            clip_threshold=(clip_threshold, clip_threshold > 0, "> 0"),
            betas=(betas, len(betas) == 3 and all(0 <= b < 1 for b in betas), "of three numbers 0 ≤ β < 1"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
        )
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def update(self, items: list[Item]) -> None:
        for item in items:
            item.count()
        matrices = [item for item in items if item.is_matrix]
        _average_squares("exp_avg_sq", matrices, [item.grad for item in matrices], beta=1, eps=0)
        updates = [self._scaled(item) for item in items]
        squares = add_up([item.placement.square(update) for item, update in zip(items, updates)])
        for item, update, square in zip(items, updates, squares):
            limit = item.group["clip_threshold"] * item.placement.numel**0.5
            update.div_((square.sqrt() / limit).clamp_(min=1.0))
            item.moment("exp_avg").lerp_(update, 1 - item.group["betas"][0])
        instabilities = [u - item.state["exp_avg"] for item, u in zip(items, updates) if item.is_matrix]
        _average_squares("exp_avg_res", matrices, instabilities, beta=2, eps=1)
        for item in items:
            change = item.state["exp_avg"]
            if item.is_matrix:
                change = _divide_by_root(item, change, "exp_avg_res")
            if item.group["weight_decay"]:
                item.value.mul_(1 - item.group["lr"] * item.group["weight_decay"])
            item.value.add_(change, alpha=-item.group["lr"])

    @staticmethod
    def _scaled(item: Item) -> torch.Tensor:
        if item.is_matrix:
            return _divide_by_root(item, item.grad, "exp_avg_sq")
        square = item.grad.square().add_(item.group["eps"][0])
        return item.moment("exp_avg_sq").lerp_(square, 1 - item.group["betas"][1]).rsqrt().mul_(item.grad)


def _average_squares(key: str, items: list[Item], tensors: list[torch.Tensor], beta: int, eps: int) -> None:
    """Advance the running means of tensor² + ε by row and by column; `beta` and `eps` say which ones of the group."""
    sums = add_up([i.placement.square_along(t, dim) for i, t in zip(items, tensors) for dim in (-1, -2)])
    for item, row_sum, column_sum in zip(items, sums[::2], sums[1::2]):
        rows, columns = item.placement.shape[-2:]
        weight, least = 1 - item.group["betas"][beta], item.group["eps"][eps]
        item.statistic(f"{key}_row", -1).lerp_(row_sum.div(columns).add_(least), weight)
        item.statistic(f"{key}_col", -2).lerp_(column_sum.div(rows).add_(least), weight)


def _divide_by_root(item: Item, tensor: torch.Tensor, key: str) -> torch.Tensor:
    """tensor / √(row ⊗ column / mean); the factors are taken apart, since their product may underflow."""
    row, column = item.state[f"{key}_row"], item.state[f"{key}_col"]
    row_factor, column_factor = (row / item.placement.mean(row, column)).rsqrt_(), column.rsqrt()

    def divided(part: Part) -> torch.Tensor:
        return (row_factor[part.without(-1)] * column_factor[part.without(-2)]).mul_(tensor[part.local])

    return item.placement.assemble(tensor, divided)
