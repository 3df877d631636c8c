"""1F1B: a backward as soon as there is one, and never more forwards ahead than it takes (Narayanan et al. 2019)."""

from __future__ import annotations

from colonnade.pipeline.action import Action


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The actions of each rank. On rank r, min(microbatches, ranks - r) micro-batches are in flight at most."""
    lists = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - 1 - rank)  # forwards before the first pair of forward and backward
        actions = [Action("F", rank, i) for i in range(ahead)]
        for i in range(microbatches - ahead):
            actions += [Action("F", rank, ahead + i), Action("B", rank, i)]
        actions += [Action("B", rank, i) for i in range(microbatches - ahead, microbatches)]
        lists.append(actions)
    return lists
