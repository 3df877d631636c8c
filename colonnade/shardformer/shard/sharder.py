"""ModelSharder: applies a policy to a model, in place."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn

from colonnade.cluster.log import get_logger
from colonnade.errors import PolicyError, UsageError, explain
from colonnade.model.adapters import has_adapters, plain_model, without_adapters
from colonnade.model.layout import deal_blocks, has_layout, layout_of, set_layout
from colonnade.shardformer.description import LocalArgument, LocalConfig, LocalRatio, LocalShare
from colonnade.shardformer.layer.adapter import follow_gathering, split_adapter
from colonnade.shardformer.layer.head import VocabParallelLMHead1D
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.shardformer.layer.logits import WholeLogits
from colonnade.shardformer.layer.loss import CausalLMLoss, LossAverage, causal_loss_owner
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.roles import Role, form_for
from colonnade.shardformer.shard.arguments import slice_argument
from colonnade.shardformer.shard.plan import (
    Match,
    Replacement,
    check_adapters,
    check_tied,
    match,
    number_of,
    places_of,
)
from colonnade.shardformer.shard.shard_config import ShardConfig
from colonnade.shardformer.shard.shares import check_shares

log = get_logger(__name__)


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
        self.inner = plain_model(model)  # what the policy speaks of: without what peft puts around a model
        self.average = average or LossAverage()
        self.axis = shard_config.axis
        self.replaced: list[tuple[str, str]] = []
        self.uneven = ""  # what is shared out unequally, in words; known once it has been prepared
        self._matches: list[Match] | None = None
        self._adapted: list[tuple[nn.Module, nn.Module]] = []  # adapters, with the layers they now stand around

    def prepare(self) -> None:
        """Find out what is to be done and whether it can be; `shard` does this first where it has not been done.

        Raises:
            PolicyError, ConfigError: the same on every rank, before any communication.
        """
        if self.axis.size > 1 and any(layout_of(p).sharded_axes for p in self.model.parameters()):
            raise UsageError("this model has been split already; load a plain one, or go on with the boosted one.")
        self.policy.set_model(self.inner)
        self.policy.set_shard_config(self.shard_config)
        self.policy.config_sanity_check()
        self._take(self.policy.preprocess())
        adapted = has_adapters(self.model)
        self.policy.set_model(without_adapters(self.inner) if adapted else self.inner)
        rules = self.policy.module_policy()
        self.policy.set_model(self.inner)
        matches = match(self.inner, rules, type(self.policy).__name__)
        if self.axis.size > 1:
            if adapted:
                check_adapters(self.model, matches)
            check_tied(self.model, matches)
            self.uneven = check_shares(matches, self.axis.size, type(self.inner).__name__)
        self._matches = matches

    def _take(self, other: nn.Module | None) -> None:
        """Go on with the model that a policy has made of the given one."""
        if other is None or other is self.inner:
            return
        if self.inner is not self.model:
            raise PolicyError(
                f"{type(self.policy).__name__} puts another model in the place of the one that has adapters; "
                "make the adapters after that, of what the policy returns."
            )
        self.model = self.inner = other

    def warn(self) -> None:
        """Say on one rank that shares are unequal, where they are. Whoever shards a model to use it calls this once."""
        if self.uneven:
            log.warning("%s", self.uneven)

    def shard(self) -> list[dict[str, nn.Parameter]]:
        """Do it, and return the groups of names under which one parameter is known (tied weights)."""
        if self._matches is None:
            self.prepare()
        places = places_of(self.model)
        for found in self._matches or ():
            self._apply(found, places)
        self._take(self.policy.postprocess())
        self._name_layouts()
        self._open_doors()
        for adapter, base in self._adapted:
            follow_gathering(adapter, base)
        for model in (self.model, self.inner):
            if self.axis.size > 1 and hasattr(model, "save_pretrained"):
                model.save_pretrained = refuse_to_save  # type: ignore[assignment]
        if self.shard_config.enable_flash_attention:
            choose_attention(self.inner)
        return shared_parameters(self.model)

    def _apply(self, found: Match, places: dict[nn.Module, list[tuple[nn.Module, str]]]) -> None:
        description = found.description
        for path, value in description.attribute_replacement.items():
            self._set_attribute(found, path, value)
        for name, share in description.argument_replacement.items():
            self._slice_argument(found, name, share)
        for change in description.param_replacement:
            change(found.module)
        region = self._region_for(found)
        for replacement in found.replacements:
            adapter = replacement.adapter
            if adapter is not None and self.axis.size == 1:
                continue  # nothing is split, and an adapter may know its layer by its class
            made = self._make(replacement, region)
            if adapter is not None:
                split_adapter(adapter, made)
                self._adapted.append((adapter, made))
            for parent, leaf in places[replacement.native]:
                setattr(parent, leaf, made)
        for name, function in description.method_replacement.items():
            setattr(found.module, name, MethodType(function, found.module))

    def _make(self, replacement: Replacement, region: Region) -> nn.Module:
        kwargs = {key: value for key, value in replacement.kwargs.items() if not key.endswith("_name")}
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
        if isinstance(value, (LocalShare, LocalRatio)):
            value = self._local(getattr(owner, leaf, None), leaf, value, found)
        elif isinstance(value, LocalConfig):
            config = copy.copy(getattr(owner, leaf))
            for name, share in value.shares.items():  # past the config's own checks, which know the whole model only
                config.__dict__[name] = self._local(config.__dict__[name], name, share, found)
            value = config
        setattr(owner, leaf, value)

    def _slice_argument(self, found: Match, name: str, share: LocalArgument) -> None:
        units = number_of(share.units, self.inner, found.module) or 1
        heads = number_of(share.heads, self.inner, found.module) or units
        held = deal_blocks(units, self.axis.size, heads // units)[self.axis.rank]
        slice_argument(found.module, name, share.dim, held, heads, share.folded, self.axis)

    def _local(self, whole: Any, name: str, share: LocalShare | LocalRatio, found: Match) -> int:
        """What becomes on this rank of a number of the whole model."""
        if not isinstance(whole, int):
            raise PolicyError(f"{type(found.module).__name__} keeps no whole number {name!r} that could be shared out.")
        units = number_of(share.units, self.inner, found.module) or whole
        heads = number_of(share.heads, self.inner, found.module) or units
        mine = deal_blocks(units, self.axis.size, heads // units)[self.axis.rank]
        if isinstance(share, LocalRatio):
            keys = deal_blocks(units, self.axis.size)[self.axis.rank]
            return mine.size // keys.size
        return mine.size * (whole // heads)

    def _name_layouts(self) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for param, keys in names.items():
            if has_layout(param):
                set_layout(param, layout_of(param).named(*keys))

    def _open_doors(self) -> None:
        """Loss and logits of a model whose head is split by vocabulary."""
        owner: Any = causal_loss_owner(self.inner)
        heads = [m for m in self.inner.modules() if isinstance(m, VocabParallelLMHead1D) and not m.gather_output]
        heads = heads if self.axis.size > 1 else []
        split = next((head for head in heads if owner is not None and head in owner.modules()), None)
        for head in heads:
            if head is not split:  # the model's own loss needs whole logits
                head.gather_output = True
        if split is not None:
            owner.register_forward_hook(WholeLogits(split))
            for wrapper in self.model.modules():  # some call the forward of the model inside and not the model
                if owner is self.inner and owner in wrapper.children():
                    wrapper.register_forward_hook(WholeLogits(split))
        if owner is not None:
            tp, vocabulary = (self.axis, split.vocab_size) if split is not None else (None, None)
            owner.loss_function = CausalLMLoss(self.average, tp, vocabulary)


def refuse_to_save(*_: Any, **__: Any) -> None:
    """Stands in for `save_pretrained` of a model that is split: it would write one rank's shards as if they were whole."""
    raise UsageError(
        explain(
            "save_pretrained would write this rank's shards as if they were the whole model.",
            [
                ("try", "booster.save_model(model, path): the same folder, put together from all ranks"),
                ("or", "booster.save_lora_as_pretrained(model, path) for the adapters of a model that has them"),
            ],
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
