"""What is to be verified: made once, before the ranks start, and read by each of them."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.model.twin import model_class
from colonnade.tools.explain.choice import Choice, load_policy
from colonnade.tools.explain.explanation import explain_config
from colonnade.tools.explain.stages import PipelineChoice, shrink_for
from colonnade.tools.train.options import ZERO_STAGES, layout_in_words

if TYPE_CHECKING:
    from transformers import PretrainedConfig

JOB, TWIN, RESULT, SAVED = "job.json", "twin", "result.json", "saved"


@dataclass(frozen=True)
class Layout:
    """What is verified.

    Args:
        tp, dp: sizes of the axes.
        policy: as `module:Class`; None for the family's own.
        zero_stage: what is dealt out over dp: 1 optimizer states, 2 gradients too, 0 nothing.
        pp: size of the pipeline; 1 for none.
        pp_style, chunks: its schedule, and stages on each rank, by default what the schedule works with.
    """

    tp: int = 2
    dp: int = 1
    policy: str | None = None
    zero_stage: int = 0
    pp: int = 1
    pp_style: str = "1f1b"
    chunks: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("dp", self.dp), ("pp", self.pp)):
            if size < 1:
                raise UsageError(f"--{name} {size}: a layout has at least 1 process along each axis.")
        if self.zero_stage not in ZERO_STAGES:
            there = ", ".join(map(str, ZERO_STAGES))
            raise UsageError(f"--zero-stage {self.zero_stage} cannot be verified; there are {there}.")
        if self.zero_stage and self.dp < 2:
            raise UsageError(
                explain(
                    f"--zero-stage {self.zero_stage} needs --dp 2 or more, and --dp is {self.dp}.",
                    [
                        (
                            "reason",
                            "ZeRO deals states out over data-parallel ranks; over one there is nothing to deal out",
                        ),
                        ("try", f"--dp 2 --zero-stage {self.zero_stage}"),
                    ],
                )
            )

        if self.zero_stage == 2 and self.pp > 1:
            raise UsageError(
                explain(
                    f"--zero-stage 2 does not go together with --pp {self.pp}.",
                    [
                        ("reason", "a pipeline accumulates the gradients of all micro-batches before they are reduced"),
                        ("try", "--zero-stage 1"),
                    ],
                )
            )
        _ = self.pipeline  # refuses what is no schedule

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tp * self.dp * self.pp

    @property
    def pipeline(self) -> PipelineChoice | None:
        """The pipeline; None where there is none."""
        if self.pp == 1:
            return None
        return PipelineChoice(self.pp, PipelineOptions(self.pp_style, self.chunks))

    def __str__(self) -> str:
        return layout_in_words(self.tp, self.dp, self.zero_stage, self.pp, self.pp_style)


@dataclass(frozen=True)
class Job:
    """What the ranks are told.

    Args:
        layout: what is verified.
        steps: optimizer steps that are compared.
        model: class of the model.
        source: where the sizes of the model are from.
        parameters: entries of all parameters of the model itself, not of the twin.
        expected_all_reduces: all-reduces over tp in a step of the twin, as `explain` counts them; None of a pipeline, where
            each stage has its own.
        uneven: what of the model itself the ranks get unequal shares of, in words.
        folder: where the twin's configuration lies and the result goes.
    """

    layout: Layout
    steps: int
    model: str
    source: str
    parameters: int
    expected_all_reduces: int | None
    uneven: str
    folder: Path

    def write(self) -> None:
        """Put the job into its folder."""
        plain = asdict(self) | {"folder": str(self.folder)}
        (self.folder / JOB).write_text(json.dumps(plain), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job in a folder."""
        plain: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
        return cls(**plain | {"layout": Layout(**plain["layout"]), "folder": folder})

    def config(self) -> PretrainedConfig:
        """The twin's configuration."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder / TWIN)


def prepare(choice: Choice, layout: Layout, steps: int, folder: Path) -> Job:
    """Check that the model takes the layout, at its own size too, and write the job for its twin.

    Args:
        choice: the model.
        steps: optimizer steps to compare.
        folder: an empty folder that all ranks see.

    Raises:
        ConfigError: some rank would hold nothing, or the model has no loss of its own.
        PolicyError: there is no policy for the family, or the one given does not fit.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least 1 step is compared.")
    kind = model_class(choice.config)
    _check_inputs(kind)
    check = layout.policy is None  # a policy of one's own is tried by the ranks
    pipeline = layout.pipeline
    real = explain_config(choice.config, layout.tp, load_policy(layout.policy), check=check, pipeline=pipeline)
    twin = shrink_for(choice.config, layout.tp, pipeline)
    small = explain_config(twin, layout.tp, load_policy(layout.policy), check=check)
    twin.architectures = [kind.__name__]
    twin.save_pretrained(folder / TWIN)
    expected = small.calls()["all_reduce"] if pipeline is None else None
    job = Job(layout, steps, kind.__name__, choice.source, real.tree.total, expected, real.uneven, folder)
    job.write()
    return job


def _check_inputs(kind: Any) -> None:
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise ConfigError(
            explain(
                f"{kind.__name__} cannot be verified.",
                [
                    ("reason", "its forward takes no labels, so it has no loss that could be compared"),
                    (
                        "try",
                        "a config.json whose architectures name a class with a loss; `colonnade explain` needs none",
                    ),
                ],
            )
        )
