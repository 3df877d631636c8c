"""Writes docs/models.md: what happens to every causal language model of transformers, and to some others, at tp 2.

    python scripts/model_table.py                   # a tiny twin of each on two ranks; minutes
    python scripts/model_table.py --only gemma2 olmo2    # some of them, printed and not written
    python scripts/model_table.py --check           # only: does the page list exactly what the installed transformers has?

A model that raises or hangs gets a row that says so, and the others go on. The page is written from what was found, whatever
it is; the exit code is 1 where a policy was accepted and the numbers are not those of one process.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from model_look import DIFFERENT, FAILS, MEANING, RANKS, STEPS, UNBUILT, Row, brief, look_at
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import colonnade
from colonnade.testing.parity import Tolerance
from colonnade.testing.ranks import RankFailure, close_pools, run_on_ranks

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TIMEOUT_S = 90
CALLS_PER_LAUNCH = 20  # each call leaves process groups behind

# Encoders, encoder-decoders and vision models, by their class; the causal language models come from transformers' mapping.
OTHERS = (
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "CLIPTextModel",
    "CLIPVisionModel",
    "DebertaV2ForMaskedLM",
    "Dinov2Model",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "MT5ForConditionalGeneration",
    "ModernBertForMaskedLM",
    "PegasusForConditionalGeneration",
    "RobertaForMaskedLM",
    "SiglipVisionModel",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "WhisperForConditionalGeneration",
    "XLMRobertaForMaskedLM",
)


def wanted() -> list[tuple[str, str]]:
    """(family, class) of every row, in the order of the page."""
    causal = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    return causal + [(getattr(transformers, name).config_class.model_type, name) for name in OTHERS]


def look_at_all(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """A row for each; what raises on one rank, dies or hangs, ends its launch and not the others."""
    rows = []
    for number, (family, name) in enumerate(pairs):
        if number % CALLS_PER_LAUNCH == 0:
            close_pools()
        try:
            row = run_on_ranks(RANKS, look_at, family, name, timeout_s=TIMEOUT_S)[0]
        except RankFailure as failure:
            lines = [line for line in next(iter(failure.reports.values())).splitlines() if line.strip()]
            late = "did not return" in str(failure).partition("\n")[0]
            remark = f"did not end within {TIMEOUT_S} s" if late else brief(lines[-1])
            row = Row(family, name, FAILS, remark=remark)
        print(f"{row.family:<24} {row.verdict:<16} {row.remark}", flush=True)
        rows.append(row)
    return rows


def page(rows: Sequence[Row]) -> str:
    """The whole of docs/models.md."""
    causal, others = [r for r in rows if r.model not in OTHERS], [r for r in rows if r.model in OTHERS]
    built = [r for r in causal if r.verdict != UNBUILT]
    proved = [r for r in causal if r.worst and r.verdict != DIFFERENT]
    totals = [[verdict, MEANING[verdict], count(causal, verdict), count(others, verdict)] for verdict in MEANING]
    return "\n".join(
        [
            "# Which models can be split",
            "",
            "After this page you know what tensor parallelism over two ranks does to each language model of transformers.",
            "",
            "<!-- written by scripts/model_table.py (`make models`); not by hand -->",
            "",
            f"transformers {transformers.__version__} has {len(causal)} types of causal language models. Of {len(built)} a tiny",
            f"twin can be built from the default configuration, and {len(proved)} of these have been proved to compute on",
            f"{RANKS} ranks what one process computes, with padding and unequal numbers of targets. {len(others)} encoders,",
            "encoder–decoders and vision models stand beside them.",
            "",
            table(["", "meaning", "causal", "others"], totals),
            "",
            f"Found with colonnade {colonnade.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}, on the CPU with gloo, in fp32, by `make models`.",
            "",
            "How to read the tables:",
            "",
            "- *policy*: a *file* of its own, or *inferred* from the model and checked on a twin ([new_policy.md](new_policy.md)).",
            "- *regions*: those that are split, of all that were found; a region is a stretch of a block from column-parallel",
            "  to row-parallel layers, such as attention or the MLP.",
            "- *vocabulary*: whether the embedding and the head are split.",
            "- *worst*: the largest relative difference from one process, over losses, gradient norms, all gradients and all",
            f"  weights after {STEPS} steps of AdamW; at most {Tolerance().gradient:.0e} counts as the same ([proof.md](proof.md)).",
            "- *stays whole*: weight matrices that every rank holds, with the reason. *In no region*: the layer is not between",
            "  a column-parallel and a row-parallel one, such as a router, or the parameter is not a linear layer's, such as",
            "  fused experts. Tables of positions and token types are not listed; they are always whole.",
            "- A twin has the structure of the family's default configuration; a model with another structure is checked anew",
            "  when it is split.",
            "",
            "## Causal language models",
            "",
            model_rows(causal),
            "",
            "## Encoders, encoder–decoders, vision models",
            "",
            model_rows(others),
            "",
        ]
    )


def count(rows: Iterable[Row], verdict: str) -> str:
    """Number of rows with a verdict."""
    return str(sum(row.verdict == verdict for row in rows))


def model_rows(rows: Iterable[Row]) -> str:
    """A table with a row for each model."""
    heads = ["family", "model", "verdict", "policy", "regions", "vocabulary", "worst", "stays whole, or why not"]
    cells = []
    for row in sorted(rows, key=lambda r: (r.family, r.model)):
        regions = "{} of {}".format(*row.regions) if row.worst else ""
        worst = f"{max(row.worst.values()):.0e}" if row.worst else ""
        name = [f"`{row.family}`", f"`{row.model}`"]
        cells.append([*name, row.verdict, row.policy, regions, row.vocabulary, worst, row.remark])
    return table(heads, cells)


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def check(text: str) -> list[str]:
    """What is wrong with a page; an empty list where it lists exactly what the installed transformers has."""
    listed, expected = set(re.findall(r"^\| `([^`]+)` \| `([^`]+)`", text, re.MULTILINE)), set(wanted())
    problems = []
    for said_of, pairs in (("lacks", expected - listed), ("lists, and transformers has not,", listed - expected)):
        if pairs:
            names = ", ".join(sorted(family for family, _ in pairs))
            problems.append(f"docs/models.md {said_of} {names}: run `make models`")
    return problems


def main() -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare what the page lists with what there is")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="families or classes; print their rows, write nothing"
    )
    args = parser.parse_args()
    if args.check:
        problems = check(PAGE.read_text(encoding="utf-8"))
        print("\n".join(problems) or "the page lists every model")
        return 1 if problems else 0
    rows = look_at_all(pair for pair in wanted() if not args.only or set(pair) & set(args.only))
    if args.only:
        print(model_rows(rows))
    else:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"{PAGE}: written")
    wrong = [row.family for row in rows if row.verdict in (DIFFERENT, FAILS)]
    if wrong:
        print(f"not the numbers of one process: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
