"""A data loader whose order depends on the seed and the epoch alone, and which knows where it stands.

[Note: who gets which rows]
Rows are dealt out by data-parallel rank, never by global rank: the ranks of one tensor-parallel group see the same batch.
All ranks draw the same permutation of an epoch and take every n-th run of `batch_size` rows of it, so that the global
batch of a step is one contiguous run of the permutation, whatever the number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from colonnade.cluster.mesh import Axis
from colonnade.cluster.streams import derive_seed
from colonnade.errors import ConfigError, explain


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for one data-parallel rank.

    Every rank yields the same number of batches. The last ones may be short: its rows are dealt out as evenly as they go,
    and where there are fewer rows than ranks the first rows of the epoch's order fill up.

    Args:
        rows: number of rows of the dataset.
        batch_size: rows of a batch on one data-parallel rank.
        axis: the data-parallel axis.
        shuffle: draw a new order each epoch.
        seed: of the order.
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(self, rows: int, batch_size: int, axis: Axis, shuffle: bool, seed: int, drop_last: bool) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
        self.rows, self.batch_size, self.shuffle, self.seed, self.drop_last = rows, batch_size, shuffle, seed, drop_last
        self.rank, self.ranks = axis.rank, axis.size
        self.epoch, self.position = 0, 0
        if len(self) == 0:
            raise ConfigError(
                explain(
                    f"{rows} rows make no batch for {self.ranks} data-parallel rank(s) with batch_size={batch_size}.",
                    [
                        ("needs", f"at least {self.ranks * batch_size if drop_last else 1} rows"),
                        ("try", "drop_last=False or a smaller batch_size"),
                    ],
                )
            )

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, self.ranks * self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> list[int]:
        """The order of all rows in an epoch, the same on every rank."""
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.rows, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        order, step = self.order(self.epoch), self.ranks * self.batch_size
        for index in range(self.position, len(self)):
            rows = order[index * step : (index + 1) * step]
            if len(rows) < self.ranks:
                rows += order[: self.ranks - len(rows)]
            per_rank, extra = divmod(len(rows), self.ranks)
            start = self.rank * per_rank + min(self.rank, extra)
            yield rows[start : start + per_rank + (self.rank < extra)]


class StatefulDataLoader(DataLoader):
    """A DataLoader that moves to the next epoch's order by itself and can be resumed at the very batch.

    Its random numbers (in a collate function or a dataset) are drawn from a stream seeded by epoch, the same on all ranks.

    Args:
        dataset: with `__len__` and `__getitem__`.
        sampler: which rows make the batches of this rank.
        **kwargs: as torch's DataLoader (num_workers, collate_fn, …).
    """

    def __init__(self, dataset: Dataset, sampler: DistributedBatchSampler, **kwargs: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, generator=torch.Generator(), **kwargs)
        self.order = sampler
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.order.epoch, self.order.position = self._epoch, self._done
        self.generator.manual_seed(derive_seed("workers", self.order.seed, self._epoch))
        for batch in super().__iter__():
            self._done += 1
            yield batch
        self._epoch, self._done = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch at the next iteration. Not needed in order: epochs count up by themselves."""
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the epoch, and how many of its rows all ranks together have been given."""
        return {
            "epoch": self._epoch,
            "rows": self._done * self.order.batch_size * self.order.ranks,
            "seed": self.order.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where `state_dict` was taken, with any number of data-parallel ranks.

        Raises:
            ConfigError: the position is not between two batches of the present global batch size.
        """
        step = self.order.batch_size * self.order.ranks
        if state["rows"] % step:
            raise ConfigError(
                explain(
                    f"the saved position, after {state['rows']} rows of epoch {state['epoch']}, lies inside a batch.",
                    [
                        ("rule", f"global batches here have {step} rows"),
                        ("try", "a global batch size that divides the position"),
                    ],
                )
            )
        self.order.seed = state["seed"]
        self._epoch, self._done = state["epoch"], state["rows"] // step


def make_dataloader(
    dataset: Any, batch_size: int, axis: Axis, *, shuffle: bool, seed: int, drop_last: bool, **kwargs: Any
) -> StatefulDataLoader:
    """The loader that `plugin.prepare_dataloader` returns; its arguments are described there."""
    sampler = DistributedBatchSampler(len(dataset), batch_size, axis, shuffle, seed, drop_last)
    return StatefulDataLoader(dataset, sampler, **kwargs)
