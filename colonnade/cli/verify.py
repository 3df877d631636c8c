"""`colonnade verify`: arguments and printing. The check itself is in `colonnade.tools.verify`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from colonnade.cli.run import start_workers
from colonnade.errors import UsageError
from colonnade.pipeline.schedule import STYLES
from colonnade.tools.explain.choice import find_config
from colonnade.tools.train.source import quiet_inference, quiet_transformers
from colonnade.tools.verify.certificate import SAME, certificate_text, make_certificate, write_certificate
from colonnade.tools.verify.job import Layout, prepare

CANNOT_RUN = 2
EXAMPLES = """\
examples:
  colonnade verify llama --tp 2                                   a family, with tiny sizes
  colonnade verify ./my-model --tp 2 --dp 2 --certificate c.json  the structure of a local model; only its config is read
  colonnade verify llama --tp 2 --dp 2 --zero-stage 1             with the optimizer's states dealt out over --dp
  colonnade verify llama --tp 2 --policy mine.py:MyPolicy         a policy of your own
  colonnade verify gemma2 --pp 2                                  a pipeline of two stages; also with --tp, --dp

A tiny twin with the same structure (heads and key/value heads, biases, norms, tied weights, layer kinds, an odd vocabulary)
is trained in one process and in tp × pp × dp processes, and compared: losses, every gradient, gradient norms, weights after
some steps of AdamW, that replicas hold the same bits, and the logits of the saved model in plain transformers. Where they
differ, the first module that does is named.

The exit code is 0 where the numbers are the same, 1 where they differ, and 2 where it could not be found out.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    parser = subparsers.add_parser(
        "verify",
        help="check that a layout computes what one process computes",
        description="Check that a layout computes what one process computes, on a tiny twin of the model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, config.json, or model type (llama, gpt2, …)")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="processes that share each layer (default: 2, or 1 where --pp is given)"
    )
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="processes that share each batch (default: 1)")
    parser.add_argument(
        "--zero-stage",
        type=int,
        default=0,
        metavar="N",
        help="deal out over --dp: 1 optimizer states, 2 gradients too, 0 nothing (default: 0)",
    )
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="processes of a pipeline (default: 1)")
    parser.add_argument(
        "--pp-style", default="1f1b", metavar="NAME", help=f"its schedule: {', '.join(STYLES)} (default: 1f1b)"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="N", help="stages of each process (default: what the schedule needs)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps to compare (default: 5)")
    parser.add_argument(
        "--policy", metavar="MODULE:CLASS", help="policy of your own: package.module:Class or file.py:Class"
    )
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write the outcome to this file, as JSON")
    parser.set_defaults(handler=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0 same, 1 different, 2 cannot be run.

    Raises:
        ConfigError, PolicyError, UsageError: before a process is started; `main` prints the text and returns 2.
    """
    quiet_transformers()
    quiet_inference()
    if args.pp == 1 and args.chunks is not None:
        raise UsageError(
            f"--chunks {args.chunks} needs --pp 2 or more: it counts the stages of a pipeline's processes."
        )
    tp = args.tp if args.tp is not None else 2 if args.pp == 1 else 1
    layout = Layout(tp, args.dp, args.policy, args.zero_stage, args.pp, args.pp_style, args.chunks)
    choice = find_config(args.model, layout.tp, layout.pipeline)
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as folder:
        job = prepare(choice, layout, args.steps, Path(folder))
        if start_workers(layout.ranks, [folder], module="colonnade.tools.verify") != 0:
            print("colonnade verify: it could not be run to its end; the reason is above.", file=sys.stderr)
            return CANNOT_RUN
        certificate = make_certificate(job)
    print(certificate_text(certificate), flush=True)
    if args.certificate is not None:
        write_certificate(certificate, args.certificate)
        print(f"certificate: {args.certificate}")
    return 0 if certificate["verdict"] == SAME else 1
