"""ZB-V: two stages on each rank, down the ranks and up again, and no rank ever waits once it has begun.

(Zero Bubble Pipeline Parallelism, Qi et al. 2023; Pipeline Parallelism with Controllable Memory, Qi et al. 2024.)

[Note: how it is written]
The lists are made by playing: at each tick of a clock every rank takes the most urgent of the actions whose inputs are there,
F, B and W all taking one tick. Two rules decide:
- Memory. From its forward to its "W", a micro-batch on a stage takes a place, and a rank has 2 · ranks of them: what the
  first rank of 1F1B keeps, in stages of half the size. The stage on the way down leaves one place free for the one on the
  way up, without which nothing on this rank could ever go on.
- Urgency. As long as a rank has forwards to do, first what frees a place (W), then forwards, which give other ranks work,
  then backwards. When the last forward is done, backwards come first, and W fills the time until the next arrives.
"""

from __future__ import annotations

from collections.abc import Iterator

from colonnade.pipeline.action import Action, needs_of

# (kind, whether on the way up) → the less, the more urgent
WITH_FORWARDS_LEFT = {
    ("W", True): 0,
    ("W", False): 0,
    ("F", True): 1,
    ("F", False): 2,
    ("B", False): 3,
    ("B", True): 4,
}
AFTER_THE_LAST_FORWARD = {("B", False): 0, ("B", True): 0, ("W", False): 1, ("W", True): 1}


def zbv(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The actions of each rank.

    With 2 · ranks - 1 micro-batches or more and F = B = W no rank waits between its first action and its last.
    """
    clock = _Clock(ranks, microbatches)
    while clock.left:
        clock.tick()
    return clock.lists


class _Clock:
    """What has been done so far; see [Note: how it is written]."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.microbatches = ranks, microbatches
        self.lists: list[list[Action]] = [[] for _ in range(ranks)]
        self.left = 6 * ranks * microbatches
        self.done: set[Action] = set()
        self.next = {(kind, stage): 0 for kind in "FBW" for stage in range(2 * ranks)}  # micro-batch
        self.kept = [0] * ranks

    def tick(self) -> None:
        """Every rank does one action, where it can."""
        chosen = [self._most_urgent(rank) for rank in range(self.ranks)]
        for rank, action in enumerate(chosen):
            if action is not None:
                self.lists[rank].append(action)
                self.done.add(action)
                self.left -= 1
                self.next[action.kind, action.stage] += 1
                self.kept[rank] += (action.kind == "F") - (action.kind == "W")

    def _most_urgent(self, rank: int) -> Action | None:
        forwards_left = self.next["F", self._up(rank)] < self.microbatches
        urgency = WITH_FORWARDS_LEFT if forwards_left else AFTER_THE_LAST_FORWARD
        possible = list(self._possible(rank))
        return min(
            possible, key=lambda a: (urgency[a.kind, a.stage >= self.ranks], a.microbatch, -a.stage), default=None
        )

    def _possible(self, rank: int) -> Iterator[Action]:
        for stage in (rank, self._up(rank)):
            for kind in "FBW":
                action = Action(kind, stage, self.next[kind, stage])
                if (
                    action.microbatch < self.microbatches
                    and all(need in self.done for need in needs_of(action, 2 * self.ranks))
                    and (kind != "F" or self.kept[rank] < 2 * self.ranks - (stage == rank))
                ):
                    yield action

    def _up(self, rank: int) -> int:
        """The second stage of a rank."""
        return 2 * self.ranks - 1 - rank
