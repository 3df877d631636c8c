"""What tensor parallelism does to one model class: its tiny twin is split, trained, and compared with one process."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from model_cases import Case
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import ColonnadeError, PolicyError
from colonnade.model.default_configs import MISSING_FIELDS
from colonnade.model.layout import layout_of
from colonnade.model.twin import VOCAB, build, shrink, with_noise
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.inference import infer_policy
from colonnade.shardformer.inference.probe import loss_of
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.registry import has_policy
from colonnade.testing.exact import compare_in_fp64, why_fp32_is_unsure
from colonnade.testing.parity import Tolerance, Training, compare_with_single
from colonnade.testing.parity_report import ParityReport
from colonnade.tools.verify.batches import make_batches

NO_DEFAULT = "the default configuration makes no model either: "
KINDS = ("loss", "gradient norm", "gradients", "weights")
STEPS, MAX_NORM = 2, 1.0
LARGEST_TWIN = 30_000_000
REASON_LENGTH = 130
OWN_MODELS = Path(__file__).parent.parent / "tests" / "shardformer"

# verdict: what it means
MEANING = {
    (ALL := "all split"): "proved; every region and the vocabulary are split, and no weight matrix is left whole",
    (REGIONS := "regions split"): "proved; every region is split, something beside the regions is whole",
    (
        GATHERED := "some gathered"
    ): "proved; every region's weights are split, some regions are computed whole on every rank",
    (SOME := "some whole"): "proved; some regions stay whole",
    (NOTHING := "nothing split"): "proved; nothing could be split, a rank holds the whole model",
    (REFUSED := "refused"): "an error before training: there is no policy that passes its check",
    (FAILS := "FAILS"): "a policy was accepted, and training with it raises or hangs",
    (DIFFERENT := "DIFFERENT"): "a policy was accepted, and the numbers are not those of one process",
    (UNTRAINED := "not trained"): "the twin is built, but one process does not train it on these inputs alone",
    (UNBUILT := "no twin"): "no tiny twin can be built",
}


@dataclass(frozen=True)
class Row:
    """What was found for one case.

    Args:
        verdict: a key of MEANING.
        policy: "file", "inferred", or empty where it did not come to that.
        regions: of them split, and all.
        vocabulary: "split", "part", "whole", or empty where there is none.
        worst: largest relative difference by kind.
        remark: what stays whole and why, or why there are no numbers.
        seconds: how long that took.
    """

    verdict: str
    policy: str = ""
    regions: tuple[int, int] = (0, 0)
    vocabulary: str = ""
    worst: dict[str, float] | None = None
    remark: str = ""
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether ranks compute what one process computes, and each holds a part of the model only."""
        return self.worst is not None and self.verdict not in (DIFFERENT, NOTHING)

    @property
    def full(self) -> bool:
        """Whether it is proved with every region split."""
        return self.proved and self.regions[0] == self.regions[1] > 0 and self.verdict != GATHERED


def look_at(case: Case) -> Row:
    """Build, split and train the twin of one case over all ranks. Runs on every rank; the same on each."""
    started = time.monotonic()
    with quiet():
        row = examine(case)
    return replace(row, seconds=time.monotonic() - started)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs: two hundred families have much to say."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def examine(case: Case) -> Row:
    """As `look_at`, with all that the families say."""
    axis = Axis.of(None)
    try:
        twin = Twin(case, axis.size)
        model = twin.model()
    except Exception as error:  # a family's own code
        return Row(UNBUILT, remark=("" if can_be_built(case) else NO_DEFAULT) + said(error))
    try:
        twin.batches = make_batches(twin.model())
        model(**twin.batches[0]).loss.backward()
    except Exception as error:  # a family's own code
        return Row(UNTRAINED, remark=said(error))
    written = has_policy(model) and not case.forced
    choose = functools.partial(infer_policy, axis=axis) if case.forced else None
    policy = "file" if written else "inferred"
    try:
        verdict, regions, vocabulary, remark = split(twin, choose)
        report = compare_with_single(
            Training(twin.model, twin.batches, steps=STEPS, max_norm=MAX_NORM),
            lambda: HybridParallelPlugin(
                tp_size=axis.size,
                precision="fp32",
                max_norm=MAX_NORM,
                custom_policy=choose(twin.model()) if choose else None,
            ),
        )
    except ColonnadeError as error:  # the same on every rank
        return Row(REFUSED, policy, remark=refusal(error))
    worst = {k: report[k].worst for k in KINDS}
    if why := why_fp32_is_unsure(report, twin.model, twin.batches[0]):
        worst = compare_in_fp64(twin.model, twin.batches[0], axis, choose)
        remark = "; ".join([f"compared in fp64, as {why}", remark])
    if not report.ok and max(worst.values()) > Tolerance().gradient:
        verdict, remark = DIFFERENT, failures(report)
    return Row(verdict, policy, regions, vocabulary, worst, remark.removesuffix("; "))


Choose = Callable[[nn.Module], Policy] | None  # how to come to a policy; None as ShardFormer does


def config_of(case: Case) -> Any:
    """The configuration of a transformers model at its own size."""
    kind = getattr(transformers, case.model)
    make = CONFIG_MAPPING.get(case.family, kind.config_class)
    return make(**copy.deepcopy({**MISSING_FIELDS.get(case.family, {}), **case.changes}))


def config_for(case: Case) -> Any:
    """As `config_of`, for the class of the case and its use."""
    config = config_of(case)
    config.architectures = [case.model]
    pairs = getattr(config, "is_encoder_decoder", False)
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(case.family) == case.model and not pairs:
        config.is_decoder = True
    if pairs and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    return config


def can_be_built(case: Case) -> bool:
    """Whether a case's configuration makes a model at all, at its own size and without weights."""
    try:
        config = config_of(case)
        config.architectures = [case.model]
        with torch.device("meta"):
            build(config)
    except Exception:  # a family's own code; what it says of the twin is reported
        return False
    return True


class Twin:
    """How the twin of a case is made.

    Raises:
        ValueError: it would not be small.
    """

    def __init__(self, case: Case, tp: int) -> None:
        self.batches: list[dict[str, Any]] = []
        self.make = self._own(case) if case.family == "own" else self._small(case, tp)
        with torch.device("meta"):
            model = self.make()
        count = sum(p.numel() for p in model.parameters())
        if count > LARGEST_TWIN:
            raise ValueError(f"the twin has {count:,} parameters: its sizes are in fields that are not known")
        self.kind = type(model) if "labels" in signature(model) else with_loss(type(model))

    def _small(self, case: Case, tp: int) -> Callable[[], Any]:
        kind = getattr(transformers, case.model)
        config = shrink(config_for(case), tp)

        def make() -> Any:
            model = build(config)
            model.__class__ = kind
            return model

        return make

    def _own(self, case: Case) -> Callable[[], Any]:
        if str(OWN_MODELS) not in sys.path:
            sys.path.append(str(OWN_MODELS))
        from models_of_our_own import own_model

        return functools.partial(own_model, case.model, **case.changes)

    def model(self) -> Any:
        """The twin, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
        if hasattr(model, "config"):
            model = with_noise(model)
            if getattr(model.config, "_experts_implementation", None):  # their grouped product does not exist in fp64
                model.set_experts_implementation("eager")
        model.__class__ = self.kind
        return model


@functools.cache
def with_loss(kind: type) -> type:
    """A subclass of a model without a loss of the usual name, whose output has one."""

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        loss = loss_of(output)
        if not isinstance(output, dict):
            logits = output if isinstance(output, torch.Tensor) else output[0]
            return CausalLMOutput(loss=loss, logits=logits)
        output.loss = loss
        return output

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def signature(model: nn.Module) -> frozenset[str]:
    """Names of what a model's forward takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def split(twin: Twin, choose: Choose) -> tuple[str, tuple[int, int], str, str]:
    """Split a twin as ShardFormer does: (verdict, regions split and all, vocabulary, what stays whole and why)."""
    axis, native = Axis.of(None), twin.model()
    regions = infer_policy(native, axis, check=False).regions
    sharder = ShardFormer(ShardConfig(axis)).prepare(native, choose(twin.model()) if choose else None)
    policy = sharder.policy
    reasons = {
        layer.path: region.reason for region in regions_of(policy) or regions for layer in (*region.columns, region.row)
    }
    sharder.shard()
    model: Any = sharder.model
    divided = {name for name, p in model.named_parameters() if is_divided(p)}
    done = sum(f"{region.row.path}.weight" in divided for region in regions)
    tables = vocabulary_of(model)
    parts = {is_divided(module.weight) for module in tables.values()}
    vocabulary = "" if not tables else "part" if len(parts) == 2 else "split" if True in parts else "whole"
    remarks = left_whole(model, reasons)
    gathered = {r.pattern: r.reason for r in regions_of(policy) if policy.is_gathered(r)}
    remarks += [f"`{'.'.join(p.split('.')[-2:])}` computed whole: {brief(why)}" for p, why in gathered.items()]
    if False in parts:
        whole = [path for path, module in tables.items() if not is_divided(module.weight)]
        why = brief(getattr(policy, "refused", {}).get("vocabulary", ""))
        remarks.insert(0, f"vocabulary, {names_of(whole)}" + (f": {why}" if why else ""))
    if not divided:
        verdict = NOTHING
    elif done < len(regions) or not regions:
        verdict = SOME
    elif gathered:
        verdict = GATHERED
    else:
        verdict = REGIONS if remarks else ALL
    return verdict, (done, len(regions)), vocabulary, "; ".join(remarks)


def regions_of(policy: Any) -> list[Any]:
    """What an inferred policy has found; nothing of a written one."""
    return getattr(policy, "regions", [])


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether a rank holds a part of it only."""
    layout = layout_of(parameter)
    return layout.local_shape != layout.shape


def vocabulary_of(model: nn.Module) -> dict[str, Any]:
    """Path → embeddings of tokens and heads over them: the layers with a weight of the vocabulary's size."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and VOCAB in layout_of(module.weight).shape
    }


def left_whole(model: nn.Module, reasons: dict[str, str]) -> list[str]:
    """Weight matrices that every rank holds whole, by reason; the vocabulary's and tables of positions do not count."""
    skipped = {f"{path}.weight" for path in vocabulary_of(model)}
    skipped |= {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings < VOCAB
    }
    found: dict[str, dict[str, None]] = {}
    for name, parameter in model.named_parameters():
        if is_divided(parameter) or parameter.dim() < 2 or min(parameter.shape) == 1 or name in skipped:
            continue
        path = name.removesuffix(".weight")
        reason = brief(reasons.get(path, "")) or "in no region"
        pattern = [part for part in path.split(".") if not part.isdigit()][-2:]
        found.setdefault(reason, {})[".".join(pattern)] = None
    return [f"{names_of(list(paths))}: {reason}" for reason, paths in found.items()]


def names_of(paths: Sequence[str]) -> str:
    """At most four of some names."""
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(f"`{path}`" for path in paths[:4]) + more


def brief(text: str) -> str:
    """A reason in one short line that a table can hold, without what differs from run to run."""
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split())).replace("|", "/").replace("`", "'")
    text = text.replace("its inside split, its twin fails: ", "")
    text = text.replace("split, its twin fails: ", "twin fails when split: ")
    text = re.sub(r"(?:\w+\.)+\d+\.([\w.]+)", r"\1", text)  # the layer's name in its block
    text = text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1].rstrip() + "…"
    return re.sub(r"([*<>]|__)", lambda found: "".join(f"\\{c}" for c in found[1]), text)


def said(error: BaseException) -> str:
    """An error, in short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return brief(f"{type(error).__name__}: {text}")


def refusal(error: ColonnadeError) -> str:
    """Why a model is refused: the reason of the error, or its last resort's."""
    rows = dict(re.findall(r"^  (\S[\w ]*?)  +(.*)$", str(error), re.MULTILINE))
    text = rows.get("reason") or rows.get("with none regions")
    return brief(text) if isinstance(error, PolicyError) and text else said(error)


def failures(report: ParityReport) -> str:
    """What differs."""
    return brief(
        f"one process off from fp64 by {max(report.rounding.values()):.0e}; "
        + "; ".join(f"{d.kind} {d.worst:.1e} {d.where}" for d in report.differences if not d.ok)
    )
