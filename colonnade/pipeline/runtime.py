"""Runtime: plays a rank's list of actions on its stages.

Everything that depends on a schedule is in its lists; here is only what an action does. A forward takes what the stage
before has sent and sends what it makes; a backward takes the gradients of that and sends those of what it was given.

[Note: one order for both ends]
Backends without tags match what two ranks send each other by order. So each pair of ranks has one list of its messages, and
both start to send and to receive in the order of that list: a message waits until all before it have been started. Receiving
is started in advance as far as that allows, so that messages travel while this rank computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from colonnade.cluster.mesh import Axis
from colonnade.model.tree import leaves
from colonnade.pipeline.action import Action
from colonnade.pipeline.mailbox import Mailbox, Message
from colonnade.pipeline.messages import transfers
from colonnade.pipeline.schedule import Schedule
from colonnade.pipeline.stage import StagedModel, as_input
from colonnade.shardformer.layer.deferred import WeightGradients

AHEAD = 2  # so many messages of a peer may be waited for in advance


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
    """An action that has been played, with the seconds between which it computed.

    On an accelerator that is when its work was handed over; and the clocks of different machines differ.
    """

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
        self.made: dict[Message, list[torch.Tensor]] = {}  # not sent yet, or for another stage of this rank
        self.queues = _queues(schedule, self.axis.rank)
        self.in_flight = 0
        self.started = 0.0  # when the present action began to compute
        self.record = Record()

    def run(self) -> None:
        play = {"F": self._forward, "B": self._backward, "W": self._weights}
        for action in self.actions:
            for peer in self.queues:
                self._start_messages(peer)
            self.started = time.perf_counter()
            play[action.kind](action)
            event = Event(action.kind, action.stage, action.microbatch, self.started, time.perf_counter())
            self.record.events.append(event)
        self.mailbox.flush()

    def _forward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        received: list[torch.Tensor] = []
        if stage:
            received = [as_input(t) for t in self._take(Message("F", stage, index), stage - 1)]
        part = self.parts[index]
        store = WeightGradients() if self.schedule.splits_backward and torch.is_grad_enabled() else None
        with nullcontext() if store is None else store.deferring():
            result = self.staged.forward(stage, received, lambda: self.step.forward(part))
            loss = self.step.loss(result.output, index) if stage == self.last else None
        if torch.is_grad_enabled():
            self.passes[stage, index] = _Pass(received, result.sent, loss, store)
            self.in_flight += 1
            self.record.peak_in_flight = max(self.record.peak_in_flight, self.in_flight)
        if stage != self.last:
            self._give(Message("F", stage + 1, index), stage + 1, [t.detach() for t in result.sent])

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
        self.made[message] = tensors
        if rank != self.axis.rank:
            self._start_messages(rank, until=message)

    def _take(self, message: Message, stage: int) -> list[torch.Tensor]:
        """What a stage has sent."""
        rank = self.schedule.rank_of(stage)
        if rank == self.axis.rank:
            return self.made.pop(message)
        self._start_messages(rank, until=message)
        tensors = self.mailbox.take(message)
        self.started = time.perf_counter()  # the wait is no work
        return tensors

    def _start_messages(self, peer: int, until: Message | None = None) -> None:
        """Start the next messages to and from a peer; see [Note: one order for both ends].

        Args:
            until: one that has to be started, with all before it; without it nothing is done that may have to wait.
        """
        queue = self.queues.get(peer, deque())
        ends = queue.index(until) if until is not None and until in queue else -1
        while queue:
            message, forced = queue[0], ends >= 0
            if message in self.made:
                self.mailbox.send(message, peer, self.made.pop(message), self.signatures[message.microbatch])
            elif self._sender(message) == self.axis.rank or not (forced or self._can_wait_for(peer, message)):
                return
            else:
                self._receive(message, peer)
            queue.popleft()
            ends -= 1

    def _sender(self, message: Message) -> int:
        return self.schedule.rank_of(message.border - (message.kind == "F"))

    def _can_wait_for(self, peer: int, message: Message) -> bool:
        """Whether receiving can be started in advance: there are not too many already, and the shapes are known."""
        known = message.kind == "B" or self.mailbox.knows(message, self.signatures[message.microbatch])
        return known and self.mailbox.waiting_for(peer) < AHEAD

    def _receive(self, message: Message, peer: int) -> None:
        specs = None
        if message.kind == "B":
            sent = self.passes[message.border - 1, message.microbatch].sent
            specs = [(t.shape, t.dtype) for t in sent if t.is_floating_point()]
        self.mailbox.post(message, peer, self.signatures[message.microbatch], specs)


def _queues(schedule: Schedule, rank: int) -> dict[int, deque[Message]]:
    """Peer → the messages between it and this rank, in the order that both follow."""
    queues: dict[int, deque[Message]] = {}
    for sent in transfers(schedule):
        if rank in (sent.source, sent.target):
            peer = sent.target if sent.source == rank else sent.source
            border = max(sent.source_stage, sent.target_stage)
            queues.setdefault(peer, deque()).append(Message(sent.kind, border, sent.microbatch))
    return queues


def _signature(part: Any) -> tuple[Any, ...]:
    return tuple((path, t.shape, t.dtype) for path, t in leaves(part).items())
