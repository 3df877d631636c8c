"""How a model is cut into pipeline stages and in which order they work: what a user can choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colonnade.errors import ConfigError, explain, refuse
from colonnade.pipeline.schedule import STYLES, make_schedule


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
        given, numbers = self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage
        ratios = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        if any(not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1 for ratio in ratios):
            raise ConfigError(f"gradient_checkpointing_ratio={given!r} must lie between 0 and 1.")
        if numbers is not None and not _whole_numbers(numbers):
            raise ConfigError(
                f"num_ckpt_layers_per_stage={numbers!r} must be whole numbers, one for each stage: [2, 1]."
            )

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
        ConfigError: with all that is wrong: no such style, a style that cannot work with so many chunks, wrong types.
    """

    style: str = "1f1b"
    chunks: int | None = None
    counts: Sequence[int] | None = None
    checkpointing: PipelineGradientCheckpointConfig | None = None
    check_cut: bool = True

    def __post_init__(self) -> None:
        refuse(pipeline_problems(self.style, self.chunks, self.counts, self.checkpointing))

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or STYLES[self.style].chunks


def pipeline_problems(style: str, chunks: int | None, counts: object, checkpointing: object) -> list[str]:
    """What is wrong with the options of a pipeline by themselves, a message for each.

    Args:
        style, chunks, counts, checkpointing: see `PipelineOptions`.
    """
    found = []
    if not isinstance(style, str) or style not in STYLES:
        rows = [(name, known.idea) for name, known in STYLES.items()]
        found.append(explain(f"pp_style={style!r} is no pipeline schedule.", rows))
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        found.append(f"num_model_chunks={chunks!r} must be a whole number of at least 1, or left out.")
    elif not found:
        try:
            make_schedule(style, 1, 1, chunks)
        except ConfigError as error:
            found.append(f"num_model_chunks={chunks}: {error}")
    if counts is not None and not _whole_numbers(counts):
        found.append(f"num_layers_per_stage={counts!r} must be whole numbers, one for each stage: [2, 1]; or left out.")
    if checkpointing is not None and not isinstance(checkpointing, PipelineGradientCheckpointConfig):
        rows = [("try", "PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)")]
        found.append(explain(f"gradient_checkpoint_config={checkpointing!r} says not what is recomputed.", rows))
    return found


def staging_problems(pp_size: int, zero_stage: int, only_for_stages: Mapping[str, object]) -> list[str]:
    """What does not go together with a pipeline of this size, a message for each.

    Args:
        pp_size: its ranks.
        zero_stage: of the plugin.
        only_for_stages: options that make sense with several stages alone, None where they are left out.
    """
    found = []
    given = [name for name, value in only_for_stages.items() if value is not None]
    if pp_size == 1 and given:
        rows = [("try", "model.gradient_checkpointing_enable() to recompute blocks without a pipeline")]
        about = f"{', '.join(given)} need{'s' * (len(given) == 1)} pp_size > 1: about stages, of which there is one."
        found.append(explain(about, rows if "gradient_checkpoint_config" in given else ()))
    if zero_stage == 2 and isinstance(pp_size, int) and pp_size > 1:
        rows = [
            ("reason", "a pipeline accumulates the gradients of all micro-batches before they are reduced"),
            ("try", "zero_stage=1: the same traffic, and the states dealt out"),
        ]
        found.append(explain("zero_stage=2 does not go together with pp_size > 1.", rows))
    return found


def _whole_numbers(value: object) -> bool:
    """Whether this is a sequence of whole numbers."""
    return isinstance(value, (list, tuple)) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
