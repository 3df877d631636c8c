"""The chain of a model: the order of its calls and what each is made of, from one forward. See `model.chain`, `origins`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import adapted_names, has_adapters, without_adapters
from colonnade.model.chain import Call, Chain, Leaf
from colonnade.model.tree import leaves, map_leaves
from colonnade.shardformer.inference.as_built import without_weights
from colonnade.shardformer.inference.check import said
from colonnade.shardformer.inference.infer import shadows
from colonnade.shardformer.inference.origins import Drawn, Inside, Origin, Origins, PythonReads
from colonnade.shardformer.inference.policy import device_of
from colonnade.shardformer.inference.probe import TRACED_ROWS, assume_yes, probe_inputs, probes
from colonnade.shardformer.inference.trace import find_blocks

DROPPING = ("dropout", "droppath", "stochasticdepth")  # in names of classes


def chain_of(model: Any) -> Chain:
    """The chain of a model, which is not changed.

    Args:
        model: a transformers model, with weights or on the meta device; or any module with weights whose forward takes
            token ids [rows, tokens] first. One with adapters of peft is looked at without them.

    Raises:
        PolicyError: it has no list of repeated blocks, its forward cannot be run for a look, or decides at random which
            blocks to call.
    """
    if has_adapters(model):
        chain = chain_of(without_adapters(model))
        return replace(chain, everywhere=frozenset(adapted_names(model, chain.everywhere)))
    if not find_blocks(model):
        raise PolicyError(
            explain(
                f"{type(model).__name__} cannot be cut into pipeline stages: it has no list of repeated blocks.",
                [
                    ("rule", "a stage is a run of the members of its nn.ModuleLists that hold linear layers"),
                    ("try", "pp_size=1, with tp_size or zero_stage to save memory"),
                ],
            )
        )
    refused: list[str] = []
    for shadow in shadows(model):
        on_meta = device_of(shadow).type == "meta"
        for options in probes(shadow):
            try:
                untouched = without_weights(shadow)  # some models keep what they have made in a forward
                inputs = probe_inputs(shadow, device_of(shadow), rows=TRACED_ROWS, **options)
                with assume_yes() if on_meta else nullcontext(), torch.enable_grad():
                    found = _Watcher(shadow).run(inputs)
            except Exception as error:  # a model's own code: it may need values, which the meta device has not
                refused.append(said(error))
                continue
            if found.origins.decided_at_random:
                raise PolicyError(_at_random(type(model).__name__))
            return found.chain(untouched)
    raise PolicyError(
        explain(
            f"{type(model).__name__} cannot be cut into pipeline stages: its forward does not run for a look.",
            [*(("reason", text) for text in dict.fromkeys(refused)), ("try", "pp_size=1")],
        )
    )


def _at_random(name: str) -> str:
    return explain(
        f"{name} cannot be cut into pipeline stages: its forward decides at random which blocks to call.",
        [
            ("rule", "all stages have to take the same way through the model"),
            ("try", "layerdrop=0 (encoder_layerdrop, decoder_layerdrop) in its config"),
        ],
    )


def units_of(model: nn.Module) -> dict[str, bool]:
    """The modules whose calls make up the chain, by name: whether each is a block.

    What contains blocks is looked into, and so are lists of modules; of the rest, those that have parameters, and those
    that draw random numbers, which would be others on each stage.
    """
    blocks = set(find_blocks(model))
    units: dict[str, bool] = {}
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in seen:  # one module under two names
            return
        seen.add(module)
        inside = any(block.startswith(f"{path}.") for block in blocks) or not path
        if path in blocks:
            units[path] = True
        elif inside or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            for name, child in module.named_children():
                visit(f"{path}.{name}".lstrip("."), child)
        elif any(True for _ in module.parameters()) or _drops(module):
            units[path] = False

    visit("", model)
    return units


def _drops(module: nn.Module) -> bool:
    return any(kind in type(part).__name__.lower() for part in module.modules() for kind in DROPPING)


@dataclass
class _Seen:
    """One call while the forward runs."""

    path: str
    nth: int
    args: dict[str, torch.Tensor]
    decided: frozenset[Origin]
    returned: Any = None


@dataclass
class _Links:
    """What the calls of a chain have to do with one another."""

    reads: list[set[Leaf]] = field(default_factory=list)
    bound: set[tuple[int, int]] = field(default_factory=set)
    draws: dict[Drawn, list[int]] = field(default_factory=dict)

    def note(self, number: int, origins: Iterable[Origin]) -> None:
        """A call, the end counting as one, is made of this."""
        leaves_read: set[Leaf] = set()
        for origin in origins:
            if isinstance(origin, Leaf):
                leaves_read.add(origin)
            elif isinstance(origin, Inside):
                self.bound.add((origin.inside, number))
            elif isinstance(origin, Drawn):
                self.draws.setdefault(origin, []).append(number)
        self.reads.append({leaf for leaf in leaves_read if leaf.call < number})

    def all_bound(self) -> tuple[tuple[int, int], ...]:
        """Calls that have to be on one stage: also those that use the same random numbers of glue."""
        same = {(min(calls), max(calls)) for calls in self.draws.values()}
        return tuple(sorted(pair for pair in self.bound | same if pair[0] != pair[1]))


class _Watcher:
    """Runs a model once and notes every call of a unit."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.units = model, units_of(model)
        self.origins = Origins(model)
        self.seen: list[_Seen] = []
        self.open: list[str] = []  # units that are being called; of one inside another nothing is noted
        self.output: Any = None
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.owned = {path: {name for name in names if name.startswith(f"{path}.")} for path in self.units}

    def run(self, inputs: dict[str, Any]) -> _Watcher:
        with self._watching(), torch.random.fork_rng(devices=[]), PythonReads(self.origins), self.origins:
            self.output = self.model(**inputs)
        return self

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = []
        for path in self.units:
            module = self.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True))
            # first of all hooks: what others note of the result, and change of it, is glue
            handles.append(module.register_forward_hook(self._after(path), with_kwargs=True, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.open.append(path)
            if len(self.open) == 1:
                nth = sum(seen.path == path for seen in self.seen)
                self.origins.call, self.origins.owned = len(self.seen), self.owned[path]
                self.seen.append(_Seen(path, nth, leaves((args, kwargs)), frozenset(self.origins.decided)))

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.open.pop()
            if self.open:
                return None
            self.origins.end_call(leaves(output).values())
            number = len(self.seen) - 1
            marked = map_leaves(output, lambda place, tensor: self.origins.result(tensor, Leaf(number, place)))
            self.seen[number].returned = map_leaves(output, lambda _, t: torch.empty_like(t, device="meta").detach())
            return marked

        return hook

    def chain(self, shadow: nn.Module) -> Chain:
        """What has been seen."""
        links, calls = _Links(), []
        for number, seen in enumerate(self.seen):
            links.note(number, self.origins.reads.get(number, set()) | seen.decided)
            like = {path: _first_like(tensor, seen.args) for path, tensor in leaves(seen.returned).items()}
            reads = frozenset(links.reads[number])
            calls.append(Call(seen.path, seen.nth, self.units[seen.path], seen.returned, like, reads))
        links.note(len(calls), self.origins.made_of(leaves(self.output).values()) | self.origins.decided)
        return Chain(
            tuple(calls),
            frozenset(links.reads[-1]),
            frozenset({*self.origins.everywhere, *self._own_parameters()}),
            links.all_bound(),
            frozenset(self.origins.altered),
            shadow,
        )

    def _own_parameters(self) -> Iterator[str]:
        """Parameters that belong to no unit, of modules that have units inside."""
        of_units = set().union(*self.owned.values())
        for name, parameter in self.model.named_parameters():
            if name not in of_units and not self._also(parameter, of_units):
                yield name

    def _also(self, parameter: nn.Parameter, names: set[str]) -> bool:
        """Whether a parameter has one of these names as well."""
        return any(p is parameter and n in names for n, p in self.model.named_parameters(remove_duplicate=False))


def _first_like(output: torch.Tensor, args: dict[str, torch.Tensor]) -> str | None:
    return next((path for path, a in args.items() if a.shape == output.shape and a.dtype == output.dtype), None)
