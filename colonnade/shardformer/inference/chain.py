"""The chain of a model: the order of its calls and what each is made of, from one forward. See `model.chain`.

[Note: what leaks out of a block]
Some models hand things on behind the back of what a block returns: keys and values that later blocks share, router logits
that the loss collects. Such a tensor's graph leads to parameters of the block without passing its result. A stage that does
not hold the block could not have it, so the two are bound together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import has_adapters, without_adapters
from colonnade.model.chain import Call, Chain, Leaf
from colonnade.model.tree import leaves, map_leaves
from colonnade.shardformer.inference.as_built import without_weights
from colonnade.shardformer.inference.check import said
from colonnade.shardformer.inference.infer import shadows
from colonnade.shardformer.inference.policy import device_of
from colonnade.shardformer.inference.probe import TRACED_ROWS, assume_yes, probe_inputs, probes
from colonnade.shardformer.inference.trace import find_blocks

Node = Any  # torch.autograd.graph.Node


def chain_of(model: Any) -> Chain:
    """The chain of a model, which is not changed.

    Args:
        model: a transformers model, with weights or on the meta device; or any module with weights whose forward takes
            token ids [rows, tokens] first. One with adapters of peft is looked at without them.

    Raises:
        PolicyError: it has no list of repeated blocks, or its forward cannot be run for a look.
    """
    if has_adapters(model):
        model = without_adapters(model)
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
                inputs = probe_inputs(shadow, device_of(shadow), rows=TRACED_ROWS, **options)
                with assume_yes() if on_meta else nullcontext(), torch.enable_grad():
                    found = _Watcher(shadow).run(inputs)
            except Exception as error:  # a model's own code: it may need values, which the meta device has not
                refused.append(said(error))
                continue
            return found.chain(shadow if on_meta else without_weights(model))
    raise PolicyError(
        explain(
            f"{type(model).__name__} cannot be cut into pipeline stages: its forward does not run for a look.",
            [*(("reason", text) for text in dict.fromkeys(refused)), ("try", "pp_size=1")],
        )
    )


def units_of(model: nn.Module) -> dict[str, bool]:
    """The modules whose calls make up the chain, by name: whether each is a block.

    What contains blocks is looked into, and so are lists of modules; of the rest, those that have parameters.
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
        elif any(True for _ in module.parameters()):
            units[path] = False

    visit("", model)
    return units


class _Mark(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass
class _Seen:
    """One call while the forward runs."""

    path: str
    nth: int
    args: dict[str, torch.Tensor]
    returned: Any = None


class _Watcher:
    """Runs a model once and notes every call of a unit."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.units = model, units_of(model)
        self.seen: list[_Seen] = []
        self.marks: dict[Node, Leaf] = {}
        self.plain: dict[int, Leaf] = {}  # tensors without a graph, by identity
        self.kept: list[torch.Tensor] = []  # so that no identity is used twice
        self.open: dict[str, list[int]] = {}
        self.output: Any = None
        self.owner: dict[Any, list[str]] = {}
        for path in self.units:
            for parameter in model.get_submodule(path).parameters():
                self.owner.setdefault(parameter, []).append(path)
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    def run(self, inputs: dict[str, Any]) -> _Watcher:
        with self._watching():
            self.output = self.model(**inputs)
        return self

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = []
        for path in self.units:
            module = self.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._after(path), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            nth = sum(seen.path == path for seen in self.seen)
            self.open.setdefault(path, []).append(len(self.seen))
            self.seen.append(_Seen(path, nth, leaves((args, kwargs))))

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            number = self.open[path].pop()
            marked = map_leaves(output, lambda place, tensor: self._marked(tensor, Leaf(number, place)))
            self.seen[number].returned = map_leaves(output, lambda _, tensor: tensor.detach().to("meta"))
            return marked

        return hook

    def _marked(self, tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        self.kept.append(tensor)
        if not tensor.requires_grad:
            self.plain.setdefault(id(tensor), leaf)
            return tensor
        marked = _Mark.apply(tensor)
        self.marks[marked.grad_fn] = leaf
        return marked

    def chain(self, shadow: nn.Module) -> Chain:
        """What has been seen."""
        everywhere: set[str] = set(self._own_parameters())
        bound: set[tuple[int, int]] = set()
        calls = []
        for number, seen in enumerate(self.seen):
            reads = self._reads(seen.args, number, everywhere, bound)
            like = {path: _first_like(tensor, seen.args) for path, tensor in leaves(seen.returned).items()}
            calls.append(Call(seen.path, seen.nth, self.units[seen.path], seen.returned, like, reads))
        output = self._reads(leaves(self.output), len(self.seen), everywhere, bound)
        return Chain(tuple(calls), output, frozenset(everywhere), tuple(sorted(bound)), shadow)

    def _own_parameters(self) -> Iterator[str]:
        """Parameters that belong to no unit, of modules that have units inside."""
        for parameter, name in self.names.items():
            if parameter not in self.owner:
                yield name

    def _reads(
        self, given: dict[str, torch.Tensor], number: int, everywhere: set[str], bound: set[tuple[int, int]]
    ) -> frozenset[Leaf]:
        """The results that these tensors are made of through glue; notes what else they are made of."""
        tensors = list(given.values())
        found = {self.plain[id(t)] for t in tensors if not t.requires_grad and id(t) in self.plain}
        seen: set[Node] = set()
        queue: list[Node] = [t.grad_fn for t in tensors]
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.marks:
                found.add(self.marks[node])
            elif hasattr(node, "variable"):
                self._used_by_glue(node.variable, number, everywhere, bound)
            else:
                queue += [before for before, _ in node.next_functions]
        return frozenset(leaf for leaf in found if leaf.call < number)

    def _used_by_glue(self, parameter: Any, number: int, everywhere: set[str], bound: set[tuple[int, int]]) -> None:
        """A parameter that a call is made of although no unit returned it."""
        if parameter not in self.names:
            return
        owners = self.owner.get(parameter, [])
        blocks = [i for i, seen in enumerate(self.seen[:number]) if seen.path in owners and self.units[seen.path]]
        if blocks:
            bound.add((blocks[0], number))  # see [Note: what leaks out of a block]
        else:
            everywhere.add(self.names[parameter])


def _first_like(output: torch.Tensor, args: dict[str, torch.Tensor]) -> str | None:
    return next((path for path, a in args.items() if a.shape == output.shape and a.dtype == output.dtype), None)
