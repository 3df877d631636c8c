"""A policy for a model that nobody has written one for, inferred from one forward."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.model.adapters import is_from_peft
from colonnade.model.layout import TensorLayout, has_layout, layout_of, set_layout
from colonnade.shardformer.description import (
    LocalArgument,
    LocalConfig,
    LocalRatio,
    LocalShare,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from colonnade.shardformer.inference.classify import Argument, Place, Region
from colonnade.shardformer.inference.vocabulary import vocabulary_rules
from colonnade.shardformer.layer import Linear1D_Col, Linear1D_Row, ShardedNorm
from colonnade.shardformer.layer.latent import LatentLinear
from colonnade.shardformer.layer.partial import sum_gradient
from colonnade.shardformer.layer.sharding import ranges_of, shard_parameter
from colonnade.shardformer.policy import Policy

LEVELS = (0, 1, 2, 3, 4)
GATHERED = 5
VOCABULARY = ("split", "gathered", "whole")
# parts of the names of attributes that are counts or widths of something else, whatever number they hold
NOT_SHARED = ("idx", "index", "layer", "head_dim", "rotary", "expert")


class InferredPolicy(Policy):
    """What `infer_policy` found. Its rules name modules by their paths.

    Attributes:
        regions: every region of every block, those that stay whole with the reason.
        levels: for each pattern of regions how far numbers that a forward reads are shared out: 0 none, 1 counts of
            heads, 2 widths too, 3 also in the modules' own copies of the config, 4 as 2 with what is called groups as a
            count of key/value heads. GATHERED splits the weights only: outputs of the columns are collected on every rank,
            and what lies between them and the row is computed whole. A pattern without a level stays whole.
        vocabulary: "split"; "gathered", split with whole logits on every rank; or "whole".
        refused: pattern of regions, or "vocabulary" → what a twin did when it was split.
    """

    def __init__(self, regions: list[Region], levels: dict[str, int] | int = 0, vocabulary: str = "split") -> None:
        if isinstance(levels, int):
            levels = dict.fromkeys((r.pattern for r in regions), levels)
        self.regions, self.levels, self.vocabulary = regions, levels, vocabulary
        self.refused: dict[str, str] = {}

    @property
    def split_regions(self) -> list[Region]:
        """Those whose weights are split."""
        return [r for r in self.regions if self.is_gathered(r) or (not r.reason and r.pattern in self.levels)]

    def is_gathered(self, region: Region) -> bool:
        """Whether only the weights of a region are split, and its inside is computed whole on every rank."""
        return self.levels.get(region.pattern) == GATHERED

    def config_sanity_check(self) -> None:
        if self.shard_config.enable_fused_normalization:
            raise PolicyError(
                explain(
                    f"enable_fused_normalization needs a written policy, and the one for {type(self.model).__name__} is inferred.",
                    [("reason", "what is inferred are linear layers, not norms"), ("try", "leave it False")],
                )
            )

        adapted = [
            place.name
            for region in self.split_regions
            for place in region.places
            if place.kind != "norm" and is_from_peft(self.model.get_submodule(place.name.rpartition(".")[0]))
        ]
        if adapted and self.shard_config.tensor_parallel_size > 1:
            raise PolicyError(
                explain(
                    f"{type(self.model).__name__} has adapters of peft on layers inside a region that stay whole.",
                    [
                        ("found", ", ".join(adapted[:4])),
                        ("try", "LoraConfig(target_modules=…) without these, or TorchDDPPlugin"),
                    ],
                )
            )

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        rules: dict[Any, ModulePolicyDescription] = {}
        for region in self.split_regions:
            for path, description in region_rules(region, self):
                rules[path] = rules[path] + description if path in rules else description
        if self.vocabulary != "whole":
            for path, description in vocabulary_rules(self.model, gather=self.vocabulary == "gathered"):
                rules[path] = rules[path] + description if path in rules else description
        return rules


def shared_numbers(region: Region, level: int, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Module path → attribute → its share, for the counts and widths that the forwards around the columns may read."""
    if region.units is None or level == GATHERED:
        return {}
    counts = {n for n in (region.units, region.heads, region.queries) if n}
    widths = {size: n for c in region.columns for size, n in zip(c.pieces, c.heads) if n}
    shares = {n: _share(region, n) for n in counts if level >= 1 and n > 1}
    shares |= {size: _share(region, n) for size, n in widths.items() if level >= 2}
    found: dict[str, dict[str, Any]] = {}
    for path in sorted({region.owner} | {c.path.rpartition(".")[0] for c in region.columns}):
        module = model.get_submodule(path)
        numbers: dict[str, Any] = {}
        for name, value in vars(module).items():
            if type(value) is not int:
                continue
            grouped = "group" in name or "rep" in name
            if grouped and level != 4 and region.heads and value == region.heads // region.units:
                numbers[name] = LocalRatio(region.units, region.heads)
            elif value in shares and not any(word in name for word in NOT_SHARED) and (not grouped or level == 4):
                numbers[name] = shares[value]
        if level == 3 and hasattr(getattr(module, "config", None), "__dict__"):
            own = {k: v for k, v in vars(module.config).items() if type(v) is int and "head" in k and "dim" not in k}
            numbers["config"] = LocalConfig({k: _share(region, v) for k, v in own.items() if v in counts})
        if numbers:
            found[path] = numbers
    return found


def signature(region: Region, level: int, model: nn.Module) -> tuple[Any, ...]:
    """What a region is made of, without sizes and block numbers: equal for a model and its twin."""

    def short(name: str) -> str:
        return re.sub(r"\.\d+(?=\.|$)", ".*", name)

    if level == GATHERED:
        return tuple(short(f.path) for f in (*region.columns, region.row))
    numbers = shared_numbers(region, level, model)
    return (
        tuple((short(c.path), len(c.pieces), tuple(n > 0 for n in c.heads)) for c in region.columns),
        tuple(short(c.path) for c in region.latents),
        region.units is None,
        region.heads is None,
        region.queries is None,
        tuple((short(p.name), p.kind, p.dim) for p in region.places),
        tuple((a.name, a.dim, a.folded) for a in region.arguments),
        tuple((short(path), tuple(names)) for path, names in numbers.items()),
    )


def _share(region: Region, count: int) -> LocalShare:
    return LocalShare(region.units, _finer(region, count))


def _finer(region: Region, count: int | None) -> int | None:
    """A number of heads where it is larger than that of blocks, else None."""
    return count if region.units is not None and count is not None and count > region.units else None


def region_rules(region: Region, policy: InferredPolicy) -> Iterator[tuple[str, ModulePolicyDescription]]:
    """For each module around a region, its path and what is said of it."""
    if policy.is_gathered(region):
        for column in region.columns:
            yield _replace(column.path, Linear1D_Col, {"gather_output": True})
        yield _replace(region.row.path, Linear1D_Row, {"parallel_input": False})
        return
    owner = region.owner
    inside = {latent.path for latent in region.latents}
    columns = [
        SubModuleReplacementDescription(
            c.path[len(owner) + 1 :],
            Linear1D_Col,
            {
                "pieces": c.pieces if len(c.pieces) > 1 else None,
                "units": region.units,
                "heads": region.heads_of(c),
                "inside": bool(c.reads & inside),
            },
        )
        for c in region.columns
    ]
    yield owner, ModulePolicyDescription(sub_module_replacement=columns)
    yield _replace(region.row.path, Linear1D_Row, {"units": region.units, "heads": region.heads})
    for latent in region.latents:
        yield _replace(latent.path, LatentLinear, {})
    norms = {place.name.rpartition(".")[0]: place for place in region.places if place.kind == "norm"}
    for path, place in norms.items():
        yield _replace(path, ShardedNorm, {"units": region.units, "heads": _finer(region, place.heads)})
    changes = [_change(place, region, policy) for place in region.places if place.kind != "norm"]
    yield owner, ModulePolicyDescription(param_replacement=changes)
    for argument in region.arguments:
        yield argument.module, _argument(argument, region)
    for path, numbers in shared_numbers(region, policy.levels[region.pattern], policy.model).items():
        yield path, ModulePolicyDescription(attribute_replacement=numbers)


def _replace(path: str, target: Any, kwargs: dict[str, Any]) -> tuple[str, ModulePolicyDescription]:
    parent, _, leaf = path.rpartition(".")
    return parent, ModulePolicyDescription(
        sub_module_replacement=[SubModuleReplacementDescription(leaf, target, kwargs)]
    )


def _argument(argument: Argument, region: Region) -> ModulePolicyDescription:
    share = LocalArgument(argument.dim, region.units or 1, _finer(region, argument.heads), argument.folded)
    return ModulePolicyDescription(argument_replacement={argument.name: share})


def _change(place: Place, region: Region, policy: InferredPolicy) -> Callable[[nn.Module], None]:
    """What happens to a parameter or buffer inside a region."""

    def change(owner: nn.Module) -> None:
        axis = policy.shard_config.axis
        path, _, leaf = place.name.rpartition(".")
        module = policy.model.get_submodule(path)
        tensor = getattr(module, leaf)
        if place.kind == "whole":
            sum_gradient(tensor, axis, module, owner)
            return
        length = layout_of(tensor).shape[place.dim]  # another region may have cut it already
        ranges = ranges_of(length, axis, place.name, 1, region.units, _finer(region, place.heads))
        if isinstance(tensor, nn.Parameter):
            shard_parameter(tensor, place.dim, ranges, axis)
        elif not has_layout(tensor):
            layout = TensorLayout.split(tensor.shape, place.dim, ranges, axis.name)
            module._buffers[leaf] = cut = layout.extract(tensor)
            set_layout(cut, layout)

    return change


def without(regions: list[Region], patterns: dict[str, str]) -> list[Region]:
    """The regions with those of some patterns left whole, each for the given reason."""
    return [dataclasses.replace(r, reason=r.reason or patterns.get(r.pattern, "")) for r in regions]


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
