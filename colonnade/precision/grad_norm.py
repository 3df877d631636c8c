"""The one gradient norm and the one clip, right for every layout because they read layouts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import all_gather
from colonnade.errors import UsageError, explain
from colonnade.model.layout import layout_of

REPLICA_TOLERANCE = (
    2e-3  # of the squared norm; replicas are bit-equal on the CPU, and nearly so where kernels use atomics
)


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: ParallelMesh, check_replicas: bool = True) -> torch.Tensor:
    """Euclidean norm of the gradient of the logical parameters, the same float64 scalar on every rank.

    A parameter that several ranks hold whole counts once; the pieces of a split one count together, a piece that several
    ranks hold on the first of them. Parameters without a gradient count as zero.

    Args:
        check_replicas: raise where ranks disagree about what they all hold.

    Traffic: one all-gather of two numbers over each axis that splits parameters.

    Raises:
        UsageError: on every rank, where ranks that hold the same parameters hold different gradients for them.
    """
    parameters = list(parameters)
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for param in parameters:
        grads = by_axes.setdefault(layout_of(param).sharded_axes, [])
        if param.grad is not None:
            grads += counted_parts(param, param.grad, mesh)
    whole = _norm(by_axes.pop((), []), total.device) ** 2
    total += whole
    for axes, grads in sorted(by_axes.items()):
        square = _norm(grads, total.device) ** 2
        for name in axes:
            squares, wholes = torch.stack(all_gather(torch.stack([square, whole]), mesh.axis(name))).unbind(1)
            if check_replicas:
                _check_replicas(wholes, name)
            square = squares.sum(0)
        total += square
    return total.sqrt()


def counted_parts(param: nn.Parameter, grad: torch.Tensor, mesh: ParallelMesh) -> list[torch.Tensor]:
    """The parts of a local gradient that this rank counts: all but the pieces of which it is not the first holder."""
    layout = layout_of(param)
    if not any(box.holders for box in layout.boxes):
        return [grad]
    mine = [mesh.rank(axis) for axis in layout.sharded_axes]
    return [grad[box.local_slices] for box in layout.boxes if not box.holders or box.holders[0] in mine]


def _check_replicas(squares: torch.Tensor, axis: str) -> None:
    """What every rank holds whole must have the same gradient on each; the exchange for the norm shows it for nothing."""
    least, most = squares.min(), squares.max()
    if most - least > REPLICA_TOLERANCE * most:
        raise UsageError(
            explain(
                f"the ranks of {axis} hold different gradients for the same parameters: their norms are "
                + ", ".join(f"{float(s) ** 0.5:.6g}" for s in squares),
                [
                    ("rule", "gradients may not be scaled on one rank by what that rank alone holds"),
                    ("try", "the plugin's max_norm instead of torch.nn.utils.clip_grad_norm_"),
                ],
            )
        )


def _norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm([g.float() for g in grads]).double()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, given as `norm`, becomes at most `max_norm`; as torch does."""
    nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, norm)
