"""Whole logits for the user of a model whose head is split by vocabulary, gathered only if somebody looks at them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from colonnade.comm.regions import gather_from_region
from colonnade.shardformer.layer.head import VocabParallelLMHead1D
from colonnade.shardformer.layer.sharding import sizes_of

FIELD = "logits"


class WholeLogits:
    """Forward hook of a model with a vocabulary-parallel head: its output's `logits` are [B, S, V] on every rank.

    Without a loss in the output, logits are what the caller wants (generation, a criterion of their own), and are
    gathered at once. With one, they are gathered at the first access; that is a collective over the tensor-parallel
    group, so all its ranks have to make it.
    """

    def __init__(self, head: VocabParallelLMHead1D) -> None:
        self.axis, self.sizes = head.axis, sizes_of(head.vocab_size, head.axis)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        logits = getattr(output, FIELD, None)
        if isinstance(output, tuple):
            return tuple(self.gather(x) if self._is_local(x) else x for x in output)
        if not isinstance(logits, torch.Tensor) or not self._is_local(logits):
            return output
        if getattr(output, "loss", None) is None:
            output[FIELD] = self.gather(logits)
            return output
        output.__class__ = _lazy(type(output))  # type: ignore[arg-type]  # classes are hashable
        output.__dict__["_gather_logits"] = self.gather
        return output

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns. Traffic: one all-gather of the whole logits."""
        return gather_from_region(local, self.axis, -1, self.sizes)

    def _is_local(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[-1] == self.sizes[self.axis.rank]


@cache
def _lazy(kind: Any) -> type:
    """A subclass of an output class whose logits are gathered when first read, by attribute, key or position."""

    def read(self: Any) -> torch.Tensor:
        gather = self.__dict__.pop("_gather_logits", None)
        if gather is not None:
            whole = gather(self.__dict__[FIELD])
            dict.__setitem__(self, FIELD, whole)
            self.__dict__[FIELD] = whole
        return self.__dict__[FIELD]

    def getitem(self: Any, key: Any) -> Any:
        read(self)
        return kind.__getitem__(self, key)

    def iterate(name: str) -> Any:
        def method(self: Any) -> Any:
            read(self)
            return getattr(kind, name)(self)

        return method

    body: dict[str, Any] = {FIELD: property(read), "__getitem__": getitem, "__module__": kind.__module__}
    body |= {name: iterate(name) for name in ("items", "values", "to_tuple")}
    return type(kind.__name__, (kind,), body)
