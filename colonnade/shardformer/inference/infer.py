"""From a model to a policy that has passed its check.

[Note: candidates]
The trace says which layers form regions. It does not say which numbers a forward reads from its modules (head counts in a
view, the width of a split), nor whether a model's code can live with shards at all. Both are found by trying: candidates
are built from least to most intrusive, and the first under which a tiny twin of the model computes the same loss and
gradients as in one piece is taken. What had to be left whole for that is listed with the reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colonnade.cluster.log import get_logger
from colonnade.cluster.mesh import Axis
from colonnade.errors import PolicyError, explain
from colonnade.model.twin import shrink, with_noise
from colonnade.shardformer.inference.check import difference_on_twin
from colonnade.shardformer.inference.classify import Region
from colonnade.shardformer.inference.policy import InferredPolicy, infer_regions
from colonnade.shardformer.inference.probe import probe_inputs

LEVELS = (0, 1, 2, 3)
log = get_logger(__name__)
_passed: dict[tuple[Any, ...], tuple[str, int, bool, str]] = {}


def can_be_inferred(model: nn.Module) -> bool:
    """Whether a model is a transformers model, of which another can be built from its config."""
    return hasattr(model, "config") and hasattr(model, "get_input_embeddings") and hasattr(type(model), "_from_config")


def infer_policy(model: Any, axis: Axis, check: bool = True) -> InferredPolicy:
    """A policy for a transformers model without one. Called by every rank of the axis.

    Args:
        model: with weights or on the meta device; it is not changed.
        axis: over which it will be split.
        check: let the policy pass the numeric check of a tiny twin first. Without it nothing is communicated, and what
            comes out may compute something else.

    Raises:
        PolicyError: the model cannot be run for a look, or no candidate passes.
    """
    if not can_be_inferred(model):
        raise PolicyError(f"{type(model).__name__} is not a transformers model; a policy for it has to be written.")
    regions = _trace(model)
    if not check:
        return InferredPolicy(regions)
    key = (type(model), str(model.config.to_dict()), axis.size)
    if key not in _passed:
        _passed[key] = _first_that_passes(model, regions, axis)
    kept, level, vocabulary, reason = _passed[key]
    policy = InferredPolicy(_keep(regions, kept, reason), level, vocabulary)
    _tell(model, policy)
    return policy


def _tell(model: nn.Module, policy: InferredPolicy) -> None:
    whole = sorted({re.sub(r"\.\d+\.", ".*.", f"{r.row.path}: {r.reason}") for r in policy.regions if r.reason})
    log.info(
        "%s: policy inferred and checked on a twin; %d of %d regions split, vocabulary %s%s",
        type(model).__name__,
        sum(not r.reason for r in policy.regions),
        len(policy.regions),
        "split" if policy.vocabulary else "whole",
        "".join(f"\n  whole  {text}" for text in whole),
    )


def _trace(model: Any) -> list[Region]:
    """Regions of the model, from a copy on the meta device."""
    with torch.device("meta"):
        shadow = _rebuild(model, copy.deepcopy(model.config))
    refused = []
    for dense_mask in (True, False):
        try:
            return infer_regions(shadow.train(), probe_inputs(shadow, torch.device("meta"), dense_mask))
        except Exception as error:  # a model's own code: it may need values, which the meta device has not
            refused.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    raise PolicyError(
        explain(
            f"no policy could be inferred for {type(model).__name__}: its forward does not run without weights.",
            [("reason", refused[0]), ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin")],
        )
    )


def _rebuild(model: Any, config: Any) -> nn.Module:
    """Another model of the same class, whose attention and experts are plain operations that can be read and run anywhere."""
    made: Any = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    if getattr(made.config, "_experts_implementation", None):
        made.config._experts_implementation = "batched_mm"
    made.requires_grad_(True)
    return made


def _candidates() -> Iterator[tuple[str, int, bool]]:
    """Which regions are split, how far numbers are shared out, and whether the vocabulary is split."""
    for kept in ("all", "without heads", "none"):
        for vocabulary in (True, False):
            if kept == "none" and not vocabulary:
                return
            for level in LEVELS if kept == "all" else (0,):
                yield kept, level, vocabulary


def _first_that_passes(model: Any, regions: list[Region], axis: Axis) -> tuple[str, int, bool, str]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = with_noise(_rebuild(model, shrink(model.config, axis.size)))
    own = _trace(twin)
    refused: dict[str, str] = {}
    for kept, level, vocabulary in _candidates():
        found = difference_on_twin(twin, InferredPolicy(_keep(own, kept, "-"), level, vocabulary), axis)
        if not found:
            return kept, level, vocabulary, refused.get("all", "")
        if kept not in refused or (level, vocabulary) == (0, False):  # the plainest says most about the regions
            refused[kept] = found
    raise PolicyError(
        explain(
            f"no inferred policy for {type(model).__name__} computes what one process computes.",
            [
                *((f"with {kept} regions", text) for kept, text in refused.items()),
                ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin"),
            ],
        )
    )


def _keep(regions: list[Region], kept: str, reason: str) -> list[Region]:
    """The regions with those that are not kept left whole, for the given reason."""
    whole = {"all": lambda r: False, "without heads": lambda r: r.units is not None, "none": lambda r: True}[kept]
    return [replace(r, reason=r.reason or f"split, its twin fails: {reason}") if whole(r) else r for r in regions]
