"""Cut: which calls each stage makes, and what travels between neighbours. Plain data, from a chain and numbers of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from colonnade.model.chain import Chain, Leaf


@dataclass(frozen=True)
class Cut:
    """A chain dealt out to stages.

    Args:
        chain: what is cut.
        counts: number of calls of blocks on each stage.
        stage_of: of each call.
        crossing: for each stage what it receives from the one before: whatever it or a later one needs of earlier ones.
    """

    chain: Chain
    counts: tuple[int, ...]
    stage_of: tuple[int, ...]
    crossing: tuple[tuple[Leaf, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    def paths_of(self, stages: Sequence[int]) -> set[str]:
        """Names of the modules that these stages call."""
        return {call.path for call, stage in zip(self.chain.calls, self.stage_of) if stage in stages}

    def last_call(self, stage: int) -> int:
        """Number of the last call that a stage makes."""
        return max(number for number, of in enumerate(self.stage_of) if of == stage)


def cut_chain(chain: Chain, counts: Sequence[int]) -> Cut:
    """Deal a chain out to stages.

    A block belongs to the stage that its number says. What stands beside the blocks belongs to the stage whose results it
    reads, or where it reads none, to that of the next block.

    Args:
        counts: number of blocks (calls of blocks) of each stage; see `partition`.
    """
    ends = list(accumulate(counts))
    of_block = {number: next(s for s, end in enumerate(ends) if i < end) for i, number in enumerate(chain.blocks)}
    stage_of = [of_block[home] for home in chain.homes[:-1]]
    return Cut(chain, tuple(counts), tuple(stage_of), _crossing(chain, stage_of, len(counts)))


def _crossing(chain: Chain, stage_of: Sequence[int], stages: int) -> tuple[tuple[Leaf, ...], ...]:
    last_reader: dict[Leaf, int] = {}
    for call, stage in zip(chain.calls, stage_of):
        for leaf in call.reads:
            last_reader[leaf] = max(last_reader.get(leaf, 0), stage)
    for leaf in chain.output_reads:
        last_reader[leaf] = stages - 1
    return tuple(
        tuple(sorted(leaf for leaf, reader in last_reader.items() if stage_of[leaf.call] < stage <= reader))
        for stage in range(stages)
    )


def blocks_bound(chain: Chain) -> list[tuple[int, int]]:
    """The chain's `bound` in numbers of blocks: (first, last) of those that have to lie on one stage."""
    position = {number: i for i, number in enumerate(chain.blocks)}
    homes = [position[home] for home in chain.homes]
    pairs = {(min(homes[a], homes[b]), max(homes[a], homes[b])) for a, b in chain.bound}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def places_to_cut(chain: Chain) -> list[int]:
    """Numbers of the blocks before which a stage may begin."""
    bound = blocks_bound(chain)
    return [place for place in range(1, len(chain.blocks)) if not any(a < place <= b for a, b in bound)]
