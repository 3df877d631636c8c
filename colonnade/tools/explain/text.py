"""An explanation as text: aligned lines for files and pipes, a coloured tree for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colonnade.tools.explain.explanation import ADAM_BYTES, FP32_BYTES, Explanation
from colonnade.tools.explain.numbers import short_bytes, short_count
from colonnade.tools.explain.stages_text import stage_lines
from colonnade.tools.explain.tree import Node

COLOURS = {"column": "green", "row": "cyan", "vocabulary": "magenta", "norm": "yellow", "head": "yellow"}


def plain_text(explanation: Explanation, source: str) -> str:
    """The whole explanation; two columns of the tree, then what, parameters on rank 0, why and traffic.

    A pipeline's stages follow, or take the place of the tree where nothing but them divides the model.

    Args:
        source: where the model's sizes are from.
    """
    if explanation.stages is not None and explanation.tp == 1:
        return "\n".join([_heading(explanation, source), "", *stage_lines(explanation.stages, 1)])
    rows = list(_rows(explanation.tree, ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [_heading(explanation, source), ""]
    for name, kind, parameters, rest in rows:
        lines.append(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {parameters:>{widths[2]}}  {rest}".rstrip())
    return "\n".join([*lines, "", *totals(explanation), *_stages(explanation)])


def rich_tree(explanation: Explanation, source: str) -> Any:
    """The same as a tree for rich's console."""
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    def label(node: Node) -> Text:
        text = Text(node.name or node.native, style="bold")
        if node.name:
            text.append(f"  {node.native}", style="dim")
        if node.kind:
            text.append(
                f"  {node.kind}", style=next((c for k, c in COLOURS.items() if node.kind.startswith(k)), "white")
            )
        if node.parameters:
            text.append(f"  {_local(node)}")
        rest = _rest(node)
        if rest:
            text.append(f"  {rest}", style="dim")
        return text

    def grow(tree: Tree, node: Node) -> Tree:
        for child in node.children:
            grow(tree.add(label(child)), child)
        return tree

    heading = Text(_heading(explanation, source))
    if explanation.stages is not None and explanation.tp == 1:
        return Group(heading, Text(""), Text("\n".join(stage_lines(explanation.stages, 1))))
    tree = grow(Tree(label(explanation.tree)), explanation.tree)
    return Group(heading, Text(""), tree, Text(""), Text("\n".join([*totals(explanation), *_stages(explanation)])))


def totals(explanation: Explanation) -> list[str]:
    """The last lines: parameters and bytes of a rank, what a step communicates, and what is wrong with it."""
    whole, local = explanation.tree.total, explanation.tree.local_total
    share = f"{local / whole:.0%} of the model" if whole else "nothing"
    most = explanation.fullest
    lines = [
        f"parameters        {whole:,} in the model, {local:,} on rank 0 ({share})"
        + (f", {most:,} on the fullest" if most != local else ""),
        f"memory a rank     {short_bytes(most * FP32_BYTES)} weights in fp32, {short_bytes(most * ADAM_BYTES)} with gradients "
        "and Adam's state, activations not counted",
    ]
    if explanation.tp == 1:
        return [*lines, "traffic a step    none over tp: one rank holds each layer"]
    lines.append(f"traffic a step    {explanation.formula} all-reduces of b·s·h, h = {explanation.hidden}")
    if explanation.blocks and explanation.per_block is not None:
        rest = explanation.all_reduces - explanation.per_block * explanation.blocks
        lines.append(
            f"                  {explanation.per_block} in each of {explanation.blocks} blocks, {rest} outside them"
        )
    lines += [f"                  and {n} × {traffic}" for traffic, n in explanation.other_traffic.items()]
    lines.append("                  b rows, s tokens each; a step without recomputation of activations")
    if explanation.uneven:
        lines += ["", *explanation.uneven.splitlines()]
    if explanation.fault:
        lines += ["", f"{explanation.policy} does NOT compute what one process computes: {explanation.fault}"]
        lines.append("  try  `colonnade verify` with the same arguments: it names the first module that differs")
    return lines


def _stages(explanation: Explanation) -> list[str]:
    return [] if explanation.stages is None else ["", *stage_lines(explanation.stages, explanation.tp)]


def _heading(explanation: Explanation, source: str) -> str:
    pipeline = f", pp {explanation.stages.ranks}" if explanation.stages else ""
    lines = [
        f"{explanation.model}, tp {explanation.tp}{pipeline}: {source}",
    ]
    if explanation.tp > 1 or explanation.stages is None:
        lines.append(f"policy {explanation.policy}: {explanation.policy_source}")
    findings = explanation.findings
    if findings is not None:
        lines += [str(findings), *(f"  {what}: {why}" for what, why in findings.whole.items())]
    return "\n".join(lines)


def _rows(node: Node, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    yield (node.native if not prefix and not node.name else f"{prefix}{node.name}  {node.native}",
           node.kind, _local(node) if node.parameters else "", _rest(node))  # fmt: skip
    deeper = prefix.replace("├ ", "│ ").replace("└ ", "  ")
    for child in node.children:
        branch = "└ " if child is node.children[-1] else "├ "
        yield from _rows(child, deeper + branch)


def _local(node: Node) -> str:
    return f"{short_count(node.local_parameters)} of {short_count(node.parameters)}"


def _rest(node: Node) -> str:
    parts = [node.why, *map(str, node.traffic)]
    text = "; ".join(part for part in parts if part)
    return f"{text} [{node.rule}]" if node.rule and text else text
