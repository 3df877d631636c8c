"""Writes docs/models.md: what happens to every causal language model of transformers, to some others and to variants of
their configurations at tp 2, at tp 4 and at pp 2.

    python scripts/model_table.py                        # a tiny twin of each on two and on four ranks; most of an hour
    python scripts/model_table.py --resume rows.json     # the same; what is in the file is not looked at again
    python scripts/model_table.py --only gemma2,olmo2 --tp 2     # some of them, printed and not written
    python scripts/model_table.py --only gemma2,olmo2 --pp       # only cut into stages
    python scripts/model_table.py --section variants     # causal, others, variants, or "without files"
    python scripts/model_table.py --check                # only: does the page list exactly what there is?

A model that raises or hangs gets a row that says so, and the others go on. The page is written from what was found, whatever
it is; the exit code is 1 where a policy was accepted and the numbers are not those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import model_cut
from model_cases import CAUSAL, FORCED, OTHERS, VARIANTS, Case, all_cases
from model_look import DIFFERENT, FAILS, Row, brief, look_at
from model_page import PP, Found, Size, failure_lines, page, rows_text, summary, variant_name

from colonnade.shardformer.registry import known_families
from colonnade.testing.ranks import RankFailure, close_pools, run_on_ranks

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SIZES = (2, 4)
TIMEOUT_S = 240
CALLS_PER_LAUNCH = 20  # each call leaves process groups behind


def wanted() -> list[Case]:
    """Every row of the page."""
    return all_cases(frozenset(known_families()))


def look(case: Case, size: Size) -> Row:
    """A row; what raises on one rank, dies or hangs, ends its launch and not the others."""
    started = time.monotonic()
    ranks, examine = (1, model_cut.cut) if size == PP else (int(size), look_at)
    try:
        return run_on_ranks(ranks, examine, case, timeout_s=TIMEOUT_S)[0]
    except RankFailure as failure:
        lines = [line for line in next(iter(failure.reports.values())).splitlines() if line.strip()]
        late = "did not return" in str(failure).partition("\n")[0]
        remark = f"did not end within {TIMEOUT_S} s" if late else brief(lines[-1])
        return Row(FAILS, remark=remark, seconds=time.monotonic() - started)


def look_at_all(cases: Sequence[Case], sizes: Sequence[Size], kept: Path | None) -> list[Found]:
    """What is found for each case, told as it is found.

    Args:
        kept: a file with rows found earlier, which gets the new ones too.
    """
    known = read_rows(kept)
    of_case = [
        (case, [s for s in sizes if s != PP or case.section != FORCED]) for case in cases
    ]  # a cut asks for no policy
    total, number, new = sum(len(own) for _, own in of_case), 0, 0
    found = []
    for case, own_sizes in of_case:
        rows: dict[Size, Row] = {}
        for size in own_sizes:
            number += 1
            key = " ".join((layout(size), *case.key))
            if key not in known:
                if new % CALLS_PER_LAUNCH == 0:
                    close_pools()
                new += 1
                known[key] = look(case, size)
                if kept is not None:
                    kept.write_text(json.dumps({k: asdict(row) for k, row in known.items()}), encoding="utf-8")
            rows[size] = known[key]
            print(f"[{number:>3}/{total}] {progress(case, size, rows[size])}", flush=True)
        if rows:
            found.append(Found(case, rows))
    return found


def layout(size: Size) -> str:
    """A size in words."""
    return f"pp {model_cut.STAGES}" if size == PP else f"tp {size}"


def progress(case: Case, size: Size, row: Row) -> str:
    """A row as it is told while the others are being looked at."""
    name = f"{case.family} {case.title}" if case.title else case.family
    worst = f"{max(row.worst.values()):.0e}" if row.worst else ""
    return f"{layout(size)} {row.seconds:5.1f} s  {name:<34} {case.model:<32} {row.verdict:<14} {worst:<6} {row.remark}"


def read_rows(path: Path | None) -> dict[str, Row]:
    """Rows that were kept in a file."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {key: Row(**fields | {"regions": tuple(fields["regions"])}) for key, fields in rows.items()}


def check(text: str) -> list[str]:
    """What is wrong with a page; an empty list where it lists exactly what there is to list."""
    problems = []
    cases = wanted()
    listed = set(re.findall(r"^\| `([^`]+)` \| `[^`]+` \|", text, re.MULTILINE))
    expected = {c.family for c in cases if c.section in (CAUSAL, OTHERS)}
    titles = set(re.findall(r"^\| (`[^`]+`: [^|]+) \|", text, re.MULTILINE))
    variants = {variant_name(c) for c in cases if c.section in (VARIANTS, FORCED)}
    for what, there, here in (("", listed, expected), ("the variant ", titles, variants)):
        for said_of, names in (("lacks", here - there), ("lists, and there is not,", there - here)):
            if names:
                known = ", ".join(sorted(names)).replace("`", "")
                problems.append(f"docs/models.md {said_of} {what}{known}: run `make models`")
    return problems


def chosen(cases: Iterable[Case], only: str, section: str) -> list[Case]:
    """The cases that were asked for: by family, class or title, and by section."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    return [
        case
        for case in cases
        if (not names or names & {case.family, case.model, case.title}) and section in ("", case.section)
    ]


def main() -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare what the page lists with what there is")
    parser.add_argument(
        "--only", default="", metavar="NAME,NAME", help="families, classes or titles; nothing is written"
    )
    parser.add_argument("--section", default="", choices=(CAUSAL, FORCED, OTHERS, VARIANTS), help="nothing is written")
    sizes_of = parser.add_mutually_exclusive_group()
    sizes_of.add_argument("--tp", type=int, choices=SIZES, help="one size of the axis; nothing is written")
    sizes_of.add_argument("--pp", action="store_true", help="only cut into stages; nothing is written")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep rows in this file, and take those in it from it"
    )
    args = parser.parse_args()
    if args.check:
        problems = check(PAGE.read_text(encoding="utf-8"))
        print("\n".join(problems) or "the page lists every model")
        return 1 if problems else 0
    started = time.monotonic()
    sizes: Sequence[Size] = (args.tp,) if args.tp else (PP,) if args.pp else (*SIZES, PP)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COLONNADE_CACHE"] = folder  # what is found is found now, and not an earlier day
        found = look_at_all(chosen(wanted(), args.only, args.section), sizes, args.resume)
    if args.only or args.section or args.tp or args.pp:
        print(rows_text(found))
    else:
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"{PAGE}: written")
    print(failure_lines(found))
    print(summary(found))
    print(f"{time.monotonic() - started:.0f} s")
    wrong = [f for f in found if any(row.verdict in (DIFFERENT, FAILS) for row in f.rows.values())]
    if wrong:
        print(f"not the numbers of one process: {', '.join(f.name for f in wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
