"""DATA-1 and DATA-2: who gets which rows, in which order, and from where after a resume."""

import random

import pytest
import torch
from field_cases import DATA_PARALLEL, GRADIENT, LOSS, Boosted, Single, assert_close, make_plugin
from torch.utils.data import Dataset

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


class Numbers(Dataset):
    """Item i is the number i."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return index


def with_random_number(items):
    return items, torch.rand(()).item()


def worker_options(workers):
    """Workers are forked, as in a script on Linux; a rank of the pool would by itself start each from scratch."""
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def deal_out(plugin, axis, rank_seeds, workers):
    """Two epochs of batches with a random number drawn in a worker; the mesh position, and the length of the loader."""
    plugin = make_plugin(plugin)
    rank = plugin.mesh.world.rank
    torch.manual_seed(rank_seeds[rank])
    random.seed(rank_seeds[rank])
    loader = plugin.prepare_dataloader(
        Numbers(20), 2, shuffle=True, collate_fn=with_random_number, **worker_options(workers)
    )
    epochs = [list(loader) for _ in range(2)]
    return plugin.mesh.rank("dp"), plugin.mesh.rank(axis), len(loader), epochs


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_rows_are_dealt_out_by_data_parallel_rank(axis, workers):
    answers = run_on_ranks(4, deal_out, f"{axis}2", axis, [0, 1, 2, 3], workers)
    answers = {(dp, inside): rest for dp, inside, *rest in answers}
    assert answers.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [length for length, _ in answers.values()] == [5] * 4
    for dp in (0, 1):
        assert answers[dp, 0] == answers[dp, 1]  # the random numbers too
    orders = []
    for epoch in (0, 1):
        rows = [[row for items, _ in answers[dp, 0][1][epoch] for row in items] for dp in (0, 1)]
        assert set(rows[0]).isdisjoint(rows[1])
        assert sorted(rows[0] + rows[1]) == list(range(20))
        orders.append(rows)
    assert orders[0] != orders[1]
    drawn = [number for epoch in answers[0, 0][1] for _, number in epoch]
    assert len(set(drawn)) == len(drawn)


def make_loader(workers):
    return make_plugin("dp").prepare_dataloader(
        Numbers(24), 3, shuffle=True, seed=5, collate_fn=list, **worker_options(workers)
    )


def uninterrupted(workers):
    loader = make_loader(workers)
    return [list(loader) for _ in range(4)]


def until_the_middle_of_epoch_1(workers):
    loader = make_loader(workers)
    seen = [list(loader), []]
    for batch in loader:
        seen[1].append(batch)
        if len(seen[1]) == 2:
            break
    return loader.state_dict(), seen


def go_on(states, global_seed, workers):
    torch.manual_seed(global_seed)
    random.seed(global_seed)
    plugin = make_plugin("dp")
    loader = make_loader(workers)
    loader.load_state_dict(states[plugin.mesh.rank("dp")])
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle_of_an_epoch(workers):
    recorded = run_on_ranks(2, uninterrupted, workers)
    assert sorted(row for rank in recorded for batch in rank[1] for row in batch) == list(range(24))
    assert recorded[0][0] != recorded[0][1]
    stopped = run_on_ranks(2, until_the_middle_of_epoch_1, workers)
    assert [seen for _, seen in stopped] == [[rank[0], rank[1][:2]] for rank in recorded]
    states = [state for state, _ in stopped]
    assert states[0] == states[1]
    for global_seed in (0, 12345):
        resumed = run_on_ranks(2, go_on, states, global_seed, workers)
        assert resumed == [[rank[1][2:], rank[2], rank[3]] for rank in recorded]


def go_on_with(plugin, state, batch_size, batches, workers):
    """Some batches from a state on (all that are left of the epoch where None), and the state after them."""
    loader = make_plugin(plugin).prepare_dataloader(
        Numbers(24), batch_size, shuffle=True, seed=5, collate_fn=list, **worker_options(workers)
    )
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == batches:
            break
    following = None if batches else list(loader)
    return loader.state_dict(), seen, following


def in_order(answers):
    """The rows of the data-parallel ranks, put together batch by batch."""
    return [row for ranks in zip(*answers) for batch in ranks for row in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks, batch_size", [(1, 5), (3, 2), (3, 3), (4, 1), (4, 5)])
def test_resume_inside_a_batch_of_another_number_of_ranks(ranks, batch_size, workers):
    [(_, *epochs)] = run_on_ranks(1, go_on_with, "dp", None, 24, None, 0)
    order, epoch_1 = (in_order([batches]) for batches in epochs)
    assert sorted(order) == sorted(epoch_1) == list(range(24)) and order != epoch_1
    stopped = run_on_ranks(2, go_on_with, "dp", None, 3, 2, workers)
    states = [state for state, *_ in stopped]
    assert states[0] == states[1] and states[0]["rows"] == 12
    assert in_order([seen for _, seen, _ in stopped]) == order[:12]
    # one batch more on other ranks: the place is then no multiple of 6, which two ranks go on from
    moved = run_on_ranks(ranks, go_on_with, "dp", states[0], batch_size, 1, workers)
    place = 12 + min(12, ranks * batch_size)
    assert [state["rows"] for state, *_ in moved] == [place] * ranks
    assert in_order([seen for _, seen, _ in moved]) == order[12:place]
    last = run_on_ranks(2, go_on_with, "dp", moved[0][0], 3, None, workers)
    assert in_order([seen for _, seen, _ in last])[: 24 - place] == order[place:]
    assert in_order([following for *_, following in last]) == epoch_1


ROWS = 7


class Texts(Dataset):
    """Rows of token ids with 15, 12, 9, … targets."""

    def __init__(self):
        self.ids = ids(ROWS, 16)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        labels = self.ids[row].clone()
        labels[16 - 2 * row :] = -100
        return {"input_ids": self.ids[row], "labels": labels}


def step_on_each_batch(plugin, batch_size):
    """(loss, gradients) of each batch of an epoch from the same weights, and the rows that all ranks were given."""
    found = []
    loader = make_plugin(plugin).prepare_dataloader(Texts(), batch_size, shuffle=True, seed=5)
    for batch in loader:
        run = Boosted(plugin, tiny_model("LL"))
        loss = run.model(**batch).loss
        run.booster.backward(loss, run.optimizer)
        found.append((loss.item(), run.gradients_by_step(), batch["input_ids"].shape[0]))
    return found, loader.order.order(0)


@pytest.mark.parametrize(
    "plugin, ranks, batch_size", [("dp", 2, 2), ("ddp", 4, 1), *[(name, 3, 2) for name in DATA_PARALLEL]]
)
def test_a_ragged_last_batch_is_averaged_over_its_targets(plugin, ranks, batch_size):
    """7 rows: 4 + 3 on two ranks, 6 + 1 (and 2 again) on three, 4 + 3 (and 1 again) on four."""
    answers = run_on_ranks(ranks, step_on_each_batch, plugin, batch_size)
    order, texts, step = answers[0][1], Texts(), ranks * batch_size
    for index in range(2):
        rows = order[index * step : (index + 1) * step]
        rows += order[: max(0, ranks - len(rows))]
        assert sum(found[index][2] for found, _ in answers) == len(rows)
        items = [texts[row] for row in rows]
        one = Single(tiny_model("LL")).step({key: torch.stack([item[key] for item in items]) for key in items[0]})
        for found, _ in answers:
            loss, gradients, _ = found[index]
            assert loss == pytest.approx(one.losses[0], abs=LOSS)
            assert_close(gradients, one.gradients, GRADIENT)
