"""Running one stage of a model by the model's own forward: what the stage does not make is stood in for.

[Note: gates]
Every call of a unit (a block, or a module with parameters beside the blocks) passes a gate. While a stage runs, the gate
lets the calls of the stage through; a call whose result the stage has received returns that; any other returns something of
the right shape that nobody reads: not-a-numbers, so that nobody can have read it unnoticed. After the last call of the stage the forward is left by an exception. So masks, positions
and everything else that a forward makes for itself is made on every stage, from the same inputs, and no model needs code.
The gate is put in by a subclass made for the instance, so `isinstance`, attributes, hooks and names stay as they are.

[Note: hollow modules]
What no stage of this rank calls gives up its parameters. Attributes of their names stay, for forwards that ask an embedding
for the device or format of its weight: zeros of the right shape that take the memory of one entry.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colonnade.cluster.device import current_device
from colonnade.errors import PolicyError, UsageError, explain
from colonnade.model.adapters import plain_model
from colonnade.model.chain import Leaf
from colonnade.model.tree import leaves, map_leaves
from colonnade.pipeline.cut import Cut


class _Stop(BaseException):
    """Leaves a forward after the last call of a stage. No Exception, so that no model takes it for an error."""


@dataclass(frozen=True)
class StageResult:
    """What a stage has made.

    Args:
        sent: the tensors for the next stage, in the order of the cut; empty on the last stage.
        output: the model's output, on the last stage.
    """

    sent: tuple[torch.Tensor, ...]
    output: Any = None


class StagedModel:
    """A model of which this rank runs some stages. Changes the model in place.

    Args:
        model: the user's, whole; afterwards it has the parameters of these stages only.
        cut: how it is dealt out.
        stages: those of this rank.
        recomputed: names of the blocks whose activations are computed again in the backward pass.
    """

    def __init__(self, model: nn.Module, cut: Cut, stages: Sequence[int], recomputed: Collection[str] = ()) -> None:
        self.model, self.cut, self.stages, self.recomputed = plain_model(model), cut, tuple(stages), set(recomputed)
        self.numbers = {(call.path, call.nth): number for number, call in enumerate(cut.chain.calls)}
        self.shapes: dict[Any, dict[str, tuple[torch.Size, torch.dtype]]] = {}
        self.read = cut.chain.read
        self.inside = False  # a unit is being called for real; what it calls itself passes unseen
        self._run: _Run | None = None
        self._flags = _flags(self.model)
        self.model.register_forward_pre_hook(self._check_flags, with_kwargs=True)
        for path in dict.fromkeys(call.path for call in cut.chain.calls):
            _put_gate(self.model.get_submodule(path), path, self)

    def forward(self, stage: int, received: Sequence[torch.Tensor], run: Callable[[], Any]) -> StageResult:
        """Run one stage.

        Args:
            stage: one of this rank's.
            received: the tensors of the stage before, in the order of the cut.
            run: calls the model's forward.
        """
        going = _Run(self, stage, dict(zip(self.cut.crossing[stage], received)))
        with self._running(going):
            try:
                output = run()
            except _Stop:
                return StageResult(going.to_send())
        going.check_complete()
        if stage != self.cut.num_stages - 1:
            raise PolicyError(f"the forward of {type(self.model).__name__} came to its end on stage {stage}.")
        return StageResult((), output)

    @property
    def dtype(self) -> torch.dtype:
        """Format of the model's parameters."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    def shapes_of(self, number: int, args: Any, kwargs: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """What a call would return, found out without values or weights.

        Raises:
            PolicyError: it needs values.
        """
        call = self.cut.chain.calls[number]
        shadow = self.cut.chain.shadow.get_submodule(call.path)
        dtype = next((p.dtype for p in self.cut.chain.shadow.parameters() if p.is_floating_point()), torch.float32)

        def on_meta(_: str, tensor: torch.Tensor) -> torch.Tensor:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=kind, device="meta")

        args, kwargs = map_leaves((args, kwargs), on_meta)
        try:
            with torch.no_grad():
                output = shadow(*args, **kwargs)
        except Exception as error:  # a model's own code
            raise PolicyError(
                explain(
                    f"{type(self.model).__name__} cannot be cut: what {call.path} returns has a shape that only its values tell.",
                    [("reason", f"{type(error).__name__}: {error}"), ("try", "pp_size=1")],
                )
            ) from error
        return {path: (t.shape, t.dtype) for path, t in leaves(output).items()}

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        before, self._run = self._run, run
        try:
            yield
        finally:
            self._run = before

    def pass_gate(self, path: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a unit: made, stood in for, or refused outside of a stage."""
        if self.inside:
            return real(*args, **kwargs)
        if self._run is None:
            if len(self.stages) == self.cut.num_stages:
                return real(*args, **kwargs)
            raise UsageError(
                explain(
                    f"this rank holds {len(self.stages)} of the model's {self.cut.num_stages} pipeline stages, and cannot run its forward alone.",
                    [
                        ("try", "booster.execute_pipeline(iterator, model, criterion, optimizer), for training and, without gradients, for evaluation"),
                        ("or", "booster.generate(model, …) for text"),
                    ],
                )
            )  # fmt: skip
        return self._run.call(path, functools.partial(self._made, real), args, kwargs)

    def _check_flags(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """What the output has more than when the model was looked at may be made inside of blocks of other stages.

        Raises:
            UsageError: the caller wants more, by an argument or by what the config says since.
        """
        asked = {name for name, value in kwargs.items() if name.startswith("output_") and value}
        asked = {name for name in asked | _flags(model) if name not in self._flags}
        if asked and self._run is not None:
            raise UsageError(
                explain(
                    f"{', '.join(sorted(asked))}=True was not set when the model was cut into pipeline stages.",
                    [("rule", "what a stage can return is settled by the cut"), ("try", "set it in the config before boost")],
                )
            )  # fmt: skip

    def _made(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call made for real, now or again in the backward pass."""
        self.inside = True
        try:
            return real(*args, **kwargs)
        finally:
            self.inside = False


class _Run:
    """One stage's forward while it is under way."""

    def __init__(self, staged: StagedModel, stage: int, received: dict[Leaf, torch.Tensor]) -> None:
        self.staged, self.stage, self.received = staged, stage, received
        self.cut = staged.cut
        self.ends = self.cut.last_call(stage) if stage < self.cut.num_stages - 1 else -1
        self.wanted = self.cut.crossing[stage + 1] if stage < self.cut.num_stages - 1 else ()
        self.made: dict[Leaf, torch.Tensor] = dict(received)
        self.called: Counter[str] = Counter()
        self.next = 0  # number of the call after the last

    def call(self, path: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nth = self.called[path]
        self.called[path] += 1
        number = self.staged.numbers.get((path, nth))
        if number is None:
            raise PolicyError(
                f"{path} is called more than {nth} times in this forward, which it was not when the model was looked at; it cannot be cut."
            )
        self._check_order(number)
        if self.cut.stage_of[number] != self.stage:
            made = self._stand_in(number, args, kwargs)
            _tell_hooks(self.staged.model.get_submodule(path), args, kwargs, made)
            return made
        if path in self.staged.recomputed and torch.is_grad_enabled():
            output = checkpoint(real, *args, use_reentrant=False, **kwargs)
        else:
            output = real(*args, **kwargs)
        self._keep(number, output)
        if number == self.ends:
            raise _Stop
        return output

    def _check_order(self, number: int) -> None:
        """Calls may be left out only where no stage needs to be told of their results, and none may come out of order.

        Raises:
            PolicyError: the forward takes another way than when it was looked at.
        """
        known = {leaf.call for leaf in (*self.received, *self.wanted)}
        left_out = [earlier for earlier in range(self.next, number) if earlier in known]
        if left_out or number < self.next:
            calls = self.cut.chain.calls
            raise PolicyError(
                explain(
                    f"the forward of {type(self.staged.model).__name__} is not the one by which it was cut.",
                    [
                        ("expected", f"a call of {calls[left_out[0] if left_out else self.next].path}"),
                        ("found", f"a call of {calls[number].path}" if number < len(calls) else "the end"),
                        ("rule", "which blocks are called, and in which order, must not depend on the inputs or on chance"),
                    ],
                )
            )  # fmt: skip
        self.next = number + 1

    def check_complete(self) -> None:
        """At the end of the forward: everything that was received has been used."""
        self._check_order(len(self.cut.chain.calls))

    def _keep(self, number: int, output: Any) -> None:
        """Note what later stages need of what a call has returned."""
        wanted = [leaf for leaf in self.wanted if leaf.call == number]
        found = leaves(output) if wanted else {}
        for leaf in wanted:
            if leaf.path not in found:
                raise PolicyError(
                    f"{self.cut.chain.calls[number].path} did not return the tensor {leaf.path or 'itself'!r} that a later "
                    "pipeline stage needs, as it did when the model was looked at."
                )
            self.made[leaf] = self._unaltered(leaf, found[leaf.path])

    def _stand_in(self, number: int, args: Any, kwargs: Any) -> Any:
        """What a call that this stage does not make is said to have returned; see [Note: gates]."""
        call, given = self.cut.chain.calls[number], leaves((args, kwargs))

        def stand(path: str, _: torch.Tensor) -> torch.Tensor | None:
            leaf, like = Leaf(number, path), call.like[path]
            if leaf in self.received:
                return self._unaltered(leaf, self.received[leaf])
            if like in given:
                shape, dtype = given[like].shape, given[like].dtype
            elif (found := self._shape(leaf, args, kwargs)) is not None:
                shape, dtype = found
            else:
                return None
            device = next(iter(given.values())).device if given else next(self.staged.model.parameters()).device
            return _poison(shape, dtype, device, whole=leaf in self.cut.chain.altered)

        return map_leaves(call.returned, stand)

    def _shape(self, leaf: Leaf, args: Any, kwargs: Any) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and format of what a call would return; None where they are not known and nobody reads it."""
        shapes = self.staged.shapes
        tensors = ((path, t.shape, t.dtype) for path, t in leaves((args, kwargs)).items())
        given = [*enumerate(args), *sorted(kwargs.items())]
        key = (
            leaf.call,
            *tensors,
            *(item for item in given if isinstance(item[1], (bool, int, float, str, type(None)))),
        )
        if key not in shapes:
            try:
                shapes[key] = self.staged.shapes_of(leaf.call, args, kwargs)
            except PolicyError:
                if leaf in self.staged.read:
                    raise
                return None
        shape, dtype = shapes[key][leaf.path]
        return shape, self.staged.dtype if dtype.is_floating_point else dtype

    def _unaltered(self, leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, where the forward will change the tensor in place; each stage does that for itself."""
        return tensor.clone() if leaf in self.cut.chain.altered else tensor

    def to_send(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.made[leaf] for leaf in self.wanted)


def _tell_hooks(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Let a module's hooks note what it is said to have returned: some models take results from such notes."""
    for key, hook in list(module._forward_hooks.items()):
        hook(module, args, kwargs, output) if key in module._forward_hooks_with_kwargs else hook(module, args, output)


def _poison(shape: torch.Size, dtype: torch.dtype, device: torch.device, whole: bool) -> torch.Tensor:
    """Not a number, or 0 where the format has no such value, in the memory of one entry unless asked for whole."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    entry = torch.full((), value, dtype=dtype, device=device)
    return entry.expand(shape).clone() if whole else entry.expand(shape)


def as_input(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another stage as this one's input: cut off the graph, and to have a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() and torch.is_grad_enabled())


def _flags(model: nn.Module) -> frozenset[str]:
    """Which outputs a model's config asks for besides the usual one."""
    config = getattr(model, "config", None)
    parts = [config, *(part for part in getattr(config, "__dict__", {}).values() if hasattr(part, "to_dict"))]
    fields = [item for part in parts for item in getattr(part, "__dict__", {}).items()]
    return frozenset(name for name, value in fields if name.startswith("output_") and value is True)


class _Gated:
    """Mixed into the class of a unit; see [Note: gates]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        staged, path = self._gate  # type: ignore[attr-defined]
        return staged.pass_gate(path, super().__call__, args, kwargs)  # type: ignore[misc]


def _put_gate(module: nn.Module, path: str, staged: StagedModel) -> None:
    kind = type(module)
    if not issubclass(kind, _Gated):
        module.__class__ = type(kind.__name__, (_Gated, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    module.__dict__["_gate"] = (staged, path)


def hollow(module: nn.Module, kept: Collection[nn.Parameter] = ()) -> None:
    """Take the parameters out of a module, all but those given, and its buffers out of its state; see [Note: hollow modules]."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter not in kept:
                del part._parameters[name]
                there = current_device() if parameter.is_meta else parameter.device
                empty = torch.zeros((), dtype=parameter.dtype, device=there)
                part.__dict__[name] = empty.expand(parameter.shape)
        for name, buffer in list(part._buffers.items()):
            del part._buffers[name]
            part.__dict__[name] = buffer
