"""Who owns what under ZeRO: parameters in flat storages, storages cut into buckets, buckets dealt out to ranks. Arithmetic.

[Note: flat storage]
Parameters of one group of the optimizer lie one behind the other in flat storages, in the order in which their gradients
become ready. A storage is cut into buckets; each rank owns a part of each bucket. So that a huge embedding does not make a
huge bucket, a storage far larger than a bucket is cut regardless of where parameters begin; else storage and bucket are one.

[Note: whole parameters]
An optimizer that treats entries by themselves can step on any part of a bucket: ranks own equal parts. One that looks at
matrices gets whole parameters: each is dealt to one rank, and the parts are as large as what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from colonnade.model.layout import layout_of

ALIGNMENT = 64  # bytes: every parameter and every rank's part begin at a multiple of a cache line
SMALLEST_CUT = 1 << 20  # bytes: buckets smaller than this are not worth cutting a parameter for


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a storage, in elements."""

    param: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.param.numel()


@dataclass(frozen=True)
class BucketPlan:
    """A range of a storage whose gradients travel together, and how many elements of it each rank owns."""

    start: int
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def part(self, rank: int) -> tuple[int, int]:
        """Where in the storage a rank's part begins and ends."""
        start = self.start + sum(self.sizes[:rank])
        return start, start + self.sizes[rank]


@dataclass(frozen=True)
class StoragePlan:
    """A flat storage: which parameters lie in it, and its buckets.

    Args:
        group: number of the optimizer's parameter group that they belong to.
        whole: every parameter has one owner; else a rank's part begins and ends anywhere.
    """

    group: int
    places: tuple[Place, ...]
    buckets: tuple[BucketPlan, ...]
    whole: bool

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return sum(bucket.numel for bucket in self.buckets)


def plan_storages(
    groups: Sequence[Iterable[nn.Parameter]],
    order: dict[nn.Parameter, int],
    ranks: int,
    bucket_bytes: int,
    itemsize: int,
    whole: bool,
) -> list[StoragePlan]:
    """Plan the storages of all parameters that train, in the order in which their gradients become complete.

    Args:
        groups: the optimizer's parameter groups.
        order: position of each parameter in the model.
        ranks: number of data-parallel ranks.
        itemsize: bytes of an element.
        whole: deal out whole parameters; see [Note: whole parameters].
    """
    plans, loads = [], [0] * ranks
    for number, group in enumerate(groups):
        params = sorted((p for p in group if p.requires_grad and _size(p, whole)), key=lambda p: -order[p])
        for chunk in _chunks(params, bucket_bytes, itemsize, whole):
            if whole:
                plans.append(_deal_parameters(number, chunk, loads, itemsize))
            else:
                plans.append(_deal_elements(number, chunk, ranks, bucket_bytes, itemsize))
    return sorted(plans, key=lambda plan: -min(order[place.param] for place in plan.places))


def _size(param: nn.Parameter, whole: bool) -> int:
    """Where whole parameters are dealt out, all ranks that share one must count the same."""
    return math.prod(layout_of(param).shape) if whole else param.numel()


def _chunks(params: list[nn.Parameter], bucket_bytes: int, itemsize: int, whole: bool) -> list[list[nn.Parameter]]:
    chunks: list[list[nn.Parameter]] = []
    room = 0
    for param in params:
        nbytes = _size(param, whole) * itemsize
        if not chunks or nbytes > room:
            chunks.append([])
            room = bucket_bytes
        chunks[-1].append(param)
        room -= nbytes
    return chunks


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _deal_elements(group: int, params: list[nn.Parameter], ranks: int, bucket_bytes: int, itemsize: int) -> StoragePlan:
    unit = max(ALIGNMENT // itemsize, 1)
    places, end = [], 0
    for param in params:
        places.append(Place(param, end))
        end = _round_up(end + param.numel(), unit)
    end = places[-1].stop  # no rounding behind the last one but what makes equal parts
    cuts = max(1, round(end * itemsize / max(bucket_bytes, SMALLEST_CUT)))
    part = _round_up(-(-end // (cuts * ranks)), unit)
    filled = -(-end // (part * ranks))  # rounding may have left nothing for the last ones
    buckets = tuple(BucketPlan(index * part * ranks, (part,) * ranks) for index in range(filled))
    return StoragePlan(group, tuple(places), buckets, whole=False)


def _deal_parameters(group: int, params: list[nn.Parameter], loads: list[int], itemsize: int) -> StoragePlan:
    """Each parameter, the largest first, to the rank that has least so far; `loads` is what each has, and is updated."""
    unit = max(ALIGNMENT // itemsize, 1)
    owned: list[list[nn.Parameter]] = [[] for _ in loads]
    for param in sorted(params, key=lambda p: -_size(p, True)):
        owner = loads.index(min(loads))
        loads[owner] += _size(param, True)
        owned[owner].append(param)
    places, sizes, end = [], [], 0
    for mine in owned:
        start = end
        for param in mine:
            places.append(Place(param, end))
            end += _round_up(param.numel(), unit)
        sizes.append(end - start)
    return StoragePlan(group, tuple(places), (BucketPlan(0, tuple(sizes)),), whole=True)
