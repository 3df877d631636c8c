"""What tensor parallelism does to one model class: its tiny twin is split, trained, and compared with one process."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ColonnadeError, PolicyError
from colonnade.model.layout import layout_of
from colonnade.model.twin import VOCAB, build, shrink, with_noise
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.inference import infer_policy
from colonnade.shardformer.inference.check import difference_on_twin
from colonnade.shardformer.inference.policy import InferredPolicy
from colonnade.shardformer.inference.probe import probe_inputs
from colonnade.shardformer.registry import has_policy
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import Tolerance, Training, compare_with_single, well_conditioned_adamw
from colonnade.testing.parity_report import ParityReport, compare_tensors, relative
from colonnade.testing.single import SingleProcess
from colonnade.tools.verify.batches import make_batches

NO_DEFAULT = "the default configuration makes no model either: "
KINDS = ("loss", "gradient norm", "gradients", "weights")
RANKS, STEPS, MAX_NORM = 2, 2, 1.0
LARGEST_TWIN = 30_000_000
REASON_LENGTH = 130

# verdict: what it means
MEANING = {
    (ALL := "all split"): "proved; every region and the vocabulary are split, and no weight matrix is left whole",
    (REGIONS := "regions split"): "proved; every region is split, something beside the regions is whole",
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
    """What was found for one model class.

    Args:
        verdict: a key of MEANING.
        policy: "file", "inferred", or empty where it did not come to that.
        regions: of them split, and all.
        vocabulary: "split", "whole", or empty.
        worst: largest relative difference by kind.
        remark: what stays whole and why, or why there are no numbers.
    """

    family: str
    model: str
    verdict: str
    policy: str = ""
    regions: tuple[int, int] = (0, 0)
    vocabulary: str = ""
    worst: dict[str, float] | None = None
    remark: str = ""


def look_at(family: str, name: str) -> Row:
    """Build, split and train the twin of one class. Runs on every rank; the same on each."""
    with quiet():
        return examine(family, name)


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


def examine(family: str, name: str) -> Row:
    """As `look_at`, with all that the families say."""
    try:
        twin = Twin(family, name)
        model = twin.model()
    except Exception as error:  # a family's own code
        return Row(family, name, UNBUILT, remark=("" if can_be_built(family, name) else NO_DEFAULT) + said(error))
    try:
        twin.batches = batches_for(model)
        model(**twin.batches[0]).loss.backward()
    except Exception as error:  # a family's own code
        return Row(family, name, UNTRAINED, remark=said(error))
    policy = "file" if has_policy(model) else "inferred"
    try:
        verdict, regions, vocabulary, remark = split(twin)
        report = compare_with_single(
            Training(twin.model, twin.batches, steps=STEPS, max_norm=MAX_NORM),
            lambda: HybridParallelPlugin(tp_size=RANKS, precision="fp32", max_norm=MAX_NORM),
        )
    except ColonnadeError as error:  # the same on every rank
        return Row(family, name, REFUSED, policy, remark=refusal(error))
    worst, rounding = {k: report[k].worst for k in KINDS}, max(report.rounding.values())
    if not report.ok and rounding > 0.5 * Tolerance().gradient:  # fp32 does not say; the same rule as in parity.py
        worst = compare_in_fp64(twin)
        remark = "; ".join([f"compared in fp64, as one process in fp32 is off from it by {rounding:.0e}", remark])
    if not report.ok and max(worst.values()) > Tolerance().gradient:
        verdict, remark = DIFFERENT, failures(report)
    return Row(family, name, verdict, policy, regions, vocabulary, worst, remark.removesuffix("; "))


def compare_in_fp64(twin: Twin) -> dict[str, float]:
    """Loss and gradients of one step in fp64, split and in one piece: the largest relative differences."""
    axis, batch = Axis.of(None), twin.batches[0]
    one = SingleProcess(twin.model(), well_conditioned_adamw, torch.float64)
    names, wanted_step = canonical_names(one.model), one.step([batch])
    model, _ = ShardFormer(ShardConfig(axis)).optimize(twin.model().double())
    loss = model(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()}).loss
    loss.backward()
    gradients = gather_parameters(model, lambda parameter: parameter.grad, names, axis)
    found = compare_tensors("gradients", gradients, wanted_step.gradients, Tolerance().gradient)
    losses = all_gather_object(relative(loss.item(), wanted_step.losses[0]), axis)
    return {"loss": max(losses), "gradients": found.worst}


def can_be_built(family: str, name: str) -> bool:
    """Whether a family's default configuration makes a model at all, at its own size and without weights."""
    try:
        config = CONFIG_MAPPING[family]()
        config.architectures = [name]
        with torch.device("meta"):
            build(config)
    except Exception:  # a family's own code; what it says of the twin is reported
        return False
    return True


class Twin:
    """How the twin of a class is made.

    Raises:
        ValueError: it would not be small.
    """

    def __init__(self, family: str, name: str) -> None:
        kind = getattr(transformers, name)
        self.config = shrink(CONFIG_MAPPING[family](), RANKS)
        self.config.architectures = [name]
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) == name and not self.config.is_encoder_decoder:
            self.config.is_decoder = True
        if self.config.is_encoder_decoder and getattr(self.config, "decoder_start_token_id", None) is None:
            self.config.decoder_start_token_id = self.config.pad_token_id or 0
        self.batches: list[dict[str, Any]] = []
        with torch.device("meta"):
            model = build(self.config)
        count = sum(p.numel() for p in model.parameters())
        if count > LARGEST_TWIN:
            raise ValueError(f"the twin has {count:,} parameters: its sizes are in fields that are not known")
        self.kind = kind if "labels" in signature(model) else with_loss(kind)

    def model(self) -> Any:
        """The twin, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build(self.config)
        model = with_noise(model)
        model.__class__ = self.kind
        if getattr(model.config, "_experts_implementation", None):  # their grouped product does not exist in fp64
            model.set_experts_implementation("eager")
        return model


@functools.cache
def with_loss(kind: type) -> type:
    """A subclass of a model without a loss, whose loss weighs its first output."""

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        first: torch.Tensor = output[0]
        weights = torch.linspace(0.1, 1.0, math.prod(first.shape), dtype=first.dtype, device=first.device)
        output.loss = (first * weights.view_as(first)).square().mean()
        return output

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def signature(model: nn.Module) -> frozenset[str]:
    """Names of what a model's forward takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def batches_for(model: Any) -> list[dict[str, Any]]:
    """Batches with what the model takes: token ids with padding and unequal targets, or pictures."""
    names = signature(model)
    if "input_ids" in names:
        causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        made = make_batches(model.config, 1, causal and not model.config.is_encoder_decoder)
        return [{k: v for k, v in batch.items() if k in names} for batch in made]
    batch = probe_inputs(model, torch.device("cpu"))
    if "decoder_input_ids" in batch:
        batch["labels"] = batch["decoder_input_ids"]
    if "labels" in names and "pixel_values" in names:
        batch["labels"] = torch.arange(len(batch["pixel_values"])) % model.config.num_labels
    return [batch]


def split(twin: Twin) -> tuple[str, tuple[int, int], str, str]:
    """Split a twin as ShardFormer does: (verdict, regions split and all, vocabulary, what stays whole and why)."""
    axis, native = Axis.of(None), twin.model()
    regions = infer_policy(native, axis, check=False).regions
    sharder = ShardFormer(ShardConfig(axis)).prepare(native)
    policy = sharder.policy
    reasons = {
        layer.path: region.reason
        for region in getattr(policy, "regions", regions)
        for layer in (*region.columns, region.row)
    }
    sharder.shard()
    model: Any = sharder.model
    divided = {name for name, p in model.named_parameters() if is_divided(p)}
    done = sum(f"{region.row.path}.weight" in divided for region in regions)
    tables = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()) if takes_ids(m)]
    vocabulary = ("split" if all(map(is_divided, tables)) else "whole") if tables else ""
    remarks = left_whole(model, reasons)
    if vocabulary == "whole" and isinstance(policy, InferredPolicy):
        why = difference_on_twin(twin.model(), InferredPolicy(policy.regions, policy.attributes), axis)
        remarks.insert(0, f"vocabulary: {brief(f'split, its twin fails: {why}' if why else 'no linear head')}")
    if not divided:
        verdict = NOTHING
    elif done < len(regions) or not regions:
        verdict = SOME
    else:
        verdict = REGIONS if remarks or vocabulary == "whole" else ALL
    return verdict, (done, len(regions)), vocabulary, "; ".join(remarks)


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether a rank holds a part of it only."""
    layout = layout_of(parameter)
    return layout.local_shape != layout.shape


def takes_ids(module: Any) -> bool:
    """Whether a module is an embedding of tokens or a head over them."""
    return VOCAB in layout_of(module.weight).shape if hasattr(module, "weight") else False


def left_whole(model: Any, reasons: dict[str, str]) -> list[str]:
    """Weight matrices that every rank holds whole, by reason; the vocabulary's and tables of positions do not count."""
    vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
    skipped = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if module in vocabulary or (isinstance(module, nn.Embedding) and module.num_embeddings < VOCAB)
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
