"""What travels between neighbouring stages: sent as soon as it is made, received ahead of its use.

[Note: shapes]
A receiver has to know the shapes of what comes. The first time that a micro-batch of some shapes passes a border they are
sent along in front; both sides remember them by the shapes of the micro-batch's own tensors, which every stage has. From
then on nothing but the tensors themselves travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import receive_start, send_start, wait
from colonnade.errors import ShapeError, explain

Spec = tuple[torch.Size, torch.dtype]
Signature = Any  # hashable: what decides the shapes of a micro-batch
MAX_DIMS = 8
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)


class Message(NamedTuple):
    """What passes the border between two stages for one micro-batch.

    Args:
        kind: "F", hidden states for the next stage, or "B", their gradients for the one before.
        border: number of the later one of the two stages.
        microbatch: whose.
    """

    kind: str
    border: int
    microbatch: int

    def __str__(self) -> str:
        what, source = ("hidden states", self.border - 1) if self.kind == "F" else ("gradients", self.border)
        return f"the {what} of micro-batch {self.microbatch} from stage {source}"


class _Arriving:
    """Tensors on their way to this rank."""

    def __init__(
        self, tensors: list[torch.Tensor], works: list[dist.Work | None], axis: Axis, message: Message, source: int
    ) -> None:
        self.tensors, self.works, self.axis, self.message, self.source = tensors, works, axis, message, source

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            wait(work, self.axis, f"{self.message}")
        return self.tensors


class Mailbox:
    """This rank's end of the traffic between stages.

    Args:
        axis: the ranks of the pipeline.
        counts: number of tensors that pass each border, by number of the later stage.
        device: where they lie.
    """

    def __init__(self, axis: Axis, counts: Sequence[int], device: torch.device) -> None:
        self.axis, self.counts, self.device = axis, counts, device
        self.specs: dict[tuple[int, Signature], list[Spec]] = {}
        self._arriving: dict[Message, _Arriving] = {}
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, message: Message, to: int, tensors: Sequence[torch.Tensor], signature: Signature = None) -> None:
        """Start to send tensors to a rank.

        Args:
            signature: of the micro-batch, with "F"; see [Note: shapes].

        Raises:
            ShapeError: micro-batches of the same shapes have given tensors of different ones.
        """
        tensors = [t.contiguous() for t in tensors]
        if message.kind == "F":
            self._announce(message, to, tensors, signature)
        for index, tensor in enumerate(tensors):
            self._leaving.append((send_start(tensor, self.axis, to, self._tag(message, index)), tensor))
        self._leaving = [(work, t) for work, t in self._leaving if work is not None and not work.is_completed()]

    def _announce(self, message: Message, to: int, tensors: list[torch.Tensor], signature: Signature) -> None:
        found = [(t.shape, t.dtype) for t in tensors]
        known = self.specs.get((message.border, signature))
        if known is None:
            self.specs[message.border, signature] = found
            head = _head(found).to(self.device)
            self._leaving.append((send_start(head, self.axis, to, self._tag(message, len(tensors))), head))
        elif known != found:
            raise ShapeError(
                explain(
                    f"micro-batch {message.microbatch} gives tensors of other shapes at the border of stages {message.border - 1} and "
                    f"{message.border} than an earlier one whose inputs had the same shapes.",
                    [("found", ", ".join(str(tuple(s)) for s, _ in found)), ("before", ", ".join(str(tuple(s)) for s, _ in known))],
                )
            )  # fmt: skip

    def post(
        self, message: Message, source: int, signature: Signature = None, specs: Sequence[Spec] | None = None
    ) -> None:
        """Make ready to receive a message; a second call does nothing.

        Args:
            signature: of the micro-batch, with "F".
            specs: shapes and formats of the tensors, with "B".
        """
        if message in self._arriving:
            return
        if specs is None:
            specs = self._shapes(message, source, signature)
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]
        works = [receive_start(t, self.axis, source, self._tag(message, i)) for i, t in enumerate(tensors)]
        self._arriving[message] = _Arriving(tensors, works, self.axis, message, source)

    def _shapes(self, message: Message, source: int, signature: Signature) -> list[Spec]:
        key = (message.border, signature)
        if key not in self.specs:
            count = self.counts[message.border]
            head = torch.empty(count * (MAX_DIMS + 2), dtype=torch.int64, device=self.device)
            wait(receive_start(head, self.axis, source, self._tag(message, count)), self.axis, f"shapes of {message}")
            self.specs[key] = _specs(head)
        return self.specs[key]

    def knows(self, message: Message, signature: Signature) -> bool:
        """Whether the shapes of a message are known, so that making ready for it does not wait."""
        return (message.border, signature) in self.specs

    def waiting_for(self, source: int) -> int:
        """Number of messages of a rank that have been made ready for and not been taken."""
        return sum(arriving.source == source for arriving in self._arriving.values())

    def take(self, message: Message) -> list[torch.Tensor]:
        """The tensors of a message that has been posted, once they are there."""
        return self._arriving.pop(message).wait()

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._leaving:
            wait(work, self.axis, "send")
        self._leaving.clear()

    def _tag(self, message: Message, index: int) -> int:
        width = max(self.counts, default=0) + 1
        return (
            1 + ((message.microbatch * len(self.counts) + message.border) * 2 + (message.kind == "B")) * width + index
        )


def _head(specs: Sequence[Spec]) -> torch.Tensor:
    rows = []
    for shape, dtype in specs:
        if len(shape) > MAX_DIMS or dtype not in DTYPES:
            raise ShapeError(f"a tensor of shape {tuple(shape)} and format {dtype} cannot pass from stage to stage.")
        rows.append([DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])
    return torch.tensor(rows, dtype=torch.int64).flatten()


def _specs(head: torch.Tensor) -> list[Spec]:
    rows = head.view(-1, MAX_DIMS + 2).tolist()
    return [(torch.Size(dims[:number]), DTYPES[kind]) for kind, number, *dims in rows]
