"""Runtime: plays a rank's list of actions on its stages.

Everything that depends on a schedule is in its lists; here is only what an action does. A forward takes what the stage
before has sent and sends what it makes; a backward takes the gradients of that and sends those of what it was given. What
has not been sent yet is made ready for in advance, so that it travels while this rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from colonnade.cluster.mesh import Axis
from colonnade.model.tree import leaves
from colonnade.pipeline.mailbox import Mailbox, Message
from colonnade.pipeline.schedule import Action, Schedule
from colonnade.pipeline.stage import StagedModel, as_input

WeightGradients = None  # TEMP

LOOKAHEAD = 2  # so many actions ahead a rank makes ready to receive


class Step(Protocol):
    """What a training or evaluation step does with micro-batches."""

    def forward(self, part: Any) -> Any:
        """Call the model with a micro-batch."""

    def loss(self, output: Any, index: int) -> torch.Tensor | None:
        """On the last stage: what the backward pass of a micro-batch starts from, from the model's output."""

    def backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward pass from these tensors."""


@dataclass
class _Pass:
    """A micro-batch between its forward and the last of its backward passes."""

    received: list[torch.Tensor]
    sent: Sequence[torch.Tensor]
    loss: torch.Tensor | None
    weights: WeightGradients | None


@dataclass(frozen=True)
class Event:
    """An action that has been played, with the seconds between which it ran."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass
class Record:
    """What a rank has done in one step.

    Args:
        events: in order.
        peak_in_flight: most micro-batches × stages whose activations were kept at a time.
    """

    events: list[Event] = field(default_factory=list)
    peak_in_flight: int = 0


class Runtime:
    """Plays schedules.

    Args:
        staged: the model.
        axis: the ranks of the pipeline.
        device: where it computes.
    """

    def __init__(self, staged: StagedModel, axis: Axis, device: torch.device) -> None:
        self.staged, self.axis = staged, axis
        self.mailbox = Mailbox(axis, [len(crossing) for crossing in staged.cut.crossing], device)
        self.record = Record()

    def play(self, schedule: Schedule, parts: Sequence[Any], step: Step) -> None:
        """Run this rank's actions of a schedule.

        Args:
            parts: the micro-batches; the same on every stage.
            step: what to do with them.
        """
        playing = _Playing(self, schedule, parts, step)
        self.record = playing.record
        playing.run()


class _Playing:
    """One step while it is under way."""

    def __init__(self, runtime: Runtime, schedule: Schedule, parts: Sequence[Any], step: Step) -> None:
        self.staged, self.axis, self.mailbox = runtime.staged, runtime.axis, runtime.mailbox
        self.schedule, self.parts, self.step = schedule, parts, step
        self.actions = schedule.actions[self.axis.rank]
        self.signatures = [_signature(part) for part in parts]
        self.last = schedule.num_stages - 1
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.local: dict[Message, list[torch.Tensor]] = {}  # between two stages of this rank
        self.in_flight = 0
        self.record = Record()

    def run(self) -> None:
        play = {"F": self._forward, "B": self._backward, "W": self._weights}
        for position, action in enumerate(self.actions):
            self._make_ready(position)
            start = time.perf_counter()
            play[action.kind](action)
            self.record.events.append(Event(action.kind, action.stage, action.microbatch, start, time.perf_counter()))
        self.mailbox.flush()

    def _forward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        received: list[torch.Tensor] = []
        if stage:
            received = [as_input(t) for t in self._take(Message("F", stage, index), stage - 1)]
        part = self.parts[index]
        result = self.staged.forward(stage, received, lambda: self.step.forward(part))
        loss = self.step.loss(result.output, index) if stage == self.last else None
        if stage != self.last:
            self._give(Message("F", stage + 1, index), stage + 1, [t.detach() for t in result.sent])
        if torch.is_grad_enabled():
            store = WeightGradients() if self.schedule.splits_backward else None
            self.passes[stage, index] = _Pass(received, result.sent, loss, store)
            self.in_flight += 1
            self.record.peak_in_flight = max(self.record.peak_in_flight, self.in_flight)

    def _backward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        going = self.passes[stage, index]
        roots: Sequence[torch.Tensor] = [] if going.loss is None else [going.loss]
        gradients: Sequence[torch.Tensor | None] = [None] * len(roots)
        if stage != self.last:
            sent = [t for t in going.sent if t.is_floating_point()]
            pairs = list(zip(sent, self._take(Message("B", stage + 1, index), stage + 1)))
            roots, gradients = [t for t, _ in pairs if t.requires_grad], [g for t, g in pairs if t.requires_grad]
        with going.weights.deferring() if going.weights is not None else nullcontext():
            self.step.backward(roots, gradients)
        if stage:
            wanted = [t for t in going.received if t.is_floating_point()]
            made = [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]
            self._give(Message("B", stage, index), stage - 1, made)
        going.received, going.sent, going.loss = [], (), None
        self.in_flight -= 1
        if going.weights is None:
            del self.passes[stage, index]

    def _weights(self, action: Action) -> None:
        store = self.passes.pop((action.stage, action.microbatch)).weights
        if store is not None:
            store.run()

    def _give(self, message: Message, stage: int, tensors: list[torch.Tensor]) -> None:
        rank = self.schedule.rank_of(stage)
        if rank == self.axis.rank:
            self.local[message] = tensors
        else:
            self.mailbox.send(message, rank, tensors, self.signatures[message.microbatch])

    def _take(self, message: Message, stage: int) -> list[torch.Tensor]:
        """What a stage has sent."""
        if self.schedule.rank_of(stage) == self.axis.rank:
            return self.local.pop(message)
        self._post(message, stage)
        return self.mailbox.take(message)

    def _post(self, message: Message, stage: int) -> None:
        specs = None
        if message.kind == "B":
            sent = self.passes[message.border - 1, message.microbatch].sent
            specs = [(t.shape, t.dtype) for t in sent if t.is_floating_point()]
        self.mailbox.post(message, self.schedule.rank_of(stage), self.signatures[message.microbatch], specs)

    def _make_ready(self, position: int) -> None:
        """Post what the next actions need, as far as its shapes are known."""
        for action in self.actions[position : position + LOOKAHEAD + 1]:
            found = self._needs(action)
            if found is not None:
                self._post(*found)

    def _needs(self, action: Action) -> tuple[Message, int] | None:
        """The message that an action waits for and can be made ready for now, and the stage that it comes from."""
        stage, index = action.stage, action.microbatch
        message = source = None
        if action.kind == "F" and stage:
            message, source = Message("F", stage, index), stage - 1
            ready = self.mailbox.knows(message, self.signatures[index])
        elif action.kind == "B" and stage != self.last:
            message, source = Message("B", stage + 1, index), stage + 1
            ready = (stage, index) in self.passes
        if message is None or source is None or not ready or self.schedule.rank_of(source) == self.axis.rank:
            return None
        return message, source


def _signature(part: Any) -> tuple[Any, ...]:
    return tuple((path, t.shape, t.dtype) for path, t in leaves(part).items())
