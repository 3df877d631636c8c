"""A policy for a model that nobody has written one for, inferred from one forward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from colonnade.errors import PolicyError, explain
from colonnade.shardformer.description import (
    LocalConfig,
    LocalShare,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from colonnade.shardformer.inference.classify import Region, regions_of
from colonnade.shardformer.inference.trace import Tracer
from colonnade.shardformer.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D, VocabParallelLMHead1D
from colonnade.shardformer.layer.sharding import ranges_of, shard_parameter
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.roles import sum_gradient


class InferredPolicy(Policy):
    """What `infer_policy` found. Its rules name modules by their paths.

    Attributes:
        regions: every region of every block, those that stay whole with the reason.
        attributes: how far numbers that a forward reads are shared out: 0 none, 1 counts of heads, 2 widths too, 3 also
            in the modules' own copies of the config.
        vocabulary: whether embedding and head are split.
    """

    def __init__(self, regions: list[Region], attributes: int = 0, vocabulary: bool = True) -> None:
        self.regions, self.attributes, self.vocabulary = regions, attributes, vocabulary

    def config_sanity_check(self) -> None:
        if self.shard_config.enable_fused_normalization:
            raise PolicyError(
                explain(
                    f"enable_fused_normalization needs a written policy, and the one for {type(self.model).__name__} is inferred.",
                    [("reason", "what is inferred are linear layers, not norms"), ("try", "leave it False")],
                )
            )

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        rules: dict[Any, ModulePolicyDescription] = {}
        for region in self.regions:
            if not region.reason:
                for path, description in self._region_rules(region):
                    rules[path] = rules[path] + description if path in rules else description
        if self.vocabulary:
            for path, target in self._vocabulary():
                parent, _, leaf = path.rpartition(".")
                description = ModulePolicyDescription(
                    sub_module_replacement=[SubModuleReplacementDescription(leaf, target)]
                )
                rules[parent] = rules[parent] + description if parent in rules else description
        return rules

    def _region_rules(self, region: Region) -> Iterator[tuple[str, ModulePolicyDescription]]:
        owner = os.path.commonpath([c.path.rpartition(".")[0].replace(".", "/") for c in region.columns]).replace(
            "/", "."
        )
        columns = [
            SubModuleReplacementDescription(
                c.path[len(owner) + 1 :],
                Linear1D_Col,
                {"pieces": c.pieces if len(c.pieces) > 1 else None, "units": region.units},
            )
            for c in region.columns
        ]
        yield owner, ModulePolicyDescription(sub_module_replacement=columns)
        parent, _, leaf = region.row.path.rpartition(".")
        row = SubModuleReplacementDescription(leaf, Linear1D_Row, {"units": region.units})
        yield parent, ModulePolicyDescription(sub_module_replacement=[row])
        for name in region.shared + region.sliced:
            parent, _, leaf = name.rpartition(".")
            yield parent, ModulePolicyDescription(param_replacement=[self._change(leaf, region, name in region.sliced)])
        if region.units is not None:
            yield from self._numbers(region, owner)

    def _change(self, leaf: str, region: Region, cut: bool) -> Callable[[nn.Module], None]:
        """What happens to a parameter inside a region."""
        axis = self.shard_config.axis

        def change(module: nn.Module) -> None:
            parameter = getattr(module, leaf)
            if cut:
                shard_parameter(parameter, 0, ranges_of(len(parameter), axis, leaf, units=region.units), axis)
            else:
                sum_gradient(parameter, module, axis)

        return change

    def _numbers(self, region: Region, owner: str) -> Iterator[tuple[str, ModulePolicyDescription]]:
        """Counts and widths that a forward may read from the modules around the columns."""
        heads = {n for c in region.columns for n in c.heads if n}
        widths = {size for c in region.columns for size, n in zip(c.pieces, c.heads) if n}
        wanted = heads if self.attributes >= 1 else set()
        wanted = wanted | widths if self.attributes >= 2 else wanted
        paths = {owner} | {c.path.rpartition(".")[0] for c in region.columns}
        for path in sorted(paths):
            module = self.model.get_submodule(path)
            found: dict[str, Any] = {
                name: LocalShare(region.units)
                for name, value in vars(module).items()
                if type(value) is int
                and value in wanted
                and value > 1
                and not any(w in name for w in ("idx", "index", "layer", "groups", "head_dim", "rotary"))
            }
            if self.attributes >= 3 and hasattr(module, "config"):
                names = [
                    k
                    for k, v in vars(module.config).items()
                    if type(v) is int and v in heads and "head" in k and "dim" not in k
                ]
                found["config"] = LocalConfig(tuple(names), region.units)
            if found:
                yield path, ModulePolicyDescription(attribute_replacement=found)

    def _vocabulary(self) -> Iterator[tuple[str, Any]]:
        model: Any = self.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for path, module in self.model.named_modules():
            if module is embedding and isinstance(module, nn.Embedding):
                yield path, VocabParallelEmbedding1D
            if module is head and isinstance(module, nn.Linear):
                yield path, VocabParallelLMHead1D


def infer_regions(model: nn.Module, inputs: dict[str, Any]) -> list[Region]:
    """Run the model once and find its regions.

    Args:
        model: on the meta device, or small.
        inputs: of one forward; see `probe_inputs`.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    blocks = Tracer(model).run(inputs)
    return [region for block in blocks.values() for region in regions_of(block, shapes)]
