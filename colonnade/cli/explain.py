"""`colonnade explain`: arguments and printing. The explanation itself is made in `colonnade.tools.explain`."""

from __future__ import annotations

import argparse
import json
import sys

from colonnade.errors import UsageError
from colonnade.tools.explain.choice import find_config, load_policy
from colonnade.tools.explain.explanation import explain_config
from colonnade.tools.explain.text import plain_text, rich_tree
from colonnade.tools.train.source import quiet_inference, quiet_transformers

EXAMPLES = """\
examples:
  colonnade explain llama --tp 2                     a family, with tiny sizes
  colonnade explain ./my-model --tp 4                a local model: only its config.json is read
  colonnade explain ./my-model --tp 4 --json         the same for machines
  colonnade explain llama --policy mine.py:MyPolicy  what a policy of your own does

No weights are loaded and no processes started: the model is laid out as on rank 0, without memory for its weights.
A policy that is inferred, or your own, is tried on a tiny twin of the model, on ranks that are threads; the exit code is 1
where yours computes something else than one process. `colonnade verify` trains such a twin in processes, and says where.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    parser = subparsers.add_parser(
        "explain",
        help="show what tensor parallelism makes of each module of a model, and why",
        description="Show what tensor parallelism makes of each module of a model, why, and what it communicates.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, config.json, or model type (llama, gpt2, …)")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="processes that share each layer (default: 2)")
    parser.add_argument(
        "--policy", metavar="MODULE:CLASS", help="policy of your own: package.module:Class or file.py:Class"
    )
    parser.add_argument("--fused-norms", action="store_true", help="as enable_fused_normalization of the plugin")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not try the policy on a tiny twin of the model"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0; 1 where a policy of one's own computes something else.

    Raises:
        ConfigError, PolicyError: the model cannot be laid out so; `main` prints the text and returns 2.
    """
    if args.tp < 1:
        raise UsageError(f"--tp {args.tp}: a layer is shared by at least 1 process.")
    quiet_transformers()
    quiet_inference()
    policy = load_policy(args.policy)
    choice = find_config(args.model, args.tp)
    explanation = explain_config(choice.config, args.tp, policy, args.fused_norms, args.check)
    if args.json:
        print(json.dumps({"source": choice.source} | explanation.to_json(), indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_tree(explanation, choice.source))
    else:
        print(plain_text(explanation, choice.source))
    return 1 if explanation.fault else 0
