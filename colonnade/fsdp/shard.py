"""Cutting a model by `fully_shard`, unit by unit, and what goes with it: layouts, the optimizer's groups, meta models."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as gathers_in
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from colonnade.cluster.device import current_device, device_type
from colonnade.cluster.log import get_logger
from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.fsdp.comms import CountedAllGather, CountedReduceScatter
from colonnade.fsdp.units import find_units
from colonnade.model.layout import Range, TensorLayout, layout_of, set_layout
from colonnade.model.lazy import check_all_or_none_meta, materialise
from colonnade.precision.optimizer import is_elementwise, steps_on_any_part
from colonnade.precision.stepped import move_state


@dataclass(frozen=True)
class ShardOptions:
    """How a model is cut.

    Args:
        reshard_after_forward: as of `fully_shard`. True: every unit is freed after its forward and gathered again for
            its backward. None: the same, but the unit of the model itself stays gathered until its backward. False: all
            stay. A whole number of ranks: whole parameters are kept by each group of so many.
        cpu_offload: keep parameters, gradients and optimizer states in host memory.
        param_dtype: format of gathered parameters and of computation; None for that of the parameters.
        reduce_dtype: format in which gradients are reduced; None for that in which they are computed.

    Raises:
        ConfigError: `reshard_after_forward` or `cpu_offload` is none of these.
    """

    reshard_after_forward: bool | int | None = True
    cpu_offload: bool | CPUOffloadPolicy = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        reshard = self.reshard_after_forward
        if reshard is not None and (not isinstance(reshard, int) or reshard < 0):
            raise ConfigError(f"reshard_after_forward={reshard!r} must be True, False, None or a number of ranks.")
        if not isinstance(self.cpu_offload, (bool, CPUOffloadPolicy)):
            raise ConfigError(f"cpu_offload={self.cpu_offload!r} must be True, False or a CPUOffloadPolicy.")

    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that cannot form groups.

        Raises:
            ConfigError: naming those that can.
        """
        size = self.reshard_after_forward
        if not isinstance(size, bool) and size is not None and (size < 1 or ranks % size):
            fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise ConfigError(
                explain(
                    f"reshard_after_forward={size}: {ranks} data-parallel ranks do not form groups of {size}.",
                    [("try", f"{' or '.join(map(str, fitting))}, or True or False")],
                )
            )

    @property
    def offload(self) -> OffloadPolicy:
        """FSDP's policy. Host memory is pinned only where there is a device to copy it to."""
        if not self.cpu_offload:
            return OffloadPolicy()
        pinned = self.cpu_offload.pin_memory if isinstance(self.cpu_offload, CPUOffloadPolicy) else True
        return CPUOffloadPolicy(pin_memory=pinned and device_type() != "cpu")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `fully_shard`."""
        # Inputs are cast once, at the door of the model: blocks get them in the formats that the model itself chose.
        policy = MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )
        reshard = self.reshard_after_forward
        if reshard == 1 and not isinstance(reshard, bool):
            reshard = False  # a group of one rank keeps everything
        return {"reshard_after_forward": reshard, "mp_policy": policy, "offload_policy": self.offload}


log = get_logger(__name__)

Place = tuple[nn.Module, str]


@dataclass
class Sharding:
    """A model that has been cut.

    Args:
        model: the user's model; its class has become a subclass of what it was.
        axis: the data-parallel ranks.
        units: modules that are gathered by themselves, the model last.
        places: for each DTensor parameter by unit, a module that has it and its name there.
        whole: parameters that cannot be cut (they have no dim or no entries); each rank holds them.
        accumulates_apart: gradients that are not reduced yet are kept by FSDP, in `reduce_dtype`.
    """

    model: nn.Module
    axis: Axis
    units: list[Any]
    places: dict[nn.Module, dict[nn.Parameter, Place]]
    whole: list[nn.Parameter] = field(default_factory=list)
    accumulates_apart: bool = False

    def reshard(self) -> None:
        """Free gathered parameters: after a forward without a backward they would outlive a change of the weights."""
        for unit in self.units:
            unit.reshard()

    def recover(self) -> None:
        """Make FSDP ready for the next forward after a forward or a backward has failed in the middle."""
        self.units[-1].reset_iter_state()


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: ParallelMesh,
    options: ShardOptions,
    optimizer: Optimizer | None = None,
) -> Sharding:
    """Cut a model over the data-parallel ranks, in place.

    Its parameters are replaced by DTensor parameters with a layout. A model on the meta device gets memory for this rank's
    share only, filled with NaN.

    Args:
        model: any module; parameters of one floating-point format.
        blocks: its repeated blocks.
        mesh: must have a process group.
        optimizer: whose groups are to hold the new parameters.

    Raises:
        UsageError: it is on the meta device and has buffers that nothing computes.
    """
    is_meta = check_all_or_none_meta(model)
    axis = mesh.axis("dp")
    before = _named(model)
    hooks = {p: list((p._backward_hooks or {}).values()) for p in before.values()}
    units = [*find_units(model, blocks), model]
    whole = [p for p in model.parameters() if not _can_be_cut(p)]
    assert mesh.device_mesh is not None  # the plugin has checked it
    for param in model.parameters():
        if not param.is_contiguous():
            param.data = param.data.contiguous()  # fully_shard takes no other order of entries in memory
    for unit in units:
        fully_shard(unit, mesh=mesh.device_mesh["dp"], ignored_params=set(whole), **options.arguments)
    if is_meta:
        there = torch.device("cpu") if options.cpu_offload else current_device()
        materialise(model, there, current_device(), keep_objects=False)
        whole = [p for p in model.parameters() if not _can_be_cut(p)]
    for param in whole:
        param.data = param.data.to(current_device())
    after = _named(model)
    apart = options.reduce_dtype not in (None, options.param_dtype or torch.float32)
    sharding = Sharding(model, axis, units, _places(units), whole, apart)
    _describe(after, axis)
    replaced = {before[name]: param for name, param in after.items()}
    for old, new in replaced.items():
        _carry_over(old, new, hooks[old])
    if optimizer is not None:
        repoint(optimizer, replaced)
    _configure(sharding)
    return sharding


def check_shardable(model: nn.Module, optimizer: Optimizer | None, axis: Axis) -> None:
    """Refuse what cannot be cut, before anything is changed.

    Raises:
        UsageError: the model has been split already, or some of its parameters are on the meta device and others are not.
        ConfigError: the optimizer looks at whole matrices, and does not know how to where they are split, or compares all
            parameters; or some layers make sparse gradients.
    """
    if isinstance(model, FSDPModule) or any(layout_of(p).sharded_axes for p in model.parameters()):
        raise UsageError("this model has been split already; load a plain one, or go on with the boosted one.")
    check_all_or_none_meta(model)
    _check_dense(model)
    if optimizer is None or axis.size == 1:
        return
    certain = steps_on_any_part(optimizer)
    if is_elementwise(optimizer) or hasattr(optimizer, "set_mesh"):
        if not certain and not hasattr(optimizer, "set_mesh"):
            log.warning("%s", _taken_on_trust(type(optimizer).__name__))
        return
    raise ConfigError(
        explain(
            f"{type(optimizer).__name__} cannot step on split parameters: its update looks at whole matrices.",
            [
                ("try", "one of colonnade.optim, which can"),
                ("or", "an optimizer that treats each entry by itself, such as AdamW, or TorchDDPPlugin"),
            ],
        )
    )


def _taken_on_trust(name: str) -> str:
    return explain(
        f"{name} is given parts of parameters, as if it treated each entry by itself.",
        [
            ("reason", "it is none of torch's own, and does not say"),
            ("try", f"{name}.elementwise = True if it does, which ends this warning"),
            ("or", "elementwise = False if it looks at a parameter as a whole (its norm, say), and another plugin"),
        ],
    )


def _check_dense(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                explain(
                    f"{type(module).__name__} {path} makes sparse gradients, and FSDP reduces dense ones.",
                    [("try", "sparse=False for this layer, or LowLevelZeroPlugin, which makes them dense itself")],
                )
            )


def repoint(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer's groups hold other parameters: the same groups, lists and order, and its state goes with them."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if old is not new:
            move_state(optimizer, old, new)


def _can_be_cut(param: nn.Parameter) -> bool:
    return param.dim() > 0 and param.numel() > 0


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _places(units: list[nn.Module]) -> dict[nn.Module, dict[nn.Parameter, Place]]:
    taken: set[nn.Parameter] = set()
    found: dict[nn.Module, dict[nn.Parameter, Place]] = {}
    for unit in units:
        mine = found.setdefault(unit, {})
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                if isinstance(param, DTensor) and param not in taken:
                    mine.setdefault(param, (module, name))
        taken |= mine.keys()
    return found


def _describe(named: dict[str, nn.Parameter], axis: Axis) -> None:
    """Let a layout ride on each parameter; see [Note: what a rank holds]."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in named.items():
        names.setdefault(param, []).append(name)
    for param, keys in names.items():
        if isinstance(param, DTensor):
            set_layout(param, chunk_layout(tuple(param.shape), axis).named(*keys))


def chunk_layout(shape: tuple[int, ...], axis: Axis) -> TensorLayout:
    """The layout of what `fully_shard` gives this rank of a parameter of this shape."""
    chunk = -(-shape[0] // axis.size)
    start = min(axis.rank * chunk, shape[0])
    return TensorLayout.split(shape, 0, [Range(start, min(start + chunk, shape[0]))], axis.name)


def _carry_over(old: nn.Parameter, new: nn.Parameter, hooks: list[Any]) -> None:
    """What the user has attached to a parameter: attributes, and hooks on its gradient (called before the reduction)."""
    if old is new:
        return
    for key, value in vars(old).items():
        if not key.startswith("_") and key not in vars(new):
            setattr(new, key, value)
    new.gradient_hooks = hooks  # type: ignore[attr-defined]


def _configure(sharding: Sharding) -> None:
    gather, scatter = CountedAllGather(sharding.axis), CountedReduceScatter(sharding.axis)
    for unit in sharding.units:
        if sharding.places[unit]:
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
            unit.set_force_sum_reduction_for_comms(True)
    root: Any = sharding.model
    # otherwise ranks that use different parameters would reduce different buffers
    root.set_reduce_scatter_unused_params(True)
    if hasattr(root, "generate"):
        gathers_in(root, "generate")  # it may call parts of the model before the model itself

    def settle(module: nn.Module, inputs: Any, output: Any) -> None:
        if output is None and sys.exc_info()[1] is not None:
            sharding.recover()
        elif not torch.is_grad_enabled():
            sharding.reshard()

    root.register_forward_hook(settle, always_call=True)
