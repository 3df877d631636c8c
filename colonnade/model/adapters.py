"""Models with adapters of the peft package: the model inside the wrappers, and the model as it was without adapters.

peft is recognised by the names of its modules, so that nothing has to be imported.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn


def is_from_peft(module: nn.Module) -> bool:
    """Whether a module is of a class of peft, or of one that derives from such a class."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put anything around or into a model."""
    return any(is_from_peft(module) for module in model.modules())


def plain_model(model: nn.Module) -> nn.Module:
    """The model that peft's wrappers hold, with the adapters' layers in it; any other model itself."""
    while is_from_peft(model):
        found = [model._modules[name] for name in ("base_model", "model") if model._modules.get(name) is not None]
        if not found:
            break
        model = found[0]  # type: ignore[assignment]  # it is a module
    return model


def adapted_names(model: nn.Module, names: Collection[str]) -> set[str]:
    """The names that some parameters of a model without adapters have in the one with them.

    Args:
        model: with adapters; see `plain_model` for what its names begin at.
        names: in the model without. A layer that is trained as a copy (modules_to_save) is there twice.
    """
    return {name for name, _ in plain_model(model).named_parameters() if _without_layers(name) in names}


def _without_layers(name: str) -> str:
    parts = name.split(".")
    saved = {i + 1 for i, part in enumerate(parts) if part == "modules_to_save"}  # the adapter's name comes next
    layers = ("base_layer", "original_module", "token_adapter", "modules_to_save")
    return ".".join(part for i, part in enumerate(parts) if part not in layers and i not in saved)


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """What an adapter stands around, the model's own layer or another adapter; None for a module that is no adapter."""
    if not is_from_peft(module):
        return None
    found = (module._modules.get(name) for name in ("base_layer", "original_module", "token_adapter"))
    return next((inner for inner in found if inner is not None), None)


def without_adapters(model: nn.Module) -> nn.Module:
    """The model as it was before it got adapters: other module objects with the same classes, paths and tensors.

    Args:
        model: it is not changed. Its wrappers are left out, see `plain_model`.
    """
    model = plain_model(model)
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        inner = adapted_layer(module)
        if inner is not None and id(module) not in memo:
            memo[id(module)] = copy.deepcopy(_innermost(inner), memo)
    return copy.deepcopy(model, memo)


def _innermost(module: nn.Module) -> nn.Module:
    while (inner := adapted_layer(module)) is not None:
        module = inner
    return module
