"""Forwards alone, for evaluation: nothing is kept, so each rank does what has come furthest."""

from __future__ import annotations

from collections.abc import Callable

from colonnade.pipeline.action import Action, needs_of


def forwards(ranks: int, microbatches: int, chunks: int, rank_of: Callable[[int, int], int]) -> list[list[Action]]:
    """The actions of each rank.

    Args:
        rank_of: (stage, ranks) → rank.
    """
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    stages = range(ranks * chunks)
    done: set[Action] = set()
    following = [Action("F", stage, 0) for stage in stages]  # of each stage
    while len(done) < len(stages) * microbatches:
        chosen: dict[int, Action] = {}  # at one tick of a clock, by rank; a later stage before an earlier one
        for action in following:
            if action.microbatch < microbatches and all(need in done for need in needs_of(action, len(stages))):
                chosen[rank_of(action.stage, ranks)] = action
        for rank, action in chosen.items():
            lists[rank].append(action)
            done.add(action)
            following[action.stage] = action._replace(microbatch=action.microbatch + 1)
    return lists
