"""What each stage of a pipeline holds, and what travels between them: the cut that the plugin would make, as data.

Needs neither weights nor processes: the chain is read off a model on the meta device, as the plugin reads it off its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colonnade.booster.plugin.pipeline import check_on_twin
from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError, PolicyError, UsageError
from colonnade.model.chain import Leaf
from colonnade.model.layout import layout_of
from colonnade.model.tree import leaves
from colonnade.model.twin import MIN_LAYERS, build, shrink
from colonnade.pipeline.balance import balance, multiplied
from colonnade.pipeline.cut import Cut, cut_chain
from colonnade.pipeline.schedule import Schedule, make_schedule
from colonnade.pipeline.timeline import simulate
from colonnade.shardformer.inference.chain import chain_of, units_of
from colonnade.shardformer.inference.probe import TOKENS, TRACED_ROWS
from colonnade.shardformer.registry import has_policy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CHECKED = "its tiny twin, cut, computes what it computes whole"
WRITTEN = "the family has a policy of its own, and is cut by the library's tests"
TRIES = 4  # how many times as many layers as stages a twin may need, where some have to stay together
SMALL = 10_000_000  # parameters of a model that may be built with weights to be looked at
ALONE = Axis("world", 1, 0, (0,), None)


@dataclass(frozen=True)
class PipelineChoice:
    """The pipeline that is asked for.

    Args:
        ranks: of the pipeline.
        options: as the plugin has them.
        microbatches: in a step; by default twice as many as ranks.

    Raises:
        ConfigError, UsageError: there is no such schedule, or it is no pipeline.
    """

    ranks: int
    options: PipelineOptions = PipelineOptions()
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(f"--pp {self.ranks}: a pipeline has at least 2 ranks.")
        self.schedule()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.options.stages_per_rank

    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        number = 2 * self.ranks if self.microbatches is None else self.microbatches
        return make_schedule(self.options.style, self.ranks, number, self.options.chunks)


@dataclass(frozen=True)
class Border:
    """A tensor that travels over a border between stages.

    Args:
        name: the module that has returned it, and which of its results it is.
        size: its elements, in b rows and s tokens of a micro-batch.
        gradient: whether its gradient travels back.
    """

    name: str
    size: str
    gradient: bool


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        number: from 0, in the order of the forward.
        rank: of the pipeline, which holds it.
        blocks: names of its blocks, in short.
        count: number of calls of blocks.
        beside: modules with parameters that stand beside the blocks.
        parameters, local_parameters: entries of its parameters in the logical model and on tensor-parallel rank 0.
        cost: its share of the multiplications of all stages.
        receives: what comes from the stage before.
    """

    number: int
    rank: int
    blocks: str
    count: int
    beside: tuple[str, ...]
    parameters: int
    local_parameters: int
    cost: float
    receives: tuple[Border, ...]


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages use.

    Args:
        names: all of its names.
        stages: that use it.
        ranks: that hold it; the first owns it, the others have copies.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """A model cut into stages.

    Args:
        style: name of the schedule.
        ranks, chunks, microbatches: of the schedule.
        stages: in the order of the forward.
        local_parameters: entries of the parameters on each rank of the pipeline, copies included.
        shared: parameters that several stages use.
        bubble: idle share of the ranks in a step whose stages take equally long.
        bubble_of_costs: the same where each takes as long as its share of the multiplications.
        in_flight: most micro-batches × stages whose activations each rank keeps.
        check: whether the cut has been tried.
    """

    style: str
    ranks: int
    chunks: int
    microbatches: int
    stages: tuple[Stage, ...]
    local_parameters: tuple[int, ...]
    shared: tuple[SharedParameter, ...]
    bubble: float
    bubble_of_costs: float
    in_flight: tuple[int, ...]
    check: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return asdict(self)


class StagePlan:
    """How the plugin would cut a model, found before it is split over other axes.

    Args:
        model: the unmodified model, on the meta device unless its forward needs values.
        choice: the pipeline.
        check: try the cut on a tiny twin, as the plugin does where the family has no policy of its own.

    Raises:
        ConfigError, PolicyError: the model cannot be cut so, and why.
    """

    def __init__(self, model: nn.Module, choice: PipelineChoice, check: bool = True) -> None:
        self.choice, self.schedule, self.check = choice, choice.schedule(), "not checked"
        chain = chain_of(model)
        self.cut: Cut = cut_chain(chain, balance(model, chain, choice.stages, choice.options.counts))
        self.units = tuple(units_of(model))
        self._costs = [multiplied(model.get_submodule(call.path)) for call in chain.calls]
        if has_policy(model):
            self.check = WRITTEN
        elif check:
            check_on_twin(model, choice.stages, ALONE)
            self.check = CHECKED

    def explain(self, model: nn.Module) -> Stages:
        """What the stages hold.

        Args:
            model: the model, which may have been split over tensor-parallel ranks since.
        """
        schedule, every = self.schedule, range(self.cut.num_stages)
        used = self._used(model)
        held = [
            {p for p, stages in used.items() if stages & set(schedule.stages_of(rank))}
            for rank in range(schedule.ranks)
        ]
        costs = [self._cost(stage) for stage in every]
        by_cost: dict[str | tuple[str, int], float] = {(kind, stage): costs[stage] for kind in "FBW" for stage in every}
        timeline = simulate(schedule)
        return Stages(
            *(schedule.style, schedule.ranks, schedule.chunks, schedule.microbatches),
            tuple(self._stage(stage, [p for p, stages in used.items() if stage in stages], costs) for stage in every),
            local_parameters=tuple(sum(p.numel() for p in parameters) for parameters in held),
            shared=tuple(self._shared(model, used)),
            bubble=timeline.idle_share,
            bubble_of_costs=simulate(schedule, by_cost).idle_share,
            in_flight=tuple(timeline.peak_in_flight(rank) for rank in range(schedule.ranks)),
            check=self.check,
        )

    def _cost(self, stage: int) -> float:
        mine = sum(cost for cost, of in zip(self._costs, self.cut.stage_of) if of == stage)
        return mine / (sum(self._costs) or 1)

    def _stage(self, stage: int, parameters: Sequence[nn.Parameter], costs: Sequence[float]) -> Stage:
        calls = [call for call, of in zip(self.cut.chain.calls, self.cut.stage_of) if of == stage]
        blocks = [call for call in calls if call.block]
        beside = [call.path for call in calls if not call.block]
        if stage == 0:
            beside += self._uncalled()
        shadow = self.cut.chain.shadow
        with_parameters = [path for path in beside if any(True for _ in shadow.get_submodule(path).parameters())]
        return Stage(
            stage,
            self.schedule.rank_of(stage),
            in_runs([call.path for call in blocks]),
            len(blocks),
            tuple(dict.fromkeys(with_parameters)),
            sum(math.prod(layout_of(p).shape) for p in parameters),
            sum(p.numel() for p in parameters),
            costs[stage],
            tuple(self._border(leaf) for leaf in self.cut.crossing[stage]),
        )

    def _uncalled(self) -> list[str]:
        """Units that a forward does not call; they are on the first rank."""
        called = {call.path for call in self.cut.chain.calls}
        return [path for path in self.units if path not in called]

    def _border(self, leaf: Leaf) -> Border:
        call = self.cut.chain.calls[leaf.call]
        tensor = leaves(call.returned)[leaf.path]
        again = f" (call {call.nth + 1})" if call.nth else ""
        which = f", result {leaf.path}" if leaf.path and len(leaves(call.returned)) > 1 else ""
        return Border(f"{call.path}{again}{which}", size_of(tensor.shape), tensor.is_floating_point())

    def _used(self, model: nn.Module) -> dict[nn.Parameter, set[int]]:
        """The stages that use each parameter: as the plugin has it, those of no unit and of glue are on all of them."""
        stages = set(range(self.cut.num_stages))
        used: dict[nn.Parameter, set[int]] = {}
        for call, stage in zip(self.cut.chain.calls, self.cut.stage_of):
            for p in model.get_submodule(call.path).parameters():
                used.setdefault(p, set()).add(stage)
        for path in self._uncalled():
            for p in model.get_submodule(path).parameters():
                used.setdefault(p, set()).add(0)
        for name, p in model.named_parameters():
            if name in self.cut.chain.everywhere or p not in used:
                used[p] = stages
        return {p: used[p] for p in model.parameters()}

    def _shared(self, model: nn.Module, used: dict[nn.Parameter, set[int]]) -> Iterable[SharedParameter]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        for p, stages in used.items():
            if len(stages) > 1:
                ranks = tuple(sorted({self.schedule.rank_of(stage) for stage in stages}))
                yield SharedParameter(tuple(names[p]), tuple(sorted(stages)), ranks)


def plan_stages(config: PretrainedConfig, choice: PipelineChoice, check: bool = True) -> StagePlan:
    """The plan for a model of this configuration; of one that needs values in its forward, only where it is small.

    Raises:
        ConfigError, PolicyError: as `StagePlan`.
    """
    with torch.device("meta"):
        model = build(config)
    try:
        return StagePlan(model, choice, check)
    except PolicyError:
        if sum(p.numel() for p in model.parameters()) > SMALL:
            raise
    return StagePlan(build(config), choice, check)


def size_of(shape: Sequence[int]) -> str:
    """Elements of a tensor that a look at the model has made, in b rows and s tokens, such as "b·s·4096"."""
    letters = {TRACED_ROWS: "b", TOKENS: "s", TRACED_ROWS * TOKENS: "b·s"}
    known = [letters[n] for n in shape if n in letters]
    rest = math.prod(n for n in shape if n not in letters)
    return "·".join([*known, *([str(rest)] if rest != 1 or not known else [])])


def in_runs(names: Sequence[str]) -> str:
    """Names that differ in their last number only, in short: "model.layers.0–3"; several calls of one with their number."""
    runs: list[list[Any]] = []  # of (stem, first, last, calls)
    for name in names:
        stem, _, number = name.rpartition(".")
        at = int(number) if number.isdigit() else None
        last = runs[-1] if runs else None
        if last and last[0] == stem and at is not None and at == last[2] + 1 and last[3] == 1:
            last[2] = at
        elif last and (last[0], last[1], last[2]) == (stem, at, at):
            last[3] += 1
        else:
            runs.append([stem if at is not None else name, at, at, 1])
    return ", ".join(
        f"{stem}" + ("" if first is None else f".{first}" if first == last else f".{first}–{last}")
        + (f" × {calls}" if calls > 1 else "")
        for stem, first, last, calls in runs
    )  # fmt: skip


def shrink_for(config: PretrainedConfig, multiple: int, choice: PipelineChoice | None) -> PretrainedConfig:
    """The configuration of a tiny twin that can be cut into the stages that are asked for; see `shrink`.

    Args:
        config: of the model.
        multiple: number of tensor-parallel ranks.
        choice: the pipeline; None for none.

    Raises:
        ConfigError, PolicyError: the model cannot be cut into so many, however many of its layers are kept.
    """
    if choice is None:
        return shrink(config, multiple)
    even = PipelineChoice(choice.ranks, PipelineOptions(choice.options.style, choice.options.chunks))
    times = 1
    while True:
        twin = shrink(config, multiple, max(MIN_LAYERS, times * choice.stages))
        try:
            plan_stages(twin, even, check=False)
        except ConfigError:
            if times == TRIES:
                raise
            times += 1
        else:
            return twin
