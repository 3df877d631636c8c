"""The one gradient norm, right for every layout because it reads layouts.

[Note: what a rank counts]
A gradient that several ranks hold whole counts once; the pieces of a split one count together, a piece that several ranks
hold on the first of them. So the entries a rank counts are put into classes by the mesh axes over which they are split; the
squares of a class are added over exactly those axes, and over all others every rank must have the same. Should replicas
differ after all, in rounding or by an overflow on one of them, every rank takes the largest: what follows from the norm
(clipping, and whether a step of fp16 is left out) must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import all_gather
from colonnade.errors import UsageError, explain
from colonnade.model.layout import layout_of, local_of

REPLICA_TOLERANCE = (
    2e-3  # of the squared norm; replicas are bit-equal on the CPU, and nearly so where kernels use atomics
)
ROW = 512  # so many float32 entries at once: 3e-7 off where all are equal, the worst there is; a million of them 2e-3

Axes = tuple[str, ...]
GradientParts = Mapping[Axes, list[torch.Tensor]]


def gradient_parts(parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> dict[Axes, list[torch.Tensor]]:
    """The entries of `parameter.grad` that this rank counts, by the axes over which they are split.

    Every rank has the same classes, whatever it holds of them.
    """
    parts: dict[Axes, list[torch.Tensor]] = {}
    for param in parameters:
        grads = parts.setdefault(layout_of(param).sharded_axes, [])
        if param.grad is not None:
            grads += counted_parts(param, local_of(param.grad), mesh)
    return parts


def counted_parts(param: torch.Tensor, grad: torch.Tensor, mesh: ParallelMesh) -> list[torch.Tensor]:
    """The parts of a local gradient that this rank counts: all but the pieces of which it is not the first holder."""
    layout = layout_of(param)
    if not any(box.holders for box in layout.boxes):
        return [grad]
    mine = [mesh.rank(axis) for axis in layout.sharded_axes]
    return [grad[box.local_slices] for box in layout.boxes if not box.holders or box.holders[0] in mine]


def gradient_norm(
    parts: GradientParts, mesh: ParallelMesh, device: torch.device, check_replicas: bool = True
) -> torch.Tensor:
    """Euclidean norm of the gradient of the logical parameters, the same float64 scalar on every rank.

    Args:
        parts: as of `gradient_parts`.
        device: where to compute and exchange it.
        check_replicas: raise where ranks disagree about what they all hold.

    Traffic: over each axis that splits parameters one all-gather of one number for each class; over stages of one number.

    Raises:
        UsageError: on every rank, where ranks that hold the same parameters hold different gradients for them.
    """
    classes = sorted({(), *parts})
    squares = torch.stack([_norm(parts.get(axes, []), device) ** 2 for axes in classes])
    for name in sorted({name for axes in classes for name in axes}):
        of_ranks = torch.stack(all_gather(squares, mesh.axis(name)))
        split = torch.tensor([name in axes for axes in classes], device=device)
        if check_replicas:
            _check_replicas(of_ranks[:, ~split].sum(1), name)
        squares = torch.where(split, of_ranks.sum(0), of_ranks.amax(0))
    of_stages = all_gather(squares.sum(), mesh.axis("pp"))  # whose parameters are others
    return torch.stack(of_stages).sum().sqrt()


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
    """Norm of all entries together, in float64."""
    rows = [torch.zeros(1, dtype=torch.float64, device=device)]
    short: list[torch.Tensor] = []
    for grad in grads:
        # of a sparse one the entries that are there, each once
        flat = (grad.coalesce().values() if grad.is_sparse else grad).flatten()
        whole = flat.numel() // ROW * ROW
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW).float(), dim=1).double())
        if flat.numel() > whole:
            short.append(flat[whole:].float())
    if short:
        rows.append(nn.utils.get_total_norm(short).double().reshape(1))
    return torch.linalg.vector_norm(torch.cat([row.to(device) for row in rows]))
