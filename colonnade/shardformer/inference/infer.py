"""From a model to a policy that has passed its check."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from colonnade.cluster.log import get_logger
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ColonnadeError, PolicyError, explain
from colonnade.model.adapters import has_adapters, without_adapters
from colonnade.model.spine import Spine
from colonnade.model.twin import MIN_LAYERS, shrink, with_noise
from colonnade.shardformer.inference import cache
from colonnade.shardformer.inference.as_built import built_anew, rebuild, without_weights
from colonnade.shardformer.inference.check import Twin, said
from colonnade.shardformer.inference.classify import Region, regions_of
from colonnade.shardformer.inference.policy import GATHERED, InferredPolicy, device_of, signature, without
from colonnade.shardformer.inference.probe import TRACED_ROWS, assume_yes, probe_inputs, probes
from colonnade.shardformer.inference.search import Choice, search
from colonnade.shardformer.inference.spine import spine_of
from colonnade.shardformer.inference.trace import Tracer
from colonnade.shardformer.inference.vocabulary import vocabulary_rules

UNCHECKED_LEVEL = 1  # how far numbers are shared out where nobody tries
LARGEST_TWIN = 100_000_000  # parameters; a model without a config is its own twin
NO_VOCABULARY = "whole: there is none, or the model has no get_input_embeddings() that names it"
log = get_logger(__name__)


def infer_policy(model: Any, axis: Axis, check: bool = True) -> InferredPolicy:
    """A policy for a model without one. Called by every rank of the axis; without a process group, by one for all.

    Args:
        model: a transformers model, with weights or on the meta device; or any module with weights whose forward takes
            token ids [rows, tokens] first. It is not changed. One with adapters of peft is looked at without them.
        axis: over which it will be split.
        check: let the policy pass the numeric check of a tiny twin first. Without it nothing is communicated, and what
            comes out may compute something else.

    Raises:
        PolicyError: the model cannot be run for a look, or no candidate passes.
    """
    if has_adapters(model):
        model = without_adapters(model)
    regions, spine = look_at(model)
    if not check:
        policy = InferredPolicy(regions, UNCHECKED_LEVEL)
        policy.spine = spine
        return policy
    choice, twins = _agree(model, axis)
    for region in regions:
        level = choice.levels.get(region.pattern)
        if level is not None and repr(signature(region, level, model)) not in twins.get(region.pattern, ()):
            choice.levels.pop(region.pattern)
            choice.refused[region.pattern] = "it looks different in the twin, on which it could be checked"
    gathered = {pattern for pattern, level in choice.levels.items() if level == GATHERED}
    reasons = {p: f"split, its twin fails: {text}" for p, text in choice.refused.items() if p not in choice.levels}
    reasons |= {p: f"its inside split, its twin fails: {choice.refused[p]}" for p in gathered & choice.refused.keys()}
    policy = InferredPolicy(without(regions, reasons), choice.levels, choice.vocabulary)
    policy.refused, policy.spine = choice.refused, spine
    _tell(model, policy)
    return policy


def _agree(model: Any, axis: Axis) -> tuple[Choice, dict[str, set[str]]]:
    """The choice and the signatures of the twin's regions, found by the first rank and told to the others."""
    if axis.group is None:
        return copy.deepcopy(_choose(model, axis.size))
    answer: Any = None
    failure: Exception | None = None
    if axis.rank == 0:
        try:
            answer = _choose(model, axis.size)
        except Exception as error:  # raised below: the other ranks wait for an answer, whatever it is
            failure = error
            answer = PolicyError(
                str(error) if isinstance(error, ColonnadeError) else f"the search failed: {said(error)}"
            )
    told = all_gather_object(answer, axis)[0]
    if failure is not None:
        raise failure
    if isinstance(told, PolicyError):
        raise told
    return copy.deepcopy(told)


def _choose(model: Any, ranks: int) -> tuple[Choice, dict[str, set[str]]]:
    built, reason = built_anew(model)
    key = cache.key_of(model, ranks, edited=built is None)
    found = cache.find(key)
    small, regions = _twin_of(model, ranks, reason)
    if found is None:
        twin = _trained(model, small, ranks)
        found = search(twin, regions)
        cache.keep(key, found)
    signatures: dict[str, set[str]] = {}
    for region in regions:
        if region.pattern in found.levels:
            seen = repr(signature(region, found.levels[region.pattern], small))
            signatures.setdefault(region.pattern, set()).add(seen)
    return found, signatures


def find_regions(model: Any) -> list[Region]:
    """The regions of a model; see `look_at`."""
    return look_at(model)[0]


def look_at(model: Any) -> tuple[list[Region], Spine | None]:
    """Regions and spine of a model: from a copy on the meta device, or where its forward needs values, from the model itself.

    Raises:
        PolicyError: its forward runs neither there nor here.
    """
    refused: list[str] = []
    for shadow in shadows(model):
        on_meta = device_of(shadow).type == "meta"
        for options in probes(shadow):
            try:
                inputs = probe_inputs(shadow, device_of(shadow), rows=TRACED_ROWS, **options)
                with assume_yes() if on_meta else nullcontext(), torch.enable_grad():
                    tracer = Tracer(shadow)
                    blocks = tracer.run(inputs)
            except Exception as error:  # a model's own code: it may need values, which the meta device has not
                refused.append(said(error))
                continue
            regions = [region for block in blocks.values() for region in regions_of(block, shadow)]
            return regions, spine_of(shadow, tracer.block_paths, tracer.calls)
    raise PolicyError(
        explain(
            f"no policy could be inferred for {type(model).__name__}: its forward does not run.",
            [
                *(("reason", text) for text in dict.fromkeys(refused)),
                ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin"),
            ],
        )
    )


def shadows(model: Any) -> Iterator[nn.Module]:
    """What may be run in the model's place: copies without weights, then the model itself."""
    yield built_anew(model)[0] or without_weights(model)
    if device_of(model).type != "meta":
        with as_if_training(model):
            yield model


@contextmanager
def as_if_training(model: nn.Module) -> Iterator[None]:
    """Let every parameter train, without dropout, and leave the model as it was."""
    training = {module: module.training for module in model.modules()}
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    model.eval()
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, mode in training.items():
            module.training = mode


def twin_of(model: Any, ranks: int = 1, layers: int = MIN_LAYERS) -> Twin:
    """A small model of the same make in float64, with inputs and what a training step of it gives.

    Args:
        ranks: over which it is to be split.
        layers: it has so many at least, where the model has.

    Raises:
        PolicyError: none can be built, or it does not train.
    """
    if has_adapters(model):
        model = without_adapters(model)
    small, _ = _twin_of(model, ranks, built_anew(model)[1], layers)
    return _trained(model, small, ranks)


def _trained(model: Any, small: nn.Module, ranks: int) -> Twin:
    try:
        return Twin(small, ranks)
    except Exception as error:  # a model's own code
        raise PolicyError(
            explain(
                f"{type(model).__name__} could not be checked: its tiny twin does not train in one process.",
                [("reason", said(error)), ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin")],
            )
        ) from error


def _twin_of(model: Any, ranks: int, reason: str, layers: int = MIN_LAYERS) -> tuple[nn.Module, list[Region]]:
    """A small model to check policies on, and its regions.

    Args:
        reason: why none can be built from the model's config; empty where one can.
    """
    if not reason:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                small = _without_dropout(with_noise(rebuild(model, shrink(model.config, ranks, layers))))
            return small, find_regions(small)
        except Exception as error:  # a model's own code, which may be written for one size
            reason = f"its tiny twin does not run ({said(error)})"
    size = sum(p.numel() for p in model.parameters())
    on_meta = " on the meta device" if device_of(model).type == "meta" else ""
    if size > LARGEST_TWIN or on_meta:
        raise PolicyError(
            explain(
                f"no policy for {type(model).__name__} can be checked: {reason}.",
                [
                    ("found", f"{size:,} parameters{on_meta}"),
                    ("rule", f"such a model is checked as it is, with its weights, up to {LARGEST_TWIN:,} parameters"),
                    ("try", "custom_policy=… (docs/new_policy.md), or ShardConfig(check_inferred_policy=False)"),
                ],
            )
        )
    small = _without_dropout(copy.deepcopy(model).cpu())
    return small, find_regions(small)


def _without_dropout(model: nn.Module) -> nn.Module:
    """The model with every parameter training, and nothing left to chance."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model.requires_grad_(True).train()


def _tell(model: nn.Module, policy: InferredPolicy) -> None:
    lines = {
        f"\n  {'gathered' if policy.is_gathered(region) else 'whole'}  {region.pattern}: {region.reason}"
        for region in policy.regions
        if region.reason
    }
    log.info(
        "%s: policy inferred and checked on a twin; %d of %d regions split, vocabulary %s%s",
        type(model).__name__,
        len(policy.split_regions),
        len(policy.regions),
        policy.vocabulary if any(vocabulary_rules(model, gather=False)) else NO_VOCABULARY,
        "".join(sorted(lines)),
    )
