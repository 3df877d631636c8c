"""Compare every known model family with one process, and write the tables in README.md and docs/proof.md.

    python scripts/proved_models.py            # trains each family in every layout, then rewrites the tables
    python scripts/proved_models.py --check    # only: do the tables list exactly the families that have a policy?

Nothing is written unless every family has the numbers of one process in every layout.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colonnade.comm.ledger import Ledger
from colonnade.model.layout import layout_of
from colonnade.shardformer import find_policy, known_families
from colonnade.testing.parity import Tolerance, assert_same_as_single, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import TINY, ids, tiny_config, tiny_model

ROOT = Path(__file__).parent.parent
# name: (ranks, plugin, options)
LAYOUTS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "tp 2 × dp 2": (4, HybridParallelPlugin, {"tp_size": 2}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "ZeRO-1 dp 2": (2, LowLevelZeroPlugin, {"stage": 1}),
    "ZeRO-2 dp 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "FSDP dp 2": (2, TorchFSDPPlugin, {}),
    "tp 2 × dp 2, ZeRO-1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "pp 2": (2, HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 3}),
    "pp 2 × dp 2, ZeRO-1": (4, HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1, "pp_style": "zbh1"}),
    "tp 2 × pp 2": (4, HybridParallelPlugin, {"tp_size": 2, "pp_size": 2}),
}
KINDS = ("loss", "gradient norm", "gradients", "weights")
VOCABULARY = 67  # not divisible by 2
STEPS, MAX_NORM = 5, 1.0


@dataclass(frozen=True)
class Proof:
    """What was found for one family in one layout.

    Args:
        worst: by kind, the largest relative difference from one process.
        all_reduces: over the tp axis in one step.
        sends: tensors that the first stage of a pipeline sends in one step.
        over_dp: elements moved over the dp axis in one step, for each parameter of a rank; an all-reduce moves each twice.
        blocks: number L of the model's blocks.
        head_norm_weights: weights inside the sharded region that every rank holds whole; each is summed by itself.
    """

    family: str
    model_class: str
    layout: str
    worst: dict[str, float]
    all_reduces: int
    sends: int
    over_dp: float
    blocks: int
    head_norm_weights: int


def batches() -> list[dict[str, torch.Tensor]]:
    """Two global batches that the data-parallel ranks cannot share equally: other numbers of rows and of targets."""
    made = []
    for rows, tokens, seed in ((4, 12, 7), (3, 9, 8)):
        input_ids = ids(rows, tokens, seed=seed, vocab=VOCABULARY)
        labels = input_ids.clone()
        labels[0, : tokens // 2], labels[-1, 3:] = -100, -100
        made.append({"input_ids": input_ids, "labels": labels})
    return made


def prove_on_this_rank(family: str, name: str, layout: str) -> Proof:
    """Train the tiny model `name` in a layout and in one process, and count a step's traffic. Runs on every rank."""

    def model_fn() -> Any:
        return tiny_model(name, vocab_size=VOCABULARY)

    def plugin_fn() -> Any:
        _, plugin_class, options = LAYOUTS[layout]
        return plugin_class(**options, precision="fp32", max_norm=MAX_NORM)

    through: Any = "execute_pipeline" if "pp" in layout else "loop"
    report = assert_same_as_single(model_fn, batches(), plugin_fn, steps=STEPS, max_norm=MAX_NORM, through=through)
    model, booster = model_fn(), Booster(plugin=plugin_fn())
    policy = find_policy(model)
    assert policy.spine is not None
    blocks = len(policy.spine.blocks_of(model))
    model_class = type(model).__name__
    boosted, optimizer, *_ = booster.boost(model, well_conditioned_adamw(model))
    held = sum(p.numel() for p in boosted.parameters())
    batch = {key: value[:2] for key, value in batches()[0].items()}
    for _ in range(2):  # the first batch also tells shapes
        with colonnade.ledger() as ledger:
            booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return Proof(
        family=family,
        model_class=model_class,
        layout=layout,
        worst={kind: report[kind].worst for kind in KINDS},
        all_reduces=ledger.calls["all_reduce", "tp"],
        sends=ledger.calls["send", "pp"],
        over_dp=moved_over_dp(ledger) / held,
        blocks=blocks,
        head_norm_weights=sum("tp" in layout_of(p).partial_axes for p in boosted.parameters()),
    )


def moved_over_dp(ledger: Ledger) -> int:
    """Elements that travel over the dp axis; an all-reduce is a reduce-scatter and an all-gather."""
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    return sum(passes[operation] * n for (operation, axis), n in ledger.elements.items() if axis == "dp")


def prove_all() -> list[Proof]:
    """Every family in every layout.

    Raises:
        AssertionError: with the report of the first that has not the numbers of one process.
    """
    proofs = []
    for family in known_families():
        name = tiny_name(family)
        for layout, (ranks, *_) in LAYOUTS.items():
            proof = run_on_ranks(ranks, prove_on_this_rank, family, name, layout, timeout_s=300)[0]
            print(f"{family:<10} {layout:<20} " + "  ".join(f"{k} {v:.1e}" for k, v in proof.worst.items()), flush=True)
            proofs.append(proof)
    return proofs


def tiny_name(family: str) -> str:
    """The first tiny model of a family."""
    for name in TINY:
        if tiny_config(name).model_type == family:
            return name
    raise SystemExit(f"there is no tiny model of the family {family!r}: add one to colonnade/testing/tiny.py")


def summary_table(proofs: list[Proof]) -> str:
    """One row a family: the worst over all layouts, and the traffic at tp 2."""
    rows = []
    for family in dict.fromkeys(p.family for p in proofs):
        own = [p for p in proofs if p.family == family]
        worst = [f"{max(p.worst[kind] for p in own):.0e}" for kind in KINDS]
        at_tp2 = next(p for p in own if p.layout == "tp 2")
        rows.append([f"`{family}`", f"`{at_tp2.model_class}`", *worst, traffic(at_tp2)])
    heads = ["family", "model", "loss", "gradient norm", "gradients", f"weights, {STEPS} steps", "all-reduces a step"]
    return f"{table(heads, rows)}\n\n{caption()}"


def layout_table(proofs: list[Proof]) -> str:
    """One row for each family and layout."""
    rows = [
        [f"`{p.family}`", p.layout, *(f"{p.worst[k]:.1e}" for k in KINDS), traffic(p), f"{p.over_dp:.2f}"]
        for p in proofs
    ]
    kinds = ["loss", "gradient norm", "gradients", f"weights, {STEPS} steps"]
    heads = ["family", "layout", *kinds, "messages a step", "moved over dp"]
    moved = (
        "Messages: all-reduces over tp, and what the first stage of a pipeline sends, one tensor for each micro-batch (and, "
        "where embedding and head are tied, its weights). “Moved over dp”: elements a step for each parameter of a rank, "
        "padding and the loss included."
    )
    return f"{table(heads, rows)}\n\n{caption()} {moved}"


def traffic(proof: Proof) -> str:
    """The all-reduces counted, against 4L + 2 and one for each weight of a head norm."""
    if proof.sends:
        return f"{proof.sends} sends" + (f", {proof.all_reduces} on tp" if proof.all_reduces else "")
    if proof.all_reduces == 0:
        return "0 on tp"
    extra = proof.head_norm_weights
    due = 4 * proof.blocks + 2 + extra
    sign = "=" if proof.all_reduces == due else "≠"
    return f"{proof.all_reduces} {sign} 4·{proof.blocks} + 2" + (f" + {extra} (head norms)" if extra else "")


def caption() -> str:
    """What the numbers are, and which versions they were found with."""
    tolerance = Tolerance()
    return (
        f"Relative differences from one process in fp32; each has to be at most {tolerance.gradient:.0e}. "
        f"Tiny models, vocabulary {VOCABULARY}, AdamW, clipping at {MAX_NORM:g}, layouts {'; '.join(LAYOUTS)}. "
        f"Found with colonnade {colonnade.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}, on the CPU with gloo. Computed by `make proof`."
    )


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# file: (name of the markers, table)
PLACES = {"README.md": ("summary", summary_table), "docs/proof.md": ("layouts", layout_table)}


def between(name: str) -> re.Pattern[str]:
    """The text between the two marker comments of a table."""
    begin = rf"<!-- proved models, {name}: written by scripts/proved_models.py -->\n"
    return re.compile(rf"({begin})(.*?)(<!-- end of proved models -->)", re.DOTALL)


def write(proofs: list[Proof]) -> None:
    """Put the tables into their files, all or none."""
    new = {
        file: replaced((ROOT / file).read_text(encoding="utf-8"), name, make(proofs), file)
        for file, (name, make) in PLACES.items()
    }
    for file, text in new.items():
        (ROOT / file).write_text(text, encoding="utf-8")
        print(f"{file}: written")


def replaced(text: str, name: str, content: str, file: str) -> str:
    """`text` with `content` between the markers."""
    new, count = between(name).subn(lambda found: f"{found[1]}\n{content}\n\n{found[3]}", text)
    if count != 1:
        raise SystemExit(f"{file} has {count} places for the table of proved models ({name}); it needs one")
    return new


def families_in(text: str, name: str) -> set[str]:
    """The families that a table lists."""
    found = between(name).search(text)
    return set(re.findall(r"^\| `([^`]+)`", found[2], re.MULTILINE)) if found else set()


def check() -> list[str]:
    """What is wrong with the tables in the files; an empty list where nothing is."""
    problems = []
    for file, (name, _) in PLACES.items():
        listed, known = families_in((ROOT / file).read_text(encoding="utf-8"), name), set(known_families())
        if listed != known:
            problems.append(
                f"{file} lists {sorted(listed)} as proved, and there are policies for {sorted(known)}: run `make proof`"
            )
    return problems


def main() -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="only compare the families in the tables with the policies"
    )
    if not parser.parse_args().check:
        write(prove_all())
    problems = check()
    print("\n".join(problems) or "the tables list every family that has a policy")
    return 1 if problems else 0


if __name__ == "__main__":
    import proved_models  # ranks find functions by the name of their module, which `__main__` is not

    sys.exit(proved_models.main())
