"""GaLore: Adam in a low-rank projection of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from colonnade.errors import ConfigError, explain
from colonnade.model.layout import TensorLayout
from colonnade.optim.adam import adam_direction, adamw_update
from colonnade.optim.placement import Part, Partial, Placement, add_up, fit, widened
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options

PROJ_TYPES = ("std", "reverse_std", "left", "right", "full")


class GaLoreAdamW(WholeParameterOptimizer):
    """GaLore (Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", algorithm 2), and
    AdamW for all other groups.

    Every `update_proj_gap` steps the first `rank` singular vectors of the gradient are taken. Between them Adam runs on the
    projected gradient, R = Pᵀ G (left) or G Qᵀ (right), and W ← (1 − lr λ) W − lr · scale · P Adam(R), or Adam(R) Q. The
    singular vectors are those of the logical gradient; a fused weight is one matrix, as in one process. Their sign, which
    the paper leaves open, is such that the largest entry is positive.

    Groups: one with `rank` is projected, and takes `update_proj_gap` (200), `scale` (0.25) and `proj_type`. One without is
        updated by AdamW. Put embeddings, the head, biases and norms there.

    State: `step`; `projection_left` (r, k) and `projection_right` (k, c), one or both, for the r rows and c columns that
        this rank holds, k being the rank; `exp_avg` and `exp_avg_sq` of the shape of the projected gradient: (k, c) left,
        (r, k) right, (k, k) full. In groups of AdamW `step`, `exp_avg`, `exp_avg_sq` of the local shape.

    Traffic: at a step that takes new singular vectors, for each split matrix an all-gather of its gradient and a broadcast
        of the vectors, over the axis that splits it; the work is dealt out, matrix by matrix, over these ranks.
        At every step one all-reduce over each axis that splits parameters (for each `batch_elements` logical entries), of
        the projected gradients of those matrices that are projected along the dim that is split (always for "full");
        others are projected without communication. AdamW communicates nothing.

    Args:
        lr, betas, eps, weight_decay: as AdamW's.

    Raises:
        ConfigError: an option is out of range, or a group with `rank` has parameters that are no matrices.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_options(
            "GaLoreAdamW",
            lr=(lr, lr >= 0, "≥ 0"),
            betas=(betas, all(0 <= b < 1 for b in betas), "of 0 ≤ β < 1"),
            eps=(eps, eps >= 0, "≥ 0"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of GaLore where it has `rank`, else of AdamW.

        Raises:
            ConfigError: an option is out of range, or a group with `rank` has parameters that are no matrices.
        """
        if "rank" in param_group:
            param_group = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"} | param_group
            rank, gap, kind = (param_group[key] for key in ("rank", "update_proj_gap", "proj_type"))
            check_options(
                "GaLoreAdamW",
                rank=(rank, isinstance(rank, int) and rank > 0, "a whole number ≥ 1"),
                update_proj_gap=(gap, isinstance(gap, int) and gap > 0, "a whole number ≥ 1"),
                proj_type=(kind, kind in PROJ_TYPES, "one of " + ", ".join(PROJ_TYPES)),
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        others = [tuple(p.shape) for p in group["params"] if p.dim() != 2] if "rank" in group else []
        if others:
            self.param_groups.pop()
            raise ConfigError(
                explain(
                    f"GaLore is for matrices, and was given parameters of the shapes "
                    f"{', '.join(map(str, dict.fromkeys(others)))} in a group with a rank.",
                    [("try", "a group of their own without rank, for AdamW")],
                )
            )

    def update(self, items: list[Item]) -> None:
        projected = [item for item in items if "rank" in item.group]
        for item in items:
            if "rank" not in item.group:
                adamw_update(item)
        self._project_anew([item for item in projected if (item.count() - 1) % item.group["update_proj_gap"] == 0])
        low_rank = add_up([_project(item) for item in projected])
        for item, gradient in zip(projected, low_rank):
            group = item.group
            moments = _moment(item, "exp_avg", gradient), _moment(item, "exp_avg_sq", gradient)
            direction = adam_direction(*moments, gradient, int(item.state["step"]), group["betas"], group["eps"])
            if group["weight_decay"]:
                item.value.mul_(1 - group["lr"] * group["weight_decay"])
            item.value.add_(_project_back(item, direction), alpha=-group["lr"] * group["scale"])

    def keeps_reduced(self, group: Mapping[str, Any], key: str) -> bool:
        return "rank" in group and key != "step"

    def _layout_of(
        self, tensor: torch.Tensor, placement: Placement, group: Mapping[str, Any], key: str
    ) -> TensorLayout:
        item = Item(tensor, tensor, {}, dict(group), placement)
        left, right = _sides(item)
        if key == "projection_left" or (key != "projection_right" and right and not left):
            return _left_layout(item)
        if key == "projection_right" or not right:
            return _right_layout(item)
        return TensorLayout.whole((_rank(item), _rank(item)))  # moments, projected from both sides

    def _project_anew(self, items: list[Item]) -> None:
        """Take the singular vectors of the present gradients."""
        for item, vectors in self.on_whole(items, lambda i: i.grad, _singular_vectors, _vectors_shape):
            left, right = _sides(item)
            rows = item.placement.shape[0] if left else 0
            if left:
                item.state["projection_left"] = _left_layout(item).extract(vectors[:rows])
            if right:
                item.state["projection_right"] = _right_layout(item).extract(vectors[rows:].T)


def _sides(item: Item) -> tuple[bool, bool]:
    """Whether the gradient is multiplied from the left, and from the right."""
    rows, columns = item.placement.shape
    kind = item.group["proj_type"]
    if kind in ("std", "reverse_std"):
        kind = "right" if (rows >= columns) == (kind == "std") else "left"
    return kind in ("left", "full"), kind in ("right", "full")


def _rank(item: Item) -> int:
    return min(item.group["rank"], *item.placement.shape)


def _left_layout(item: Item) -> TensorLayout:
    """Of what has a row for each row of the parameter: the left projection, and the gradient projected from the right."""
    return widened(item.placement.statistic(-1), -1, _rank(item))


def _right_layout(item: Item) -> TensorLayout:
    """Of what has a column for each column of the parameter."""
    return widened(item.placement.statistic(-2), -2, _rank(item))


def _vectors_shape(item: Item) -> tuple[int, int]:
    sizes = [n for n, taken in zip(item.placement.shape, _sides(item)) if taken]
    return sum(sizes), _rank(item)


def _singular_vectors(item: Item, gradient: torch.Tensor) -> torch.Tensor:
    """The first left singular vectors as columns, above the first right ones; those that are needed.

    Singular vectors have no sign of their own, and moments go on over a change of the projection: the largest entry is made
    positive, or rounding would decide in which direction.
    """
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    rank = _rank(item)
    vectors = [x for x, taken in zip((u[:, :rank], v[:rank].T), _sides(item)) if taken]
    return torch.cat([x * x.gather(0, x.abs().argmax(0, keepdim=True)).sign() for x in vectors])


def _project(item: Item) -> Partial:
    """The low-rank gradient: a matrix in held coordinates, or of (k, k) where both sides are projected."""
    left, right = _sides(item)
    place, grad, rank = item.placement, item.grad, _rank(item)
    if left:
        item.state["projection_left"] = fit(item.state["projection_left"], _left_layout(item))
    if right:
        item.state["projection_right"] = fit(item.state["projection_right"], _right_layout(item))
    to_left, to_right = item.state.get("projection_left", grad), item.state.get("projection_right", grad)
    if left and right:
        total = grad.new_zeros(rank, rank)
        for part in place.parts:
            if part.counted or not place.axes:
                rows, columns = part.held
                total += to_left[rows].T @ grad[part.local] @ to_right[:, columns].T
        return Partial(total, place.axes)
    if left:
        return place.sum_along(
            -2,
            lambda part: to_left[part.held[0]].T @ grad[part.local],
            lambda: grad.new_zeros(_right_layout(item).local_shape),
            width=rank,
        )
    return place.sum_along(
        -1,
        lambda part: grad[part.local] @ to_right[:, part.held[1]].T,
        lambda: grad.new_zeros(_left_layout(item).local_shape),
        width=rank,
    )


def _project_back(item: Item, direction: torch.Tensor) -> torch.Tensor:
    """This rank's boxes of the full-rank update."""
    left, right = _sides(item)

    def back(part: Part) -> torch.Tensor:
        rows, columns = part.held
        if left and right:
            return item.state["projection_left"][rows] @ direction @ item.state["projection_right"][:, columns]
        if left:
            return item.state["projection_left"][rows] @ direction[:, columns]
        return direction[rows] @ item.state["projection_right"][:, columns]

    return item.placement.assemble(item.grad, back)


def _moment(item: Item, key: str, low_rank: torch.Tensor) -> torch.Tensor:
    if key not in item.state:
        item.state[key] = torch.zeros_like(low_rank)
    left, right = _sides(item)
    if left != right:
        item.state[key] = fit(item.state[key], _right_layout(item) if left else _left_layout(item))
    return item.state[key]
