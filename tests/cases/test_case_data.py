"""DATA-1 and DATA-2: who gets which rows, in which order, and from where after a resume."""

import random

import pytest
import torch
from field_cases import make_plugin
from torch.utils.data import Dataset

from colonnade.testing.ranks import run_on_ranks


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


def deal_out(plugin, rank_seeds, workers):
    """Two epochs of batches with a random number drawn in a worker; the mesh position, and the length of the loader."""
    plugin = make_plugin(plugin)
    rank = plugin.mesh.world.rank
    torch.manual_seed(rank_seeds[rank])
    random.seed(rank_seeds[rank])
    loader = plugin.prepare_dataloader(
        Numbers(20), 2, shuffle=True, collate_fn=with_random_number, **worker_options(workers)
    )
    epochs = [list(loader) for _ in range(2)]
    return plugin.mesh.rank("dp"), plugin.mesh.rank("tp"), len(loader), epochs


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_dealt_out_by_data_parallel_rank(workers):
    answers = {(dp, tp): rest for dp, tp, *rest in run_on_ranks(4, deal_out, "tp2", [0, 1, 2, 3], workers)}
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
