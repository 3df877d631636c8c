"""The data loader: every row once an epoch from any row on, its place, its random numbers, and what it refuses.

A loader does not communicate, so the ranks are played one after the other in this process. That batches arrive on ranks of
a job is shown by tests/cases/test_case_data.py.
"""

import pickle
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from colonnade.booster.plugin.dataloader import make_dataloader
from colonnade.cluster.mesh import Axis
from colonnade.cluster.seed import seed_all
from colonnade.errors import ConfigError, UsageError


def loader_of(dataset, batch_size=3, ranks=1, rank=0, **options):
    """The loader of one rank of `ranks`, whose batches are lists of items."""
    options = {"shuffle": True, "seed": 5, "drop_last": False, "collate_fn": list} | options
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    axis = Axis("dp", ranks, rank, tuple(range(ranks)), None)
    return make_dataloader(range(dataset) if isinstance(dataset, int) else dataset, batch_size, axis, **options)


def take(loader, number):
    """The next batches of an iteration that is then left."""
    found = []
    if number:
        for batch in loader:
            found.append(batch)
            if len(found) == number:
                break
    return found


# ---------------------------------------------------------------------------------------------- every row once an epoch

LEG = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)
)  # ranks, batch size, batches before the next leg


def run_legs(rows, legs, shuffle, drop_last):
    """One epoch by several jobs, each resuming the one before; global batches as lists of the ranks' batches."""
    state, found = None, []
    for index, (ranks, batch_size, number) in enumerate(legs):
        loaders = [
            loader_of(rows, batch_size, ranks, r, shuffle=shuffle, drop_last=drop_last and index == len(legs) - 1)
            for r in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        last = index == len(legs) - 1
        per_rank = [list(loader) if last else take(loader, number) for loader in loaders]
        assert len({len(batches) for batches in per_rank}) == 1
        found += [list(batches) for batches in zip(*per_rank)]
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * ranks
        state = states[0]
        if state["epoch"] == 1:
            return found, loaders
    return found, loaders


@given(st.integers(1, 40), st.lists(LEG, min_size=1, max_size=4), st.booleans())
def test_every_row_is_given_once_over_resumes_with_other_ranks_and_batch_sizes(rows, legs, shuffle):
    batches, loaders = run_legs(rows, legs, shuffle, drop_last=False)
    order = loaders[0].order.order(0)
    given_out = [row for ranks in batches for batch in ranks for row in batch]
    assert given_out[:rows] == order
    refilled = given_out[rows:]
    if refilled:  # fewer rows than ranks were left, and the first of the order filled up
        assert len(refilled) < len(batches[-1])
        assert refilled == (order * len(batches[-1]))[: len(refilled)]
    for ranks in batches:
        sizes = [len(batch) for batch in ranks]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert (loaders[0].epoch, loaders[0].state_dict()["rows"]) == (1, 0)
    following = [row for ranks in zip(*loaders) for batch in ranks for row in batch]
    assert following[:rows] == loaders[0].order.order(1)


@given(st.integers(20, 40), st.lists(LEG, min_size=1, max_size=3), st.booleans())
def test_drop_last_leaves_out_less_than_one_batch_of_the_end(rows, legs, shuffle):
    batches, loaders = run_legs(rows, legs, shuffle, drop_last=True)
    given_out = [row for ranks in batches for batch in ranks for row in batch]
    order, step = loaders[0].order.order(0), len(loaders) * loaders[0].order.batch_size
    assert given_out[:rows] == order[: len(given_out)]
    assert len(given_out) >= rows or rows - len(given_out) < step


def test_length_is_that_of_a_whole_epoch_wherever_the_loader_stands():
    loader = loader_of(20, 3, ranks=2)
    assert len(loader) == 4 and len(loader_of(20, 3, ranks=2, drop_last=True)) == 3
    take(loader, 2)
    assert len(loader) == 4
    assert len(list(loader)) == 2


def test_a_batch_size_may_be_any_whole_number():
    assert len(loader_of(20, numpy.int64(4))) == 5
    assert list(loader_of(4, torch.tensor(2), shuffle=False)) == [[0, 1], [2, 3]]
    for wrong in (0, -1, 2.0, "2", None, True):
        with pytest.raises(ConfigError, match="batch_size"):
            loader_of(20, wrong)


# ------------------------------------------------------------------------------------------------------------- its place


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_breaking_out_and_iterating_again_goes_on_with_the_rest(options):
    whole = list(loader_of(24))
    loader = loader_of(24, **options)
    first = take(loader, 3)
    assert loader.state_dict()["rows"] == 9  # what was handed out, not what workers fetched
    rest = list(loader)
    assert first + rest == whole
    reference = loader_of(24)
    assert [list(reference) for _ in range(3)][1:] == [list(loader) for _ in range(2)]
    assert loader.epoch == 3


def test_the_batch_in_hand_counts_as_given():
    loader, seen = loader_of(8), []
    for _ in loader:
        seen.append((loader.state_dict()["epoch"], loader.state_dict()["rows"]))
    assert seen == [(0, 3), (0, 6), (0, 8)]
    assert loader.state_dict() == {"epoch": 1, "rows": 0, "seed": 5, "shuffle": 1, "dataset_rows": 8}


def test_after_the_last_batch_nothing_is_left_of_the_epoch():
    """A resumed loop ends at once; the loop that was there goes on with the next epoch."""
    loader = loader_of(8)
    take(loader, 3)
    resumed = loader_of(8)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    wanted = [list(batch) for batch in resumed]
    assert [list(batch) for batch in loader] == wanted
    assert sorted(row for batch in wanted for row in batch) == list(range(8))


def test_set_epoch_begins_another_epoch_and_leaves_the_present_one_where_it_is():
    reference = loader_of(12)
    epochs = [list(reference) for _ in range(4)]
    loader = loader_of(12)
    take(loader, 2)
    loader.set_epoch(3)
    assert list(loader) == epochs[3]
    loader.set_epoch(1)
    take(loader, 1)
    resumed = loader_of(12)
    resumed.load_state_dict(loader.state_dict())
    for epoch in (1, 2):
        resumed.set_epoch(epoch)  # as people do before every epoch
        assert list(resumed) == epochs[epoch][1 if epoch == 1 else 0 :]
    for wrong in (-1, 1.5, None):
        with pytest.raises(ConfigError, match="epoch"):
            loader.set_epoch(wrong)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_second_iteration_ends_the_first(options):
    loader = loader_of(12, **options)
    first = iter(loader)
    start = next(first)
    second = iter(loader)
    rest = [next(second)]
    with pytest.raises(UsageError, match="one iteration at a time"):
        next(first)
    rest += second
    assert [start, *rest] == list(loader_of(12))


def test_moving_the_loader_ends_the_iteration():
    loader = loader_of(12)
    state = loader.state_dict()
    for move in (lambda: loader.set_epoch(4), lambda: loader.load_state_dict(state)):
        batches = iter(loader)
        next(batches)
        move()
        with pytest.raises(UsageError, match="the loader was moved"):
            next(batches)
    assert list(loader) == list(loader_of(12))


def test_an_error_of_the_dataset_leaves_the_place_before_its_batch():
    class Broken(Dataset):
        fails = True

        def __len__(self):
            return 6

        def __getitem__(self, row):
            if row == 4 and self.fails:
                raise OSError("row 4 cannot be read")
            return row

    dataset = Broken()
    loader = loader_of(dataset, 2, shuffle=False)
    with pytest.raises(OSError, match="row 4"):
        list(loader)
    assert loader.state_dict()["rows"] == 4
    dataset.fails = False
    assert list(loader) == [[4, 5]]


def test_the_seed_of_the_state_goes_on():
    saved = loader_of(12, seed=5)
    take(saved, 2)
    loader = loader_of(12, seed=6)
    loader.load_state_dict({key: numpy.int64(value) for key, value in saved.state_dict().items()})
    assert list(loader) == list(saved)
    assert loader.state_dict()["seed"] == 5


def test_a_state_that_does_not_fit_is_refused():
    state, loader = loader_of(12).state_dict(), loader_of(12)
    take(loader, 1)
    before = loader.state_dict()
    cases = [
        (loader_of(13).state_dict(), "dataset_rows.*13 in the state, 12 here"),
        (loader_of(12, shuffle=False).state_dict(), "shuffle.*0 in the state, 1 here"),
        ({"epoch": 0}, "lacks dataset_rows, rows, seed, shuffle"),
        (None, "no state of a data loader, but a NoneType"),
        ([1], r"but a list: \[1\]"),
        (state | {"rows": 13}, "after row 13 of a dataset of 12 rows"),
        (state | {"rows": -1}, "rows=-1"),
        (state | {"epoch": 0.5}, "epoch=0.5"),
    ]
    for wrong, text in cases:
        with pytest.raises(ConfigError, match=text):
            loader.load_state_dict(wrong)
        assert loader.state_dict() == before


# --------------------------------------------------------------------------------------------------- its random numbers


class Noisy(Dataset):
    """Item: (row, one number from each default generator)."""

    def __init__(self, rows=24):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return row, torch.rand(()).item(), random.random(), numpy.random.random()


class NoisyBatches(Noisy):
    def __getitems__(self, rows):
        return [self[row] for row in rows]


def with_noise(items):
    return items, torch.rand(()).item(), random.random(), numpy.random.random()


@pytest.mark.parametrize("dataset", [Noisy(), NoisyBatches()], ids=["rows", "whole batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_are_the_same_after_a_resume_with_any_number_of_workers(workers, dataset):
    reference = loader_of(dataset, collate_fn=with_noise)
    recorded = [list(reference) for _ in range(2)]
    loader = loader_of(dataset, collate_fn=with_noise, num_workers=workers)
    assert list(loader) == recorded[0]
    assert take(loader, 3) == recorded[1][:3]
    torch.manual_seed(99)
    resumed = loader_of(dataset, collate_fn=with_noise, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == recorded[1][3:]
    numbers = [n for epoch in recorded for items, *drawn in epoch for n in [*drawn, *(x for i in items for x in i[1:])]]
    assert len(set(numbers)) == len(numbers) == 2 * 3 * (24 + 8)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(24))], ids=["dataset", "subset"])
def test_what_a_row_draws_does_not_depend_on_who_gets_it(wrap):
    one = {item[0]: item for batch in loader_of(wrap(Noisy())) for item in batch}
    many = [loader_of(wrap(Noisy()), 2, ranks=5, rank=r, num_workers=r % 2) for r in range(5)]
    found = [item for loader in many for batch in loader for item in batch]
    assert len(found) == 25  # 24 rows are 2 global batches of 10 and one of 4, which is filled up
    assert all(one[item[0]] == item for item in found)


def test_different_ranks_draw_different_numbers_and_epochs_too():
    drawn = []
    for rank in range(2):
        loader = loader_of(24, 3, ranks=2, rank=rank, collate_fn=with_noise)
        drawn += [number for _ in range(2) for _, *numbers in loader for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 4 * 3


def test_the_random_state_of_the_training_does_not_move():
    seed_all(3)
    undisturbed = torch.rand(3).tolist(), random.random(), numpy.random.random()
    seed_all(3)
    loader = loader_of(Noisy(), collate_fn=with_noise)
    batches, values = iter(loader), []
    for _ in range(3):
        next(batches)
        values.append(torch.rand(()).item())
    assert (values, random.random(), numpy.random.random()) == undisturbed


# ----------------------------------------------------------------------------------------- the dataset, and what is refused


class WithHandle(Dataset):
    handle = None

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return row, self.handle


def open_handle(worker):
    get_worker_info().dataset.handle = f"opened by {worker}"


def test_a_worker_can_prepare_the_dataset():
    found = list(loader_of(WithHandle(), 2, shuffle=False, num_workers=2, worker_init_fn=open_handle))
    assert found == [[(row, f"opened by {row // 2}") for row in rows] for rows in ([0, 1], [2, 3])]


def test_the_dataset_can_be_reached_and_the_loader_sent_to_a_process():
    dataset = Noisy(7)
    loader = loader_of(dataset)
    assert len(loader.dataset) == loader.dataset.rows == 7
    loader.dataset.extra = 3
    assert dataset.extra == 3
    assert loader.dataset[2][0] == 2
    with pytest.raises(AttributeError):
        loader.dataset.nothing  # noqa: B018
    sent = pickle.loads(pickle.dumps(loader.dataset))
    assert (len(sent), sent.extra) == (7, 3)


def test_batches_are_collated_as_torch_does():
    rows = [{"x": torch.tensor([float(i)]), "n": i} for i in range(4)]
    batch = next(iter(loader_of(rows, 4, shuffle=False, collate_fn=None)))
    assert torch.equal(batch["x"], torch.arange(4.0)[:, None]) and torch.equal(batch["n"], torch.arange(4))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class StreamWithLength(Stream):
    def __len__(self):
        return 4


class Endless(Dataset):
    def __getitem__(self, row):
        return row


def test_a_dataset_whose_rows_cannot_be_dealt_out_is_refused():
    for dataset, text in [
        (Stream(), "this Stream: it is iterable only"),
        (StreamWithLength(), "it is iterable only"),
        (Endless(), "this Endless: it has no length"),
        ((i for i in range(3)), "this generator: it has no __getitem__"),
        ({1, 2}, "this set: it has no __getitem__"),
    ]:
        with pytest.raises(ConfigError, match=text):
            loader_of(dataset)
    with pytest.raises(ConfigError, match="0 rows make no batch"):
        loader_of([])


def test_options_that_would_decide_the_order_are_refused():
    for option in ("sampler", "batch_sampler", "generator"):
        with pytest.raises(ConfigError, match=f"was given {option}"):
            loader_of(4, **{option: torch.Generator()})
    with pytest.raises(ConfigError, match="in_order=False"):
        loader_of(4, num_workers=2, in_order=False)


def test_a_loop_that_takes_as_many_batches_as_there_are_goes_on_with_the_next_epoch():
    loader, whole = (
        make_dataloader(list(range(10)), 4, Axis.alone("dp"), shuffle=True, seed=3, drop_last=False) for _ in range(2)
    )
    wanted = [[batch.tolist() for batch in whole] for _ in range(3)]
    found = []
    for _ in range(3):
        batches = iter(loader)
        found.append([next(batches).tolist() for _ in range(len(loader))])
    assert found == wanted


def test_a_dropped_last_batch_is_not_waited_for():
    loader = make_dataloader(list(range(10)), 4, Axis.alone("dp"), shuffle=True, seed=3, drop_last=True)
    for epoch in range(3):
        batches = iter(loader)
        assert loader.epoch == epoch
        for _ in range(len(loader)):
            next(batches)
