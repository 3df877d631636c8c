"""Folders of the hub for every model of docs/models.md: what is saved loads in transformers, what transformers saves loads here.

    python scripts/model_hub.py                  # a tiny model of each, in one process; some minutes
    python scripts/model_hub.py --only mixtral,gpt2
    python scripts/model_hub.py --out rows.json  # what was found, as JSON too

For each: transformers' own way there and back first. Then a boosted model is saved, and `from_pretrained` has to find every key,
no other, and the same bits; and a folder of `save_pretrained` is loaded into a boosted model of other weights, which has to have
the same bits then; and a training checkpoint of it is exported, with the same demands. The exit code is 1 where one differs that
transformers itself can do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from model_cases import FORCED, Case, all_cases
from model_look import Twin, brief, quiet

from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin
from colonnade.tools.ckpt.export import export

SAME, UNBUILT, THEIRS = "same", "cannot be built", "transformers itself"


def look(case: Case) -> str:
    """What comes of one case, in words."""
    with quiet():
        try:
            first, second = (Twin(case, 1).make() for _ in range(2))
        except Exception as error:  # a family's own code
            return f"{UNBUILT}: {brief(str(error))}"
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).to(parameter.dtype)
                )
        with tempfile.TemporaryDirectory() as folder:
            try:
                first.save_pretrained(f"{folder}/theirs")
                wrong = different(first, f"{folder}/theirs")
            except Exception as error:  # a family's own code
                wrong = brief(str(error))
            if wrong:
                return f"{THEIRS}: {wrong}"
            return ours(first, second, Path(folder)) or SAME


def ours(first: Any, second: Any, folder: Path) -> str:
    """What differs; empty where nothing does."""
    wanted = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    try:
        boosted, *_ = booster.boost(second)
        booster.load_model(boosted, folder / "theirs")
        unlike = [name for name, tensor in second.state_dict().items() if not torch.equal(tensor, wanted[name])]
        if unlike:
            return f"loaded: {unlike[0]} and {len(unlike) - 1} others differ"
        booster.save_model(boosted, folder / "ours", size_per_shard="100KB")
        if wrong := different(first, folder / "ours"):
            return f"saved: {wrong}"
        booster.save(folder / "training", boosted, step=1)
        export(folder / "training", folder / "export")
        if wrong := different(first, folder / "export"):
            return f"exported: {wrong}"
    except Exception as error:  # whatever goes wrong is what is looked for
        return f"fails: {type(error).__name__}: {brief(str(error))}"
    return ""


def different(model: Any, folder: Any) -> str:
    """How the model of a folder, as transformers loads it, differs from one in memory."""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            return f"{kind}: {sorted(map(str, info[kind]))[0]}"
    state = loaded.state_dict()
    unlike = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    return f"{unlike[0]} and {len(unlike) - 1} others differ" if unlike else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--part", default="0/1", help="which of how many equal parts of the list")
    parser.add_argument("--out", type=Path, help="file for what was found")
    args = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, args.part.split("/"))
    cases = [c for c in all_cases(frozenset()) if c.section != FORCED and c.family != "own"]
    cases = [c for c in cases if not args.only or c.family in args.only.split(",")][part::parts]
    found: dict[str, str] = {}
    for case in cases:
        started = time.monotonic()
        found[" ".join(case.key)] = verdict = look(case)
        print(f"{' '.join(case.key):<70} {time.monotonic() - started:5.1f} s  {verdict}", flush=True)
    counts = {kind: sum(v.startswith(kind) for v in found.values()) for kind in (SAME, UNBUILT, THEIRS)}
    print(f"{len(found)} looked at: {counts}, {len(found) - sum(counts.values())} others")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if len(found) > sum(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
