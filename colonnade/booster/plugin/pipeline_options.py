"""How a model is cut into pipeline stages and in which order they work: what a user can choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.errors import ConfigError, explain
from colonnade.pipeline.schedule import STYLES


@dataclass(frozen=True)
class PipelineGradientCheckpointConfig:
    """Which blocks are computed again in the backward pass instead of keeping their activations.

    (Training deep nets with sublinear memory cost, Chen et al. 2016.)

    Args:
        gradient_checkpointing_ratio: share of each stage's blocks, from 0 to 1; or one for each stage.
        num_ckpt_layers_per_stage: number of blocks on each stage instead.

    Raises:
        ConfigError: both are given, or one is out of range.
    """

    gradient_checkpointing_ratio: float | Sequence[float] | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if (self.gradient_checkpointing_ratio is None) == (self.num_ckpt_layers_per_stage is None):
            raise ConfigError(
                "PipelineGradientCheckpointConfig takes one of gradient_checkpointing_ratio (0.5, or one for each stage) and "
                "num_ckpt_layers_per_stage ([2, 1])."
            )
        given = self.gradient_checkpointing_ratio
        ratios = [] if given is None else [given] if isinstance(given, (int, float)) else list(given)
        if any(not 0 <= ratio <= 1 for ratio in ratios):
            raise ConfigError(f"gradient_checkpointing_ratio={given!r} must lie between 0 and 1.")

    def blocks_of(self, counts: Sequence[int]) -> list[int]:
        """How many blocks of each stage are recomputed: the first ones, whose activations are kept longest.

        Args:
            counts: blocks of each stage.

        Raises:
            ConfigError: what was given is not one number for each stage, or more than a stage has.
        """
        ratio = self.gradient_checkpointing_ratio
        if isinstance(ratio, (int, float)):
            return [round(ratio * n) for n in counts]
        chosen = (
            [round(r * n) for r, n in zip(ratio, counts)]
            if ratio is not None
            else list(self.num_ckpt_layers_per_stage or ())
        )
        number = len(ratio) if ratio is not None else len(chosen)
        if number != len(counts) or any(not 0 <= n <= most for n, most in zip(chosen, counts)):
            raise ConfigError(
                explain(
                    f"{self} does not fit the pipeline.",
                    [
                        ("found", f"stages of {list(counts)} blocks"),
                        ("needs", "a number for each stage, at most its blocks"),
                    ],
                )
            )
        return chosen


@dataclass(frozen=True)
class PipelineOptions:
    """The pipeline of a `HybridParallelPlugin`.

    Args:
        style: name of the schedule; see `colonnade.pipeline.make_schedule`.
        chunks: stages on each rank; by default what the style works with.
        counts: blocks of each stage; by default so that no stage is slower than it has to be.
        checkpointing: which blocks are recomputed.
        check_cut: try the cut on a tiny twin of the model first.

    Raises:
        ConfigError: there is no such style, or it cannot work with so many chunks.
    """

    style: str = "1f1b"
    chunks: int | None = None
    counts: Sequence[int] | None = None
    checkpointing: PipelineGradientCheckpointConfig | None = None
    check_cut: bool = True

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            rows = [(name, style.idea) for name, style in STYLES.items()]
            raise ConfigError(explain(f"pp_style={self.style!r} is no pipeline schedule.", rows))

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or STYLES[self.style].chunks
