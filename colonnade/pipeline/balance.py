"""What each block costs, estimated from its weights, and from that how many blocks each stage gets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from colonnade.model.chain import Chain
from colonnade.pipeline.cut import blocks_bound
from colonnade.pipeline.partition import check_counts, partition


def multiplied(module: nn.Module) -> int:
    """Weights that a token is multiplied by in a module, which is what its products cost; tables are only looked up."""
    tables = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters(recurse=False)}
    looked_up = {p for p in tables if _only_looked_up(p, module)}
    return sum(p.numel() for p in module.parameters() if p.dim() > 1 and p not in looked_up)


def _only_looked_up(table: nn.Parameter, module: nn.Module) -> bool:
    users = [m for m in module.modules() if any(p is table for p in m.parameters(recurse=False))]
    return all(isinstance(user, nn.Embedding) for user in users)


def balance(model: nn.Module, chain: Chain, stages: int, counts: Sequence[int] | None = None) -> list[int]:
    """Number of blocks of each stage.

    What stands beside the blocks counts for the stage that has it: a head over a large vocabulary may cost as much as
    many blocks.

    Args:
        model: whose chain it is, before it is split.
        stages: number of stages.
        counts: chosen by the user; only checked.

    Raises:
        ConfigError: there are fewer places to cut than stages, or the counts do not fit.
    """
    blocks, bound = chain.blocks, blocks_bound(chain)
    if counts is not None:
        return check_counts(counts, len(blocks), stages, bound)
    costs = [float(multiplied(model.get_submodule(call.path))) for call in chain.calls]
    first = sum(costs[: blocks[0]])
    last = sum(costs[blocks[-1] + 1 :])
    of_blocks = [sum(costs[a:b]) for a, b in zip(blocks, [*blocks[1:], blocks[-1] + 1])]
    return partition(of_blocks, stages, first, last, bound)
