"""Where two runs part: the first module whose output differs, and the first whose output gradient differs.

[Note: what can be compared]
One process runs beside the parallel model on every rank. Outputs outside the regions (blocks, norms, row-parallel layers,
embeddings) are whole on every rank and are compared as they are, each data-parallel rank with its rows. The output of a
column-parallel layer is compared with those columns of the whole one that its layout names. What is split without a
layout, such as the attention inside its region, is not compared: a fault there shows in the row-parallel layer behind it.
Of keys and values that several ranks hold the output is compared, its gradient is not: each rank has a share of that.

Of a pipeline each rank compares what its stages call, in one micro-batch; what is called several times, such as blocks that
share their weights, is left out, as a stage does not know which of the calls it makes.

[Note: what counts as a difference]
One process in fp32 is compared with itself in fp64 first. A module counts as different where it is off by more than ten
times of that, and by more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from colonnade.booster import Booster
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.model.layout import Range, layout_of
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.testing.logical import largest
from colonnade.testing.parity import rows_of

TOLERANCE = 1e-5
TIMES_ROUNDING = 10.0
Key = tuple[str, int]  # module and number of the call


@dataclass(frozen=True)
class Place:
    """A module whose output, or its gradient, differs, by how much (relative), and on which rank."""

    module: str
    kind: str
    difference: float
    rank: int


@dataclass(frozen=True)
class Places:
    """Where the parallel run parts from one process.

    Args:
        forward: the first module in forward order whose output differs.
        backward: the first module in backward order whose output gradient differs.
        suspects: layers that are cut otherwise than those they work with, in words.
        compared: number of module outputs that were compared.
    """

    forward: Place | None
    backward: Place | None
    suspects: tuple[str, ...]
    compared: int


@dataclass
class _Records:
    """Outputs of all modules and their gradients, in the order in which they came about.

    Args:
        staged: the model is a stage of a pipeline; what nobody reads there is not-a-numbers, and says nothing.
    """

    staged: bool = False
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def called_once(self) -> _Records:
        """Those of modules that are called once."""
        once = {name for name, calls in self.calls.items() if calls == 1}
        return _Records(
            outputs={key: tensor for key, tensor in self.outputs.items() if key[0] in once},
            gradients={key: tensor for key, tensor in self.gradients.items() if key[0] in once},
        )

    def watch(self, model: nn.Module, without: Collection[str] = ()) -> None:
        """Record what the modules of a model put out from now on, all but those named."""
        for name, module in model.named_modules():
            if name and name not in without:
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _tensor_of(output)
            if tensor is None or (self.staged and bool(tensor.isnan().all())):
                return
            key = (name, self.calls.get(name, 0))
            self.calls[name] = key[1] + 1
            self.outputs[key] = tensor.detach().cpu().clone()
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._received(key, gradient))

        return record

    def _received(self, key: Key, gradient: torch.Tensor) -> None:
        self.gradients[key] = gradient.detach().cpu().clone()


def _tensor_of(output: Any) -> torch.Tensor | None:
    if type(output) in (tuple, list) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) and output.is_floating_point() else None


def find_places(model_fn: Callable[[], Any], batch: Mapping[str, Any], plugin: Any) -> Places:
    """Run one forward and backward in one process and in parallel, and compare module by module; a collective call.

    Args:
        model_fn: builds the unmodified model.
        batch: a global batch.
        plugin: a fresh plugin of the layout, of a pipeline with a single micro-batch.
    """
    one, exact = (_run_single(model_fn(), batch, dtype) for dtype in (torch.float32, torch.float64))
    booster, dp = Booster(plugin=plugin), plugin.mesh.axis("dp")
    plain = model_fn()
    model: Any
    model, optimizer, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    many = _Records(staged=model.pipeline is not None)
    many.watch(model.unwrap(), _of_other_stages(model.pipeline))
    share = rows_of(dict(batch), dp.rank, dp.size)
    if model.pipeline is None:
        booster.backward(model(**share).loss, optimizer)
    else:
        booster.execute_pipeline(iter([share]), model, None, optimizer)
        one = one.called_once()
    modules = dict(model.unwrap().named_modules())
    outputs = _differences(many.outputs, one.outputs, exact.outputs, modules, dp)
    # the mean over data-parallel ranks is taken later, of the parameters' gradients
    means = {key: gradient / dp.size for key, gradient in many.gradients.items() if not _has_share(modules, key[0])}
    gradients = _differences(means, one.gradients, exact.gradients, modules, dp, whole_only=True)
    return Places(
        _first(outputs, modules), _first(gradients, modules), tuple(disagreeing_cuts(model.unwrap())), len(outputs)
    )


def _of_other_stages(pipeline: Any) -> set[str]:
    """The modules that are called on other ranks of a pipeline; hooks hear of them here too."""
    if pipeline is None:
        return set()
    staged = pipeline.runtime.staged
    return {call.path for call in staged.cut.chain.calls} - staged.cut.paths_of(staged.stages)


def _run_single(model: Any, batch: Mapping[str, Any], dtype: torch.dtype) -> _Records:
    model = model.to(current_device(), dtype)
    records = _Records()
    records.watch(model)
    model(**{k: v.to(current_device()) if torch.is_tensor(v) else v for k, v in batch.items()}).loss.backward()
    return records


def _differences(
    many: Mapping[Key, torch.Tensor],
    one: Mapping[Key, torch.Tensor],
    exact: Mapping[Key, torch.Tensor],
    modules: Mapping[str, nn.Module],
    dp: Axis,
    whole_only: bool = False,
) -> list[tuple[int, Key, float]]:
    """Each comparable tensor, its place in the order of one process, and by how much it is off, 0 where that is rounding.

    Args:
        whole_only: leave out columns that several ranks hold.
    """
    found = []
    for place, (key, whole) in enumerate(one.items()):
        module = modules.get(key[0])
        if key not in many or key not in exact or module is None:
            continue
        pair = _comparable(whole, many[key], module, dp, whole_only)
        if pair is None:
            continue
        wanted, ours = pair
        rounding = largest(whole - exact[key].float()) / _scale(whole)
        difference = largest(ours - wanted) / _scale(whole)
        found.append((place, key, difference if difference > max(TOLERANCE, TIMES_ROUNDING * rounding) else 0.0))
    return found


def _scale(tensor: torch.Tensor) -> float:
    return max(largest(tensor), 1e-30)


def _has_share(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether a module that every rank holds whole works on this rank's heads alone, such as a norm of each head."""
    module = modules.get(name)
    return module is not None and any(layout_of(p).partial_axes for p in module.parameters(recurse=False))


def _comparable(
    whole: torch.Tensor, ours: torch.Tensor, module: nn.Module, dp: Axis, whole_only: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One process's tensor and this rank's, as far as they should be the same; see [Note: what can be compared]."""
    if whole.dim() and whole.shape[0] % dp.size == 0 and whole.shape[0] > 1:
        share = whole.shape[0] // dp.size
        rows = whole[dp.rank * share : (dp.rank + 1) * share]
    else:
        rows = whole
    weight = getattr(module, "weight", None)
    if isinstance(module, ColumnParallel) and isinstance(weight, nn.Parameter) and not module.gather_output:
        columns, mine, offset = [], [], 0
        for start, stop, holders in _ranges(module):
            if not (whole_only and len(holders) > 1):
                columns.append(torch.arange(start, stop))
                mine.append(torch.arange(offset, offset + stop - start))
            offset += stop - start
        if columns and offset == ours.shape[-1] and rows.shape[:-1] == ours.shape[:-1]:
            return rows.index_select(-1, torch.cat(columns)), ours.index_select(-1, torch.cat(mine))
        return None
    return (rows, ours) if rows.shape == ours.shape else None


def _ranges(module: Any) -> list[Range]:
    """What a layer holds of the dimension along which it is cut."""
    layout, dim = layout_of(module.weight), _cut(module)
    return [Range(box.logical[dim], box.logical[dim] + box.extent[dim], box.holders) for box in layout.boxes]


def _cut(module: Any) -> int:
    """The dimension of a layer's weight along which ranks hold different parts; nn.Linear keeps its outputs first."""
    return int(isinstance(module, ColumnParallel) != isinstance(module, nn.Linear))


def _first(differences: Sequence[tuple[int, Key, float]], modules: Mapping[str, nn.Module]) -> Place | None:
    """The first that differs on any rank; the same answer on every rank."""
    world = Axis.of(None, "world")
    mine = next(((i, key[0], type(modules[key[0]]).__name__, d) for i, key, d in differences if d > 0), None)
    found = [(place[0], rank, place) for rank, place in enumerate(all_gather_object(mine, world)) if place is not None]
    if not found:
        return None
    _, rank, (_, name, kind, difference) = min(found, key=lambda item: item[:2])
    return Place(name, kind, difference, rank)


def disagreeing_cuts(model: nn.Module) -> list[str]:
    """Column-parallel layers that hold another part of their width than the row-parallel layer that closes their region,
    where a layer beside them does hold the same part: such as a k_proj that is cut otherwise than q_proj and v_proj.
    A part that several ranks hold has to contain the row-parallel layer's.
    """
    regions: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallel, RowParallel)) and module.region is not None:
            regions.setdefault(id(module.region), []).append((name, module))
    found: dict[str, None] = {}
    for layers in regions.values():
        closing = [module for _, module in layers if isinstance(module, RowParallel)]
        if len(closing) != 1:
            continue
        agreeing = [name for name, module in layers if _agree(module, closing[0])]
        for name, module in layers:
            if name not in agreeing and len(agreeing) > 1:
                beside = ", ".join(other.rpartition(".")[2] for other in agreeing)
                short = ".".join("*" if part.isdigit() else part for part in name.split("."))
                found[f"{short} holds {_in_words(module)}, which is another part than {beside} hold"] = None
    return list(found)


def _agree(module: Any, closing: Any) -> bool:
    """Whether a layer holds the part of its width that goes with what the row-parallel layer holds of its own."""
    parts, wanted = _parts(module), _parts(closing)
    if parts == wanted or len(parts) != len(wanted):
        return parts == wanted
    return all(
        len(held.holders) > 1 and start <= first and last <= stop
        for held, (start, stop), (first, last) in zip(_ranges(module), parts, wanted)
    )


def _parts(module: Any) -> list[tuple[Fraction, Fraction]]:
    whole = layout_of(module.weight).shape[_cut(module)]
    return [(Fraction(start, whole), Fraction(stop, whole)) for start, stop, _ in _ranges(module)]


def _in_words(module: Any) -> str:
    ranges = ", ".join(f"{start}–{stop - 1}" for start, stop, _ in _ranges(module))
    whole = layout_of(module.weight).shape[_cut(module)]
    return f"columns {ranges} of {whole} on rank {module.axis.rank} of {module.axis.name}"
