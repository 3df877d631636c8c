"""A data loader whose order depends on the seed and the epoch alone, and which knows where it stands.

[Note: who gets which rows]
Rows are dealt out by data-parallel rank, never by global rank: the ranks of one tensor-parallel group see the same batch.
All ranks draw the same permutation of an epoch. A global batch is the next ranks × batch_size rows of it, cut into one
contiguous piece a rank. So the place in an epoch is one number, the rows that all ranks together have been given, and an
epoch can be left and gone on with at any row, by any number of ranks with any batch size: each row is given once.

[Note: random numbers of a dataset]
What `dataset[row]` draws (augmentation) depends on the seed, the epoch and the row; what the collate function draws
(masking) on the seed, the epoch and the place of the batch in the order. Neither depends on workers, on what was drawn
before, or on an interruption, and the training's own random state does not move. On another number of ranks or with
another batch size, rows are augmented the same, and collated in other batches. A dataset that fetches whole batches
(`__getitems__`) draws by batch too. It is the default CPU generators of torch, Python and NumPy that are seeded; a
generator of the user's own is left alone.

[Note: why this is not torchdata's StatefulDataLoader]
Its state (torchdata 0.11) belongs to one rank and one number of workers: a distributed sampler counts that rank's own rows,
which says nothing to another number of ranks. The place that does is one integer here, too little for a dependency.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, default_collate

from colonnade.cluster.mesh import Axis
from colonnade.cluster.streams import derive_seed
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.model.layout import deal

_END = object()
_NOT_OURS = ("batch_sampler", "sampler", "generator")  # of torch's DataLoader: they would decide the order of rows


@dataclass(frozen=True)
class BatchOfRows:
    """Which rows make a batch of one rank, and what its random numbers depend on.

    Args:
        rows: their numbers in the dataset.
        place: position of the first of them in the epoch's order.
        epoch, seed: of the order.
    """

    rows: tuple[int, ...]
    place: int
    epoch: int
    seed: int


class DistributedBatchSampler(Sampler[BatchOfRows]):
    """Batches of row numbers for one data-parallel rank.

    Every rank yields the same number of batches. The last one may be short: its rows are dealt out as evenly as they go,
    and where there are fewer rows than ranks the first rows of the epoch's order fill up.

    Args:
        rows: number of rows of the dataset.
        batch_size: rows of a batch on one data-parallel rank.
        axis: the data-parallel axis.
        shuffle: draw a new order each epoch.
        seed: of the order.
        drop_last: leave out a last global batch that is not full.

    Attributes:
        epoch: whose order is given at the next iteration.
        start: how many of its rows have been given already.
    """

    def __init__(self, rows: int, batch_size: int, axis: Axis, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.batch_size = _whole_number("batch_size", batch_size, 1)
        self.rows, self.shuffle, self.seed, self.drop_last = rows, bool(shuffle), _whole_number("seed", seed), drop_last
        self.rank, self.ranks = axis.rank, axis.size
        self.epoch, self.start = 0, 0
        if len(self) == 0:
            raise ConfigError(
                explain(
                    f"{rows} rows make no batch for {self.ranks} data-parallel rank(s) with batch_size={batch_size}.",
                    [
                        ("needs", f"at least {self.step if drop_last else 1} rows"),
                        ("try", "drop_last=False or a smaller batch_size"),
                    ],
                )
            )

    @property
    def step(self) -> int:
        """Rows of a full global batch."""
        return self.ranks * self.batch_size

    def __len__(self) -> int:
        """Number of batches of a whole epoch, from its first row on."""
        whole, rest = divmod(self.rows, self.step)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> list[int]:
        """The order of all rows in an epoch, the same on every rank."""
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.rows, generator=generator).tolist()

    def __iter__(self) -> Iterator[BatchOfRows]:
        return self._batches(self.epoch, self.start)  # as they are now, not when the first batch is asked for

    def _batches(self, epoch: int, start: int) -> Iterator[BatchOfRows]:
        order = self.order(epoch)
        for place in range(start, self.rows, self.step):
            rows = order[place : place + self.step]
            if self.drop_last and len(rows) < self.step:
                return
            while len(rows) < self.ranks:  # more than once where the whole dataset has fewer rows than there are ranks
                rows += order[: self.ranks - len(rows)]
            first, last = deal(len(rows), self.ranks)[self.rank]
            yield BatchOfRows(tuple(rows[first:last]), place + first, epoch, self.seed)


class StatefulDataLoader(DataLoader):
    """A DataLoader that moves to the next epoch's order by itself and can be resumed at the very row.

    Its place is that of the last batch the user was given, whatever workers have fetched beyond it. An iteration begins
    there: after a loop that was left by `break` the next one goes on with the rest of the epoch, or with the next one where
    nothing is left. There is one iteration at a time; beginning another, `set_epoch` and `load_state_dict` end the one before.

    `len` is the number of batches of a whole epoch; an iteration that begins inside one has fewer.

    Args:
        dataset: with `__len__` and `__getitem__`; see [Note: random numbers of a dataset].
        sampler: which rows make the batches of this rank.
        collate_fn: makes a batch of a list of items; by default torch's `default_collate`.
        **kwargs: as torch's DataLoader (num_workers, pin_memory, persistent_workers, …).
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: DistributedBatchSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        batches = CollatedBatches(dataset, collate_fn or default_collate)
        super().__init__(
            batches,  # type: ignore[arg-type]  # anything with __getitem__ and __len__ will do
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **kwargs,
        )
        self.order = sampler
        self._epoch, self._rows, self._iteration = 0, 0, 0
        self._given_all = False  # of the epoch, to an iteration that has not asked for its end

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or that the next iteration begins."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._iteration += 1
        if self._given_all:  # as a loop over range(len(loader)) leaves it
            self._move(self._epoch + 1, 0)
        self.order.epoch, self.order.start = self._epoch, self._rows
        self.generator.manual_seed(derive_seed("workers", self.order.seed, self._epoch))  # for worker_init_fn
        return self._counted(super().__iter__(), self._iteration)

    def _counted(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        """Hand the batches on, and count what has been handed on."""
        while True:
            if iteration != self._iteration:
                raise UsageError(
                    explain(
                        "this iteration over the data loader is over: another was begun, or the loader was moved.",
                        [
                            ("rule", "a loader has one place, so one iteration at a time"),
                            ("try", "a second loader, from plugin.prepare_dataloader with the same arguments"),
                        ],
                    )
                )
            batch = next(batches, _END)
            if batch is _END:
                break
            self._rows = min(self._rows + self.order.step, self.order.rows)
            left = self.order.rows - self._rows
            self._given_all = left < (self.order.step if self.order.drop_last else 1)
            yield batch
        self._move(self._epoch + 1, 0)

    def _move(self, epoch: int, rows: int) -> None:
        self._epoch, self._rows, self._given_all = epoch, rows, False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at the next iteration. Not needed in order: epochs count up by themselves.

        The epoch that the loader is in goes on where it is, so that calling this before every epoch does no harm after a
        resume.
        """
        epoch = _whole_number("epoch", epoch, 0)
        if epoch != self._epoch:
            self._move(epoch, 0)
            self._iteration += 1

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the epoch, and how many of its rows all ranks together have been given.

        The same on every rank. Inside the loop the batch in hand counts as given, so after the last one an iteration of
        that epoch is left that gives nothing; after the loop it is the next epoch.
        """
        return {
            "epoch": self._epoch,
            "rows": self._rows,
            "seed": self.order.seed,
            "shuffle": int(self.order.shuffle),
            "dataset_rows": self.order.rows,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at the row where `state_dict` was taken, with any number of data-parallel ranks and any batch size.

        The order goes on with the seed of the state, whatever seed this loader was made with.

        Raises:
            ConfigError: it is the state of another dataset (by its length) or of the other value of `shuffle`, or none.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"this is no state of a data loader, but a {type(state).__name__}: {state!r:.60}.")
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ConfigError(f"this is no state of a data loader: it lacks {', '.join(sorted(missing))}.")
        found = {key: _whole_number(key, state[key], None if key == "seed" else 0) for key in self.state_dict()}
        here = {"dataset_rows": self.order.rows, "shuffle": int(self.order.shuffle)}
        wrong = [key for key in here if found[key] != here[key]]
        if wrong:
            raise ConfigError(
                explain(
                    "the state belongs to another data loader: its order of rows is not the one of this loader.",
                    [
                        *[(key, f"{found[key]} in the state, {here[key]} here") for key in wrong],
                        ("try", "the dataset and the value of shuffle that the state was saved with, or set_epoch"),
                    ],
                )
            )
        if found["rows"] > self.order.rows:
            raise ConfigError(f"the state stands after row {found['rows']} of a dataset of {self.order.rows} rows.")
        self.order.seed = found["seed"]
        self._move(found["epoch"], found["rows"])
        self._iteration += 1


class CollatedBatches(Dataset):
    """A dataset by batches: fetched and collated with their own random numbers, in the worker if there is one.

    Otherwise it is the dataset it was made from: its length, single items and attributes, which can also be set (by a
    `worker_init_fn`, say).

    Args:
        dataset: with `__len__` and `__getitem__`, and perhaps `__getitems__`.
        collate_fn: makes a batch of a list of items.
    """

    _dataset: Any
    _collate: Callable[[list[Any]], Any]

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        vars(self).update(_dataset=dataset, _collate=collate_fn)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, BatchOfRows):
            return self._dataset[index]
        with _default_generators() as seed:
            if _fetches_batches(self._dataset):
                seed(derive_seed("batch", index.seed, index.epoch, index.place))
                items = self._dataset.__getitems__(list(index.rows))
            else:
                items = []
                for row in index.rows:
                    seed(derive_seed("row", index.seed, index.epoch, row))
                    items.append(self._dataset[row])
            seed(derive_seed("collate", index.seed, index.epoch, index.place))
            return self._collate(items)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_collate"):  # asked for while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def make_dataloader(
    dataset: Any, batch_size: int, axis: Axis, *, shuffle: bool, seed: int, drop_last: bool, **kwargs: Any
) -> StatefulDataLoader:
    """The loader that `plugin.prepare_dataloader` returns; its arguments are described there.

    Raises:
        ConfigError: the dataset has no length or cannot be asked for a row by its number; there is not a single batch; or
            an option is given that would take the order of rows out of the loader's hands.
    """
    _check_options(kwargs)
    sampler = DistributedBatchSampler(_length(dataset), batch_size, axis, shuffle, seed, drop_last)
    return StatefulDataLoader(dataset, sampler, **kwargs)


def _length(dataset: Any) -> int:
    wrong = "is iterable only" if isinstance(dataset, IterableDataset) else ""
    if not wrong and not hasattr(dataset, "__getitem__"):
        wrong = "has no __getitem__"
    if not wrong:
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            wrong = "has no length"
    raise ConfigError(
        explain(
            f"prepare_dataloader cannot deal out the rows of this {type(dataset).__name__}: it {wrong}.",
            [
                ("needs", "a dataset with __len__ and __getitem__, whose rows can be taken in any order"),
                (
                    "try",
                    "list(dataset) where it fits into memory; or a loader of your own, with batches by data-parallel rank",
                ),
            ],
        )
    )


def _check_options(kwargs: dict[str, Any]) -> None:
    given = [name for name in _NOT_OURS if kwargs.get(name) is not None]
    if given:
        raise ConfigError(
            explain(
                f"prepare_dataloader decides the order of rows itself, and was given {', '.join(given)}.",
                [("try", "batch_size, shuffle, seed and drop_last; or torch's own DataLoader")],
            )
        )
    if kwargs.get("in_order") is False:
        raise ConfigError("in_order=False gives batches in an order that cannot be resumed; leave it out.")


def _whole_number(name: str, value: Any, least: int | None = None) -> int:
    """An int, a NumPy integer or a tensor of one as an int.

    Raises:
        ConfigError: it is no whole number, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        rule = "a whole number" + ("" if least is None else f" of at least {least}")
        raise ConfigError(f"{name}={value!r} must be {rule}.")
    return number


def _as_it_is(batch: Any) -> Any:
    return batch


def _fetches_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):  # which has the method, and passes a batch on
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


@contextmanager
def _default_generators() -> Iterator[Callable[[int], None]]:
    """Seed the default generators of torch (CPU), Python and NumPy inside, and find them as they were afterwards."""
    try:
        import numpy
    except ImportError:
        numpy = None  # type: ignore[assignment]  # optional: without NumPy there is no generator to seed

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if numpy is not None:
            numpy.random.seed(number % 2**32)  # the range NumPy takes

    before = torch.default_generator.get_state(), random.getstate()
    before_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield seed
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        if before_numpy is not None:
            numpy.random.set_state(before_numpy)
