"""The one gradient norm and the one clip, right for every layout because they read layouts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import all_gather
from colonnade.model.layout import layout_of


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> torch.Tensor:
    """Euclidean norm of the gradient of the logical parameters, the same float64 scalar on every rank.

    A parameter that several ranks hold whole counts once; the pieces of a split one count together. Parameters without
    a gradient count as zero.

    Traffic: one all-gather of one number over each axis that splits parameters.
    """
    parameters = list(parameters)
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for param in parameters:
        grads = by_axes.setdefault(layout_of(param).sharded_axes, [])
        if param.grad is not None:
            grads.append(param.grad)
    for axes, grads in sorted(by_axes.items()):
        square = _norm(grads, total.device) ** 2
        for name in axes:
            square = torch.stack(all_gather(square, mesh.axis(name))).sum(0)
        total += square
    return total.sqrt()


def _norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm([g.float() for g in grads]).double()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, given as `norm`, becomes at most `max_norm`; as torch does."""
    nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, norm)
