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
from colonnade.model.spine import Spine
from colonnade.model.twin import shrink, with_noise
from colonnade.shardformer.inference import cache
from colonnade.shardformer.inference.check import Twin, said
from colonnade.shardformer.inference.classify import Region, regions_of
from colonnade.shardformer.inference.policy import GATHERED, InferredPolicy, device_of, signature, without
from colonnade.shardformer.inference.probe import TRACED_ROWS, assume_yes, probe_inputs, probes
from colonnade.shardformer.inference.search import Choice, search
from colonnade.shardformer.inference.spine import spine_of
from colonnade.shardformer.inference.trace import Tracer

UNCHECKED_LEVEL = 1  # how far numbers are shared out where nobody tries
LARGEST_TWIN = 100_000_000  # parameters; a model without a config is its own twin
log = get_logger(__name__)


def infer_policy(model: Any, axis: Axis, check: bool = True) -> InferredPolicy:
    """A policy for a model without one. Called by every rank of the axis; without a process group, by one for all.

    Args:
        model: a transformers model, with weights or on the meta device; or any module with weights whose forward takes
            token ids [rows, tokens] first. It is not changed.
        axis: over which it will be split.
        check: let the policy pass the numeric check of a tiny twin first. Without it nothing is communicated, and what
            comes out may compute something else.

    Raises:
        PolicyError: the model cannot be run for a look, or no candidate passes.
    """
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
    alone = axis.group is None
    answer: Any = None
    if alone or axis.rank == 0:
        try:
            answer = _choose(model, axis.size)
        except ColonnadeError as error:
            if alone:
                raise
            answer = error
    answer = answer if alone else all_gather_object(answer, axis)[0]
    if isinstance(answer, ColonnadeError):
        raise answer
    choice, signatures = copy.deepcopy(answer)
    return choice, signatures


def _choose(model: Any, ranks: int) -> tuple[Choice, dict[str, set[str]]]:
    key = cache.key_of(model, ranks)
    found = cache.find(key)
    small = _twin_of(model, ranks)
    regions = find_regions(small)
    if found is None:
        try:
            twin = Twin(small, ranks)
        except Exception as error:  # a model's own code
            raise PolicyError(
                explain(
                    f"no policy for {type(model).__name__} could be checked: its tiny twin does not train in one process.",
                    [("reason", said(error)), ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin")],
                )
            ) from error
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
    for shadow in _shadows(model):
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


def _shadows(model: Any) -> Iterator[nn.Module]:
    """What may be run in the model's place: copies without weights, then the model itself."""
    if can_be_rebuilt(model):
        with torch.device("meta"):
            shadow = _rebuild(model, copy.deepcopy(model.config))
        yield shadow.to("meta")  # what a constructor has made elsewhere all the same
    else:
        yield _all_training(copy.deepcopy(model).to("meta"))
    if device_of(model).type != "meta":
        with as_if_training(model):
            yield model


def can_be_rebuilt(model: nn.Module) -> bool:
    """Whether another model of the same class can be built from this one's config."""
    return hasattr(model, "config") and hasattr(type(model), "_from_config")


def _rebuild(model: Any, config: Any) -> nn.Module:
    """Another model of the same class, whose attention and experts are plain operations that can be read and run anywhere."""
    made: Any = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    if getattr(made.config, "_experts_implementation", None):
        made.config._experts_implementation = "batched_mm"
    return _all_training(made)


def _all_training(model: nn.Module) -> nn.Module:
    return model.requires_grad_(True).train()


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


def _twin_of(model: Any, ranks: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if can_be_rebuilt(model):
            return _all_training(with_noise(_rebuild(model, shrink(model.config, ranks))))
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST_TWIN or device_of(model).type == "meta":
        raise PolicyError(
            explain(
                f"no policy for {type(model).__name__} can be checked: it has no config from which a small one could be built.",
                [
                    (
                        "found",
                        f"{size:,} parameters" + (" on the meta device" if device_of(model).type == "meta" else ""),
                    ),
                    ("rule", f"such a model is checked as it is, with its weights, up to {LARGEST_TWIN:,} parameters"),
                    ("try", "custom_policy=… (docs/new_policy.md), or ShardConfig(check_inferred_policy=False)"),
                ],
            )
        )
    return _all_training(copy.deepcopy(model).cpu())


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
        policy.vocabulary,
        "".join(sorted(lines)),
    )
