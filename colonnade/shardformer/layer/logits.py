"""Whole logits for the user of a model whose head is split by vocabulary, gathered only if somebody looks at them."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import nn

from colonnade.comm.regions import gather_from_region
from colonnade.shardformer.layer.head import VocabParallelLMHead1D
from colonnade.shardformer.layer.sharding import sizes_of

FIELD = "logits"
_PENDING = "_gather_logits"
# what hands out values of a ModelOutput, or copies it
_READERS = (
    "__getitem__",
    "__reduce__",
    "__reduce_ex__",
    "__eq__",
    "get",
    "items",
    "pop",
    "setdefault",
    "to_tuple",
    "values",
)


class WholeLogits:
    """Forward hook of a model with a vocabulary-parallel head: its output's `logits` are [B, S, V] on every rank.

    Without a loss in the output, logits are what the caller wants (generation, a criterion of their own), and are
    gathered at once. With one, they are gathered at the first access; that is a collective over the tensor-parallel
    group, so all its ranks have to make it.
    """

    def __init__(self, head: VocabParallelLMHead1D) -> None:
        self.axis, self.sizes = head.axis, sizes_of(head.vocab_size, head.axis)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # return_dict=False: a scalar loss where there is one, then the logits
            at = next((i for i, x in enumerate(output) if self._is_local(x)), None)
            return output if at is None else (*output[:at], self.gather(output[at]), *output[at + 1 :])
        if _PENDING in getattr(output, "__dict__", {}):  # seen by the hook of a module inside this one
            return output
        logits: Any = getattr(output, FIELD, None)
        if not self._is_local(logits):
            return output
        if getattr(output, "loss", None) is None:
            output[FIELD] = self.gather(logits)
            return output
        output.__class__ = _lazy(type(output))  # type: ignore[arg-type]  # classes are hashable
        output.__dict__[_PENDING] = self.gather
        return output

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns. Traffic: one all-gather of the whole logits."""
        return gather_from_region(local, self.axis, -1, self.sizes)

    def _is_local(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[-1] == self.sizes[self.axis.rank]


@cache
def _lazy(kind: Any) -> type:
    """A subclass of an output class whose logits are gathered when something first asks for them.

    From then on, or once other logits have been put in their place, the object is an ordinary `kind` again.
    """

    def settle(self: Any) -> None:
        self.__class__ = kind
        setattr(self, FIELD, self.__dict__.pop(_PENDING)(self.__dict__[FIELD]))

    def read(self: Any) -> torch.Tensor:
        settle(self)
        return getattr(self, FIELD)

    def write(self: Any, logits: Any) -> None:
        pending = self.__dict__.pop(_PENDING, None)  # absent while a new object is being filled
        if pending is not None and OrderedDict.get(self, FIELD) is self.__dict__[FIELD]:
            OrderedDict.__delitem__(self, FIELD)  # or the local ones would stay behind as an item
        self.__class__ = kind
        setattr(self, FIELD, logits)

    def settled(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name in ("__getitem__", "get") and args and args[0] != FIELD and args[0] in self.keys():  # noqa: SIM118
                return OrderedDict.get(self, args[0])  # another field, by its name
            settle(self)
            return getattr(self, name)(*args, **kwargs)

        return method

    body: dict[str, Any] = {FIELD: property(read, write), "__module__": kind.__module__}
    body |= {name: settled(name) for name in _READERS}
    return type(kind.__name__, (kind,), body)
