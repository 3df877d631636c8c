"""What a plugin is given, looked at before anything is changed; and what it has made, found again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.precision.optimizer import ParallelOptimizer


def check_boostable(model: Any, optimizer: Any) -> None:
    """Refuse what cannot be boosted, before anything is changed.

    Raises:
        UsageError: no module, no optimizer, one that has been boosted before, or an optimizer of another model.
    """
    if isinstance(model, BoostedModel) or isinstance(optimizer, ParallelOptimizer):
        what = "model" if isinstance(model, BoostedModel) else "optimizer"
        raise UsageError(
            f"this {what} has been boosted already; boost takes the plain one (boosted.unwrap(), optimizer.inner)."
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"boost takes a torch module as the model, and was given {kind_of(model)}.")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"boost takes a torch optimizer, and was given {kind_of(optimizer)}.")
    own = set(model.parameters())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(p not in own for p in params)
    if foreign:
        raise UsageError(
            explain(
                f"{foreign} of the optimizer's {len(params)} parameters are not parameters of this {type(model).__name__}.",
                [
                    ("reason", "it was made from another model, or before the model's parameters were replaced"),
                    ("try", "make the optimizer from model.parameters() right before boost"),
                ],
            )
        )
    if params and any(p.requires_grad for p in own) and not any(p.requires_grad for p in params):
        raise UsageError(
            explain(
                f"none of the optimizer's {len(params)} parameters trains.",
                [
                    (
                        "found",
                        f"{sum(p.requires_grad for p in own)} parameters of the model that do, and are not in it",
                    ),
                    ("try", "make the optimizer after freezing and after booster.enable_lora"),
                ],
            )
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS is not possible here: its step runs the model several times, by a closure. Take AdamW, or one of colonnade.optim."
        )


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}: {value!r:.60}"


def pristine_config(model: nn.Module) -> Any:
    """A copy of the model's config, to be saved with it whatever a policy does to the original."""
    return copy.deepcopy(getattr(model, "config", None))


def boosted_model(model: Any) -> BoostedModel:
    """The model, if it is one that `boost` returned.

    Raises:
        UsageError: it is not.
    """
    if isinstance(model, BoostedModel):
        return model
    raise UsageError(f"this needs the model that booster.boost(...) returned, and was given a {type(model).__name__}.")


def boosted_optimizer(optimizer: Any) -> ParallelOptimizer:
    """The optimizer, if it is one that `boost` returned.

    Raises:
        UsageError: it is not.
    """
    if isinstance(optimizer, ParallelOptimizer):
        return optimizer
    raise UsageError(
        f"this needs the optimizer that booster.boost(...) returned, and was given {type(optimizer).__name__}."
    )
