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
    stage_of: list[int] = []
    for number, call in enumerate(chain.calls):
        if call.block:
            stage_of.append(of_block[number])
        elif call.reads:
            stage_of.append(max(stage_of[leaf.call] for leaf in call.reads))
        else:
            later = [of_block[n] for n in chain.blocks if n > number]
            stage_of.append(later[0] if later else len(counts) - 1)
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
    blocks = chain.blocks
    found = []
    for first, last in chain.bound:
        inside = [i for i, number in enumerate(blocks) if first <= number <= last]
        if len(inside) > 1:
            found.append((inside[0], inside[-1]))
    return found
