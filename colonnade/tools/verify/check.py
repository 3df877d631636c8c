"""The check itself, run by every rank: training compared with one process, traffic, and saving and loading."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.comm.ledger import ledger
from colonnade.errors import CheckpointError
from colonnade.model.twin import twin_model
from colonnade.testing.exact import compare_in_fp64, compare_pipeline_in_fp64, why_fp32_is_unsure
from colonnade.testing.logical import largest
from colonnade.testing.parity import Tolerance, Training, compare_with_single, rows_of, well_conditioned_adamw
from colonnade.testing.parity_report import ParityReport
from colonnade.tools.explain.choice import load_policy
from colonnade.tools.train.source import quiet_transformers
from colonnade.tools.verify.batches import make_batches
from colonnade.tools.verify.job import RESULT, SAVED, Job
from colonnade.tools.verify.places import Places, find_places

MAX_NORM = 1.0
MICROBATCH = 2  # rows; of a pipeline, whose last micro-batch has one
Traffic = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class Saving:
    """How far logits of the saved model, loaded by transformers, are from those of the parallel model."""

    difference: float
    tolerance: float
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.difference <= self.tolerance

    def __str__(self) -> str:
        if self.error:
            return f"saved model    cannot be loaded: {self.error}"
        sign = "≤" if self.ok else ">"
        return f"saved model    {self.difference:8.1e} {sign} {self.tolerance:.0e}   logits after transformers' from_pretrained"


@dataclass(frozen=True)
class Outcome:
    """All that was found; the same on every rank.

    Args:
        report: the comparison of training with one process.
        saving: the comparison after saving and loading.
        traffic: (operation, axis) → calls and elements of one training step of a rank.
        held: entries of the parameters that this rank trains.
        places: where the runs part; None where they do not.
        exact: the differences in fp64, where a comparison in fp32 says nothing; see testing/exact.py.
        unsure: why it says nothing.
    """

    report: ParityReport
    saving: Saving
    traffic: Traffic
    held: int
    places: Places | None
    exact: dict[str, float] | None = None
    unsure: str = ""

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one process computes."""
        return (self.report.ok or is_exact(self.exact)) and self.saving.ok


def is_exact(differences: dict[str, float] | None) -> bool:
    """Whether there are differences in fp64, and they are within the tolerance."""
    return differences is not None and max(differences.values()) <= Tolerance().gradient


class _Check:
    """The pieces that every part of the check needs: how the twin, its batches and the plugin are made."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config()
        self.piped = job.layout.pp > 1
        share = MICROBATCH * job.layout.pp + 1 if self.piped else None
        self.batches = make_batches(self.model(), job.layout.dp, share)

    def model(self) -> Any:
        """The twin, with its experts as plain operations: their grouped product does not exist in fp64."""
        model: Any = twin_model(self.config)
        if getattr(model.config, "_experts_implementation", None):
            model.set_experts_implementation("eager")
        return model

    def plugin(self, microbatches: int | None = None) -> HybridParallelPlugin:
        """A plugin of the layout, with a policy object of its own; the cut has been tried already where it has to be.

        Args:
            microbatches: of a pipeline; by default as many as `MICROBATCH` says.
        """
        layout = self.job.layout
        return HybridParallelPlugin(
            tp_size=layout.tp,
            pp_size=layout.pp,
            zero_stage=layout.zero_stage,
            precision="fp32",
            max_norm=MAX_NORM,
            custom_policy=load_policy(layout.policy),
            pp_style=layout.pp_style,
            num_model_chunks=layout.chunks if self.piped else None,
            microbatch_size=MICROBATCH if self.piped and microbatches is None else None,
            num_microbatches=microbatches if self.piped else None,
            check_cut=False,
        )


def verify_on_this_rank(job: Job) -> Outcome:
    """Run the whole check; a collective call over tp·dp ranks that all have the same device.

    Raises:
        ConfigError, PolicyError: the twin cannot be laid out so.
    """
    quiet_transformers()
    check = _Check(job)
    through: Literal["loop", "execute_pipeline"] = "execute_pipeline" if check.piped else "loop"
    training = Training(check.model, check.batches, steps=job.steps, max_norm=MAX_NORM, through=through)
    report = compare_with_single(training, check.plugin)
    exact = None
    unsure = why_fp32_is_unsure(report, check.model, check.batches[0])
    if job.layout.dp == 1 and unsure:  # with more, fp64 would leave out what data parallelism adds
        if check.piped:
            exact = compare_pipeline_in_fp64(check.model, check.batches[0], check.plugin())
        else:
            tp = check.plugin().mesh.axis("tp")
            exact = compare_in_fp64(check.model, check.batches[0], tp, lambda _: load_policy(job.layout.policy))
    same = report.ok or is_exact(exact)
    places = None if same else find_places(check.model, check.batches[0], check.plugin(microbatches=1))
    traffic, held, saving = _train_and_save(check)
    return Outcome(report, saving, traffic, held, places, exact, unsure)


def _train_and_save(check: _Check) -> tuple[Traffic, int, Saving]:
    """One step under the ledger, then save the trained model and load it by transformers."""
    plugin = check.plugin()
    booster, dp = Booster(plugin=plugin), plugin.mesh.axis("dp")
    model = check.model()
    model, optimizer, *_ = booster.boost(model, well_conditioned_adamw(model))
    optimizer.check_replicas = False  # the report has said already where they differ
    held = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = rows_of(check.batches[0], dp.rank, dp.size)
    with ledger() as book:
        if check.piped:
            booster.execute_pipeline(iter([share]), model, None, optimizer)
        else:
            booster.backward(model(**share).loss, optimizer)
        optimizer.step()
    traffic = {key: (calls, book.elements[key]) for key, calls in sorted(book.calls.items())}
    folder = check.job.folder / SAVED
    try:
        booster.save_model(model, folder)
    except CheckpointError as error:  # raised on every rank, with the same reason
        return traffic, held, Saving(math.inf, Tolerance().loss, f"{type(error).__name__}: {error}")
    return traffic, held, _compare_loaded(check, booster, model, folder)


def _compare_loaded(check: _Check, booster: Booster, model: Any, folder: Path) -> Saving:
    world, tolerance = Axis.of(None, "world"), Tolerance().loss
    # a whole batch on every rank, without labels: nothing is averaged
    batch = {k: v for k, v in check.batches[-1].items() if k != "labels"}
    batch = {k: v.to(current_device()) if torch.is_tensor(v) else v for k, v in batch.items()}
    model.eval()
    ours = _logits(check, booster, model, batch)
    error, difference = "", math.inf
    try:
        loaded = type(check.model()).from_pretrained(folder, dtype=torch.float32).to(current_device()).eval()
        with torch.no_grad():
            theirs = loaded(**batch).logits
        difference = 0.0 if ours is None else largest(ours - theirs) / max(largest(theirs), 1e-30)
    except Exception as problem:  # whatever transformers raises, it cannot load what was saved
        error = f"{type(problem).__name__}: {problem}"
    of_ranks = all_gather_object((difference, error), world)
    errors = [text for _, text in of_ranks if text]
    return Saving(max(d for d, _ in of_ranks), tolerance, errors[0] if errors else "")


def _logits(check: _Check, booster: Booster, model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
    """Logits of a whole batch; of a pipeline on the ranks of its last stage only."""
    with torch.no_grad():
        if not check.piped:
            return model(**batch).logits
        made = booster.execute_pipeline(iter([batch]), model, return_loss=False, return_outputs=True)["outputs"]
    return None if made is None else made["logits"]


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Plain data; what is no number (an infinite difference) as text."""
    report = outcome.report
    return {
        "ok": outcome.ok,
        "text": str(report),
        "layout": report.layout,
        "differences": [_finite(asdict(difference) | {"ok": difference.ok}) for difference in report.differences],
        "rounding": _finite(dict(report.rounding)),
        "exact": _finite(outcome.exact),
        "unsure": outcome.unsure,
        "weights_compared": report.num_weights - sum(report.undetermined.values()),
        "weights": report.num_weights,
        "saving": _finite(asdict(outcome.saving) | {"ok": outcome.saving.ok, "text": str(outcome.saving)}),
        "traffic": [
            {"operation": operation, "axis": axis, "calls": calls, "elements": elements}
            for (operation, axis), (calls, elements) in outcome.traffic.items()
        ],
        "held": outcome.held,
        "places": None if outcome.places is None else _finite(asdict(outcome.places)),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run_job(folder: Path) -> None:
    """What a worker process does: run the job in the folder; rank 0 leaves the result there."""
    job = Job.read(folder)
    outcome = verify_on_this_rank(job)
    if Axis.of(None, "world").rank == 0:
        shutil.rmtree(folder / SAVED, ignore_errors=True)
        (folder / RESULT).write_text(json.dumps(outcome_to_json(outcome)), encoding="utf-8")
