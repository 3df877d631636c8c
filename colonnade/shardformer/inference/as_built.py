"""Whether a model is what its class builds from its config: only then do a copy and a twin built from one speak for it.

People edit models: they replace a layer, drop or repeat blocks, let two layers share a weight. Of that a config knows
nothing. Such a model is looked at, and checked, as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from colonnade.model.layout import has_layout
from colonnade.shardformer.inference.check import said
from colonnade.shardformer.inference.trace import find_blocks


def can_be_rebuilt(model: nn.Module) -> bool:
    """Whether another model of the same class can be built from this one's config."""
    return hasattr(model, "config") and hasattr(type(model), "_from_config")


def rebuild(model: Any, config: Any, attention: str = "eager") -> nn.Module:
    """Another model of the same class, without a cache, whose attention and experts are plain operations that can be read
    and run anywhere.

    Args:
        config: taken over.
    """
    made: Any = type(model)._from_config(config, attn_implementation=attention, dtype=torch.float32)
    if getattr(made.config, "_experts_implementation", None):
        made.config._experts_implementation = "batched_mm"
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = False
    return made.requires_grad_(True).train()


def built_anew(model: Any) -> tuple[nn.Module | None, str]:
    """A copy without weights, built from the model's config; None and why where the model is something else than that."""
    if not can_be_rebuilt(model):
        return None, "it has no config from which a small one could be built"
    try:
        with torch.device("meta"):
            made = rebuild(model, copy.deepcopy(model.config))
    except Exception as error:  # a model's own code
        return None, f"its class does not build it from its config ({said(error)})"
    if (edit := edit_of(model, made)) and edit_of(model, _with_attention_of(model, made)):
        return None, f"it is not what its class builds ({edit})"
    return made.to("meta"), ""  # what a constructor has made elsewhere all the same


def _with_attention_of(model: Any, made: nn.Module) -> nn.Module:
    """What the class builds with the model's own kind of attention, where that is another: some have a class for each."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention in (None, "eager"):
        return made
    with torch.device("meta"):
        return rebuild(model, copy.deepcopy(model.config), attention)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy on the meta device; the weights are not copied on the way."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(t): _on_meta(t) for t in tensors}
    return copy.deepcopy(model, memo).to("meta").requires_grad_(True).train()


def edit_of(model: nn.Module, built: nn.Module) -> str:
    """In which point the blocks of a model are not those that its class builds, in words; empty where they are.

    Args:
        built: what the class builds from the model's config.
    """
    if any(has_layout(p) for p in model.parameters()):
        return ""  # split already, as is said elsewhere
    ours, theirs = find_blocks(model), find_blocks(built)
    if ours != theirs:
        return f"it has {len(ours)} blocks, and its config makes {len(theirs)}"
    found, wanted = _modules(model, ours), _modules(built, theirs)
    for path in {**wanted, **found}:
        names = [type(modules[path]).__name__ if path in modules else "nothing" for modules in (found, wanted)]
        if path not in found or path not in wanted or type(found[path]) is not type(wanted[path]):
            return f"{path} is {names[0]}, and its config makes {names[1]}"
    weights, made = _weights(model, ours), _weights(built, theirs)
    for name in {**made, **weights}:
        if weights.get(name) != made.get(name):
            return f"{name} has another shape, or shares its weight with another layer than its config says"
    return ""


def _modules(model: nn.Module, blocks: list[str]) -> dict[str, nn.Module]:
    inside = tuple(f"{block}." for block in blocks)
    return {path: m for path, m in model.named_modules(remove_duplicate=False) if path.startswith(inside)}


def _weights(model: nn.Module, blocks: list[str]) -> dict[str, tuple[torch.Size, str]]:
    """Name of a parameter inside a block → its shape, and the first name that it has."""
    inside = tuple(f"{block}." for block in blocks)
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
        if name.startswith(inside):
            found[name] = (parameter.shape, first[parameter])
    return found


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().to("meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
