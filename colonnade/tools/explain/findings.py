"""What inference has found in a model, for the reader: what is split, what stays whole, and why."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colonnade.shardformer import Policy
from colonnade.shardformer.inference.policy import InferredPolicy
from colonnade.shardformer.inference.vocabulary import vocabulary_rules
from colonnade.shardformer.layer import VocabParallelLMHead1D
from colonnade.shardformer.shard.plan import compact

VOCABULARY = {
    "split": "vocabulary split",
    "gathered": "vocabulary split and its logits gathered",
    "whole": "vocabulary whole",
}
REFUSED = "split, its twin fails: "


@dataclass(frozen=True)
class Findings:
    """What an inferred policy splits.

    Args:
        split: number of regions that are split.
        regions: number of regions that were found.
        vocabulary: "split", "gathered" or "whole"; empty where the model has none.
        whole: what stays whole, or is gathered → why.
        modules: path of a module → why it stays whole.
        gathered: path of a head, or of the last layer of a region → why its logits, or what the region computes, are
            gathered.
        reads: path of a column-parallel layer → what it reads; the same where layers read the same tensor.
    """

    split: int
    regions: int
    vocabulary: str
    whole: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    gathered: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Hashable] = field(default_factory=dict)

    def __str__(self) -> str:
        regions = f"{self.split} of {self.regions} regions split"
        return f"{regions}, {VOCABULARY[self.vocabulary]}" if self.vocabulary else f"{regions}, no vocabulary"

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {
            "regions_split": self.split,
            "regions": self.regions,
            "vocabulary": self.vocabulary,
            "whole": dict(self.whole),
        }


def findings_of(policy: Policy, model: nn.Module) -> Findings | None:
    """What an inferred policy says of a model; None for a policy that somebody wrote.

    Args:
        model: the model, before it is split.
    """
    if not isinstance(policy, InferredPolicy):
        return None
    vocabulary = dict(_vocabulary(model))
    whole: dict[str, str] = {}
    modules: dict[str, str] = {}
    gathered: dict[str, str] = {}
    for region in policy.regions:
        if policy.is_gathered(region):
            whole.setdefault(compact([region.row.path]), f"only its weights are split: {region.reason}")
            gathered[region.row.path] = f"only the region's weights are split: {region.reason}"
        elif region.reason:
            whole.setdefault(compact([region.row.path]), region.reason)
            layers = (*region.columns, *region.latents, region.row)
            modules |= {layer.path: f"left whole: {region.reason}" for layer in layers}
    reason = REFUSED + policy.refused.get("vocabulary", "")
    if vocabulary and policy.vocabulary == "whole":
        whole["vocabulary"] = reason
        modules |= dict.fromkeys(vocabulary, f"left whole: {reason}")
    elif vocabulary and policy.vocabulary == "gathered":
        whole["logits"] = f"left {reason}"
        gathered |= {path: f"left {reason}" for path, is_head in vocabulary.items() if is_head}
    return Findings(
        len(policy.split_regions),
        len(policy.regions),
        policy.vocabulary if vocabulary else "",
        whole,
        modules,
        gathered,
        {column.path: (column.reads, column.parameters) for region in policy.regions for column in region.columns},
    )


def _vocabulary(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Path of each module that makes up the vocabulary, and whether it is a head."""
    for parent, description in vocabulary_rules(model, gather=False):
        for rule in description.sub_module_replacement:
            yield f"{parent}.{rule.suffix}".lstrip("."), rule.target_module is VocabParallelLMHead1D
