"""`colonnade train`: arguments and printing. The training itself is in `colonnade.tools.train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch.distributed as dist

from colonnade.cli.run import start_workers
from colonnade.cluster.launch import launch_from_torch
from colonnade.errors import ColonnadeError, CommunicationError
from colonnade.pipeline.schedule import STYLES
from colonnade.tools.train.curve import NO_MATPLOTLIB, can_draw
from colonnade.tools.train.options import (
    PRECISIONS,
    DataOptions,
    LayoutOptions,
    ModelOptions,
    OptimizerOptions,
    OutputOptions,
    TrainOptions,
    layout_sizes,
)
from colonnade.tools.train.output import remove_work
from colonnade.tools.train.prepare import prepare
from colonnade.tools.train.presets import PRESETS
from colonnade.tools.train.recipe import is_first_rank, train_on_this_rank

EXAMPLES = """\
examples:
  colonnade train --preset tiny --output out                        the standard library's sources, one process
  colonnade train --preset tiny --tp 2 --dp 2 --output out          the same training in four processes
  colonnade train --preset tiny --dp 2 --zero-stage 1 --output out  two processes, each with half of the optimizer's states
  colonnade train --preset tiny --pp 2 --microbatches 8 --output out two processes, each with half of the layers
  colonnade train --model ./my-model --data texts/ --output tuned   fine-tune a local model on a folder of text

The output folder loads in plain transformers: AutoModelForCausalLM.from_pretrained("out"). It also holds metrics.jsonl,
summary.json and the loss curve, and of a pipeline its last step's trace, which `colonnade schedule --trace` draws. Under torchrun or `colonnade run` the processes are the ones that are there already; on
several machines the output folder has to be on a file system that they share.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command with the parser of `colonnade`."""
    parser = subparsers.add_parser(
        "train",
        help="train or fine-tune a language model on local text",
        description="Train a causal language model from scratch, or fine-tune a local one, on local text, in parallel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser)
    _add_layout(parser)
    _add_optimizer(parser)
    parser.set_defaults(handler=run_train)


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model, text and output")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--model", type=Path, metavar="PATH", help="local model folder, .gguf file, or folder with one, to fine-tune"
    )
    which.add_argument(
        "--preset", metavar="NAME", help=f"Llama of this size, from scratch: {', '.join(PRESETS)} (default: tiny)"
    )
    data = DataOptions()
    group.add_argument(
        "--data", type=Path, metavar="PATH", help="text file or folder (default: sources of Python's standard library)"
    )
    group.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the results; new or empty")
    group.add_argument("--overwrite", action="store_true", help="replace an earlier output of this command in DIR")
    _number(group, "--vocab-size", int, ModelOptions().vocab_size, "tokens of the vocabulary learned for a preset")
    _number(group, "--seq", int, data.sequence, "tokens in a sequence")
    _number(group, "--held-out", float, data.held_out_percent, "percent of the text to measure on instead of training")
    _number(group, "--eval-tokens", int, data.eval_tokens, "held-out tokens to measure on at most")
    _number(group, "--eval-every", int, 50, "steps between two measurements; 0 measures at the end only")
    group.add_argument("--prompt", metavar="TEXT", help="beginning of the sample (default: that of the held-out text)")
    _number(group, "--sample-tokens", int, 48, "tokens of the sample")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    group.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: tp × pp × dp)")
    _number(group, "--tp", int, 1, "processes that share each layer")
    _number(group, "--pp", int, 1, "processes of a pipeline, which hold consecutive layers each")
    group.add_argument(
        "--pp-style",
        default=LayoutOptions.pp_style,
        metavar="NAME",
        help=f"its schedule: {', '.join(STYLES)} (default: {LayoutOptions.pp_style})",
    )
    group.add_argument("--dp", type=int, metavar="N", help="processes that share each batch (default: fill --nproc)")
    group.add_argument(
        "--microbatch-size", type=int, metavar="N", help="sequences in a forward pass (default: all of a process)"
    )
    group.add_argument(
        "--microbatches", type=int, metavar="N", help="forward passes of a step instead (default with --pp: twice --pp)"
    )
    group.add_argument(
        "--zero-stage",
        type=int,
        default=0,
        metavar="N",
        help="deal out over --dp: 1 optimizer states, 2 gradients too, 0 nothing (default: 0)",
    )
    group.add_argument(
        "--precision",
        default="fp32",
        metavar="NAME",
        help=f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}, in which the loss is scaled (default: fp32)",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("optimizer"), OptimizerOptions()
    _number(group, "--steps", int, default.steps, "optimizer steps")
    _number(group, "--batch", int, default.batch, "sequences in the global batch, the same whatever the layout")
    group.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help=f"highest learning rate (default: {default.learning_rate:g}; {default.fine_tuning_rate:g} with --model)",
    )
    _number(group, "--warmup", int, default.warmup, "steps in which the learning rate rises")
    _number(group, "--weight-decay", float, default.weight_decay, "decay of the matrices")
    _number(group, "--max-norm", float, default.max_norm, "norm the gradient is clipped to; 0 does not clip")
    _number(group, "--seed", int, 1024, "of the initial weights, the order of the data and the sample")


def _number(group: argparse._ArgumentGroup, name: str, kind: type, default: float, text: str) -> None:
    metavar = "N" if kind is int else "X"
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default:g})")


def options_from(args: argparse.Namespace, nproc: int | None) -> TrainOptions:
    """The options of a run from parsed arguments.

    Args:
        nproc: number of processes where it is given; None leaves it to tp × pp × dp.

    Raises:
        ConfigError: for values that cannot work.
    """
    preset = args.preset if args.preset is not None or args.model is not None else "tiny"
    tp, dp = layout_sizes(tp=args.tp, dp=args.dp, nproc=nproc, pp=args.pp)
    rate = args.lr
    if rate is None:
        rate = OptimizerOptions.fine_tuning_rate if args.model is not None else OptimizerOptions.learning_rate
    return TrainOptions(
        output=OutputOptions(args.output, args.overwrite, args.prompt, args.sample_tokens),
        model=ModelOptions(args.model, preset, args.vocab_size),
        data=DataOptions(args.data, args.seq, args.held_out, args.eval_tokens),
        layout=LayoutOptions(
            tp=tp,
            dp=dp,
            microbatch_size=args.microbatch_size,
            precision=args.precision,
            zero_stage=args.zero_stage,
            pp=args.pp,
            pp_style=args.pp_style,
            microbatches=args.microbatches,
        ),
        optimizer=OptimizerOptions(args.steps, args.batch, rate, args.warmup, args.weight_decay, args.max_norm),
        seed=args.seed,
        eval_every=args.eval_every,
    )


def run_train(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0, or that of the worker that failed.

    Raises:
        ConfigError, PolicyError: for arguments that cannot work, before a process is started.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_as_worker(args)
    options = options_from(args, args.nproc)
    if not can_draw():
        _say(NO_MATPLOTLIB)
    work = prepare(options, _say)
    try:
        ranks = options.layout.ranks
        _say(f"starting {ranks} process{'es' * (ranks != 1)}: {options.layout}")
        return start_workers(ranks, [str(work)], module="colonnade.tools.train")
    finally:
        remove_work(options.output.folder)


def _run_as_worker(args: argparse.Namespace) -> int:
    """Take part in a job whose processes somebody else has started; rank 0 prepares for all."""
    options = options_from(args, int(os.environ["WORLD_SIZE"]))
    launch_from_torch(seed=options.seed)
    outcome: list[Path | ColonnadeError | None] = [None]
    if is_first_rank():
        try:
            outcome = [prepare(options, _say)]
        except ColonnadeError as error:  # raised below, on every rank
            outcome = [error]
    dist.broadcast_object_list(outcome)
    work = outcome[0]
    if isinstance(work, ColonnadeError):
        raise work
    if work is None:
        raise CommunicationError("rank 0 has sent no work folder to the other ranks.")
    try:
        train_on_this_rank(work)
    finally:
        if is_first_rank():
            remove_work(options.output.folder)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
