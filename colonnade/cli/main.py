"""`colonnade …`: finds the command and runs it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys

from colonnade.errors import ColonnadeError

# Command → the module that has `add_parser(subparsers)`, which sets `handler(args) -> exit code`; and its line of help.
# Only the module of the command that was asked for is imported: some need seconds.
COMMANDS = {
    "run": ("colonnade.cli.run", "start a script on several processes"),
    "train": ("colonnade.cli.train", "train a model on a text"),
    "explain": (
        "colonnade.cli.explain",
        "show what a layout makes of each module of a model, what its stages hold, and why",
    ),
    "verify": ("colonnade.cli.verify", "check that a layout computes what one process computes"),
    "ckpt": ("colonnade.cli.ckpt", "look at training checkpoints, check, compare and export them"),
    "schedule": ("colonnade.cli.schedule", "show who does what when in a pipeline, and how long ranks are idle"),
}


_EPILOG = """\
example:
  colonnade run --nproc-per-node 2 script.py

`colonnade COMMAND --help` explains a command."""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; by default those of this process.

    Returns:
        The exit code: 0 when all went well, 2 for a mistake in the call, 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv[0] if argv else None).parse_args(argv)
    try:
        return args.handler(args)
    except ColonnadeError as error:
        print(f"colonnade {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"colonnade {args.command}: interrupted.", file=sys.stderr)
        return 130


def _parser(asked: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colonnade",
        description="Train any unmodified Hugging Face model in parallel, with the numbers of one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"colonnade {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, line) in COMMANDS.items():
        if name == asked:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("colonnade")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


if __name__ == "__main__":
    sys.exit(main())
