"""Muon: momentum made orthogonal, for matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from colonnade.errors import ConfigError, explain
from colonnade.optim.adam import adamw_update
from colonnade.optim.whole_parameter import Item, WholeParameterOptimizer, check_options

ADJUST_LR = (None, "original", "match_rms_adamw")


class Muon(WholeParameterOptimizer):
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    Scalable for LLM Training", section 2), and AdamW for what is no matrix.

    B ← μ B + (1 − μ) G;  O = NewtonSchulz(G + μ (B − G), or B without Nesterov);  W ← (1 − lr λ) W − lr · scale · O.
    Arguments are those of `torch.optim.Muon`. A fused weight is one matrix, as in one process.

    Groups: one with `use_muon=False` is updated by AdamW, with its own `lr`, `weight_decay`, `betas` (0.9, 0.95) and `eps`
        (1e-8). Put embeddings, the head, biases and norms there.

    State: `step`, `momentum_buffer` of the local shape; in groups of AdamW `step`, `exp_avg`, `exp_avg_sq` of the local shape.

    Traffic: for each split matrix an all-gather of its update, and a broadcast of the orthogonal one, over the axis that
        splits it. The work is dealt out, matrix by matrix, over these ranks; for each of its own a rank needs memory of a
        few times that matrix. Matrices that ranks hold whole, each makes orthogonal by itself. AdamW communicates
        nothing.

    Args:
        lr, weight_decay, momentum, nesterov: as of momentum SGD with decoupled weight decay; lr is scaled by `adjust_lr_fn`.
        ns_coefficients, eps, ns_steps: of the Newton–Schulz iteration.
        adjust_lr_fn: "original" (also None) scales lr by √max(1, rows / columns), "match_rms_adamw" by
            0.2 √max(rows, columns).
        ns_dtype: format of the iteration; by default float32, or float64 for float64 parameters. torch computes it in
            bfloat16, which is faster on accelerators, and turns rounding of the gradient into visible differences.

    Raises:
        ConfigError: an option is out of range, or a group of Muon has parameters that are no matrices.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        check_options(
            "Muon",
            lr=(lr, lr >= 0, "≥ 0"),
            weight_decay=(weight_decay, weight_decay >= 0, "≥ 0"),
            momentum=(momentum, 0 <= momentum < 1, "of 0 ≤ μ < 1"),
            ns_coefficients=(ns_coefficients, len(ns_coefficients) == 3, "of three numbers"),
            eps=(eps, eps >= 0, "≥ 0"),
            ns_steps=(ns_steps, 1 <= ns_steps < 100, "of 1 to 99"),
            adjust_lr_fn=(adjust_lr_fn, adjust_lr_fn in ADJUST_LR, '"original" or "match_rms_adamw"'),
            ns_dtype=(ns_dtype, ns_dtype is None or ns_dtype.is_floating_point, "a floating point format or None"),
        )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of Muon or, with `use_muon=False`, of AdamW.

        Raises:
            ConfigError: a group of Muon has parameters that are no matrices.
        """
        if not param_group.get("use_muon", True):
            param_group = {"betas": (0.9, 0.95), "eps": 1e-8} | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        others = [tuple(p.shape) for p in group["params"] if p.dim() != 2] if group["use_muon"] else []
        if others:
            self.param_groups.pop()
            raise ConfigError(
                explain(
                    f"Muon is for matrices, and was given parameters of the shapes "
                    f"{', '.join(map(str, dict.fromkeys(others)))}.",
                    [("try", '{"params": [...], "use_muon": False, "lr": 3e-4} as a group of its own, for AdamW')],
                )
            )

    def update(self, items: list[Item]) -> None:
        updates: dict[int, torch.Tensor] = {}
        matrices = [item for item in items if item.group["use_muon"]]
        for item in items:
            if item.group["use_muon"]:
                updates[id(item)] = self._momentum(item)
            else:
                adamw_update(item)
        whole = self.on_whole(matrices, lambda i: updates.pop(id(i)), _orthogonal, lambda i: i.placement.shape)
        for item, orthogonal in whole:
            group, layout = item.group, item.placement.layout
            item.value.mul_(1 - group["lr"] * group["weight_decay"])
            own = layout.extract(orthogonal) if item.placement.axes else orthogonal
            item.value.add_(own, alpha=-group["lr"] * _scale(group["adjust_lr_fn"], *layout.shape))

    @staticmethod
    def _momentum(item: Item) -> torch.Tensor:
        item.count()
        buffer = item.moment("momentum_buffer").lerp_(item.grad, 1 - item.group["momentum"])
        return item.grad.lerp(buffer, item.group["momentum"]) if item.group["nesterov"] else buffer


def _orthogonal(item: Item, matrix: torch.Tensor) -> torch.Tensor:
    """The polar factor of a matrix, roughly, by a quintic Newton–Schulz iteration that drives singular values to about 1."""
    group = item.group
    a, b, c = group["ns_coefficients"]
    x = matrix.to(group["ns_dtype"] or matrix.dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x  # the Gram matrix is then the small one
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def _scale(adjust: str | None, rows: int, columns: int) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
