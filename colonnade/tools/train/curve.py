"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

NO_MATPLOTLIB = 'no loss curve: matplotlib is not installed. Install it with: pip install "colonnade[train]"'


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curve(
    file: Path,
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    unigram_entropy: float,
    title: str,
) -> None:
    """Draw training loss, held-out loss and the unigram entropy over the steps; the file's suffix chooses the format.

    Args:
        losses: training loss of step 1, 2, …, in nats per token.
        held_out: (step, held-out loss in nats per token).
        unigram_entropy: nats per token; a horizontal line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever the environment asks of pyplot
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, color="tab:blue", label="training")
    if held_out:
        steps, values = zip(*held_out)
        axes.plot(steps, values, "o-", color="tab:orange", label="held-out")
    axes.axhline(unigram_entropy, linestyle="--", linewidth=1, color="tab:gray", label="unigram entropy")
    axes.set(title=title, xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
