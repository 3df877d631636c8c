"""What cutting one model class into pipeline stages does: the stages of its tiny twin, run one after the other, against the
twin in one piece."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import transformers
from model_cases import Case
from model_look import (
    DIFFERENT,
    FAILS,
    NO_DEFAULT,
    REFUSED,
    UNBUILT,
    UNTRAINED,
    Row,
    Twin,
    can_be_built,
    config_for,
    quiet,
    refusal,
    said,
)

from colonnade.errors import ColonnadeError
from colonnade.model.chain import Chain
from colonnade.model.twin import build
from colonnade.pipeline.check import difference
from colonnade.pipeline.cut import blocks_bound, cut_chain, places_to_cut
from colonnade.pipeline.partition import partition
from colonnade.shardformer.inference.chain import chain_of
from colonnade.shardformer.inference.check import Twin as Trained
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.inference.infer import twin_of
from colonnade.shardformer.inference.probe import loss_of
from colonnade.shardformer.registry import has_policy

CUT = "cut"
STAGES = 2
ALL_TOGETHER = "all blocks have to stay together, as what they do not return is used further up or by the loss"
BLOCKS = 4  # of a twin, at least


def cut(case: Case) -> Row:
    """Build the twin of one case, cut it in two and wherever it can be cut, and compare. Runs on one rank."""
    started = time.monotonic()
    with quiet():
        row = examine(case)
    return replace(row, seconds=time.monotonic() - started)


def examine(case: Case) -> Row:
    """As `cut`, with all that the families say. `regions` are the places where it can be cut, of all between blocks.

    A cut that differs is refused by `boost`, which makes the same comparison, but for families with a policy of their own.
    """
    try:
        model = whole(case)
    except Exception as error:  # a family's own code
        return Row(UNBUILT, remark=("" if can_be_built(case) else NO_DEFAULT) + said(error))
    try:
        twin = twin_of(model, layers=BLOCKS)
    except ColonnadeError as error:
        return Row(UNTRAINED, remark=refusal(error))
    unchecked = has_policy(twin.model)
    try:
        chain = chain_of(twin.model)
        places = len(places_to_cut(chain))
        if not places:
            return Row(REFUSED, remark=ALL_TOGETHER)
        wrong = [found for stages in sorted({STAGES, 1 + places}) if (found := compare(twin, chain, stages))]
    except ColonnadeError as error:
        return Row(REFUSED, remark=refusal(error))
    except Exception as error:  # a family's own code
        return Row(FAILS if unchecked else REFUSED, remark=f"its twin fails when cut: {said(error)}")
    regions = places, len(chain.blocks) - 1
    if wrong:
        return Row(DIFFERENT if unchecked else REFUSED, "", regions, remark=f"its twin differs when cut: {wrong[0]}")
    return Row(CUT, "", regions, worst={}, remark=kept(chain))


def whole(case: Case) -> Any:
    """The model of a case at its own size, without weights; one of our own as it is."""
    if case.family == "own":
        return Twin(case, 1).model()
    config = config_for(case)
    with torch.device("meta"):
        model = build(config)
    model.__class__ = getattr(transformers, case.model)
    return model


def compare(twin: Trained, chain: Chain, stages: int) -> str:
    """What differs between the twin and the twin in stages; empty where nothing does.

    Raises:
        ConfigError: there are fewer places to cut it.
    """
    counts = partition([1.0] * len(chain.blocks), stages, bound=blocks_bound(chain))
    with in_double(), torch.enable_grad():
        return difference(twin.model, cut_chain(chain, counts), twin.inputs, loss_of)


def kept(chain: Chain) -> str:
    """Which blocks have to stay together."""
    pairs = blocks_bound(chain)
    return "together: " + ", ".join(f"{a}–{b}" for a, b in pairs) if pairs else ""
