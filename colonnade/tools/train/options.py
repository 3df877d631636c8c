"""What a person may choose about a training run, and the checks that need neither files nor a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.errors import ConfigError, explain
from colonnade.pipeline.schedule import STYLES
from colonnade.tools.explain.stages import PipelineChoice
from colonnade.tools.train.presets import find_preset

PRECISIONS = ("fp32", "bf16", "fp16")
ZERO_STAGES = (0, 1, 2)


@dataclass(frozen=True)
class ModelOptions:
    """Which model is trained: one of the two is given."""

    path: Path | None = None  # a local model folder, or a GGUF file or a folder with one: fine-tuned
    preset: str | None = None  # a row of PRESETS: trained from scratch
    vocab_size: int = 4096  # tokens in the vocabulary learned from the text; a given model brings its own


@dataclass(frozen=True)
class DataOptions:
    """Which text it is trained on."""

    path: Path | None = None  # file or folder; None means the sources of the standard library
    sequence: int = 128  # tokens in a sequence
    held_out_percent: float = 5.0  # share of the text that is only measured on
    eval_tokens: int = 32768  # held-out tokens measured at most


@dataclass(frozen=True)
class LayoutOptions:
    """How the run is laid out over processes."""

    tp: int = 1  # tensor-parallel ranks
    dp: int = 1  # data-parallel ranks
    microbatch_size: int | None = None  # sequences per forward pass; None means the whole share of a rank at once
    precision: str = "fp32"
    zero_stage: int = 0  # 1: optimizer states dealt out over data-parallel ranks; 2: gradients too
    pp: int = 1  # ranks of a pipeline
    pp_style: str = "1f1b"  # its schedule
    microbatches: int | None = (
        None  # of a rank's share, in place of their size; a pipeline has 2·pp where neither is given
    )

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tp * self.dp * self.pp

    @property
    def pipeline(self) -> PipelineChoice | None:
        """The pipeline; None where there is none.

        Raises:
            ConfigError: there is no such schedule.
        """
        return None if self.pp == 1 else PipelineChoice(self.pp, PipelineOptions(self.pp_style), self.microbatches)

    def __str__(self) -> str:
        return layout_in_words(self.tp, self.dp, self.zero_stage, self.pp, self.pp_style)


def layout_in_words(tp: int, dp: int, zero_stage: int = 0, pp: int = 1, style: str = "") -> str:
    """A layout for a person to read; of a pipeline with its schedule."""
    pipeline = (f" × pp {pp}", f", {style}") if pp > 1 else ("", "")
    return f"tp {tp}{pipeline[0]} × dp {dp}" + (f", ZeRO-{zero_stage}" if zero_stage else "") + pipeline[1]


@dataclass(frozen=True)
class OptimizerOptions:
    """How the weights are updated: AdamW, linear warm-up, then a cosine down to a tenth of the rate."""

    fine_tuning_rate: ClassVar[float] = 5e-5  # the usual learning rate where a model has been trained already

    steps: int = 200
    batch: int = 16  # sequences in the global batch, over all data-parallel ranks
    learning_rate: float = 3e-3
    warmup: int = 10  # steps
    weight_decay: float = 0.1  # of matrices only, not of norms and biases
    max_norm: float = 1.0  # the gradient is scaled down to this norm; 0 leaves it as it is


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    folder: Path
    overwrite: bool = False  # replace an earlier output of this command
    prompt: str | None = None  # beginning of the sample; None takes the first tokens of the held-out text
    sample_tokens: int = 48  # length of the sample


def layout_sizes(tp: int, dp: int | None, nproc: int | None, pp: int = 1) -> tuple[int, int]:
    """Sizes (tp, dp) of a layout, dp filling the processes where it is not given.

    Raises:
        ConfigError: when the sizes are not those of `nproc` processes.
    """
    sizes = {"tp": tp, "pp": pp, "dp": dp, "nproc": nproc}
    if any(size is not None and size < 1 for size in sizes.values()):
        given = ", ".join(f"--{k} {v}" for k, v in sizes.items() if v is not None and (k, v) != ("pp", 1))
        raise ConfigError(explain(f"the layout {given} is not possible.", [("needs", "whole numbers of at least 1")]))
    if nproc is None:
        return tp, dp or 1
    one = tp * pp  # ranks that share one model
    if nproc % one or (dp is not None and one * dp != nproc):
        asked = f"--tp {tp}" + (f" --pp {pp}" if pp > 1 else "") + ("" if dp is None else f" --dp {dp}")
        fitting = [t for t in range(1, nproc + 1) if nproc % t == 0]
        product = "--tp" if pp == 1 else "--tp × --pp"
        advice = f"{product} {' or '.join(map(str, fitting))} without --dp" if nproc % one else f"--dp {nproc // one}"
        raise ConfigError(
            explain(
                f"{nproc} processes cannot be laid out as {asked}.",
                [
                    ("needs", f"a multiple of {one} processes" if dp is None else f"{one * dp} processes"),
                    ("try", advice),
                ],
            )
        )
    return tp, nproc // one


@dataclass(frozen=True)
class TrainOptions:
    """Everything about one run.

    Raises:
        ConfigError: on construction, with every value that cannot work.
    """

    output: OutputOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    seed: int = 1024
    eval_every: int = 50  # steps between two measurements of the held-out loss; 0 measures at the end only

    def __post_init__(self) -> None:
        if (self.model.path is None) == (self.model.preset is None):
            raise ConfigError(
                explain(
                    "a run starts from either a model or a preset.",
                    [("try", "--preset tiny to train from scratch, or --model FOLDER to fine-tune")],
                )
            )
        if self.model.preset is not None:
            find_preset(self.model.preset)
        problems = list(self._problems())
        if problems:
            count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
            raise ConfigError(explain(f"the options do not fit together ({count}).", problems))

    def _problems(self) -> list[tuple[str, str]]:
        opt, data, layout = self.optimizer, self.data, self.layout
        whole = {
            "--steps": opt.steps,
            "--batch": opt.batch,
            "--tp": layout.tp,
            "--dp": layout.dp,
            "--pp": layout.pp,
            "--eval-tokens": data.eval_tokens,
        }
        problems = [(name, f"{value} is not at least 1") for name, value in whole.items() if value < 1]
        zero = {
            "--warmup": opt.warmup,
            "--weight-decay": opt.weight_decay,
            "--max-norm": opt.max_norm,
            "--eval-every": self.eval_every,
            "--seed": self.seed,
            "--sample-tokens": self.output.sample_tokens,
        }
        problems += [(name, f"{value} is negative") for name, value in zero.items() if not value >= 0]
        if data.sequence < 2:
            problems.append(("--seq", f"{data.sequence} leaves nothing to predict; at least 2"))
        if not opt.learning_rate > 0:
            problems.append(("--lr", f"{opt.learning_rate} is not positive"))
        if not 0 < data.held_out_percent < 100:
            problems.append(("--held-out", f"{data.held_out_percent} is not between 0 and 100 percent"))
        if layout.precision not in PRECISIONS:
            problems.append(("--precision", f"{layout.precision!r} is not one of {', '.join(PRECISIONS)}"))
        if layout.zero_stage not in ZERO_STAGES:
            problems.append(("--zero-stage", f"{layout.zero_stage} is not one of {', '.join(map(str, ZERO_STAGES))}"))
        if layout.pp > 1 and layout.zero_stage == 2:
            problems.append(("--zero-stage", "2 does not go together with --pp; 1 deals the optimizer's states out"))
        if layout.pp == 1 and layout.pp_style != LayoutOptions.pp_style:
            problems.append(("--pp-style", f"{layout.pp_style} needs --pp 2 or more"))
        elif layout.pp > 1 and layout.pp_style not in STYLES:
            problems.append(("--pp-style", f"{layout.pp_style!r} is not one of {', '.join(STYLES)}"))
        if layout.microbatches is not None and layout.microbatch_size is not None:
            problems.append(("--microbatches", "one of it and --microbatch-size is enough: the other follows"))
        return problems or self._misfits()

    def _misfits(self) -> list[tuple[str, str]]:
        batch, dp, micro = self.optimizer.batch, self.layout.dp, self.layout.microbatch_size
        if batch % dp:
            lower, upper = batch // dp * dp, (batch // dp + 1) * dp
            near = " or ".join(str(n) for n in (lower, upper) if n)
            return [("--batch", f"{batch} sequences cannot be shared equally by {dp} data-parallel ranks; try {near}")]
        share = batch // dp
        if micro is not None and (micro < 1 or share % micro):
            fitting = [n for n in range(1, share + 1) if share % n == 0]
            return [
                (
                    "--microbatch-size",
                    f"{micro} does not divide the {share} sequences of a rank; try {', '.join(map(str, fitting))}",
                )
            ]
        if self.layout.microbatches is not None and not 1 <= self.layout.microbatches <= share:
            return [
                ("--microbatches", f"{self.layout.microbatches} for the {share} sequences of a rank; try 1 to {share}")
            ]
        return []

    def to_json(self) -> dict[str, Any]:
        """The options as plain numbers and strings."""
        plain = asdict(self)
        for group, key in (("model", "path"), ("data", "path"), ("output", "folder")):
            plain[group][key] = None if plain[group][key] is None else str(plain[group][key])
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> TrainOptions:
        """The inverse of `to_json`."""
        model, data, output = dict(plain["model"]), dict(plain["data"]), dict(plain["output"])
        for group, key in ((model, "path"), (data, "path"), (output, "folder")):
            group[key] = None if group[key] is None else Path(group[key])
        return cls(
            output=OutputOptions(**output),
            model=ModelOptions(**model),
            data=DataOptions(**data),
            layout=LayoutOptions(**plain["layout"]),
            optimizer=OptimizerOptions(**plain["optimizer"]),
            seed=plain["seed"],
            eval_every=plain["eval_every"],
        )
