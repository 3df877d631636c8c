"""Times saving and loading a training checkpoint on two ranks, on CPU, in interleaved rounds. One command:

    python benchmarks/checkpoint.py [--rounds 7] [--megabytes 768]

Two processes with one thread each share a Llama and AdamW's state for it by tensor parallelism, so that a rank writes what it
reads, about so many megabytes. On the same disk:

    save, load                  booster.save, booster.load
    save_file + fsync           each rank writes the bytes that it writes in a save with safetensors' own function, and syncs
    load_file + copy            each rank reads the file that it has written and copies all to where it belongs
    stall                       what an asynchronous save takes of the training's time
    copy to host memory         of the tensors that a rank writes
    DCP save, DCP load          torch's distributed checkpoint of the same tensors in its own format, with its own fsync

A round runs each once, in alternating order; figures are medians over rounds, of times and of per-round ratios. Everything is
written to new files; old ones are removed between the timings. Peak memory
is measured once, after the rounds: how far the resident set rises while a save goes on, beside the bytes of a rank's share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from paired import Step, Target, about, measure, report, start
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.booster.plugin.training_state import Training
from colonnade.cli.run import start_workers

RANKS = 2
SAVE, LOAD = "save", "load"
FILE_SAVE, FILE_LOAD = "save_file + fsync", "load_file + copy"
STALL, COPY = "stall", "copy to host memory"
TARGETS = [
    Target(SAVE, FILE_SAVE, "at most", 1 / 0.8),
    Target(LOAD, FILE_LOAD, "at most", 1 / 0.8),
    Target(STALL, COPY, "at most", 1.1),
]


def sync(file: Path) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Job:
    """A boosted model that has made a step, and what its rank writes.

    Args:
        megabytes: about so many for each rank.
        folder: of the disk that is measured; the same on all ranks.
    """

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        hidden = 1024
        layers = max(
            1, round((megabytes * RANKS * 2**20 / 12 - 2 * 2048 * hidden) / (4 * hidden**2 + 3 * hidden * 2816))
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=2048, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        self.booster = Booster(plugin=HybridParallelPlugin(tp_size=RANKS, precision="fp32"))
        model = LlamaForCausalLM(config)
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        ids = torch.randint(0, 2048, (1, 32))
        self.booster.backward(self.model(input_ids=ids, labels=ids).loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        training = Training(self.model, self.optimizer)  # type: ignore[arg-type]
        snapshot = training.snapshot(folder, self.booster.plugin.mesh, 0)
        self.own = {key: tensor.contiguous() for key, tensor in snapshot.tensors.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.own.values())
        self.memory = {key: torch.empty_like(tensor) for key, tensor in self.own.items()}
        self.file, self.count = folder, 0
        self.dcp_state = {f"{self.rank}/{key}": tensor for key, tensor in self.own.items()}
        self.dcp_memory = {f"{self.rank}/{key}": tensor for key, tensor in self.memory.items()}

    def steps(self) -> dict[str, Step]:
        """What is timed, by name. Those that read follow one that has written."""
        return {
            SAVE: lambda: self._save(),
            LOAD: lambda: self._load(),
            FILE_SAVE: self._save_file,
            FILE_LOAD: self._load_file,
            STALL: lambda: self._save(asynchronous=True),
            COPY: self._copy,
            "DCP save": self._dcp_save,
            "DCP load": self._dcp_load,
        }

    def _save(self, **options: Any) -> None:
        self.count += 1
        self.booster.save(self.folder / "ours", self.model, self.optimizer, step=self.count, **options)

    def _load(self) -> None:
        self.booster.load(self.folder / "ours", self.model, self.optimizer)

    def _save_file(self) -> None:
        self.count += 1
        self.file = self.folder / f"plain-{self.count:05d}-{self.rank}.safetensors"
        safetensors.torch.save_file(self.own, self.file)
        sync(self.file)

    def _load_file(self) -> None:
        for key, tensor in safetensors.torch.load_file(self.file).items():
            self.memory[key].copy_(tensor)

    def _copy(self) -> None:
        self.copies = [tensor.clone() for tensor in self.own.values()]

    def _dcp_save(self) -> None:
        dcp.save(self.dcp_state, checkpoint_id=str(self.folder / "dcp"))

    def _dcp_load(self) -> None:
        dcp.load(self.dcp_memory, checkpoint_id=str(self.folder / "dcp"))

    def between(self) -> None:
        """Between two timings: nothing may be under way, and what is superseded is removed."""
        self.booster.finish_saving()
        self.copies = []
        for file in self.folder.glob(f"plain-*-{self.rank}.safetensors"):
            if file != self.file:
                file.unlink()
        dist.barrier()
        steps = sorted((self.folder / "ours").glob("step-*"))
        for old in steps[:-1] if self.rank == 0 else ():
            shutil.rmtree(old)
        dist.barrier()

    def peak_growth(self) -> int:
        """Bytes by which the resident set rises above where it was, at most, while a save goes on."""
        self.between()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._save()
        return _resident("VmHWM") - before


def _resident(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the system does not tell {entry}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="at least 2")
    parser.add_argument("--megabytes", type=int, default=768, help="that each rank writes, about")
    parser.add_argument("--folder", default=None, help="on the disk to measure; by default one for temporary files")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        folder = tempfile.mkdtemp(prefix="colonnade-bench-", dir=args.folder)
        try:
            options = ["--rounds", str(max(2, args.rounds)), "--megabytes", str(args.megabytes), "--folder", folder]
            return start_workers(RANKS, [__file__, *options])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    start()
    job = Job(args.megabytes, Path(args.folder))
    times = measure(job.steps(), args.rounds, between=job.between)
    growth = job.peak_growth()
    title = f"a checkpoint of {RANKS} × {job.nbytes / 2**20:.0f} MiB"
    lines = report(title, times, TARGETS)
    if dist.get_rank() == 0:
        share = job.nbytes / 2**20
        lines.append(
            f"  peak memory of a save above what was there: {growth / 2**20:.0f} MiB, a rank's share {share:.0f} MiB"
        )
        print("\n".join([*lines, about()]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
