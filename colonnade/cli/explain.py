"""`colonnade explain`: arguments and printing. The explanation itself is made in `colonnade.tools.explain`."""

from __future__ import annotations

import argparse
import json
import sys

from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.errors import UsageError
from colonnade.pipeline.schedule import STYLES
from colonnade.tools.explain.choice import find_config, load_policy
from colonnade.tools.explain.explanation import explain_config
from colonnade.tools.explain.stages import PipelineChoice
from colonnade.tools.explain.text import plain_text, rich_tree
from colonnade.tools.train.source import quiet_inference, quiet_transformers

EXAMPLES = """\
examples:
  colonnade explain llama --tp 2                     a family, with tiny sizes
  colonnade explain ./my-model --tp 4                a local model: only its config.json is read
  colonnade explain ./my-model --tp 4 --json         the same for machines
  colonnade explain llama --policy mine.py:MyPolicy  what a policy of your own does
  colonnade explain ./my-model --pp 4                what each stage of a pipeline holds; with --tp 2, which shares each stage
  colonnade explain ./my-model --pp 2 --pp-style interleaved --chunks 2 --microbatches 8

No weights are loaded and no processes started: the model is laid out as on rank 0, without memory for its weights.
A policy that is inferred, or your own, is tried on a tiny twin of the model, on ranks that are threads; the exit code is 1
where yours computes something else than one process. `colonnade verify` trains such a twin in processes, and says where.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    parser = subparsers.add_parser(
        "explain",
        help="show what a layout makes of each module of a model, what its stages hold, and why",
        description="Show what tensor parallelism makes of each module of a model, why, and what it communicates; and what each\n"
        "stage of a pipeline holds.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, config.json, or model type (llama, gpt2, …)")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="processes that share each layer (default: 2, or 1 where --pp is given)"
    )
    parser.add_argument(
        "--policy", metavar="MODULE:CLASS", help="policy of your own: package.module:Class or file.py:Class"
    )
    parser.add_argument("--fused-norms", action="store_true", help="as enable_fused_normalization of the plugin")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not try the policy on a tiny twin of the model"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--pp", type=int, default=1, metavar="N", help="processes that hold stages of the model (default: 1)"
    )
    group.add_argument("--pp-style", metavar="NAME", help=f"schedule: {', '.join(STYLES)} (default: 1f1b)")
    group.add_argument(
        "--chunks", type=int, metavar="N", help="stages of each process (default: what the schedule needs)"
    )
    group.add_argument(
        "--layers-per-stage", metavar="N,N,…", help="blocks of each stage (default: as evenly as their costs allow)"
    )
    group.add_argument("--microbatches", type=int, metavar="N", help="micro-batches of a step (default: twice --pp)")
    parser.set_defaults(handler=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0; 1 where a policy of one's own computes something else.

    Raises:
        ConfigError, PolicyError: the model cannot be laid out so; `main` prints the text and returns 2.
    """
    pipeline = _pipeline(args)
    tp = args.tp if args.tp is not None else 2 if pipeline is None else 1
    if tp < 1:
        raise UsageError(f"--tp {tp}: a layer is shared by at least 1 process.")
    quiet_transformers()
    quiet_inference()
    policy = load_policy(args.policy)
    choice = find_config(args.model, tp, pipeline)
    explanation = explain_config(choice.config, tp, policy, args.fused_norms, args.check, pipeline)
    if args.json:
        print(json.dumps({"source": choice.source} | explanation.to_json(), indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_tree(explanation, choice.source))
    else:
        print(plain_text(explanation, choice.source))
    return 1 if explanation.fault else 0


def _pipeline(args: argparse.Namespace) -> PipelineChoice | None:
    """The pipeline that is asked for; None for none."""
    given = {
        "--pp-style": args.pp_style,
        "--chunks": args.chunks,
        "--layers-per-stage": args.layers_per_stage,
        "--microbatches": args.microbatches,
    }
    if args.pp == 1:
        if alone := [f"{name} {value}" for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(alone)}: needs --pp 2 or more, as it is about the stages of a pipeline.")
        return None
    options = PipelineOptions(args.pp_style or "1f1b", args.chunks, _numbers(args.layers_per_stage))
    return PipelineChoice(args.pp, options, args.microbatches)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers-per-stage {text}: whole numbers with commas between them, such as 3,3,2.") from None
