"""`colonnade schedule`: arguments, printing and the file. What is drawn is in `colonnade.tools.schedule`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from colonnade.errors import ConfigError, UsageError, explain
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import Timeline, simulate
from colonnade.tools.schedule.svg import draw_svg
from colonnade.tools.schedule.text import plain_text, rich_text
from colonnade.tools.schedule.trace import read_trace

EXAMPLES = """\
examples:
  colonnade schedule --pp 4 --microbatches 8                          1f1b, in the terminal
  colonnade schedule --pp 4 --microbatches 8 --style zbv --out a.svg  as a drawing too
  colonnade schedule --pp 4 --microbatches 8 --style interleaved --chunks 3 --costs F=1,B=1.1,W=0.9 --transfer 0.1
  colonnade schedule --trace trace.json --out run.svg                 what really happened, on a time axis in seconds

A row for each rank, time from left to right. An action is named by its kind and its micro-batch, with the stage in front
where a rank has several: 5F2 is the forward of micro-batch 2 on stage 5. Under it, how many activations each rank keeps.
A trace is written by `model.pipeline.save_trace("trace.json")` after a batch.
"""
STYLE = "1f1b"
COLUMNS = {False: 1000, True: 160}  # at most, in files and pipes; measured actions differ too much for all labels


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    parser = subparsers.add_parser(
        "schedule",
        help="show who does what when in a pipeline, and how long ranks are idle",
        description="Show who does what when in a pipeline, how long ranks are idle, and what they keep in memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pp", type=int, metavar="N", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="N", help="micro-batches of a step")
    parser.add_argument("--style", metavar="STYLE", help=f"{', '.join(STYLES)} (default: {STYLE})")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each rank (default: what the style needs)")
    parser.add_argument("--forward-only", action="store_true", help="without backward, as in evaluation")
    parser.add_argument(
        "--costs",
        metavar="F=1,B=1,W=1",
        help="how long a forward, the backward of the inputs and that of the weights take (default: 1 each)",
    )
    parser.add_argument("--transfer", type=float, metavar="T", help="how long a message takes (default: 0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="show this measured run instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw it into this file: FILE.svg")
    parser.set_defaults(handler=run_schedule)


def run_schedule(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0.

    Raises:
        ConfigError, UsageError: what was asked for cannot be; `main` prints the text and returns 2.
    """
    _check_out(args.out)
    measured = args.trace is not None
    timeline = _measured(args) if measured else _simulated(args)
    if sys.stdout.isatty():
        from rich.console import Console

        columns = shutil.get_terminal_size().columns
        Console().print(rich_text(timeline, measured, columns), no_wrap=True, crop=False)
    else:
        print(plain_text(timeline, measured, COLUMNS[measured]))
    if args.out is not None:
        try:
            args.out.write_text(draw_svg(timeline, measured), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {args.out}: {error.strerror or error}.") from error
        print(f"drawing: {args.out}")
    return 0


def _measured(args: argparse.Namespace) -> Timeline:
    simulated = ("pp", "microbatches", "style", "chunks", "costs", "transfer", "forward_only")
    given = ["--" + name.replace("_", "-") for name in simulated if getattr(args, name) not in (None, False)]
    if given:
        rows = [("rule", "all of that is in the trace"), ("try", f"colonnade schedule --trace {args.trace}")]
        raise UsageError(explain(f"--trace together with {', '.join(given)}.", rows))
    return read_trace(args.trace)


def _simulated(args: argparse.Namespace) -> Timeline:
    missing = [f"--{name}" for name in ("pp", "microbatches") if getattr(args, name) is None]
    if missing:
        rows = [("needs", "--pp and --microbatches, or --trace FILE"), ("try", "--pp 4 --microbatches 8")]
        raise UsageError(explain(f"{' and '.join(missing)}: not given.", rows))
    small = [f"--{name} {getattr(args, name)}" for name in ("pp", "microbatches") if getattr(args, name) < 1]
    if small:
        raise UsageError(f"{' and '.join(small)}: whole numbers of at least 1.")
    try:
        schedule = make_schedule(args.style or STYLE, args.pp, args.microbatches, args.chunks, args.forward_only)
    except ConfigError as error:
        raise UsageError(f"--style, --chunks: {error}") from error
    return simulate(schedule, _costs(args.costs), args.transfer or 0)


def _costs(given: str | None) -> dict[str | tuple[str, int], float]:
    """Kind → duration, from F=1,B=1,W=1."""
    costs: dict[str | tuple[str, int], float] = {}
    for part in given.split(",") if given else []:
        kind, _, value = part.partition("=")
        try:
            costs[kind.strip()] = float(value)
        except ValueError:
            kind = ""
        if kind.strip() not in ("F", "B", "W") or not 0 <= costs[kind.strip()] < float("inf"):
            rows = [("needs", "durations from 0 of F, B or W"), ("try", "--costs F=1,B=1.2,W=0.8")]
            raise UsageError(explain(f"--costs {given}: {part!r} is no duration of a kind of action.", rows))
    return costs


def _check_out(file: Path | None) -> None:
    if file is None:
        return
    if file.suffix.lower() != ".svg":
        rows = [("needs", "a name that ends in .svg"), ("try", f"--out {file.with_suffix('.svg')}")]
        raise UsageError(explain(f"--out {file}: drawings are SVG.", rows))
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {file.absolute().parent}.")
