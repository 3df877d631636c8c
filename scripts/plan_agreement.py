"""Writes docs/agreement.md: where an inferred policy and transformers' own plan (`tp_plan`) split a model differently.

    python scripts/plan_agreement.py                       # tiny twins of all families that have a plan; minutes
    python scripts/plan_agreement.py --only gemma2,glm     # some of them, printed and not written

Compared is what is done with each parameter. A difference that its kind does not explain (their plan splits more, or
otherwise) has to be in `EXPLAINED`, else the exit code is 1. A test does the same for policies as inference finds them,
without the check on twins that takes most of the time.
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colonnade.cluster.mesh import Axis
from colonnade.errors import ColonnadeError, PolicyError
from colonnade.model.default_configs import default_config
from colonnade.model.layout import layout_of
from colonnade.model.twin import shrink
from colonnade.shardformer import ModelSharder, ShardConfig
from colonnade.shardformer.inference import infer_policy
from colonnade.shardformer.layer.latent import LatentLinear
from colonnade.tools.train.source import quiet_inference, quiet_transformers

PAGE = Path(__file__).parent.parent / "docs" / "agreement.md"
TWO = Axis("tp", 2, 0, (0, 1), None)  # on which nothing is communicated
COLUMN, ROW, SUMMED, LATENT, WHOLE = "by columns", "by rows", "whole, gradient summed", "low-rank stage, whole", "whole"

STYLES = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN,
    "colwise_rep": COLUMN,
    "embedding_rowwise": COLUMN,
    "packed_colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": ROW,
    "rowwise_rep": ROW,
    "packed_rowwise": ROW,
    "replicated_with_grad_allreduce": SUMMED,
    "mla_kv_a_proj": LATENT,
}
GATHERED = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"}

SAME = "the same"
LOGITS = "their logits are gathered, ours stay split"
ACTIVATIONS = "split by both; they gather the activations and compute in one piece, we compute in parts"
OURS = "split by us, whole in their plan"
INSIDE = "inside a region: its gradient is summed by us, and not in their plan"
EXPERTS = "experts: split by them, whole with us"
COLLECTED = "split by both; we gather the activations and compute in one piece, they compute in parts"
THEIRS = "split by them, not or otherwise by us"
REFUSED = "no policy can be inferred"
HEADINGS = {
    LOGITS: "logits gathered",
    ACTIVATIONS: "activations gathered",
    OURS: "split by us",
    INSIDE: "gradient summed by us",
    EXPERTS: "experts",
    COLLECTED: "activations gathered by us",
    THEIRS: "split by them",
}
KINDS = (SAME, LOGITS, ACTIVATIONS, OURS, INSIDE, EXPERTS, COLLECTED, THEIRS, REFUSED)

# (family, part of the parameter's name): why their plan splits what an inferred policy does not, or splits otherwise
_CONVOLUTION = (
    "linear attention: one convolution runs over queries, keys and values, so the inside is computed whole, and the last "
    "layer may be cut either way"
)
EXPLAINED: dict[tuple[str, str], str] = {
    ("doge", "self_attn"): "a mask is made for all heads; their plan fails for that in transformers itself",
    ("dory", ""): "with its inside split the loss of its twin is another",
    (
        "dots3_note_text",
        "self_attn",
    ): "in the twin a norm is as wide as there are heads, and is taken for one entry for each",
    ("hrm_text", "L_module"): "its first call is without gradients, and a look sees the first call only",
    (
        "gemma3n_text",
        "mlp",
    ): "the activation keeps what is large among the whole width, of which a rank sees its share only",
    ("gemma3n_text", "self_attn"): "blocks read keys and values that an earlier block has made, of all heads",
    **{
        (family, "linear_attn"): _CONVOLUTION
        for family in ("lara_mini", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text")
    },
    ("qwen4_exp_text", "input_mix_weight"): "mixes residual streams, outside the regions",
    ("qwen4_exp_text", "indexer"): "chooses what attention reads: all of it is needed on every rank",
    ("gemma3n", ""): "needs a package for pictures; `gemma3n_text` stands for it",
    ("gemma4_assistant", ""): "does not run by itself: it reads the states of another model",
    ("gemma4_unified_assistant", ""): "does not run by itself: it reads the states of another model",
    ("granitemoehybrid", ""): "its default configuration has no attention layer, and does not run",
}


TO_EXPLAIN = (COLLECTED, THEIRS, REFUSED)


@dataclass(frozen=True)
class Difference:
    """A parameter with which something else is done.

    Args:
        name: of the parameter, with block numbers as *.
        kind: one of `KINDS`.
        theirs, ours: what is done with it; for a model without a policy the error.
    """

    name: str
    kind: str
    theirs: str
    ours: str


@dataclass
class Comparison:
    """A family's plan beside the inferred policy.

    Args:
        same: number of parameters that their plan speaks of, or we split, and that are treated alike.
    """

    family: str
    model: str
    same: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Difference]:
        """Differences that somebody has to look at."""
        return [d for d in self.differences if d.kind in TO_EXPLAIN and reason_of(self.family, d) is None]


def reason_of(family: str, difference: Difference) -> str | None:
    """Why there is a difference that is not explained by its kind."""
    found = (why for (name, part), why in EXPLAINED.items() if name == family and part in difference.name)
    return next(found, None)


def families() -> Iterator[tuple[str, Any, Any]]:
    """Model type, class and default configuration of each causal language model that has a plan.

    A class that serves several types comes once, with its own.
    """
    own: dict[str, tuple[str, Any, Any]] = {}
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config, kind = default_config(family), getattr(transformers, name)
        is_own = type(config) is kind.config_class
        if not isinstance(config, kind.config_class):
            config = next((part for part in vars(config).values() if isinstance(part, kind.config_class)), config)
        parts = (config, config.get_text_config())
        if any(getattr(part, "base_model_tp_plan", None) for part in parts) and (is_own or name not in own):
            own[name] = family, kind, config
    yield from sorted(own.values(), key=lambda found: found[0])


def compare(family: str, kind: Any, config: Any, check: bool = True) -> Comparison:
    """Build a tiny twin, infer a policy for it, and hold its layouts against the plan.

    Args:
        check: take the policy that has passed its check; else the one that inference finds, where it can be applied.
    """
    found = Comparison(family, kind.__name__)
    torch.manual_seed(0)
    try:
        model = kind._from_config(shrink(config, TWO.size), dtype=torch.float32)
        plan = dict(model.tp_plan or {})
        model, replaced = split(model, check)
    except (PolicyError, ImportError) as error:  # the latter for packages that are not there
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line.removeprefix("reason").strip() for line in lines if line.startswith("reason")), lines[0])
        found.differences.append(Difference("", REFUSED, "", reason))
        return found
    told: dict[str, Difference] = {}
    for name, parameter in model.named_parameters():
        short = starred(name)
        theirs, style = planned(short, parameter, plan)
        ours, gathered = done(name, parameter, model, replaced)
        if ours == theirs == WHOLE:
            continue
        what = kind_of(short, theirs, style, ours, gathered)
        if short not in told or told[short].kind == SAME:  # of several blocks, one that differs
            told[short] = Difference(short, what, style or WHOLE, ours)
    found.same = sum(d.kind == SAME for d in told.values())
    found.differences = [d for d in told.values() if d.kind != SAME]
    return found


def split(model: Any, check: bool) -> tuple[Any, Mapping[str, str]]:
    """The model as rank 0 holds it, and which class stands where."""
    untouched = copy.deepcopy(model)
    sharder = ModelSharder(model, infer_policy(model, TWO, check), ShardConfig(TWO))
    try:
        sharder.shard()
    except ColonnadeError:  # what the check is there to find
        if check:
            raise
        return split(untouched, check=True)
    return sharder.model, dict(sharder.replaced)


def starred(name: str) -> str:
    """A path with block numbers as *."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def planned(short: str, parameter: torch.Tensor, plan: Mapping[str, str]) -> tuple[str, str]:
    """What their plan does with a parameter, and the name it has for that."""
    style = plan.get(short) or plan.get(short.rpartition(".")[0]) or ""
    what = STYLES.get(style, WHOLE)
    if parameter.numel() == 1 or (what == ROW and short.endswith(".bias")):
        what = WHOLE  # the bias is added after the sum
    return what, style


def done(name: str, parameter: torch.Tensor, model: Any, replaced: Mapping[str, str]) -> tuple[str, bool]:
    """What the policy has done with a parameter, and whether the layer's output or input is whole on every rank."""
    layout = layout_of(parameter)
    path = name.rpartition(".")[0]
    module, kind = model.get_submodule(path), replaced.get(path, "")
    if layout.sharded_axes:
        gathered = getattr(module, "gather_output", False) or not getattr(module, "parallel_input", True)
        return ROW if kind.endswith("_Row") else COLUMN, gathered
    if kind == LatentLinear.__name__:
        return LATENT, False
    return SUMMED if layout.partial_axes else WHOLE, False


def kind_of(name: str, theirs: str, style: str, ours: str, gathered: bool) -> str:
    """Of which kind a difference is.

    Args:
        gathered: as of `done`.
    """
    split_by_us = ours in (COLUMN, ROW)
    if split_by_us and style in GATHERED and not gathered:
        return LOGITS if "lm_head." in name else ACTIVATIONS
    if split_by_us and gathered and theirs in (COLUMN, ROW) and style not in GATHERED:
        return COLLECTED
    if ours == theirs:
        return SAME
    if theirs == WHOLE and ours == SUMMED:
        return INSIDE
    if theirs == WHOLE and (split_by_us or ours == LATENT):
        return OURS
    if "experts" in name and ours == WHOLE:
        return EXPERTS
    return THEIRS


def page(found: list[Comparison]) -> str:
    """The document."""
    counts = counted(found)
    parameters = sum(counts.values()) - counts[REFUSED]
    lines = [
        "# Inferred policies beside transformers' own plans",
        "",
        "After this page you know where an inferred policy splits a model otherwise than the plan that transformers has for it.",
        "",
        "<!-- written by scripts/plan_agreement.py (`make agreement`); not by hand -->",
        "",
        f"transformers {transformers.__version__} has a tensor-parallel plan (`tp_plan`) for {len(found)} classes of causal",
        "language models. Each is held against the policy that is inferred for a tiny twin and has passed its check, by parameter",
        "(alike blocks count once; what both leave whole is not counted). The plans are never obeyed: what proves a policy is",
        "its numbers ([models.md](models.md)). They are a second opinion, and a difference has to have an explanation.",
        "",
        "| | parameters | families |",
        "| --- | --- | --- |",
    ]
    for kind in KINDS:
        families = sum(bool(c.same) if kind == SAME else any(d.kind == kind for d in c.differences) for c in found)
        lines.append(f"| {kind} | {'' if kind == REFUSED else counts[kind]} | {families} |")
    share = (counts[SAME] + counts[LOGITS]) / parameters
    lines += ["", f"Of {parameters} parameters {share:.0%} are treated alike, or but for the gathering of logits.", ""]
    for kind in TO_EXPLAIN:
        rows = explained_rows(found, kind)
        lines += [f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [*rows, ""] if rows else ["None.", ""]
    shown = [kind for kind in KINDS if kind not in (SAME, REFUSED)]
    lines += ["## By family", "", "Numbers of parameters:", ""]
    lines += [
        f"| family | model | the same | {' | '.join(HEADINGS[kind] for kind in shown)} |",
        "| --- " * (len(shown) + 3) + "|",
    ]
    for c in found:
        kinds = Counter(d.kind for d in c.differences)
        numbers = " | ".join(str(kinds[kind] or "") for kind in shown)
        lines.append(f"| `{c.family}` | `{c.model}` | {c.same} | {numbers} |")
    lines.append("")
    for kind in (OURS, ACTIVATIONS, INSIDE):
        lines += [f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"- `{c.family}`: {listed(c, kind)}" for c in found if any(d.kind == kind for d in c.differences)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def explained_rows(found: list[Comparison], kind: str) -> list[str]:
    """A line for each family and explanation."""
    rows: dict[tuple[str, str], list[Difference]] = {}
    for c in found:
        for d in c.differences:
            if d.kind == kind:
                rows.setdefault((c.family, reason_of(c.family, d) or "NOT EXPLAINED"), []).append(d)
    lines = []
    for (family, why), differences in rows.items():
        what = names_of(differences) if kind != REFUSED else differences[0].ours.partition(".")[0]
        lines.append(f"- `{family}`: {what}. {why[0].upper()}{why[1:]}.")
    return lines


def listed(comparison: Comparison, kind: str) -> str:
    """The parameters of a kind."""
    return names_of([d for d in comparison.differences if d.kind == kind])


def names_of(differences: list[Difference]) -> str:
    """The parameters' last two names."""
    names = [".".join(d.name.removesuffix(".weight").split(".")[-2:]) for d in differences]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def counted(found: list[Comparison]) -> Counter[str]:
    """How many parameters are treated in which way."""
    counts = Counter(d.kind for c in found for d in c.differences)
    counts[SAME] += sum(c.same for c in found)
    return counts


def problems(found: list[Comparison]) -> list[str]:
    """Differences without an explanation."""
    return [f"{c.family}: {d.name or d.ours}: {d.kind} ({d.theirs}; {d.ours})" for c in found for d in c.unexplained]


def stale(found: list[Comparison]) -> list[tuple[str, str]]:
    """Keys of explanations without a difference."""
    names = {(c.family, d.name) for c in found for d in c.differences if d.kind in TO_EXPLAIN}
    looked_at = {c.family for c in found}
    return [
        (family, part)
        for family, part in EXPLAINED
        if family in looked_at and not any(part in name for f, name in names if f == family)
    ]


def check_page(text: str) -> list[str]:
    """What is wrong with the page; an empty list where it lists exactly the families that have a plan."""
    listed = set(re.findall(r"^\| `([^`]+)` \| `\w+` \| \d", text, re.MULTILINE))
    there = {family for family, *_ in families()}
    lacking = [f"docs/agreement.md lacks {name}: run `make agreement`" for name in sorted(there - listed)]
    return lacking + [f"docs/agreement.md lists {name}, which has no plan" for name in sorted(listed - there)]


def look(only: str = "", check: bool = True) -> list[Comparison]:
    """The comparisons of all families, or of some; `check` as of `compare`."""
    quiet_transformers()
    quiet_inference()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    names = {name.strip() for name in only.split(",") if name.strip()}
    return [compare(*found, check) for found in families() if not names or found[0] in names]


def main() -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="families; nothing is written")
    args = parser.parse_args()
    found = look(args.only)
    if args.only:
        print(page(found))
    else:
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"{PAGE}: written")
    unmet = {family for family, _ in stale(found)}
    unchecked = look(",".join(unmet), check=False) if unmet else []
    wrong = problems(found) + [f"{family}: {part}: no such difference" for family, part in stale([*found, *unchecked])]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
