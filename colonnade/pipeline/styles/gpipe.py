"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from colonnade.pipeline.action import Action


def gpipe(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The actions of each rank. All micro-batches are in flight at once."""
    every = range(microbatches)
    return [[Action("F", rank, i) for i in every] + [Action("B", rank, i) for i in every] for rank in range(ranks)]
