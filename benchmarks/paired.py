"""What the benchmarks share: interleaved rounds, medians and ratios, and what was measured on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers

import colonnade

Step = Callable[[], None]


class Target(NamedTuple):
    """A ratio of two medians and what it is held to."""

    above: str
    below: str
    rule: str  # "at most" or "at least"
    bound: float


def measure(
    steps: dict[str, Step], rounds: int, warmup: int = 2, between: Step = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each step in each round, from a barrier to the next, as rank 0 sees them.

    A round runs each once, in alternating order.

    Args:
        between: called after each step, and not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warmup):
        for step in steps.values():
            step()
            between()
    for index in range(rounds):
        for name in list(steps) if index % 2 == 0 else list(steps)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            between()
    return times


def report(title: str, times: dict[str, list[float]], targets: Iterable[Target]) -> list[str]:
    """The figures as lines of text: medians and quartiles of times, medians of the ratios within a round."""
    width = max(map(len, times))
    lines = [f"{title}: milliseconds (median, quartiles)"]
    for name, values in times.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(values, n=4))
        lines.append(f"  {name:<{width}} {middle:8.1f}   {low:.1f} – {high:.1f}")
    for above, below, rule, bound in targets:
        if above in times and below in times:
            ratio = statistics.median(a / b for a, b in zip(times[above], times[below]))
            met = ratio <= bound if rule == "at most" else ratio >= bound
            lines.append(f"  {above} / {below}: {ratio:.3f}   {rule} {bound:.2f}: {'met' if met else 'NOT met'}")
    return lines


def about() -> str:
    """What was measured: commit, versions, machine."""
    here = Path(__file__).resolve().parent
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return (
        f"commit {asked.stdout.strip() or 'unknown'}, colonnade {colonnade.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def start() -> None:
    """Make this process a rank that computes with one thread and says nothing of its own accord."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    colonnade.launch_from_torch()
