"""The page docs/models.md, and what is printed, from what was found for each model."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import transformers
from model_cases import CAUSAL, FORCED, OTHERS, VARIANTS, Case
from model_look import MEANING, NO_DEFAULT, STEPS, UNBUILT, UNTRAINED, Row, brief

import colonnade
from colonnade.testing.parity import Tolerance

PP = "pp"
Size = int | str  # a number of tensor-parallel ranks, or PP


@dataclass(frozen=True)
class Found:
    """A case and its rows: by the number of tensor-parallel ranks, and for PP that of the cut."""

    case: Case
    rows: dict[Size, Row]

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.case.family} ({self.case.title})" if self.case.title else self.case.family

    @property
    def first(self) -> Row:
        """The row of the fewest ranks."""
        return self.rows[next(iter(self.rows))]


def page(found: Sequence[Found]) -> str:
    """The whole of docs/models.md."""
    return "\n".join(
        [
            "# Which models can be split",
            "",
            "After this page you know what tensor parallelism over two and over four ranks, and a pipeline of two stages, do to",
            "each language model of transformers, to other kinds of models, and to variants of their configurations.",
            "",
            "<!-- written by scripts/model_table.py (`make models`); not by hand -->",
            "",
            summary_table(found),
            "",
            cut_table(found),
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
            "- *pp 2*: in how many of the places between two blocks of the twin it can be cut into pipeline stages (one place for",
            "  two stages). *n of n* has been compared: cut in two, and in all those places at once, the twin has the loss and every",
            "  gradient of the twin in one piece, in fp64. Fewer than all: what only some blocks know keeps them on one stage.",
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


HEADS = ["verdict", "policy", "regions", "vocabulary", "tp 2", "tp 4", "pp 2", "stays whole, or why not"]


def model_rows(found: Iterable[Found]) -> str:
    """A table with a row for each model."""
    heads = ["family", "model", *HEADS]
    cells = []
    for f in sorted(found, key=lambda f: (f.case.family, f.case.model)):
        cells.append([f"`{f.case.family}`", f"`{f.case.model}`", *row_cells(f)])
    return table(heads, cells)


def variant_rows(found: Iterable[Found]) -> str:
    """A table with a row for each variant."""
    return table(["variant", *HEADS], [[variant_name(f.case), *row_cells(f)] for f in found])


def variant_name(case: Case) -> str:
    """A variant as its row has it: the family, or the class where the family has several, and what is special."""
    several = case.section == VARIANTS and case.family != "own" and "CausalLM" not in case.model
    return f"`{case.model if several else case.family}`: {brief(case.title or 'default')}"


def row_cells(f: Found) -> list[str]:
    """What a row says beside the name of its model."""
    first = f.first
    regions = "{} of {}".format(*first.regions) if first.worst else ""
    sizes = [*(size_cell(f, tp) for tp in (2, 4)), cut_cell(f)]
    return [first.verdict, first.policy, regions, first.vocabulary, *sizes, first.remark]


def cut_cell(f: Found) -> str:
    """In how many places a twin can be cut, or why in none."""
    row = f.rows.get(PP)
    if row is None or row.verdict in (UNBUILT, UNTRAINED):
        return ""
    return "{} of {}".format(*row.regions) if row.proved else f"{row.verdict}: {row.remark}"


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
    sizes = sizes_of(found)
    lines = [[name, *(fraction(count(tp)) for tp in sizes)] for name, count in counts(found)]
    return table(["proved", *(f"tp {tp}" for tp in sizes)], lines)


def summary(found: Sequence[Found]) -> str:
    """The proved fractions as plain text."""
    sizes = sizes_of(found)
    lines = [
        f"  {name:<58}" + "".join(f"  tp {tp}: {fraction(count(tp)):<22}" for tp in sizes)
        for name, count in counts(found)
    ]
    cuts = [f"  {name:<58}  pp 2: {fraction(two)}" for name, two, _ in cut_counts(found)]
    return "\n".join(["proved", *lines, *cuts])


def sizes_of(found: Iterable[Found]) -> list[Size]:
    """The numbers of ranks of tensor parallelism that were looked at."""
    return sorted({size for f in found for size in f.rows if size != PP})


def cut_table(found: Sequence[Found]) -> str:
    """How many can be cut."""
    lines = [[name, fraction(two), fraction(every)] for name, two, every in cut_counts(found)]
    return table(["proved as a pipeline", "pp 2", "cut between any two blocks"], lines)


def cut_counts(found: Sequence[Found]) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Of those that are trained in one process: a name, how many can be cut in two, and how many between any two blocks."""
    parts = [
        ("causal language models, types", part(found, CAUSAL)),
        ("encoders, encoder–decoders, vision models", part(found, OTHERS)),
        ("configuration variants", part(found, VARIANTS)),
    ]
    counts_of = []
    for name, of_part in parts:
        rows = [f.rows[PP] for f in of_part if PP in f.rows and f.rows[PP].verdict not in (UNBUILT, UNTRAINED)]
        if rows:
            proved = [row for row in rows if row.proved]
            everywhere = sum(row.regions[0] == row.regions[1] for row in proved)
            counts_of.append((name, (len(proved), len(rows)), (everywhere, len(rows))))
    return counts_of


def fraction(counted: tuple[int, int]) -> str:
    """Two counts and their ratio."""
    proved, all_of_them = counted
    return f"{proved} of {all_of_them} ({100 * proved / all_of_them:.1f} %)" if all_of_them else "–"


Count = Callable[[Size], tuple[int, int]]


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


def counted(found: Iterable[Found], tp: Size) -> list[Found]:
    """Those whose configuration makes a model."""
    return [
        f
        for f in found
        if tp in f.rows and not (f.rows[tp].verdict == UNBUILT and f.rows[tp].remark.startswith(NO_DEFAULT))
    ]


def by_type(found: Iterable[Found], tp: Size, full: bool = False) -> tuple[int, int]:
    """Rows proved, and all of which there is a model; with `full`, those of which every region is split."""
    rows = [f.rows[tp] for f in counted(found, tp)]
    return sum(row.full if full else row.proved for row in rows), len(rows)


def by_class(found: Iterable[Found], tp: Size, full: bool = False) -> tuple[int, int]:
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
                where = "pp 2" if tp == PP else f"tp {tp}"
                reasons.setdefault(f"{row.verdict}: {row.remark}", []).append(f"{f.name} at {where}")
    lines = [f"{len(names):>4}  {reason}\n        {', '.join(names)}" for reason, names in reasons.items()]
    return "\n".join(sorted(lines, key=lambda line: -int(line[:4])))
