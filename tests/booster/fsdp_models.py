"""Models that fully sharded training has to get right and that are no transformers: frozen, unused, tied, without dims."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

WIDTH = 8


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    out: torch.Tensor | None = None


class Block(nn.Module):
    """A linear layer, and a second one that only some rows use: a rank that has none of them never calls it."""

    def __init__(self):
        super().__init__()
        self.main, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, extra):
        out = x + torch.tanh(self.main(x))
        return out + self.extra(x).sum(-1, keepdim=True) * extra if extra.any() else out


class Odd(nn.Module):
    """Two blocks, an unused layer, a frozen layer, a tied one, a parameter without dims and one with fewer rows than ranks.

    Args:
        scalar: have the parameter without dims.
    """

    def __init__(self, scalar=True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.unused = nn.Linear(WIDTH, 5)
            self.frozen = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)
            self.short = nn.Parameter(torch.randn(1, WIDTH))
            self.scale = nn.Parameter(torch.tensor(1.3)) if scalar else None
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, target, extra):
        x = self.first(x) * self.short
        for block in self.blocks:
            x = block(self.frozen(x), extra)
        x = self.last(x)
        x = x * self.scale if self.scale is not None else x
        return Output(loss=F.mse_loss(x, target), out=x)


def odd_batches(*shares, rows=12):
    """Global batches for `Odd`; for each the share of its rows that use the second layers, the first ones."""
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(rows, WIDTH, generator=generator),
            "target": torch.randn(rows, WIDTH, generator=generator),
            "extra": (torch.arange(rows) < share * rows).float()[:, None],
        }
        for share in shares
    ]
