"""Pipeline: a model cut into stages inside a booster. Cuts it, and runs global batches through it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.booster.plugin.batches import (
    batch_rows,
    check_same_batch,
    join_outputs,
    next_batch,
    split_rows,
    take_rows,
)
from colonnade.booster.plugin.boosted_model import BoostedModel, zero_from
from colonnade.booster.plugin.microbatch import Shares, detached, loss_from, run_on
from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.checkpoint.agreement import Attempt
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.comm.collectives import all_gather_object, broadcast
from colonnade.errors import PolicyError, ShapeError, UsageError, explain
from colonnade.model.adapters import plain_model
from colonnade.model.layout import layout_of, set_layout
from colonnade.pipeline.balance import balance
from colonnade.pipeline.check import difference
from colonnade.pipeline.cut import Cut, cut_chain, places_to_cut
from colonnade.pipeline.mailbox import DTYPES
from colonnade.pipeline.runtime import Record, Runtime
from colonnade.pipeline.schedule import Schedule, make_schedule
from colonnade.pipeline.shared import Shared, SharedParameters
from colonnade.pipeline.stage import StagedModel, hollow
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.shardformer.inference.chain import chain_of, units_of
from colonnade.shardformer.inference.check import in_double, said
from colonnade.shardformer.inference.infer import twin_of
from colonnade.shardformer.inference.probe import loss_of
from colonnade.shardformer.layer.deferred import split_backward
from colonnade.shardformer.registry import has_policy


class PipelinePlan:
    """How a model will be cut; found before it is split or changed.

    Args:
        model: the user's, whole.
        mesh: the ranks.
        options: what the user chose.

    Raises:
        PolicyError, ConfigError: the same on every rank; it cannot be cut so.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, options: PipelineOptions) -> None:
        self.mesh, self.options, self.axis = mesh, options, mesh.axis("pp")
        plain = plain_model(model)
        chain = chain_of(model)
        stages = self.axis.size * options.stages_per_rank
        self.cut: Cut = cut_chain(chain, balance(plain, chain, stages, options.counts))
        self.units = tuple(units_of(plain))
        if options.check_cut and not has_policy(plain):
            check_on_twin(model, stages, mesh.world)
        self._order = make_schedule(options.style, self.axis.size, 1, options.chunks)

    def apply(self, model: nn.Module) -> StagedModel:
        """Cut the model, which may have been split over other axes since: it keeps what this rank's stages need."""
        plain = plain_model(model)
        held = [self._units_of(rank) for rank in range(self.axis.size)]
        owners = {path: plain.get_submodule(path) for path in self.units}
        everywhere = {p for name, p in plain.named_parameters() if name in self.cut.chain.everywhere}
        names = _all_names(model)
        for param, of in names.items():
            if len(of) > 1:
                set_layout(param, layout_of(param).named(*of))
        self.shared = self._shared(names, owners, held, everywhere)
        stages = self._order.stages_of(self.axis.rank)
        staged = StagedModel(model, self.cut, stages, self._recomputed())
        for path, module in owners.items():
            if path not in held[self.axis.rank]:
                hollow(module, everywhere)
            elif self._order.splits_backward:
                split_backward(module)
        return staged

    def _units_of(self, rank: int) -> set[str]:
        """Names of the units on a rank; those that a forward does not call are on the first."""
        called = {call.path for call in self.cut.chain.calls}
        uncalled = {path for path in self.units if path not in called} if rank == 0 else set()
        return self.cut.paths_of(self._order.stages_of(rank)) | uncalled

    def _recomputed(self) -> set[str]:
        if self.options.checkpointing is None:
            return set()
        numbers = self.options.checkpointing.blocks_of(self.cut.counts)
        found: set[str] = set()
        for stage, number in enumerate(numbers):
            blocks = [n for n in self.cut.chain.blocks if self.cut.stage_of[n] == stage]
            found |= {self.cut.chain.calls[n].path for n in blocks[:number]}
        return found

    def _shared(
        self,
        names: dict[nn.Parameter, list[str]],
        owners: dict[str, nn.Module],
        held: Sequence[set[str]],
        everywhere: set[nn.Parameter],
    ) -> SharedParameters:
        """The parameters that several ranks hold, in the order of the model."""
        homes: dict[nn.Parameter, set[str]] = {}
        for path, module in owners.items():
            for param in module.parameters():
                homes.setdefault(param, set()).add(path)
        found = []
        for param in names:
            if not param.requires_grad:
                continue
            on_all = param in everywhere or param not in homes
            holders = tuple(r for r, units in enumerate(held) if on_all or homes[param] & units)
            if len(holders) > 1:
                found.append(Shared(param if self.axis.rank in holders else None, holders))
        return SharedParameters(found, self.axis)

    def keep_own(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Leave in the optimizer's groups what this rank steps on."""
        own = set(model.parameters()) - self.shared.copies
        for group in optimizer.param_groups:
            for param in [p for p in group["params"] if p not in own]:
                optimizer.state.pop(param, None)
            group["params"] = [p for p in group["params"] if p in own]


TWIN_LAYERS = 4  # of a twin, at least: enough to have layers of each kind on several stages
_CHECKED: dict[str, str] = {}  # what was found wrong with a cut, by model and number of stages


def check_on_twin(model: nn.Module, stages: int, world: Axis) -> None:
    """Cut a tiny twin of the model, and compare loss and gradients with those of the whole twin; one rank does it for all.

    Families with a policy of their own have been compared already, by the library's tests.

    Raises:
        PolicyError: on every rank, where they differ or there can be no twin.
    """
    wrong = ""
    if world.rank == 0:
        key = f"{type(model).__qualname__} {getattr(model, 'config', id(model))} {stages}"
        if key not in _CHECKED:
            _CHECKED[key] = _wrong_with_twin(model, stages)
        wrong = _CHECKED[key]
    wrong = all_gather_object(wrong, world)[0]
    if wrong:
        raise PolicyError(
            explain(
                f"{type(plain_model(model)).__name__} cannot be cut into pipeline stages: its tiny twin, cut, does not compute what it computes whole.",
                [("found", wrong), ("try", "pp_size=1; or check_cut=False, if you know better")],
            )
        )  # fmt: skip


def _wrong_with_twin(model: nn.Module, stages: int) -> str:
    """What differs when the twin is cut into so many stages, or as far as it can be, and wherever it can be cut."""
    try:
        twin = twin_of(model, layers=TWIN_LAYERS)
        chain = chain_of(twin.model)
        most = 1 + len(places_to_cut(chain))
        for number in sorted({min(stages, most), most}):
            cut = cut_chain(chain, balance(twin.model, chain, number))
            with in_double(), torch.enable_grad():
                if wrong := difference(twin.model, cut, twin.inputs, loss_of):
                    return wrong
    except Exception as error:  # a model's own code; every rank has to hear of it
        return said(error)
    return ""


def _all_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


class Pipeline:
    """Runs global batches through the stages.

    Args:
        plan: how the model was cut.
        staged: the model.
    """

    def __init__(self, plan: PipelinePlan, staged: StagedModel) -> None:
        self.plan, self.mesh, self.axis = plan, plan.mesh, plan.axis
        self.runtime = Runtime(staged, plan.axis, current_device())
        self.played: tuple[Schedule, Record] | None = None  # the last batch
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def execute(
        self,
        data_iter: Any,
        model: BoostedModel,
        criterion: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: ParallelOptimizer | None,
        *,
        microbatch_size: int | None,
        num_microbatches: int | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Forward, and backward if an optimizer is given and gradients are on, over the next batch of `data_iter`.

        Returns:
            {"loss": the mean over the global batch, the same scalar on every rank, or None; "outputs": of the whole local
            batch on the ranks of the last stage, else None}.
        """
        model.check_loaded()
        batch = next_batch(data_iter)
        rows = batch_rows(batch)
        if rows == 0:
            raise ShapeError("this rank's share of the batch has no rows: every rank needs at least one in each step.")
        if model.check_batches:
            check_same_batch(batch, self.mesh, "pp")
        if microbatch_size is None and num_microbatches is None:
            num_microbatches = 2 * self.axis.size
        cuts = split_rows(rows, microbatch_size, num_microbatches)
        parts = [take_rows(batch, rows, *cut) for cut in cuts]
        trained = optimizer if torch.is_grad_enabled() else None
        step = _Step(model, criterion, trained, Shares(batch, parts, model), parts, return_loss, return_outputs)
        schedule = self._schedule(len(parts), trained is None)
        if trained is None:
            with torch.no_grad():
                self.runtime.play(schedule, parts, step)
        else:
            with trained.no_sync():
                self.runtime.play(schedule, parts, step)
            trained.reduce()
        self.played = schedule, self.runtime.record
        outputs = [step.made[index] for index in sorted(step.made)]
        is_last = schedule.rank_of(schedule.num_stages - 1) == self.axis.rank
        return {
            "loss": self._told(step, model, schedule, is_last) if return_loss else None,
            "outputs": join_outputs(outputs, [b - a for a, b in cuts]) if return_outputs and is_last else None,
        }

    def _schedule(self, microbatches: int, forward_only: bool) -> Schedule:
        key = microbatches, forward_only
        if key not in self._schedules:
            options = self.plan.options
            self._schedules[key] = make_schedule(
                options.style, self.axis.size, microbatches, options.chunks, forward_only
            )
        return self._schedules[key]

    def _told(self, step: _Step, model: BoostedModel, schedule: Schedule, is_last: bool) -> torch.Tensor:
        """The loss, known on the last stage, on every rank."""
        mean = step.shares.mean(step.total, model) if is_last else torch.zeros((), device=current_device())
        return broadcast(mean, self.axis, schedule.rank_of(schedule.num_stages - 1))

    def last_logits(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last position, on every rank; without gradients.

        Args:
            forward: the model's own.
            inputs: of the whole model, the same on every rank of the pipeline.
        """
        found = _Logits(forward)
        schedule = self._schedule(1, forward_only=True)
        self.runtime.play(schedule, [inputs], found)
        source = schedule.rank_of(schedule.num_stages - 1)
        head = torch.zeros(3 + 1, dtype=torch.int64, device=current_device())
        if found.logits is not None:
            head[:3] = torch.tensor(found.logits.shape)
            head[3] = DTYPES.index(found.logits.dtype)
        *shape, kind = broadcast(head, self.axis, source).tolist()
        logits = torch.empty(shape, dtype=DTYPES[kind], device=current_device())
        if found.logits is not None:
            logits = found.logits.contiguous()
        return broadcast(logits, self.axis, source)

    def save_trace(self, path: str | Path) -> None:
        """Write when each rank of this pipeline did what in the last batch; `colonnade schedule --trace` draws it.

        Called by every rank; one rank of the first data-parallel replica writes.

        Raises:
            UsageError: there has been no batch.
            CheckpointError: on every rank; the file cannot be written.
        """
        if self.played is None:
            raise UsageError(
                explain(
                    "save_trace: no batch has been run yet.",
                    [("try", "booster.execute_pipeline first, then save_trace")],
                )
            )
        schedule, record = self.played
        events = all_gather_object([asdict(event) for event in record.events], self.axis)
        attempt = Attempt(self.mesh, f"the trace was not written to {path}.")
        with attempt:
            if not self.mesh.world.rank:
                _write_trace(Path(path), schedule, events)
        attempt.agree()


def _write_trace(path: Path, schedule: Schedule, events: list[list[dict[str, Any]]]) -> None:
    """The file of a trace.

    Args:
        events: by rank.
    """
    start = min(event["start"] for of_rank in events for event in of_rank)
    rows = [
        {**event, "rank": rank, "start": event["start"] - start, "end": event["end"] - start}
        for rank, of_rank in enumerate(events)
        for event in of_rank
    ]
    head = {"style": schedule.style, "ranks": schedule.ranks, "microbatches": schedule.microbatches}
    path.write_text(json.dumps({**head, "chunks": schedule.chunks, "events": rows}), encoding="utf-8")


class _Logits:
    """Runs a forward for the logits of the last position."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.logits: torch.Tensor | None = None

    def forward(self, part: Any) -> Any:
        return self.run(**part)

    def loss(self, output: Any, index: int) -> None:
        self.logits = output["logits"][:, -1:]

    def backward(self, tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
        """Never called: there are no gradients."""


class _Step:
    """What is done with the micro-batches of one batch."""

    def __init__(
        self,
        model: BoostedModel,
        criterion: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: ParallelOptimizer | None,
        shares: Shares,
        parts: Sequence[Any],
        wants_loss: bool,
        wants_outputs: bool,
    ) -> None:
        self.model, self.criterion, self.optimizer, self.shares, self.parts = model, criterion, optimizer, shares, parts
        self.wants_loss, self.wants_outputs = wants_loss or optimizer is not None, wants_outputs
        self.made: dict[int, Any] = {}  # outputs by number of the micro-batch
        self.total: torch.Tensor | None = None

    def forward(self, part: Any) -> Any:
        return run_on(self.model, part)

    def loss(self, output: Any, index: int) -> torch.Tensor | None:
        if self.wants_outputs:
            self.made[index] = detached(output)
        if not self.wants_loss:
            return None
        loss = loss_from(self.criterion, output, self.parts[index])
        weight = self.shares.weights[index]
        if weight:
            loss = loss.float() * weight
            self.total = loss.detach() if self.total is None else self.total + loss.detach()
        if self.optimizer is None:
            return None
        return self.optimizer.scaled(loss if weight else zero_from(output))

    def backward(self, tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
        if self.optimizer is not None:
            self.optimizer.backward_from(list(tensors), list(gradients))
