"""Origins: whose results every tensor of a forward is made of, noted operation by operation.

[Note: by storage]
Each operation's outputs are made of what its inputs are made of. That is noted for storages and not for tensors, so that
views and changes in place are covered, and below autograd, so that integers, masks and detached tensors are covered too.
Operations that look at a tensor's shape alone hand nothing on.

[Note: what leaks out of a call]
Some models hand things on behind the back of what a block returns: keys and values that later blocks share, router logits
that the loss collects, an input changed in place. What is made inside a call is marked as such, and its result gets another
mark when it is returned. Who meets the first mark later uses something that a stage without that call could not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from colonnade.model.chain import Leaf
from colonnade.shardformer.inference.dispatch import OperationMode, tensors_in

SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
              "new_ones", "new_full", "new_empty_strided")  # fmt: skip
DECIDING = ("_local_scalar_dense", "is_nonzero", "equal", "item")
READ_IN_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)  # seen by no dispatcher


@dataclass(frozen=True)  # no tuple: those are equal whatever their class
class Inside:
    """Something made inside a call that has not been returned by it."""

    inside: int


@dataclass(frozen=True)
class Drawn:
    """Random numbers that glue has drawn; each stage would draw others."""

    drawn: int


@dataclass(frozen=True)
class Weight:
    """A parameter, by name."""

    name: str


Origin = Leaf | Inside | Drawn | Weight
NOTHING: frozenset[Origin] = frozenset()


class Origins(OperationMode):
    """Within it, every operation is noted.

    Args:
        model: its parameters are origins.

    Attributes:
        call: number of the call that is under way, None in glue.
        owned: the parameters of the unit that is called.
        reads: by call, what it was made of besides what it made itself.
        everywhere: names of parameters that glue, or a call of another unit, uses.
        decided: what glue has decided upon: values that Python code asked for.
        altered: results that were changed in place after they had been returned.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.call: int | None = None
        self.owned: Collection[str] = ()
        self.reads: dict[int, set[Origin]] = {}
        self.everywhere: set[str] = set()
        self.decided: set[Origin] = set()
        self.decided_at_random = False
        self.altered: set[Leaf] = set()
        self._of: dict[int, frozenset[Origin]] = {}
        self._results: dict[int, Leaf] = {}
        self._kept: list[Any] = []  # so that no address is used twice
        self._drawn = 0
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._set(parameter, self.of(parameter) | {Weight(name)})

    def of(self, tensor: torch.Tensor) -> frozenset[Origin]:
        """What a tensor is made of."""
        return self._of.get(_key(tensor), NOTHING)

    def made_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[Origin]:
        """What some tensors are made of."""
        return NOTHING.union(*map(self.of, tensors))

    def end_call(self, returned: Iterable[torch.Tensor]) -> None:
        """A call ends and returns these tensors, which it may have been given."""
        self._noted(self.made_of(returned), draws=False)
        self.call = None

    def result(self, tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        """A copy of what a call has returned, known as its result."""
        marked = tensor.clone()
        self._set(marked, frozenset({leaf}))
        self._results[_key(marked)] = leaf
        return marked

    def _set(self, tensor: torch.Tensor, origins: frozenset[Origin]) -> None:
        key = _key(tensor)
        if origins:
            self._of[key] = origins
            self._kept.append(_storage(tensor))
        else:
            self._of.pop(key, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        made = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        origins = NOTHING if name in SHAPE_ONLY else self.made_of(inputs)
        if name in ("lt", "le") and isinstance(args[1], (int, float)) and args[1] <= 0:
            origins = frozenset(o for o in origins if not isinstance(o, Drawn))  # no random number is below 0
        if name in DECIDING:
            self._decide(origins, inputs[0])
        origins = self._noted(origins, draws=_draws(function, name, args, kwargs))
        keys = {_key(t) for t in inputs}
        for tensor in tensors_in(made):
            if _key(tensor) not in keys:
                self._set(tensor, origins)
        for tensor in _written(function, args, kwargs):
            key = _key(tensor)
            if key in self._results:
                self.altered.add(self._results[key])
            self._set(tensor, self.of(tensor) | origins)
        return made

    def _noted(self, origins: frozenset[Origin], draws: bool) -> frozenset[Origin]:
        """What the outputs of an operation are made of, from what its inputs are."""
        if self.call is not None:
            read = self.reads.setdefault(self.call, set())
            for origin in origins:
                if isinstance(origin, Weight):
                    if origin.name not in self.owned:
                        self._used(origin, origins)
                elif origin != Inside(self.call):
                    read.add(origin)
            return frozenset({Inside(self.call)}) if origins or draws else NOTHING
        for origin in origins:
            if isinstance(origin, Weight):
                self._used(origin, origins)
        kept = frozenset(o for o in origins if not isinstance(o, Weight))
        if draws:
            self._drawn += 1
            return kept | {Drawn(self._drawn)}
        return kept

    def _used(self, weight: Weight, origins: frozenset[Origin]) -> None:
        """A parameter is used outside of its unit, unless under another name of it."""
        if self.call is None or not any(isinstance(o, Weight) and o.name in self.owned for o in origins):
            self.everywhere.add(weight.name)

    def _decide(self, origins: frozenset[Origin], asked: torch.Tensor) -> None:
        if self.call is None:
            self.decided |= origins
            drawn = any(isinstance(o, Drawn) for o in origins)
            self.decided_at_random |= drawn and asked.dtype == torch.bool

    def read_in_python(self, tensors: Iterable[torch.Tensor]) -> None:
        """Values of tensors were asked for where no operation tells."""
        for tensor in tensors:
            origins = self.of(tensor)
            self._decide(origins, tensor)
            self._noted(origins, draws=False)


class PythonReads(TorchFunctionMode):
    """Within it, values that become Python's are noted as well."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self.origins = origins

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READ_IN_PYTHON:
            self.origins.read_in_python(args[:1])
        return function(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return tensor


def _key(tensor: torch.Tensor) -> int:
    storage = _storage(tensor)
    return id(storage) if storage is tensor else storage._cdata


def _written(function: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """The arguments that an operation changes."""
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[position] if position < len(args) else None)
            yield from tensors_in(given)


def _draws(function: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    if name == "native_dropout":
        return bool(args[1]) and args[2] is not False
    if "attention" in name:
        given = {a.name: v for a, v in zip(function._schema.arguments, args)} | kwargs
        return bool(given.get("dropout_p"))
    return True
