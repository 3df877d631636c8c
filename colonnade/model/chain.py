"""Chain: what a forward calls in which order, and whose results each call is made of. Where to cut a model is read off it.

[Note: calls and glue]
A model's forward is looked at as a sequence of calls of modules that have parameters: its blocks, and what stands beside
the lists of blocks (embeddings, norms, heads). What happens between them (masks, positions, sums of what two calls have
returned) is glue: it has no parameters, is cheap, and runs on every stage. So a stage needs exactly those results of earlier
stages that its calls, through glue alone, are made of. In most models that is the hidden state of the block before; a bias
of relative positions, the states of an encoder, an embedding that is read again further up are found in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    """One tensor that a call returns: number of the call, path of the tensor in its result; see `model.tree`."""

    call: int
    path: str


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward.

    Args:
        path: the module's name in the model.
        nth: which of the calls of this module it is, from 0.
        block: whether it is one of the repeated blocks.
        returned: what it has returned, with tensors on the meta device.
        like: for each tensor that it returns, by path, the path of the tensor among its arguments (args, kwargs) that has
            its shape and format; None where there is none.
        reads: whose results it is made of, directly or through glue.
    """

    path: str
    nth: int
    block: bool
    returned: Any = field(compare=False, repr=False)
    like: dict[str, str | None]
    reads: frozenset[Leaf]


@dataclass(frozen=True)
class Chain:
    """All calls of a forward.

    Args:
        calls: in the order of the forward.
        output_reads: whose results the output of the model is made of.
        everywhere: names of the parameters that glue uses; every stage has them.
        bound: pairs of calls (first, last) that no cut may separate: the last uses something inside the first that it does
            not return, or both use the same random numbers. The end of the forward counts as one call more.
        altered: results that the forward changes in place after they have been returned.
        shadow: the model on the meta device, to find out shapes.
    """

    calls: tuple[Call, ...]
    output_reads: frozenset[Leaf]
    everywhere: frozenset[str] = frozenset()
    bound: tuple[tuple[int, int], ...] = ()
    altered: frozenset[Leaf] = frozenset()
    shadow: Any = field(default=None, compare=False, repr=False)

    @property
    def read(self) -> frozenset[Leaf]:
        """All results that anything reads."""
        return self.output_reads.union(*(call.reads for call in self.calls))

    @property
    def homes(self) -> list[int]:
        """For each call the block on whose stage it has to be: for a block itself, for any other call the last that it is
        made of, or where it is made of none, the next one. The end of the forward is with the last block.
        """
        blocks = self.blocks
        homes: list[int] = []
        for number, call in enumerate(self.calls):
            before = [leaf.call for leaf in call.reads] + [first for first, last in self.bound if last == number]
            if call.block:
                homes.append(number)
            elif before:
                homes.append(max(homes[earlier] for earlier in before))
            else:
                homes.append(next((block for block in blocks if block > number), blocks[-1]))
        return [*homes, blocks[-1]]

    @property
    def blocks(self) -> list[int]:
        """Numbers of the calls of blocks."""
        return [number for number, call in enumerate(self.calls) if call.block]
