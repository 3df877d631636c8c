"""ModelSharder: applies a policy to a model, in place."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn

from colonnade.errors import PolicyError, UsageError, explain
from colonnade.model.layout import deal, has_layout, layout_of, set_layout
from colonnade.shardformer.description import LocalConfig, LocalShare
from colonnade.shardformer.layer.head import VocabParallelLMHead1D
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.shardformer.layer.logits import WholeLogits
from colonnade.shardformer.layer.loss import CausalLMLoss, LossAverage, causal_loss_owner
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.roles import Role, form_for
from colonnade.shardformer.shard.plan import Match, Replacement, check_divisible, check_tied, config_number, match
from colonnade.shardformer.shard.shard_config import ShardConfig


class ModelSharder:
    """Applies one policy to one model: preprocess, match, check, replace, postprocess.

    Nothing is changed before the policy has been found to fit, except by the policy's own `preprocess`.

    Args:
        model: the model to shard, in place.
        policy: what to do with it.
        shard_config: how it is split.
        average: where the loss function learns over which data-parallel ranks to average; a new one by default.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, shard_config: ShardConfig, average: LossAverage | None = None
    ) -> None:
        self.model, self.policy, self.shard_config = model, policy, shard_config
        self.average = average or LossAverage()
        self.axis = shard_config.axis
        self.replaced: list[tuple[str, str]] = []
        self._matches: list[Match] | None = None

    def prepare(self) -> None:
        """Find out what is to be done and whether it can be; `shard` does this first where it has not been done.

        Raises:
            PolicyError, ConfigError: the same on every rank, before any communication.
        """
        if self.axis.size > 1 and any(layout_of(p).sharded_axes for p in self.model.parameters()):
            raise UsageError("this model has been split already; load a plain one, or go on with the boosted one.")
        self.policy.set_model(self.model)
        self.policy.set_shard_config(self.shard_config)
        self.policy.config_sanity_check()
        self.model = self.policy.preprocess() or self.model
        self.policy.set_model(self.model)
        matches = match(self.model, self.policy.module_policy(), type(self.policy).__name__)
        if self.axis.size > 1:
            check_tied(self.model, matches)
            check_divisible(matches, self.axis.size, type(self.model).__name__)
        self._matches = matches

    def shard(self) -> list[dict[str, nn.Parameter]]:
        """Do it, and return the groups of names under which one parameter is known (tied weights)."""
        if self._matches is None:
            self.prepare()
        for found in self._matches or ():
            self._apply(found)
        self.model = self.policy.postprocess() or self.model
        self._name_layouts()
        self._open_doors()
        if self.axis.size > 1 and hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained = refuse_to_save  # type: ignore[assignment]
        if self.shard_config.enable_flash_attention:
            choose_attention(self.model)
        return shared_parameters(self.model)

    def _apply(self, found: Match) -> None:
        description = found.description
        for path, value in description.attribute_replacement.items():
            self._set_attribute(found, path, value)
        for change in description.param_replacement:
            change(found.module)
        region = self._region_for(found)
        for replacement in found.replacements:
            parent, _, leaf = replacement.name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, self._make(replacement, region))
        for name, function in description.method_replacement.items():
            setattr(found.module, name, MethodType(function, found.module))

    def _make(self, replacement: Replacement, region: Region) -> nn.Module:
        kwargs = {key: value for key, value in replacement.kwargs.items() if key != "units_name"}
        target = form_for(replacement.target, replacement.native)
        self.replaced.append((replacement.name, getattr(target, "__name__", str(target))))
        if isinstance(target, type) and issubclass(target, Role):
            return target.apply(replacement.native, self.shard_config, self.axis)
        linear = isinstance(target, type) and issubclass(target, (ColumnParallel, RowParallel))
        if linear and not issubclass(target, VocabParallelLMHead1D):
            kwargs.setdefault("region", region)
        return target.from_native_module(replacement.native, self.axis, **kwargs)

    def _region_for(self, found: Match) -> Region:
        """The column-parallel layers of one module share its region; see [Note: entering once]."""
        region = Region(self.axis)
        if any(isinstance(r.target, type) and issubclass(r.target, ColumnParallel) for r in found.replacements):
            region.watch(found.module)
        return region

    def _set_attribute(self, found: Match, path: str, value: Any) -> None:
        *parents, leaf = path.split(".")
        owner: Any = found.module
        for part in parents:
            owner = getattr(owner, part)
        if isinstance(value, LocalShare):
            value = self._local_share(getattr(owner, leaf, None), leaf, value, found)
        elif isinstance(value, LocalConfig):
            share, config = LocalShare(value.units), copy.copy(getattr(owner, leaf))
            for name in value.names:  # past the config's own checks, which know the whole model only
                config.__dict__[name] = self._local_share(config.__dict__[name], name, share, found)
            value = config
        setattr(owner, leaf, value)

    def _local_share(self, whole: Any, name: str, share: LocalShare, found: Match) -> int:
        if not isinstance(whole, int):
            raise PolicyError(f"{type(found.module).__name__} keeps no whole number {name!r} that could be shared out.")
        units = share.units if share.units is not None else whole
        if isinstance(units, str):
            units = config_number(self.model, units, found.module)
        start, stop = deal(units, self.axis.size)[self.axis.rank]
        return (stop - start) * (whole // units)

    def _name_layouts(self) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for param, keys in names.items():
            if has_layout(param):
                set_layout(param, layout_of(param).named(*keys))

    def _open_doors(self) -> None:
        """Loss and logits of a model whose head is split by vocabulary."""
        head = next((m for m in self.model.modules() if isinstance(m, VocabParallelLMHead1D)), None)
        owner: Any = causal_loss_owner(self.model)
        if head is not None and self.axis.size > 1 and not head.gather_output:
            if owner is not None:
                owner.register_forward_hook(WholeLogits(head))
            else:  # the model's own loss needs whole logits
                head.gather_output = True
        if owner is not None:
            split = head is not None and self.axis.size > 1 and not head.gather_output
            owner.loss_function = CausalLMLoss(
                self.average, self.axis if split else None, head.vocab_size if split and head is not None else None
            )


def refuse_to_save(*_: Any, **__: Any) -> None:
    """Stands in for `save_pretrained` of a model that is split: it would write one rank's shards as if they were whole."""
    raise UsageError(
        explain(
            "save_pretrained would write this rank's shards as if they were the whole model.",
            [("try", "booster.save_model(model, path): the same folder, put together from all ranks")],
        )
    )


def shared_parameters(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Groups of state-dict names that are one parameter."""
    groups: dict[nn.Parameter, dict[str, nn.Parameter]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(param, {})[name] = param
    return [group for group in groups.values() if len(group) > 1]


def choose_attention(model: nn.Module) -> None:
    """Use the flash-attention package where it is installed and can run, else torch's own fused attention."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        return
    from transformers.utils import is_flash_attn_2_available

    param = next(model.parameters())
    fits = param.device.type == "cuda" and param.element_size() == 2 and is_flash_attn_2_available()
    choose("flash_attention_2" if fits else "sdpa")
