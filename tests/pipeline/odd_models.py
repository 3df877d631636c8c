"""Plain modules that hand things from block to block in every way there is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, WIDTH, BLOCKS = 19, 8, 4


class Block(nn.Module):
    """Two linear layers and a residual; `told` is added to what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, told=0.0):
        return x + self.down(F.gelu(self.up(x + told)))


class Plain(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(self.through(self.embed(ids))))

    def through(self, x):
        """The blocks, with what goes on between them."""
        for block in self.blocks:
            x = block(x)
        return x


class TiedInGlue(Plain):
    """The head is a product with the embedding's weight that no module makes."""

    def forward(self, ids):
        return F.linear(self.norm(self.through(self.embed(ids))), self.embed.weight)


class Skips(Plain):
    """The first block's result is used again by the last."""

    def through(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x, first)


class MaskOfStates(Plain):
    """The last block is told something that is not differentiable, made of the first block's result."""

    def through(self, x):
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](x, (first > 0).long().argmax(-1, keepdim=True).float())


class Detached(Plain):
    """As `Skips`, behind detach()."""

    def through(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x, first.detach())


class ChangedByGlue(Plain):
    """Results are changed in place between the blocks, and one of them is used again."""

    def through(self, x):
        first = x = self.blocks[0](x)
        x = self.blocks[1](x * 1.0)
        first.mul_(0.5)
        x = self.blocks[2](x)
        x += 1.0
        return self.blocks[3](x, first)


class ChangesItsInput(Plain):
    """Blocks add to what they are given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlaceBlock() for _ in range(BLOCKS)])


class InPlaceBlock(Block):
    """Adds to what it is given."""

    def forward(self, x, told=0.0):
        made = self.down(F.gelu(self.up(x + told)))
        x += made
        return x


class InPlaceAlone(ChangesItsInput):
    """The blocks return nothing."""

    def through(self, x):
        for block in self.blocks:
            block(x)
        return x


class DropsTwice(Plain):
    """Two blocks get the same embedding with the same entries dropped, by a function and not by a module."""

    def through(self, x):
        dropped = F.dropout(x, 0.5, self.training)
        for block in self.blocks[:-1]:
            x = block(x, dropped)
        return self.blocks[-1](x)


class DropsByModule(Plain):
    """As `DropsTwice`, by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def through(self, x):
        dropped = self.dropout(x)
        for block in self.blocks:
            x = block(x, dropped)
        return x


class SkipsBlocks(Plain):
    """Leaves out blocks at random."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def through(self, x):
        for block in self.blocks:
            if self.training and torch.rand([]) < self.share:
                continue
            x = block(x)
        return x


class LooksAtValues(Plain):
    """What is called depends on a value."""

    def through(self, x):
        x = self.blocks[0](x)
        scale = 2.0 if x.sum().item() > 0 else 0.5
        for block in self.blocks[1:]:
            x = block(x * scale)
        return x


class Leaks(Plain):
    """A block leaves a tensor in a place that all know, and a later one takes it from there.

    Args:
        change: what is left there of it.
    """

    def __init__(self, change=lambda x: x) -> None:
        super().__init__()
        self.change = change
        self.blocks = nn.ModuleList([LeakingBlock(i) for i in range(BLOCKS)])

    def through(self, x):
        shared = {"change": self.change}
        for block in self.blocks:
            x = block(x, shared)
        return x


class LeakingBlock(Block):
    """The second leaves something, the third takes it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x, shared):
        if self.number == 1:
            shared["left"] = shared["change"](self.up(x).sum(-1, keepdim=True))
        return super().forward(x, shared["left"] if self.number == 2 else 0.0)


class LeaksNumber(Plain):
    """A block leaves a number of Python, which no operation tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"left": 0.0}
        self.blocks = nn.ModuleList([NumberBlock(i, self.state) for i in range(BLOCKS)])


class NumberBlock(Block):
    """The second leaves a number, the third takes it."""

    def __init__(self, number: int, state: dict[str, float]) -> None:
        super().__init__()
        self.number, self.state = number, state

    def forward(self, x, told=0.0):
        if self.number == 1:
            self.state["left"] = 3.0
        return super().forward(x, self.state["left"] if self.number == 2 else told)


class TakesTurns(Plain):
    """Calls its blocks in another order each time."""

    def through(self, x):
        order = list(self.blocks)
        if self.turned:
            order = order[::-1]
        for block in order:
            x = block(x)
        return x

    turned = False
