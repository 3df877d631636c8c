"""The spine of a model that nobody has described: where it begins, repeats and ends, from the order of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from colonnade.model.spine import Spine
from colonnade.shardformer.inference.vocabulary import named_by


def spine_of(model: nn.Module, blocks: Sequence[str], calls: Sequence[str]) -> Spine | None:
    """The spine; None for a model without repeated blocks.

    A model with several lists of blocks (encoder and decoder) has its spine along the one that is called last.

    Args:
        blocks: paths of all blocks.
        calls: paths of blocks and of the modules beside them, in the order in which they were called.
    """
    called = [path for path in calls if path in blocks]
    if not called:
        return None
    stack = called[-1].rpartition(".")[0]
    first = min(i for i, path in enumerate(calls) if path.rpartition(".")[0] == stack)
    last = max(i for i, path in enumerate(calls) if path.rpartition(".")[0] == stack)
    base = getattr(model, "base_model_prefix", "")
    if not stack.startswith(f"{base}."):
        base = stack.rpartition(".")[0]
    prefix = f"{base}." if base else ""

    def inside(paths: Sequence[str]) -> list[str]:
        """Those in the base that have parameters, and are no blocks, by their names in it."""
        trained = [p for p in paths if p.startswith(prefix) and p not in blocks and _parameters(model, p)]
        return [path[len(prefix) :] for path in dict.fromkeys(trained)]

    norms = [name for name in inside(calls[last + 1 :]) if all(p.dim() == 1 for p in _parameters(model, prefix + name))]
    return Spine(
        base=base,
        embed=tuple(inside(calls[:first])),
        blocks=stack[len(prefix) :],
        norm=norms[0] if norms else None,
        head=_head(model, calls[last + 1 :], prefix),
    )


def beside_blocks(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Paths of the modules that stand beside the lists of blocks or beside what those are in."""
    above = {""}
    for path in {block.rpartition(".")[0] for block in blocks}:
        parts = path.split(".")
        above |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    found = set()
    for path in above:
        children = [f"{path}.{name}".lstrip(".") for name, _ in model.get_submodule(path).named_children()]
        found |= {child for child in children if child not in above and child not in blocks}
    return found


def _parameters(model: nn.Module, path: str) -> list[nn.Parameter]:
    return list(model.get_submodule(path).parameters())


def _head(model: Any, after: Sequence[str], prefix: str) -> str | None:
    """What turns hidden states into the output: the head over the vocabulary, or what is called last beside the base."""
    head = named_by(model, "get_output_embeddings")
    found = [path for path, module in model.named_modules() if module is head]
    others = [path for path in after if prefix and not path.startswith(prefix) and _parameters(model, path)]
    return next(iter([*found, *others]), None)
