"""The messages between ranks that a schedule needs, in an order that both ends of each can follow."""

from __future__ import annotations

from typing import NamedTuple

from colonnade.pipeline.action import Action, needs_of
from colonnade.pipeline.schedule import Schedule
from colonnade.pipeline.timeline import simulate


class Transfer(NamedTuple):
    """What an action hands to the same action of a neighbouring stage on another rank.

    Args:
        kind: "F", hidden states for the next stage, or "B", their gradients for the one before.
        source_stage, target_stage: neighbours.
        microbatch: whose.
        source, target: ranks of the two stages.
    """

    kind: str
    source_stage: int
    target_stage: int
    microbatch: int
    source: int
    target: int


def transfers(schedule: Schedule) -> list[Transfer]:
    """All messages between ranks, in the order in which they are made on a logical clock.

    Backends that match what two ranks send each other by order alone need the same order on both ends: the messages of any
    two ranks, picked out of this list. Starting them in that order never deadlocks: what a message waits for, and what its
    sender has sent before, was made before it, and so stands before it in the list.

    Raises:
        ConfigError: the schedule cannot be played.
    """
    timeline = simulate(schedule)
    made_at = {span.action: span.end for of_rank in timeline.spans for span in of_rank}
    found = []
    for action in made_at:
        for need in needs_of(action, schedule.num_stages):
            source, target = schedule.rank_of(need.stage), schedule.rank_of(action.stage)
            if source != target:
                found.append(Transfer(action.kind, need.stage, action.stage, action.microbatch, source, target))
    return sorted(found, key=lambda t: (made_at[Action(t.kind, t.source_stage, t.microbatch)], t))
