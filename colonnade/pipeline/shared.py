"""Parameters that several stages hold: one logical parameter, which one of them steps on.

[Note: one owner]
The first rank that holds such a parameter (a tied embedding, say) owns it; on the others it is a copy that no optimizer
knows. After the backward passes the copies' gradients are added to the owner's, after a step the owner's weights are
copied. So it counts once in the gradient norm, decays once, has its optimizer state once, and the copies have its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import receive_start, send_start, wait


@dataclass(frozen=True)
class Shared:
    """A parameter that several ranks of the pipeline hold.

    Args:
        parameter: this rank's; None where it holds none.
        holders: positions of the ranks that hold it; the first is its owner.
    """

    parameter: nn.Parameter | None
    holders: tuple[int, ...]


class SharedParameters:
    """Keeps the copies of shared parameters equal to their owner's.

    Args:
        shared: those that train, in the same order on every rank.
        axis: the ranks of the pipeline.

    Traffic: a step sends each copy's gradient to the owner, with one number for each parameter, and the weights back.
    """

    def __init__(self, shared: Iterable[Shared], axis: Axis) -> None:
        self.axis = axis
        self.shared = [entry for entry in shared if axis.rank in entry.holders]
        self.copies = {s.parameter for s in self.shared if s.parameter is not None and s.holders[0] != axis.rank}

    def add_gradients(self, contribute: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Add the copies' gradients to those of their owners, and drop them.

        Args:
            contribute: takes a gradient of an owned parameter.
        """
        sending, receiving = self._by_peer()
        works, arriving = [], []
        for peer, parameters in sending.items():
            used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in parameters]
            works += [send_start(t, self.axis, peer) for t in (used, *gradients)]
            for parameter in parameters:
                parameter.grad = None
        for peer, parameters in receiving.items():
            buffers = [torch.empty(len(parameters), device=parameters[0].device)]
            buffers += [torch.empty_like(p) for p in parameters]
            started = [receive_start(t, self.axis, peer) for t in buffers]
            arriving.append((parameters, buffers, started))
        for parameters, (flags, *gradients), started in arriving:
            for work in started:
                wait(work, self.axis, "receive of shared gradients")
            for parameter, gradient, flag in zip(parameters, gradients, flags.tolist()):
                if flag:
                    contribute(parameter, gradient)
        for work in works:
            wait(work, self.axis, "send of shared gradients")

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Give the copies the weights of their owners."""
        sending, receiving = self._by_peer()
        works = [receive_start(p.data, self.axis, peer) for peer, params in sending.items() for p in params]
        works += [send_start(p.data, self.axis, peer) for peer, params in receiving.items() for p in params]
        for work in works:
            wait(work, self.axis, "exchange of shared weights")

    def forget(self) -> None:
        """Drop the gradients of the copies."""
        for parameter in self.copies:
            parameter.grad = None

    def _by_peer(self) -> tuple[dict[int, list[nn.Parameter]], dict[int, list[nn.Parameter]]]:
        """Owner → this rank's copies of its parameters; holder of copies → this rank's own ones."""
        copies: dict[int, list[nn.Parameter]] = {}
        owned: dict[int, list[nn.Parameter]] = {}
        for entry in self.shared:
            owner, *others = entry.holders
            if entry.parameter is None:
                continue
            if owner == self.axis.rank:
                for other in others:
                    owned.setdefault(other, []).append(entry.parameter)
            else:
                copies.setdefault(owner, []).append(entry.parameter)
        return copies, owned


def holders_of(
    names: Mapping[nn.Parameter, Sequence[str]], held: Sequence[Callable[[str], bool]]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Which ranks of the pipeline hold each parameter.

    Args:
        names: all names of each parameter.
        held: for each rank whether it keeps what has a name.
    """
    return {
        parameter: tuple(rank for rank, keeps in enumerate(held) if any(keeps(name) for name in of))
        for parameter, of in names.items()
    }
