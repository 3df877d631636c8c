"""The page docs/models.md, and what is printed, from what was found for each model."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import transformers
from model_cases import CAUSAL, FORCED, OTHERS, VARIANTS, Case
from model_look import MEANING, NO_DEFAULT, STEPS, UNBUILT, Row, brief

import colonnade
from colonnade.testing.parity import Tolerance


@dataclass(frozen=True)
class Found:
    """A case and its rows, by the number of tensor-parallel ranks."""

    case: Case
    rows: dict[int, Row]

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.case.family} ({self.case.title})" if self.case.title else self.case.family

    @property
    def first(self) -> Row:
        """The row of the fewest ranks."""
        return self.rows[min(self.rows)]


def page(found: Sequence[Found]) -> str:
    """The whole of docs/models.md."""
    return "\n".join(
        [
            "# Which models can be split",
            "",
            "After this page you know what tensor parallelism over two and over four ranks does to each language model of",
            "transformers, to other kinds of models, and to variants of their configurations.",
            "",
            "<!-- written by scripts/model_table.py (`make models`); not by hand -->",
            "",
            summary_table(found),
            "",
            "A model is *proved* where a tiny twin of it, split, has been trained to the numbers of one process, with padding and",
            "unequal numbers of targets. A *type* is a `model_type` of transformers; several types may share a *class*, which is",
            "proved where all of its types are. Counted are those of which the configuration makes a model at all.",
            "",
            verdict_table(found),
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
            "- *tp 2*, *tp 4*: the largest relative difference from one process, over losses, gradient norms, all gradients and",
            f"  all weights after {STEPS} steps of AdamW; at most {Tolerance().gradient:.0e} counts as the same ([proof.md](proof.md)).",
            "  Where less is split on four ranks than on two, the regions stand behind it.",
            "- *stays whole*: weight matrices that every rank holds, with the reason. *In no region*: the layer is not between",
            "  a column-parallel and a row-parallel one, such as a router, or the parameter is not a linear layer's, such as",
            "  fused experts. Tables of positions and token types are not listed; they are always whole.",
            "- A twin has the structure of the configuration; a model with another structure is checked anew when it is split.",
            "",
            "## Causal language models",
            "",
            model_rows(part(found, CAUSAL)),
            "",
            "## Encoders, encoder–decoders, vision models",
            "",
            model_rows(part(found, OTHERS)),
            "",
            "## Configuration variants",
            "",
            "Each differs from the default configuration of its family in what is named. The last rows are models that are in no",
            "library.",
            "",
            variant_rows(part(found, VARIANTS)),
            "",
            "## Families with a file, inferred all the same",
            "",
            "What inference makes of the families that have a policy of their own.",
            "",
            variant_rows(part(found, FORCED)),
            "",
        ]
    )  # fmt: skip


def part(found: Iterable[Found], section: str) -> list[Found]:
    """Those of one section."""
    return [f for f in found if f.case.section == section]


def rows_text(found: Sequence[Found]) -> str:
    """The tables of some cases."""
    plain, titled = [f for f in found if not f.case.title], [f for f in found if f.case.title]
    return "\n\n".join(text for text in (plain and model_rows(plain), titled and variant_rows(titled)) if text)


def model_rows(found: Iterable[Found]) -> str:
    """A table with a row for each model."""
    heads = ["family", "model", "verdict", "policy", "regions", "vocabulary", "tp 2", "tp 4", "stays whole, or why not"]
    cells = []
    for f in sorted(found, key=lambda f: (f.case.family, f.case.model)):
        cells.append([f"`{f.case.family}`", f"`{f.case.model}`", *row_cells(f)])
    return table(heads, cells)


def variant_rows(found: Iterable[Found]) -> str:
    """A table with a row for each variant."""
    heads = ["variant", "verdict", "policy", "regions", "vocabulary", "tp 2", "tp 4", "stays whole, or why not"]
    return table(heads, [[variant_name(f.case), *row_cells(f)] for f in found])


def variant_name(case: Case) -> str:
    """A variant as its row has it: the family, or the class where the family has several, and what is special."""
    several = case.section == VARIANTS and case.family != "own" and "CausalLM" not in case.model
    return f"`{case.model if several else case.family}`: {brief(case.title or 'default')}"


def row_cells(f: Found) -> list[str]:
    """What a row says beside the name of its model."""
    first = f.first
    regions = "{} of {}".format(*first.regions) if first.worst else ""
    return [first.verdict, first.policy, regions, first.vocabulary, *(size_cell(f, tp) for tp in (2, 4)), first.remark]


def size_cell(f: Found, tp: int) -> str:
    """The worst difference on so many ranks; or why there is none, where the verdict is another than on the fewest."""
    row, first = f.rows.get(tp), f.first
    if row is None or (row.worst is None and row.verdict == first.verdict):
        return ""
    if row.worst is None:
        return f"{row.verdict}: {row.remark}"
    less = row.regions[0] < first.regions[0] or row.vocabulary != first.vocabulary or row.verdict != first.verdict
    note = f" ({row.verdict}, {row.regions[0]} of {row.regions[1]})" if less else ""
    return f"{max(row.worst.values()):.0e}{note}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def verdict_table(found: Sequence[Found]) -> str:
    """How often each verdict was given on the fewest ranks, by section."""
    heads = ["", "meaning", "causal", "others", "variants"]
    return table(
        heads,
        [
            [
                verdict,
                meaning,
                *(str(sum(f.first.verdict == verdict for f in part(found, s))) for s in (CAUSAL, OTHERS, VARIANTS)),
            ]
            for verdict, meaning in MEANING.items()
        ],
    )


def summary_table(found: Sequence[Found]) -> str:
    """The proved fractions."""
    sizes = sorted({tp for f in found for tp in f.rows})
    lines = [[name, *(fraction(count(tp)) for tp in sizes)] for name, count in counts(found)]
    return table(["proved", *(f"tp {tp}" for tp in sizes)], lines)


def summary(found: Sequence[Found]) -> str:
    """The proved fractions as plain text."""
    sizes = sorted({tp for f in found for tp in f.rows})
    lines = [
        f"  {name:<58}" + "".join(f"  tp {tp}: {fraction(count(tp)):<22}" for tp in sizes)
        for name, count in counts(found)
    ]
    return "\n".join(["proved", *lines])


def fraction(counted: tuple[int, int]) -> str:
    """Two counts and their ratio."""
    proved, all_of_them = counted
    return f"{proved} of {all_of_them} ({100 * proved / all_of_them:.1f} %)" if all_of_them else "–"


Count = Callable[[int], tuple[int, int]]


def counts(found: Sequence[Found]) -> list[tuple[str, Count]]:
    """What is counted, and how: for a number of ranks, those proved and all."""
    causal, forced = part(found, CAUSAL), part(found, FORCED)
    plain = {f.case.family: f for f in forced if not f.case.title}
    inferred = [plain.get(f.case.family, f) for f in causal]
    return [
        ("causal language models, types", lambda tp: by_type(causal, tp)),
        ("causal language models, classes", lambda tp: by_class(causal, tp)),
        ("causal language models, classes with every region split", lambda tp: by_class(causal, tp, full=True)),
        ("the same without policy files, types", lambda tp: by_type(inferred, tp)),
        ("the same without policy files, classes", lambda tp: by_class(inferred, tp)),
        ("encoders, encoder–decoders, vision models", lambda tp: by_type(part(found, OTHERS), tp)),
        ("configuration variants", lambda tp: by_type(part(found, VARIANTS), tp)),
        ("configuration variants with every region split", lambda tp: by_type(part(found, VARIANTS), tp, full=True)),
        ("variants of families with a file, inferred", lambda tp: by_type(forced, tp)),
    ]


def counted(found: Iterable[Found], tp: int) -> list[Found]:
    """Those whose configuration makes a model."""
    return [
        f
        for f in found
        if tp in f.rows and not (f.rows[tp].verdict == UNBUILT and f.rows[tp].remark.startswith(NO_DEFAULT))
    ]


def by_type(found: Iterable[Found], tp: int, full: bool = False) -> tuple[int, int]:
    """Rows proved, and all of which there is a model; with `full`, those of which every region is split."""
    rows = [f.rows[tp] for f in counted(found, tp)]
    return sum(row.full if full else row.proved for row in rows), len(rows)


def by_class(found: Iterable[Found], tp: int, full: bool = False) -> tuple[int, int]:
    """As `by_type`, of classes: a class counts where all of its rows do."""
    classes: dict[str, list[bool]] = {}
    for f in counted(found, tp):
        classes.setdefault(f.case.model, []).append(f.rows[tp].full if full else f.rows[tp].proved)
    return sum(map(all, classes.values())), len(classes)


def failure_lines(found: Sequence[Found]) -> str:
    """Those that are not proved, by their reason."""
    reasons: dict[str, list[str]] = {}
    for f in found:
        for tp, row in f.rows.items():
            if not row.proved:
                reasons.setdefault(f"{row.verdict}: {row.remark}", []).append(f"{f.name} at tp {tp}")
    lines = [f"{len(names):>4}  {reason}\n        {', '.join(names)}" for reason, names in reasons.items()]
    return "\n".join(sorted(lines, key=lambda line: -int(line[:4])))
