"""The stages of a pipeline as text: a table, and below it what passes over the borders, is shared and stands idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from colonnade.tools.explain.numbers import short_bytes, short_count
from colonnade.tools.explain.stages import Border, SharedParameter, Stage, Stages

FP32_BYTES = 4
HEADINGS = ("stage", "rank", "blocks", "beside them", "parameters", "fp32", "cost")
RIGHT = {"parameters", "fp32", "cost"}


def stage_lines(stages: Stages, tp: int) -> list[str]:
    """The lines about a pipeline.

    Args:
        tp: tensor-parallel ranks, which share each stage.
    """
    rows = [HEADINGS, *(_row(stage, tp) for stage in stages.stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    table = [
        "  ".join(f"{cell:{'>' if HEADINGS[i] in RIGHT else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
    return [
        f"cut into {len(stages.stages)} stages on {stages.ranks} ranks: {stages.check}",
        *table,
        "",
        *_facts(stages),
    ]


def _row(stage: Stage, tp: int) -> tuple[str, ...]:
    whole, local = stage.parameters, stage.local_parameters
    parameters = short_count(whole) if tp == 1 else f"{short_count(local)} of {short_count(whole)}"
    return (
        *(str(stage.number), str(stage.rank), f"{stage.count}: {stage.blocks}", ", ".join(stage.beside) or "–"),
        *(parameters, short_bytes(local * FP32_BYTES), f"{stage.cost:.0%}"),
    )


def _facts(stages: Stages) -> Iterator[str]:
    for before, stage in zip(stages.stages, stages.stages[1:]):
        stays = f"; stays on rank {stage.rank}" if before.rank == stage.rank else ""
        way = f"border {stage.number - 1} → {stage.number}"
        for border in stage.receives:
            yield f"{way:<16}  {_border(border)}{stays}"
            way = ""
        if not stage.receives:
            yield f"{way:<16}  nothing"
    yield f"{'':<16}  b rows of a micro-batch, s tokens each"
    way = "shared"
    for (users, ranks), group in groupby(stages.shared, key=lambda s: (s.stages, s.ranks)):
        yield f"{way:<16}  {_shared(list(group), users, ranks)}"
        way = ""
    if not stages.shared:
        yield f"{way:<16}  no parameter: each belongs to one stage"
    yield (
        f"{'schedule':<16}  {stages.style}, {stages.microbatches} micro-batches: ranks idle for {stages.bubble:.1%} of a step "
        f"where stages take equally long, {stages.bubble_of_costs:.1%} with the costs above"
    )
    kept = ", ".join(map(str, stages.in_flight))
    yield f"{'in flight':<16}  activations of at most {kept} micro-batches × stages on ranks 0–{stages.ranks - 1}"
    held = ", ".join(short_bytes(n * FP32_BYTES) for n in stages.local_parameters)
    yield f"{'memory a rank':<16}  {held} weights in fp32 on ranks 0–{stages.ranks - 1}, copies included"


def _border(border: Border) -> str:
    return f"{border.size} elements of {border.name}" + (", and as many gradients back" if border.gradient else "")


def _shared(group: Sequence[SharedParameter], users: Sequence[int], ranks: Sequence[int]) -> str:
    names = " = ".join(group[0].names) + (f" and {len(group) - 1} more" if len(group) > 1 else "")
    used = f"stages {', '.join(map(str, users))}"
    if len(ranks) == 1:
        return f"{names}: {used}, all on rank {ranks[0]}"
    others = f"rank{'s' * (len(ranks) > 2)} {', '.join(map(str, ranks[1:]))}"
    return f"{names}: {used}; rank {ranks[0]} owns it, {others} hold{'s' * (len(ranks) == 2)} a copy"
