"""Times a training step on two data-parallel ranks against its peers, on CPU, in interleaved pairs. One command:

    python benchmarks/data_parallel.py [--rounds 15]

Two processes with one thread each train the same Llama of 8 million parameters, each on its half of the same batch, by

    ZeRO-1, ZeRO-2          LowLevelZeroPlugin(stage=…) around torch's AdamW as it is by default
    DDP                     torch's DistributedDataParallel with that AdamW;   DDP, fused   with AdamW(fused=True)
    FSDP2                   torch's fully_shard, reshard_after_forward=False, with that AdamW
    TorchDDPPlugin, TorchFSDPPlugin    ours around the last two
    DeepSpeed ZeRO-2        where the package is installed

all in fp32. Ours measure the norm of the gradient as well, which the others do not.

Then, in one process, the optimizer's step alone is compared with the time in which the machine moves 28 bytes a parameter
(what AdamW has to read and write) at the rate of a triad a = b + s·c, for large tensors and for 2,000 small ones.

A round runs each once, in alternating order; figures are medians over rounds, of times and of per-round ratios.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from paired import Step, Target, about, measure, report, start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cli.run import start_workers

ROWS, TOKENS = 4, 128  # of a rank
LR = 1e-4
DDP, FUSED, FSDP, SPEED = "DDP", "DDP, fused", "FSDP2", "DeepSpeed ZeRO-2"
STEPS = [
    *(Target(zero, DDP, "at most", 1.0) for zero in ("ZeRO-1", "ZeRO-2")),
    *(Target(zero, FUSED, "at most", 1.05) for zero in ("ZeRO-1", "ZeRO-2")),
    *(Target(zero, FSDP, "at most", 0.7) for zero in ("ZeRO-1", "ZeRO-2")),
    *(Target(zero, SPEED, "at most", 1.0) for zero in ("ZeRO-1", "ZeRO-2")),
]
TRIAD, STEP, WHOLE = "28 bytes a parameter", "fused step on flat shards", "whole optimizer.step"
SHAPES = [(16, 1 << 20), (2000, 8 << 10)]  # number of tensors, entries of each
ALONE = [Target(TRIAD, STEP, "at least", 0.8)]

Batch = dict[str, torch.Tensor]


def build() -> LlamaForCausalLM:
    """The model, with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=4096,
            max_position_embeddings=512,
            use_cache=False,
            tie_word_embeddings=False,
        )
    ).train()


def plain(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """A training step without Colonnade."""

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(plugin: Plugin, batch: Batch) -> Step:
    """A training step through the booster, with torch's AdamW as it is by default."""
    model, booster = build(), Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LR))

    def step() -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(batch: Batch, **options: bool) -> Step:
    """torch's DistributedDataParallel."""
    model = DistributedDataParallel(build())
    return plain(model, batch, torch.optim.AdamW(model.parameters(), lr=LR, **options))


def fsdp(batch: Batch) -> Step:
    """torch's fully_shard, a unit a layer, whose parameters stay gathered between forward and backward."""
    model = build()
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return plain(model, batch, torch.optim.AdamW(model.parameters(), lr=LR))


def deepspeed_step(batch: Batch) -> Step | None:
    """DeepSpeed's ZeRO-2; None where it is not installed."""
    try:
        import deepspeed
    except ImportError:
        return None
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
    }
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step


def variants(batch: Batch) -> dict[str, Step]:
    """Name → one training step, all from the same weights and batch."""
    steps: dict[str, Step | None] = {
        "ZeRO-1": ours(LowLevelZeroPlugin(1, precision="fp32"), batch),
        "ZeRO-2": ours(LowLevelZeroPlugin(2, precision="fp32"), batch),
        DDP: ddp(batch),
        FUSED: ddp(batch, fused=True),
        FSDP: fsdp(batch),
        "TorchDDPPlugin": ours(TorchDDPPlugin(precision="fp32"), batch),
        "TorchFSDPPlugin": ours(TorchFSDPPlugin(precision="fp32", reshard_after_forward=False), batch),
        SPEED: deepspeed_step(batch),
    }
    return {name: step for name, step in steps.items() if step is not None}


class Tensors(nn.Module):
    """Parameters of the given number and size, whose sum of squares is the loss."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([torch.randn(size) for _ in range(number)])


def optimizer_alone(number: int, size: int) -> dict[str, Step]:
    """ZeRO's step on one rank that owns everything, and the time in which a triad moves as much; each three times over."""
    model = Tensors(number, size)
    booster = Booster(plugin=LowLevelZeroPlugin(2, precision="fp32"))
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LR))
    booster.backward(sum(tensor.square().sum() for tensor in model.tensors), optimizer)
    a, b, c = (torch.rand(number * size) for _ in range(3))

    def triad() -> None:
        for _ in range(7):  # of 12 bytes an element: three times 28
            torch.add(b, c, alpha=3.0, out=a)

    def step() -> None:
        with optimizer.stepped.stepping():
            for _ in range(3):
                optimizer.inner.step()

    def whole() -> None:
        for _ in range(3):
            optimizer.step()

    return {TRIAD: triad, STEP: step, WHOLE: whole}


def steps_of_two_ranks(rounds: int) -> list[str]:
    """The report of the training steps."""
    ids = torch.randint(0, 4096, (2 * ROWS, TOKENS), generator=torch.Generator().manual_seed(0))[dist.get_rank() :: 2]
    steps = variants({"input_ids": ids, "labels": ids})
    return report(f"a step of 2 ranks, batch 2 × {ROWS} × {TOKENS}", measure(steps, rounds), STEPS)


def steps_of_the_optimizer(rounds: int) -> list[str]:
    """The report of the optimizer's step alone."""
    lines = []
    for number, size in SHAPES:
        title = f"three optimizer steps, {number} tensors of {size} entries"
        lines += report(title, measure(optimizer_alone(number, size), rounds), ALONE)
    return lines


PARTS = {"step": (2, steps_of_two_ranks), "optimizer": (1, steps_of_the_optimizer)}  # ranks, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    rounds = str(max(2, args.rounds))
    if "RANK" not in os.environ:
        runs = (start_workers(PARTS[part][0], [__file__, "--rounds", rounds, "--parts", part]) for part in args.parts)
        return max(runs)
    start()
    lines = PARTS[args.parts[0]][1](int(rounds))
    if dist.get_rank() == 0:
        print("\n".join([*lines, about()]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
