"""The mesh: every rank's place on the named axes dp, pp, sp and tp, and the groups that go with it.

We say *axis* for a direction of the mesh and *dim* for a dimension of a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from colonnade.cluster.device import device_type
from colonnade.errors import ConfigError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AXES = ("dp", "pp", "sp", "tp")


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis as seen by this rank: the peers along it, and this rank's position among them.

    Args:
        name: the axis ("tp"), as the ledger and error messages call it.
        size: number of ranks along it.
        rank: this rank's position, 0 ≤ rank < size.
        ranks: global ranks of the peers in order of position.
        group: their process group, or a `comm.threads.ThreadGroup`; None where size is 1 and no group is needed.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: Any

    def __deepcopy__(self, memo: dict) -> Axis:
        return self  # a process group belongs to the job: a copied model talks over the same one

    def __str__(self) -> str:
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"

    @staticmethod
    def alone(name: str) -> Axis:
        """An axis of one rank: every collective over it is the identity."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Axis(name, 1, 0, (rank,), None)

    @staticmethod
    def of(group: Axis | ProcessGroup | None, name: str = "tp") -> Axis:
        """The axis for what a caller passes as `process_group`.

        Args:
            group: an Axis (returned as it is), a process group, or None for all ranks of the job.
            name: what to call it where `group` is a plain process group.
        """
        if isinstance(group, Axis):
            return group
        if group is None:
            if not dist.is_initialized():
                return Axis.alone(name)
            group = dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        return Axis(name, len(ranks), dist.get_rank(group), ranks, group)


class ParallelMesh:
    """Places the ranks of the job on a grid with the axes dp × pp × sp × tp (tp varies fastest).

    Args:
        tp, pp, sp: sizes of the tensor, pipeline and sequence axes.
        dp: size of the data axis; by default what the world size leaves.

    Raises:
        ConfigError: on every rank alike, before any group is made, when the sizes do not fit the number of ranks.
    """

    def __init__(self, tp: int = 1, pp: int = 1, sp: int = 1, dp: int | None = None) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.sizes = plan_sizes(self.world_size, dp=dp, pp=pp, sp=sp, tp=tp)
        self.device_mesh = _device_mesh(tuple(self.sizes[a] for a in AXES)) if dist.is_initialized() else None
        self._axes = {name: self._make_axis(name) for name in AXES} | {"ep": Axis.alone("ep")}  # experts are not split
        self.world = Axis.of(None, "world")

    def _make_axis(self, name: str) -> Axis:
        if self.device_mesh is None:
            return Axis.alone(name)
        return Axis.of(self.device_mesh.get_group(name), name)

    def axis(self, name: str) -> Axis:
        """The axis `name` with its group, size and this rank's position."""
        if name not in self._axes:
            raise ConfigError(f"the mesh has no axis {name!r}; its axes are {', '.join(self._axes)}.")
        return self._axes[name]

    def size(self, name: str) -> int:
        """Number of ranks along an axis."""
        return self.axis(name).size

    def rank(self, name: str) -> int:
        """This rank's position along an axis."""
        return self.axis(name).rank

    def group(self, name: str) -> ProcessGroup | None:
        """Process group of the peers along an axis; None where the job has one process without a group."""
        return self.axis(name).group

    def __repr__(self) -> str:
        return "ParallelMesh(" + " × ".join(f"{name} {self.sizes[name]}" for name in AXES) + ")"


def plan_sizes(world_size: int, *, dp: int | None, pp: int, sp: int, tp: int) -> dict[str, int]:
    """Check the sizes of the axes against the number of ranks and fill in dp. Pure arithmetic.

    Raises:
        ConfigError: with every problem found, its rule, and sizes that work.
    """
    given = {"tp_size": tp, "pp_size": pp, "sp_size": sp} | ({} if dp is None else {"dp_size": dp})
    bad = {k: v for k, v in given.items() if not isinstance(v, int) or isinstance(v, bool) or v < 1}
    if bad:
        raise ConfigError(
            explain(
                "parallel sizes must be whole numbers of at least 1: "
                + ", ".join(f"{k}={v!r}" for k, v in bad.items()),
                [("try", ", ".join(f"{k}=1" for k in bad))],
            )
        )
    model = tp * pp * sp
    if world_size % model or (dp is not None and dp * model != world_size):
        asked = " × ".join(f"{k}={v}" for k, v in given.items())
        raise ConfigError(
            explain(
                f"{world_size} rank{'s' * (world_size != 1)} cannot be laid out as {asked}.",
                [
                    ("needs", f"a world size that is a multiple of {model}" if dp is None else f"{dp * model} ranks"),
                    *(
                        []
                        if dist.is_initialized()
                        else [("found", "no process group: call colonnade.launch_from_torch() first")]
                    ),
                    ("try", _suggest_sizes(world_size, model, dp, tp, pp * sp)),
                ],
            )
        )
    return {"dp": world_size // model, "pp": pp, "sp": sp, "tp": tp}


def _suggest_sizes(world_size: int, model: int, dp: int | None, tp: int, rest: int) -> str:
    ranks = dp * model if dp is not None else model * max(1, math.ceil(world_size / model))
    fitting = [t for t in range(1, world_size + 1) if world_size % (t * rest) == 0]
    near = sorted(sorted(fitting, key=lambda t: (abs(t - tp), t))[:3])
    sizes = f"tp_size={' or '.join(map(str, near))}, or " if near else ""
    return f"{sizes}start {ranks} processes: colonnade run --nproc-per-node {ranks} …"


_MESHES: dict[tuple[object, tuple[int, ...]], DeviceMesh] = {}


def _device_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """One DeviceMesh per shape and job: making it again would make all its process groups again."""
    key = (dist.group.WORLD, shape)
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(device_type(), shape, mesh_dim_names=AXES)
    return _MESHES[key]
