"""`colonnade ckpt …`: arguments and printing. What is done is in `colonnade.tools.ckpt`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colonnade.tools.ckpt.diff import compare, diff_lines
from colonnade.tools.ckpt.export import FORMATS, export
from colonnade.tools.ckpt.inspect import inspect_lines
from colonnade.tools.ckpt.reshard import reshard
from colonnade.tools.ckpt.source import Source
from colonnade.tools.ckpt.verify import verify
from colonnade.tools.explain.numbers import short_bytes

EXAMPLES = """\
examples:
  colonnade ckpt inspect run                            what a folder of checkpoints holds
  colonnade ckpt inspect run --tensors '*layers.0.*'    with some of its tensors
  colonnade ckpt verify run --all                       read every byte of all of them
  colonnade ckpt diff run/step-00000100 other/step-00000100
  colonnade ckpt export run model --dtype bf16          a folder that transformers loads
  colonnade ckpt reshard run other --ranks 8            never needed, and says so

RUN is a folder that booster.save writes to, whose latest checkpoint is meant, or the folder of one step.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "ckpt", help="look at training checkpoints, check, compare and export them",
        description="Look at training checkpoints, check, compare and export them. No processes are started.",
        epilog=EXAMPLES, formatter_class=raw,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(
        name: str, text: str, example: str, handler: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example:\n  {example}", formatter_class=raw)  # fmt: skip
        made.set_defaults(handler=handler)
        return made

    run: dict[str, Any] = {"metavar": "RUN", "help": "folder of checkpoints, or of one"}
    look = action("inspect", "show what a checkpoint holds", "colonnade ckpt inspect run", run_inspect)
    look.add_argument("path", **run)
    look.add_argument(
        "--tensors", nargs="?", const="*", metavar="PATTERN", help="list tensors, all or those that match"
    )
    check = action("verify", "read every byte and compare check sums", "colonnade ckpt verify run --all", run_verify)
    check.add_argument("path", **run)
    check.add_argument("--all", action="store_true", help="all checkpoints of the folder")
    differ = action("diff", "compare two checkpoints, of whatever layouts, or folders of the hub", "colonnade ckpt diff run/step-00000100 other/step-00000100", run_diff)  # fmt: skip
    differ.add_argument("first", metavar="A", help="a checkpoint, or a folder in the format of the hub")
    differ.add_argument("second", metavar="B", help="another one")
    differ.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="relative difference that counts as none (default: 0, the same numbers)")  # fmt: skip
    write = action("export", "write a folder that transformers loads", "colonnade ckpt export run model --dtype bf16", run_export)  # fmt: skip
    write.add_argument("path", **run)
    write.add_argument("out", type=Path, metavar="OUT", help="folder to write; new, or one with an earlier model")
    write.add_argument("--dtype", choices=FORMATS, help="format of the weights (default: that of the training)")
    write.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a file (default: 5GB)")
    write.add_argument("--tokenizer", type=Path, metavar="DIR", help="copy the tokenizer's files from this folder")
    again = action("reshard", "rewrite a checkpoint as another number of ranks would have; never needed", "colonnade ckpt reshard run other --ranks 8 --anyway", run_reshard)  # fmt: skip
    again.add_argument("path", **run)
    again.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    again.add_argument("--ranks", type=int, required=True, metavar="N", help="number of files")
    again.add_argument("--anyway", action="store_true", help="do it")


def run_inspect(args: argparse.Namespace) -> int:
    """Returns 0."""
    for line in inspect_lines(args.path, args.tensors):
        print(line)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Returns 0 where all is well, 1 where something is damaged."""
    with _progress("reading") as told:
        problems = verify(args.path, args.all, told)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "every byte is what was written")
    return 1 if problems else 0


def run_diff(args: argparse.Namespace) -> int:
    """Returns 0 where they are the same, 1 where they differ."""
    found = compare(Source(args.first), Source(args.second), args.tolerance)
    for line in diff_lines(found, args.first, args.second):
        print(line)
    return 0 if found.is_none else 1


def run_export(args: argparse.Namespace) -> int:
    """Returns 0."""
    with _progress("writing") as told:
        plan = export(
            args.path, args.out, dtype=args.dtype, size_per_shard=args.max_shard_size, tokenizer=args.tokenizer, told=told
        )  # fmt: skip
    print(
        f"{args.out}: {plan.total_parameters:,} parameters, {short_bytes(plan.total_size)} in {len(plan.files)} files"
    )
    return 0


def run_reshard(args: argparse.Namespace) -> int:
    """Returns 0."""
    if not args.anyway:
        print("Not needed: booster.load reads a checkpoint in any layout and on any number of ranks. --anyway does it.")
        return 0
    reshard(args.path, args.out, args.ranks)
    print(f"{args.out}: written as {args.ranks} files")
    return 0


@contextlib.contextmanager
def _progress(verb: str) -> Iterator[Callable[[str], None]]:
    """Shows the file in hand, where someone looks."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{verb} …") as status:
        yield lambda name: status.update(f"{verb} {name}")
