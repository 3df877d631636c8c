"""Times a training step at tp = 2 against its peers, on CPU, in interleaved pairs. One command:

    python benchmarks/tensor_parallel.py [--hidden 1024 256] [--rounds 15]

Two processes with one thread each train the same Llama on the same batch in turn by

    colonnade       HybridParallelPlugin(tp_size=2)
    no traffic      the same layers with their collectives left out: a bound (its numbers are wrong)
    tp_plan         transformers' own tensor parallelism
    one, 1 thread   plain PyTorch in one process; the other process waits
    one, 2 threads  the same with two threads

A round runs each once, in alternating order; figures are medians over rounds, of times and of per-round ratios.
A step is forward, backward and AdamW as torch makes it by default, with the norm of the gradient measured in Colonnade.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from paired import Target, about, measure, report, start
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cli.run import start_workers

OURS, BOUND, PEER, ONE, TWO = "colonnade", "no traffic", "tp_plan", "one, 1 thread", "one, 2 threads"
# hidden width: layers, sequences, tokens a sequence
SIZES = {1024: (2, 4, 256), 256: (8, 4, 128)}
TARGETS = {
    1024: [
        Target(OURS, PEER, "at most", 0.90),
        Target(OURS, BOUND, "at most", 1.20),
        Target(ONE, OURS, "at least", 1.70),
        Target(OURS, TWO, "at most", 1.10),
    ],
    256: [Target(OURS, PEER, "at most", 0.55), Target(OURS, BOUND, "at most", 1.20)],
}


def config_for(hidden: int) -> LlamaConfig:
    """A Llama of the given width with 8 heads and a vocabulary of 4096."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=SIZES[hidden][0],
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        max_position_embeddings=512,
        use_cache=False,
        tie_word_embeddings=False,
    )


@contextmanager
def no_traffic() -> Iterator[None]:
    """Leave every collective out; what they would have changed stays as it is."""
    saved = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: None
    try:
        yield
    finally:
        dist.all_reduce = saved


def plain_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A training step without Colonnade."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: torch.nn.Module, batch: dict[str, torch.Tensor], right: bool = True) -> Callable[[], None]:
    """A training step through the booster; `right` says whether its numbers will be."""
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    optimizer.check_replicas = right

    def step() -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer_step(folder: str, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A training step with transformers' tensor parallelism."""
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float32
    )
    model.train()
    return plain_step(model, batch)


def on_rank_0(step: Callable[[], None], threads: int) -> Callable[[], None]:
    """One process works, the other waits for it at the barrier that ends the measurement."""

    def run() -> None:
        if dist.get_rank() == 0:
            torch.set_num_threads(threads)
            step()
            torch.set_num_threads(1)

    return run


def variants(hidden: int) -> dict[str, Callable[[], None]]:
    """Name → one training step, all from the same weights and batch."""
    config = config_for(hidden)
    _, rows, tokens = SIZES[hidden]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (rows, tokens))
    batch = {"input_ids": ids, "labels": ids}
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    ours = our_step(_copy(model), batch)
    bound = our_step(_copy(model), batch, right=False)
    one, two = plain_step(_copy(model), batch), plain_step(_copy(model), batch)

    def without_traffic() -> None:
        with no_traffic():
            bound()

    return {
        OURS: ours,
        BOUND: without_traffic,
        PEER: peer_step(folder[0], batch),
        ONE: on_rank_0(one, 1),
        TWO: on_rank_0(two, 2),
    }


def _copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copied = LlamaForCausalLM(model.config)
    copied.load_state_dict(model.state_dict())
    return copied.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 256], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return start_workers(2, [__file__, *sys.argv[1:]])
    start()
    for hidden in args.hidden:
        layers, rows, tokens = SIZES[hidden]
        title = f"hidden {hidden}, {layers} layers, batch {rows} × {tokens}"
        lines = report(title, measure(variants(hidden), max(2, args.rounds)), TARGETS[hidden])
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)
    if dist.get_rank() == 0:
        print(about(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
