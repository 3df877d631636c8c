"""Interleaved 1F1B: several stages on each rank, so that a rank starts and ends sooner (Narayanan et al. 2021)."""

from __future__ import annotations

from colonnade.pipeline.action import Action


def interleaved(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The actions of each rank.

    Micro-batches go round the ranks in groups of `ranks`: such a group passes all stages of a rank, then the next one does.
    A group that is not full, the first one, is written as if it were, and the micro-batches that are not there left out:
    what is done with one of them waits for nothing of another, so what is left keeps its order and can be played.
    """
    full = -(-microbatches // ranks) * ranks
    absent = full - microbatches
    forwards = _order(ranks, full, range(chunks))
    backwards = _order(ranks, full, range(chunks - 1, -1, -1))
    lists = []
    for rank in range(ranks):
        ahead = min(len(forwards), 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        forward = [Action("F", chunk * ranks + rank, i) for chunk, i in forwards]
        backward = [Action("B", chunk * ranks + rank, i) for chunk, i in backwards]
        actions = forward[:ahead]
        for pair in zip(forward[ahead:], backward):
            actions += pair
        actions += backward[len(forward) - ahead :]
        lists.append([a._replace(microbatch=a.microbatch - absent) for a in actions if a.microbatch >= absent])
    return lists


def _order(ranks: int, microbatches: int, chunks: range) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a rank sees them; micro-batches are a multiple of ranks."""
    groups = range(0, microbatches, ranks)
    return [(chunk, i) for first in groups for chunk in chunks for i in range(first, first + ranks)]
