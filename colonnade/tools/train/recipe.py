"""The training run itself, as every rank executes it. The whole recipe is `train_on_this_rank`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.device import current_device, synchronize
from colonnade.tools.train.corpus import TokenSequences
from colonnade.tools.train.curve import NO_MATPLOTLIB, can_draw, draw_curve
from colonnade.tools.train.evaluate import held_out_loss, write_sample
from colonnade.tools.train.options import OptimizerOptions, TrainOptions
from colonnade.tools.train.output import CURVE, METRICS, SUMMARY, TRACE, publish
from colonnade.tools.train.prepare import HELD_OUT_TOKENS, TOKENIZER, TRAIN_TOKENS, Plan
from colonnade.tools.train.report import Reporter, StepRecord, summary_lines
from colonnade.tools.train.source import build_model, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TOKENS = 12  # of the held-out text, where no prompt was given
LOWEST_RATE = 0.1  # of the learning rate, reached at the last step


def train_on_this_rank(work: Path) -> None:
    """Train as a work folder says, measure, and leave model, tokenizer, metrics and summary in the output folder.

    Every rank calls it, after `colonnade.launch_from_torch`.

    Args:
        work: what `prepare` returned.
    """
    from transformers import AutoTokenizer

    quiet_transformers()
    plan = Plan.read(work)
    options = plan.options
    tokenizer = AutoTokenizer.from_pretrained(work / TOKENIZER)
    train = TokenSequences.open(work / TRAIN_TOKENS, options.data.sequence)
    held_out = TokenSequences.open(work / HELD_OUT_TOKENS, options.data.sequence)

    plugin = make_plugin(options)
    native = build_model(plan.start, plan.from_scratch, options.seed)
    parameters = sum(p.numel() for p in native.parameters())
    adamw = make_optimizer(native, options.optimizer)
    share = options.optimizer.batch // options.layout.dp
    loader = plugin.prepare_dataloader(train, batch_size=share, shuffle=True, seed=options.seed, drop_last=True)
    booster = Booster(plugin=plugin)
    model: Any
    model, optimizer, _, loader, scheduler = booster.boost(
        native, adamw, None, loader, make_scheduler(adamw, options.optimizer)
    )

    def measure() -> float:
        return held_out_loss(booster, model, held_out, plan.held_out_rows, options.optimizer.batch)

    before = None if plan.from_scratch else measure()
    reporter = Reporter(options.output.folder / METRICS, options.optimizer.steps) if is_first_rank() else None
    batches = endless(loader)
    started = time.perf_counter()
    with reporter or nullcontext():
        for step in range(1, options.optimizer.steps + 1):
            record = train_step(step, started, batches, booster, model, optimizer, scheduler, options)
            if step == options.optimizer.steps and model.pipeline is not None:
                model.pipeline.save_trace(work / TRACE)
            loss = measure() if measures_after(step, options) else None
            if reporter is not None:
                reporter.step(record, loss)
    seconds = time.perf_counter() - started

    prompt = prompt_ids(options, tokenizer, held_out)
    sample = write_sample(booster, model, tokenizer, prompt, options.output.sample_tokens, options.seed)
    ready = work / "ready"
    booster.save_model(model, ready, shard=True)
    if reporter is not None:
        found = {"parameters": parameters, "held_out_loss_before": before, "seconds": seconds, "sample": sample}
        finish(plan, reporter, tokenizer, ready, found)
    if dist.is_initialized():
        dist.barrier()


def make_plugin(options: TrainOptions) -> HybridParallelPlugin:
    """The plugin for the layout the options ask for."""
    layout = options.layout
    return HybridParallelPlugin(
        tp_size=layout.tp,
        pp_size=layout.pp,
        zero_stage=layout.zero_stage,
        precision=layout.precision,
        max_norm=options.optimizer.max_norm,
        microbatch_size=layout.microbatch_size,
        num_microbatches=layout.microbatches,
        pp_style=layout.pp_style,
        check_cut=False,  # `prepare` has tried it, before the ranks were started
    )


def make_optimizer(model: torch.nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay, and leaves vectors (norms, biases) alone."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=options.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True
    )


def make_scheduler(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> LambdaLR:
    """Linear warm-up, then a cosine to a tenth of the learning rate at the last step."""

    def factor(step: int) -> float:
        """Share of the learning rate; `step` counts from 0."""
        if step < options.warmup:
            return (step + 1) / (options.warmup + 1)
        done = min(1.0, (step - options.warmup) / max(1, options.steps - 1 - options.warmup))
        return LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def measures_after(step: int, options: TrainOptions) -> bool:
    """Whether the held-out loss is measured after a step: at the end, and every `eval_every` steps where that is not 0."""
    every = options.eval_every
    return step == options.optimizer.steps or (every > 0 and step % every == 0)


def endless(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of this data-parallel rank, epoch after epoch, each in a new order."""
    device = current_device()
    while True:
        for batch in loader:
            yield {key: value.to(device) for key, value in batch.items()}


def train_step(
    step: int,
    started: float,
    batches: Iterator[dict[str, torch.Tensor]],
    booster: Booster,
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any,
    options: TrainOptions,
) -> StepRecord:
    """One step on one global batch, and what there is to say about it."""
    begin = time.perf_counter()
    rate = scheduler.get_last_lr()[0]
    loss = booster.execute_pipeline(batches, model, None, optimizer, return_loss=True)["loss"]
    optimizer.step()
    optimizer.zero_grad()
    scaler = optimizer.loss_scaler
    if scaler is None or math.isfinite(optimizer.grad_norm):  # else the step was left out, and the rate waits for it
        scheduler.step()
    synchronize()
    now = time.perf_counter()
    tokens = options.optimizer.batch * options.data.sequence
    return StepRecord(
        step=step,
        loss=float(loss),
        grad_norm=float(optimizer.grad_norm),
        lr=rate,
        tokens_per_s=tokens / (now - begin),
        elapsed=now - started,
        loss_scale=None if scaler is None else scaler.scale,
    )


def prompt_ids(options: TrainOptions, tokenizer: PreTrainedTokenizerBase, held_out: TokenSequences) -> torch.Tensor:
    """Ids [1, tokens] with which the sample begins."""
    if options.output.prompt:
        return tokenizer(options.output.prompt, return_tensors="pt")["input_ids"]
    return held_out[0]["input_ids"][None, :PROMPT_TOKENS]


def is_first_rank() -> bool:
    """Whether this process is the one that speaks and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def finish(
    plan: Plan, reporter: Reporter, tokenizer: PreTrainedTokenizerBase, ready: Path, found: dict[str, Any]
) -> None:
    """Put tokenizer, curve and summary beside the saved model, move all to the output folder, and print the summary."""
    options = plan.options
    layout, opt = options.layout, options.optimizer
    summary = {
        "held_out_loss": reporter.held_out[-1][1],
        "unigram_entropy": plan.unigram_entropy,
        "held_out_targets": len(plan.held_out_rows) * (options.data.sequence - 1),
        "train_loss": reporter.losses[-1],
        "steps_left_out": reporter.left_out,
        "held_out": reporter.held_out,
        "steps": opt.steps,
        "tokens_per_s": opt.steps * opt.batch * options.data.sequence / found["seconds"],
        "train_tokens": plan.train_tokens,
        "train_texts": plan.train_texts,
        "held_out_texts": plan.held_out_texts,
        "output": str(options.output.folder),
        **asdict(layout),
        **{key: value for key, value in found.items() if value is not None},
    }
    tokenizer.save_pretrained(ready)
    if (ready.parent / TRACE).exists():
        (ready.parent / TRACE).replace(ready / TRACE)
    (ready / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if can_draw():
        before = found["held_out_loss_before"]
        points = [*([] if before is None else [(0, before)]), *reporter.held_out]
        title = f"{layout}, {found['parameters']:,} parameters"
        draw_curve(ready / CURVE, reporter.losses, points, plan.unigram_entropy, title)
    publish(options.output.folder, ready, options.to_json())
    for line in summary_lines(summary):
        reporter.say(line)
    if not can_draw():
        reporter.say(NO_MATPLOTLIB)
