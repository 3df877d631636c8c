"""What one forward tells about a model: which linear layers read what, and how their outputs are cut into heads.

[Note: reading the graph]
The model runs once on the meta device, without weights or arithmetic. Every linear layer's output and every block's
input passes a node of ours, so the graph that autograd keeps can be read back: from the input of a layer to the nearest
layers whose outputs it is made of, with the parameters met on the way; and from the output of a layer forward to the
first operation that gives it another shape, which is where a model splits fused parts and views heads.
What a block is given beside its input is looked through where nothing but parameters is behind it: a bias by relative
positions that the first block made, say.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from colonnade.shardformer.inference.parts import consumers_of, parts_of
from colonnade.shardformer.inference.spine import beside_blocks
from colonnade.shardformer.layer.fused_linear import is_conv1d

INPUT, CONTEXT = "<input>", "<context>"
Node = Any  # torch.autograd.graph.Node


@dataclass(frozen=True)
class LinearFacts:
    """One linear layer.

    Args:
        path: its name in the model.
        reads: the nearest linear layers before it, by name; INPUT or CONTEXT where it sees what entered the block.
        parameters: names of the parameters between those and it.
        pieces: sizes of the parts into which its output is split at once, one where it is not.
        heads: for each part the number of equal blocks it is viewed as, 0 where it is not.
        inner: extents of what a block is viewed as.
    """

    path: str
    reads: frozenset[str]
    parameters: frozenset[str]
    pieces: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    inner: frozenset[int] = frozenset()


@dataclass
class BlockFacts:
    """One repeated block.

    Args:
        path: its name in the model.
        linears: its linear layers in the order of their calls.
        leaves_by: those that reach its output directly.
        arguments: for each module of the block the shapes of the tensors it is called with, by name.
    """

    path: str
    linears: dict[str, LinearFacts] = field(default_factory=dict)
    leaves_by: frozenset[str] = frozenset()
    arguments: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class _Mark(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Tracer:
    """Runs a model once and reads its graph. The model is left as it was.

    Args:
        model: on any device; every parameter must require gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = {p: name for name, p in model.named_parameters()}
        self.block_paths = find_blocks(model)
        self.marks: dict[Node, str] = {}
        self.inputs: dict[str, Node] = {}
        self.outputs: dict[str, Node] = {}
        self.order: list[str] = []
        self.arguments: dict[str, dict[str, tuple[int, ...]]] = {}
        self.calls: list[str] = []

    def run(self, inputs: dict[str, Any]) -> dict[str, BlockFacts]:
        """Block path → its facts.

        Raises:
            whatever the model raises for these inputs.
        """
        with self._watching():
            output = self.model(**inputs)
        roots = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
        consumers = consumers_of(roots)
        marked = {name: node for node, name in self.marks.items()}
        blocks = {path: BlockFacts(path) for path in self.block_paths if path in self.outputs}
        for path in self.order:
            home = next((b for b in blocks if path.startswith(b + ".")), None)
            if home is None or path not in marked:  # a linear layer that returns something else than a tensor
                continue
            reads, parameters = self._before(self.inputs[path])
            blocks[home].linears[path] = LinearFacts(path, reads, parameters, *parts_of(marked[path], consumers))
        for block in blocks.values():
            block.leaves_by = self._before(self.outputs[block.path])[0]
            within = {p: found for p, found in self.arguments.items() if p.startswith(block.path + ".")}
            block.arguments = within
        return blocks

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = []
        beside = beside_blocks(self.model, self.block_paths)
        for path, module in self.model.named_modules():
            if is_linear(module):
                handles.append(module.register_forward_pre_hook(self._note_input(path)))
                handles.append(module.register_forward_hook(self._mark_output(path)))
            if path in beside or path in self.block_paths:
                handles.append(module.register_forward_pre_hook(self._note_call(path)))
            if path in self.block_paths:
                handles.append(module.register_forward_pre_hook(self._mark_block_input(path), with_kwargs=True))
                handles.append(module.register_forward_hook(self._note_block_output(path)))
            elif any(path.startswith(block + ".") for block in self.block_paths):
                handles.append(module.register_forward_pre_hook(self._note_arguments(path), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if not x.requires_grad:
            return x
        marked = _Mark.apply(x)
        self.marks[marked.grad_fn] = name
        return marked

    def _note_input(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if path not in self.inputs:
                self.order.append(path)
            if self.inputs.get(path) is None:  # a first call may be one without gradients
                self.inputs[path] = args[0].grad_fn

        return hook

    def _mark_output(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return self._mark(output, path) if isinstance(output, torch.Tensor) else None

        return hook

    def _mark_block_input(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            def mark(value: Any, name: str) -> Any:
                floating = isinstance(value, torch.Tensor) and value.is_floating_point()
                return self._mark(value, name) if floating else value

            first_given = bool(args) and isinstance(args[0], torch.Tensor)
            args = tuple(mark(a, INPUT if i == 0 else CONTEXT) for i, a in enumerate(args))
            stream = "hidden_states" if not first_given else None
            return args, {k: mark(v, INPUT if k == stream else CONTEXT) for k, v in kwargs.items()}

        return hook

    def _note_block_output(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) else output
            if self.outputs.get(path) is None:
                self.outputs[path] = first.grad_fn

        return hook

    def _note_call(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.calls.append(path)

        return hook

    def _note_arguments(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if path not in self.arguments:
                names = list(inspect.signature(module.forward).parameters)
                given = dict(zip(names, args)) | kwargs
                self.arguments[path] = {n: tuple(v.shape) for n, v in given.items() if isinstance(v, torch.Tensor)}

        return hook

    def _before(self, start: Node) -> tuple[frozenset[str], frozenset[str]]:
        """Nearest marks before a node, and the parameters between."""
        seen: set[Node] = set()
        marks: set[str] = set()
        parameters: set[str] = set()
        queue = [start]
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if self.marks.get(node) == CONTEXT:
                found, behind = self._before(node.next_functions[0][0])
                if found:
                    marks.add(CONTEXT)
                else:  # made of parameters alone
                    parameters |= behind
            elif node in self.marks:
                marks.add(self.marks[node])
            elif hasattr(node, "variable"):
                parameters.add(self.parameters.get(node.variable, ""))
            else:
                queue += [before for before, _ in node.next_functions]
        return frozenset(marks), frozenset(parameters - {""})


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by one weight matrix: `nn.Linear` or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of the repeated blocks: members of the outermost lists of modules that hold linear layers, several each where
    the list has more than one kind of them.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(block + ".") for block in found):
            continue
        least = 1 if len({type(child) for child in module}) == 1 else 2
        if len(module) and all(sum(map(is_linear, child.modules())) >= least for child in module):
            found += [f"{path}.{name}" for name, _ in module.named_children()]
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
