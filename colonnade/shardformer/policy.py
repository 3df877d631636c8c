"""Policy: what a model family looks like, said once and as data."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from colonnade.errors import PolicyError
from colonnade.model.spine import Spine
from colonnade.shardformer.description import ModulePolicyDescription
from colonnade.shardformer.shard.shard_config import ShardConfig

__all__ = ["Policy", "PolicyError", "Spine", "WholePolicy"]


class Policy:
    """Base of all policies.

    A policy states in `module_policy` what happens to the modules of each class. The other methods exist for the rare
    model that needs work before or after.

    Attributes:
        families: transformers' `model_type` → the prefix of its class names, for the models this policy is for.
        spine: where the model begins, repeats and ends.
        model: the model to be sharded, set before any method is called.
        shard_config: the `ShardConfig` in use, likewise.
    """

    families: ClassVar[dict[str, str]] = {}
    spine: Spine | None = None
    model: nn.Module
    shard_config: ShardConfig

    def set_model(self, model: nn.Module) -> None:
        """Tell the policy which model it is for."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Tell the policy how the model will be split."""
        self.shard_config = shard_config

    @property
    def family(self) -> str:
        """Prefix of the model's class names, such as "Llama"."""
        model_type = getattr(getattr(self.model, "config", None), "model_type", None)
        if model_type not in self.families:
            raise PolicyError(
                f"{type(self).__name__} is for {', '.join(self.families)}, and the model's type is {model_type!r}."
            )
        return self.families[model_type]

    def config_sanity_check(self) -> None:
        """Refuse models or options that the policy cannot serve, before anything is changed."""

    def preprocess(self) -> nn.Module | None:
        """Change the model before its modules are replaced; may return another model."""

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        """What happens to the modules of each class; keys are classes or their names."""
        raise NotImplementedError(
            f"{type(self).__name__} must say in module_policy() what to do with the model's modules"
        )

    def postprocess(self) -> nn.Module | None:
        """Change the model after its modules have been replaced; may return another model."""


class WholePolicy(Policy):
    """Leaves every module as it is: the policy for one rank."""

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {}
