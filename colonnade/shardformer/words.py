"""The words of a policy file. Each builds a description; `+` joins them.

    col("q_proj", "k_proj", "v_proj", units="num_key_value_heads") + row("o_proj", units="num_key_value_heads")

means: the block is entered once, its work is split by whole groups of heads, and it is left with one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colonnade.shardformer.description import (
    LocalRatio,
    LocalShare,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from colonnade.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    Linear1D_Col,
    Linear1D_Row,
    ShardedNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from colonnade.shardformer.roles import HeadNorm, Norm, Replicated


def col(
    *names: str,
    pieces: int | Sequence[int] = 1,
    units: int | str | None = None,
    heads: int | str | Sequence[int | str | None] | None = None,
    gather: bool = False,
    optional: bool = False,
) -> ModulePolicyDescription:
    """Column-parallel linear layers (nn.Linear or Conv1D).

    Args:
        pieces: fused parts in the output, each split by itself: a number of equal ones, or sizes.
        units: blocks in each part that stay together while there are enough of them: a number, or the config's name.
        heads: heads in each part, into which a block is cut where there are fewer blocks than ranks; one entry for all
            parts, or one for each. Without it such a block is held by several ranks (keys and values).
        gather: collect the output on every rank.
        optional: a named layer may be missing.
    """
    kwargs: dict[str, Any] = {"pieces": pieces, "units": units, "heads": heads, "gather_output": gather}
    return _replace(names, Linear1D_Col, kwargs, optional)


def row(
    *names: str, units: int | str | None = None, heads: int | str | None = None, optional: bool = False
) -> ModulePolicyDescription:
    """Row-parallel linear layers, which close the region that `col` opens; `units` and `heads` as of its query layer."""
    return _replace(names, Linear1D_Row, {"units": units, "heads": heads}, optional)


def vocab_embedding(name: str, optional: bool = False) -> ModulePolicyDescription:
    """The token embedding, its vocabulary dealt out over ranks."""
    return _replace((name,), VocabParallelEmbedding1D, None, optional)


def lm_head(name: str, gather: bool = False) -> ModulePolicyDescription:
    """The language-model head, its vocabulary dealt out as the embedding's. The class it stands in may be absent.

    Args:
        gather: collect the logits on every rank, for a model that computes with whole logits (adds a bias of its own to
            them, scales them token by token) before they reach the loss. Costs an all-gather of all logits.
    """
    description = _replace((name,), VocabParallelLMHead1D, {"gather_output": True} if gather else None, False)
    description.optional = True
    return description


def norm(*names: str, optional: bool = False) -> ModulePolicyDescription:
    """Norms of the residual stream, whole on every rank; fused where `enable_fused_normalization` asks for it."""
    return _replace(names, Norm, None, optional)


def head_norm(*names: str, optional: bool = False) -> ModulePolicyDescription:
    """Norms inside the region that treat each head alike: whole on every rank, gradients summed over the ranks' heads."""
    return _replace(names, HeadNorm, None, optional)


def split_norm(
    *names: str, units: int | str | None = None, heads: int | str | None = None, optional: bool = False
) -> ModulePolicyDescription:
    """Norms inside the region over the whole dimension that it splits (all heads together, a whole inner width).

    Each rank norms its share with a statistic of all; `units` and `heads` as of the layer whose output is normed.
    """
    return _replace(names, ShardedNorm, {"units": units, "heads": heads}, optional)


def dropout(*names: str, sharded: bool, optional: bool = False) -> ModulePolicyDescription:
    """Dropout modules whose input is split over ranks (`sharded`: own masks) or whole on each (common masks)."""
    return _replace(names, DropoutForParallelInput if sharded else DropoutForReplicatedInput, None, optional)


def replicate(*names: str, optional: bool = False) -> ModulePolicyDescription:
    """Modules that deliberately stay whole on every rank, outside any region."""
    return _replace(names, Replicated, None, optional)


def shrink(*attributes: str, units: int | str | None = None, heads: int | str | None = None) -> ModulePolicyDescription:
    """Numbers that a forward reads from the module (head counts, widths) become this rank's share."""
    return ModulePolicyDescription(attribute_replacement={name: LocalShare(units, heads) for name in attributes})


def ratio(attribute: str, units: int | str, heads: int | str) -> ModulePolicyDescription:
    """How many query heads read one key/value head, by which a forward repeats keys and values: this rank's number."""
    return ModulePolicyDescription(attribute_replacement={attribute: LocalRatio(units, heads)})


def method(name: str, function: Callable[..., Any], because: str) -> ModulePolicyDescription:
    """Replace a method, the last resort. `because` names the door that is missing in the model's own code."""
    if not because.strip():
        raise ValueError("method(...) needs a reason: name the door that is missing in the model's code")
    return ModulePolicyDescription(method_replacement={name: function})


def _replace(
    names: Sequence[str], target: Any, kwargs: dict[str, Any] | None, optional: bool
) -> ModulePolicyDescription:
    rules = [SubModuleReplacementDescription(name, target, dict(kwargs or {}), optional) for name in names]
    return ModulePolicyDescription(sub_module_replacement=rules)
