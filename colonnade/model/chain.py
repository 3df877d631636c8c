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
        reads: whose results its arguments are made of, directly or through glue.
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
        bound: pairs of calls (first, last) of which the last uses something inside the first that it does not return; no
            cut may separate them. The end of the forward counts as one call more.
        shadow: the model on the meta device, to find out shapes.
    """

    calls: tuple[Call, ...]
    output_reads: frozenset[Leaf]
    everywhere: frozenset[str] = frozenset()
    bound: tuple[tuple[int, int], ...] = ()
    shadow: Any = field(default=None, compare=False, repr=False)

    @property
    def read(self) -> frozenset[Leaf]:
        """All results that anything reads."""
        return self.output_reads.union(*(call.reads for call in self.calls))

    @property
    def blocks(self) -> list[int]:
        """Numbers of the calls of blocks."""
        return [number for number, call in enumerate(self.calls) if call.block]
