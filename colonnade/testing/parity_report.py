"""How far a parallel run is from one process: the comparison of numbers and tensors, and the report."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from colonnade.testing.logical import LogicalTensor, largest

FLOOR = 1e-2  # of the largest entry of all tensors of a kind; below it, differences are measured against it
SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """The worst difference of one kind.

    Args:
        kind: "loss", "gradient norm", "gradients", "weights" or "replicas".
        worst: the largest relative difference; infinite where something is missing, has another shape or is not finite.
        where: the step and rank, or the parameter, in which it is.
        tolerance: what is still the same number.
        failures: (difference, where) of all that are beyond it, the worst first.
        note: why nothing was compared, where that is so.
    """

    kind: str
    worst: float
    where: str
    tolerance: float
    failures: tuple[tuple[float, str], ...] = ()
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if self.note:
            return f"{self.kind:<14} {self.note}"
        sign = "≤" if self.ok else ">"
        text = f"{self.kind:<14} {self.worst:8.1e} {sign} {self.tolerance:.0e}   {self.where}"
        if self.ok:
            return text
        shown = [f"\n    {value:8.1e}  {where}" for value, where in self.failures[:SHOWN]]
        more = len(self.failures) - len(shown)
        return text + "".join(shown) + (f"\n    and {more} more" if more else "")


@dataclass(frozen=True)
class ParityReport:
    """What `assert_same_as_single` found.

    Args:
        layout: the mesh, as text.
        steps: number of optimizer steps.
        differences: the worst of each kind.
        rounding: by kind, how far one process in fp32 is from itself in fp64: the size of differences without meaning.
        undetermined: by parameter, the number of entries of the weights that rounding decides and that were not compared.
        num_weights: number of entries of all weights.
    """

    layout: str
    steps: int
    differences: tuple[Difference, ...]
    rounding: Mapping[str, float]
    undetermined: Mapping[str, int]
    num_weights: int

    @property
    def ok(self) -> bool:
        """Whether every difference is within its tolerance."""
        return all(difference.ok for difference in self.differences)

    def __getitem__(self, kind: str) -> Difference:
        return next(difference for difference in self.differences if difference.kind == kind)

    def __str__(self) -> str:
        verdict = "the same numbers as one process" if self.ok else "NOT the numbers of one process"
        lines = [f"{self.layout}, {self.steps} steps: {verdict}"]
        lines += [f"  {difference}" for difference in self.differences]
        lines.append("  one process, fp32 against fp64: " + ", ".join(f"{k} {v:.1e}" for k, v in self.rounding.items()))
        if self.undetermined:
            most = sorted(self.undetermined.items(), key=lambda item: -item[1])[:SHOWN]
            names = ", ".join(f"{name} {count}" for name, count in most)
            count = f"{sum(self.undetermined.values())} of {self.num_weights}"
            lines.append(f"  weights not compared, as rounding decides them: {count} entries, most in {names}")
        return "\n".join(lines)


def relative(found: float, wanted: float) -> float:
    """Relative difference of two numbers; infinite where either is not finite."""
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return math.inf
    return 0.0 if found == wanted else abs(found - wanted) / max(abs(wanted), 1e-30)


def compare_numbers(
    kind: str,
    of_ranks: Sequence[Sequence[float | None]],
    wanted: Sequence[float],
    tolerance: float,
    optional: bool = False,
) -> Difference:
    """Compare a number per step, which has to be the same, bit for bit, on every rank.

    Args:
        of_ranks: by rank, then by step.
        optional: whether ranks may all report None, which is then noted and not compared.
    """
    if optional and all(number is None for numbers in of_ranks for number in numbers):
        return Difference(kind, 0.0, "", tolerance, note="not compared: the plugin reports none when it does not clip")
    found: list[tuple[float, str]] = []
    failures: list[tuple[float, str]] = []
    for rank, numbers in enumerate(of_ranks):
        for step, target in enumerate(wanted):
            number = numbers[step] if step < len(numbers) else None
            if number is None:
                failures.append((math.inf, f"step {step} on rank {rank}: none, one process {target:.6f}"))
                continue
            where = f"step {step} on rank {rank}: {number:.7g}, one process {target:.7g}"
            found.append((relative(number, target), where))
            if found[-1][0] > tolerance:
                failures.append(found[-1])
            if number != of_ranks[0][step]:
                failures.append((relative(number, target), where + f", but {of_ranks[0][step]!r} on rank 0"))
    return _difference(kind, found, failures, tolerance)


def compare_tensors(
    kind: str,
    found: Mapping[str, LogicalTensor],
    wanted: Mapping[str, torch.Tensor],
    tolerance: float,
    undetermined: Mapping[str, torch.Tensor] | None = None,
    exact: Collection[str] = (),
) -> Difference:
    """Compare tensors by name; see [Note: relative difference] in parity.py.

    Args:
        undetermined: masks of entries not to compare.
        exact: names of tensors that must be equal bit for bit.
    """
    scale = max((largest(tensor) for tensor in wanted.values()), default=0.0)
    all_found: list[tuple[float, str]] = []
    failures = [(math.inf, f"{name}: one process has none") for name in found.keys() - wanted.keys()]
    for name, target in wanted.items():
        if name not in found or found[name].missing:
            missing = found[name].missing if name in found else target.numel()
            failures.append((math.inf, f"{name}: no rank holds {missing} of its {target.numel()} entries"))
            continue
        value = found[name].value
        if value.shape != target.shape:
            failures.append((math.inf, f"{name}: shape {tuple(value.shape)}, one process {tuple(target.shape)}"))
            continue
        delta = value - target
        if undetermined and name in undetermined:
            delta = delta.masked_fill(undetermined[name], 0.0)
        difference = largest(delta) / max(largest(target), FLOOR * scale, 1e-30)
        all_found.append((difference, name))
        if difference > tolerance or not math.isfinite(difference):
            failures.append((difference, name))
        elif name in exact and not value.equal(target):
            failures.append((difference, f"{name}: frozen, but its bits have changed"))
    return _difference(kind, all_found, failures, tolerance)


def _difference(
    kind: str, found: list[tuple[float, str]], failures: list[tuple[float, str]], tolerance: float
) -> Difference:
    failures.sort(key=lambda failure: -failure[0])  # stable: among equals the first step, rank or parameter
    worst, where = max(failures[:1] + found, key=lambda one: one[0], default=(0.0, ""))
    return Difference(kind, worst, where, tolerance, tuple(failures))
