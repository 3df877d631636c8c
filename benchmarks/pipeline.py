"""Times a step of a pipeline of two stages on two ranks, on CPU, in interleaved rounds. One command:

    python benchmarks/pipeline.py [--rounds 15]

Two processes with one thread each run forward and backward of one batch of eight micro-batches through the same Llama of 8
blocks, cut in the same places, in fp32, without the optimizer's step:

    1F1B, ZBV, …                ours, by execute_pipeline
    torch 1F1B, torch ZBV       torch's PipelineStage and schedule around the same stages of the same cut
    compute alone               what each rank has to compute, one micro-batch after the other, without messages

The ideal of a schedule is the compute alone times (1 + its bubble): for 1F1B (p − 1)/m, for ZBV 0.

A round runs each once, in alternating order; figures are medians over rounds, of times and of per-round ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from paired import Step, Target, about, measure, report, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cli.run import start_workers
from colonnade.pipeline.cut import Cut, cut_chain
from colonnade.pipeline.stage import StagedModel, as_input, hollow
from colonnade.shardformer.inference.chain import chain_of, units_of

RANKS, MICROBATCHES, ROWS, TOKENS = 2, 8, 2, 128
BLOCKS, HIDDEN, VOCABULARY = 8, 256, 512
ALONE = "compute alone"
TARGETS = [
    Target("1F1B", ALONE, "at most", 1.1 * (1 + (RANKS - 1) / MICROBATCHES)),
    Target("ZBV", ALONE, "at most", 1.1),
    Target("1F1B", "torch 1F1B", "at most", 1.0),
    Target("ZBV", "torch ZBV", "at most", 0.9),
    Target("ZBV", "1F1B", "at most", 1.0),
]


def build() -> LlamaForCausalLM:
    """The model, with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=704,
            num_hidden_layers=BLOCKS,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
            use_cache=False,
            tie_word_embeddings=False,
        )
    ).train()


def batch() -> torch.Tensor:
    """Token ids [rows, tokens] of one global batch."""
    return torch.randint(0, VOCABULARY, (MICROBATCHES * ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def ours(style: str) -> Step:
    """Forward and backward through our runtime."""
    counts = None if style != "zbv" else [BLOCKS // 4] * 4
    plugin = HybridParallelPlugin(
        pp_size=RANKS,
        pp_style=style,
        microbatch_size=ROWS,
        precision="fp32",
        num_layers_per_stage=counts or [BLOCKS // RANKS] * RANKS,
    )
    booster, model, ids = Booster(plugin=plugin), build(), batch()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def step() -> None:
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, None, optimizer)
        optimizer.zero_grad()

    return step


class _Stage(nn.Module):
    """A stage of the cut as torch's pipeline wants it: tensors in, one tensor out."""

    def __init__(self, model: nn.Module, cut: Cut, stage: int) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self.staged = StagedModel(model, cut, [stage])
        for path in units_of(model):
            if path not in cut.paths_of([stage]):
                hollow(model.get_submodule(path))

    def forward(self, *given: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = given[0] if self.stage == 0 else input_ids
        received = () if self.stage == 0 else given
        result = self.staged.forward(self.stage, received, lambda: self.model(input_ids=ids))
        return result.output.logits if result.output is not None else result.sent[0]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def stages_of(counts: Sequence[int], held: Sequence[int]) -> list[_Stage]:
    """Stages of a fresh model."""
    return [_Stage(model, cut_chain(chain_of(model), counts), stage) for stage in held for model in [build()]]


def torchs(style: str) -> Step:
    """Forward and backward through torch's runtime."""
    rank, ids = dist.get_rank(), batch()
    held = [rank] if style == "1f1b" else [rank, 2 * RANKS - 1 - rank]
    stages = RANKS * len(held)
    modules = stages_of([BLOCKS // stages] * stages, held)
    parts = [PipelineStage(m, m.stage, stages, torch.device("cpu")) for m in modules]
    schedule: Any = (
        Schedule1F1B(parts[0], MICROBATCHES, loss_fn=loss_of)
        if style == "1f1b"
        else ScheduleZBVZeroBubble(parts, MICROBATCHES, loss_fn=loss_of)  # type: ignore[arg-type]
    )
    first, last = 0 in held, stages - 1 in held

    def step() -> None:
        given = (ids,) if first else ()
        schedule.step(*given, target=ids if last else None, losses=[] if last else None, input_ids=ids)
        for module in modules:
            module.zero_grad()

    return step


def alone() -> Step:
    """What this rank computes in a step: its stage's forwards and backwards, on its own."""
    (module,) = stages_of([BLOCKS // RANKS] * RANKS, [dist.get_rank()])
    parts = batch().split(ROWS)

    def step() -> None:
        for ids in parts:
            if module.stage == 0:
                sent = module(ids)
            else:
                sent = module(as_input(torch.zeros(ROWS, TOKENS, HIDDEN)), input_ids=ids)
            root = loss_of(sent, ids) if module.stage else sent
            root.backward(None if module.stage else torch.ones_like(sent))
        module.zero_grad()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return start_workers(RANKS, [__file__, "--rounds", str(max(2, args.rounds))])
    start()
    steps = {
        ALONE: alone(),
        "1F1B": ours("1f1b"),
        "ZB-H1": ours("zbh1"),
        "ZBV": ours("zbv"),
        "torch 1F1B": torchs("1f1b"),
        "torch ZBV": torchs("zbv"),
    }
    title = f"a step of {RANKS} stages, {MICROBATCHES} micro-batches of {ROWS} × {TOKENS}"
    lines = report(title, measure(steps, args.rounds), TARGETS)
    if dist.get_rank() == 0:
        print("\n".join([*lines, about()]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
