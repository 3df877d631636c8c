"""ZB-H1: 1F1B whose weight gradients are put off, a third of its idle time (Zero Bubble Pipeline Parallelism, Qi et al. 2023)."""

from __future__ import annotations

from colonnade.pipeline.action import Action


def zbh1(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The actions of each rank.

    The order of 1F1B. Rank r puts each "W" off by r micro-batches, to have r of them at the end, where 1F1B would wait. So
    it never keeps more than min(microbatches, ranks) micro-batches: as many as the first rank of 1F1B.
    """
    lists = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        actions = [Action("F", rank, i) for i in range(ahead)]
        for i in range(microbatches):
            actions.append(Action("B", rank, i))
            if i >= rank:
                actions.append(Action("W", rank, i - rank))
            if ahead + i < microbatches:
                actions.append(Action("F", rank, ahead + i))
        actions += [Action("W", rank, i) for i in range(max(0, microbatches - rank), microbatches)]
        lists.append(actions)
    return lists
