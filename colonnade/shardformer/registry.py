"""Finds the policy that has been written for a model."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import lru_cache

from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import plain_model
from colonnade.shardformer import policies
from colonnade.shardformer.policy import Policy


@lru_cache(maxsize=1)
def known_families() -> dict[str, type[Policy]]:
    """transformers' `model_type` → the policy class for it, from every file in policies/."""
    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(policies.__path__):
        for value in vars(importlib.import_module(f"{policies.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Policy) and value.families:
                found |= dict.fromkeys(value.families, value)
    return dict(sorted(found.items()))


def has_policy(model: nn.Module) -> bool:
    """Whether a policy has been written for the model's family; adapters around it do not matter."""
    return getattr(getattr(plain_model(model), "config", None), "model_type", None) in known_families()


def find_policy(model: nn.Module) -> Policy:
    """The policy written for a model's family, by its config's `model_type`; adapters around it do not matter.

    Raises:
        PolicyError: there is none; the message names near families and what to do.
    """
    model = plain_model(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    families = known_families()
    if model_type in families:
        return families[model_type]()
    near = difflib.get_close_matches(str(model_type), families, 1)
    raise PolicyError(
        explain(
            f"there is no policy for {type(model).__name__} (config.model_type = {model_type!r}).",
            [
                ("known", ", ".join(families)),
                *([("nearest", f"{families[near[0]].__name__} ({near[0]})")] if near else []),
                ("try", "custom_policy=… (docs/new_policy.md), or a plugin that needs none: TorchDDPPlugin"),
            ],
        )
    )
