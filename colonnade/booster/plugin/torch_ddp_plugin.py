"""TorchDDPPlugin: data parallelism by torch's DistributedDataParallel. Any module, no policy."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.checks import boosted_model, check_boostable, pristine_config
from colonnade.booster.plugin.plugin_base import Boosted, DPPluginBase
from colonnade.booster.plugin.start import put_in_place, start_alike
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.comm.collectives import all_gather, all_reduce_async, wait
from colonnade.errors import ConfigError, explain
from colonnade.model.lazy import check_all_or_none_meta
from colonnade.precision.clipping import Clipping
from colonnade.precision.loss_scale import LossScale
from colonnade.precision.precision import DEFAULT_PRECISION, cast_parameters
from colonnade.shardformer.layer.loss import LossAverage, average_causal_loss

_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters


class TorchDDPPlugin(DPPluginBase):
    """Every rank holds the whole model and a share of the batch; torch's DDP averages the gradients.

    Args:
        broadcast_buffers, bucket_cap_mb, find_unused_parameters, gradient_as_bucket_view, static_graph: as
            torch.nn.parallel.DistributedDataParallel, which see. With `static_graph` the first backward of all reduces
            even under `no_sync`, as torch learns the graph from it, and there are no micro-batches.
        check_reduction: has no effect in torch any more; taken for scripts that give it.
        bucket_cap_mb_list, skip_all_reduce_unused_params, batched_grad_copy: as there; None and False leave them out.
        precision: "bf16" or "fp16" (parameters and activations in 16 bits, optimizer on float32 master weights), or "fp32".
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        max_value: every entry of a gradient is clipped to this size instead; 0 leaves them.
        loss_scale: how the loss scale of fp16 starts and moves.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; by default not at all.

    Raises:
        ConfigError: an option that the installed torch does not have, or `static_graph` together with micro-batches.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        bucket_cap_mb_list: list[int] | None = None,
        skip_all_reduce_unused_params: bool = False,
        batched_grad_copy: bool = False,
        precision: str = DEFAULT_PRECISION,
        max_norm: float = 0.0,
        max_value: float = 0.0,
        loss_scale: LossScale | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        if static_graph and (microbatch_size is not None or num_microbatches not in (None, 1)):
            # the first of them would have to reduce, and a rank with a shorter batch has fewer of them
            raise ConfigError("static_graph=True cannot be used with micro-batches; leave one of them out.")
        clipping = Clipping(max_norm, max_value)
        super().__init__(ParallelMesh(), precision, clipping, loss_scale, microbatch_size, num_microbatches)
        self.ddp_options = _known_to_torch(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb_list=bucket_cap_mb_list,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        if not broadcast_buffers:
            # torch 2.13 renamed the option
            newer = "forward_sync_buffers" in _DDP_OPTIONS
            self.ddp_options["forward_sync_buffers" if newer else "broadcast_buffers"] = False

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        check_boostable(model, optimizer)
        is_meta = check_all_or_none_meta(model)
        config, average = pristine_config(model), LossAverage()
        start_alike(model, self.mesh)
        average_causal_loss(model, average)
        put_in_place(model)
        parallel_optimizer = None
        if optimizer is not None:
            parallel_optimizer = self.parallel(optimizer)
        cast_parameters(model, self.dtype)
        if parallel_optimizer is not None and self.mesh.size("dp") > 1:
            parallel_optimizer.covered = {p for p in model.parameters() if p.requires_grad}.__contains__
        module = self._parallel(model)
        if parallel_optimizer is not None and module is not None:
            parallel_optimizer.reducer = UnsyncedGradients(module)
        boosted = self.wrap(model, average, parallel_optimizer, config, module, unloaded=is_meta)
        return boosted, parallel_optimizer, criterion, dataloader, lr_scheduler

    def _parallel(self, model: nn.Module) -> "AveragingDDP | None":
        axis = self.mesh.axis("dp")
        if axis.size == 1 or not any(p.requires_grad for p in model.parameters()):
            return None
        return AveragingDDP(model, axis, **self.ddp_options)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        module = boosted_model(model).module
        if not isinstance(module, AveragingDDP) or (module.static_graph and not module.averaging.begun):
            return nullcontext()  # a static graph is learned in a backward that reduces; under no_sync torch breaks
        return module.no_sync()

    def __repr__(self) -> str:
        return f"TorchDDPPlugin({self.mesh!r}, {self.precision})"


@dataclass
class Averaging:
    """What the communication hook knows.

    Args:
        axis: over which ranks it averages.
        begun: whether it has done so before.
        unsynced: parameters whose gradient holds something that was added since, by a backward under `no_sync`.
    """

    axis: Axis
    begun: bool = False
    unsynced: set[nn.Parameter] = field(default_factory=set)


class AveragingDDP(DistributedDataParallel):
    """torch's DistributedDataParallel over an axis, with its all-reduces in the ledger.

    Args:
        model: whose gradients are averaged.
        axis: over which ranks.
        **options: as torch's.
    """

    def __init__(self, model: nn.Module, axis: Axis, **options: Any) -> None:
        super().__init__(model, process_group=axis.group, **options)
        self.averaging = Averaging(axis)
        self.register_comm_hook(self.averaging, average_bucket)


def average_bucket(averaging: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the same all-reduce as its own, entered in the ledger."""
    averaging.begun = True
    averaging.unsynced.difference_update(bucket.parameters())
    flat = bucket.buffer().div_(averaging.axis.size)
    work = all_reduce_async(flat, averaging.axis)
    future = work.get_future()  # type: ignore[union-attr]  # over one rank there is no DDP
    return future.then(lambda done: done.value()[0])


class UnsyncedGradients:
    """Sees to the gradients that DDP leaves alone: those of backward passes under `no_sync` that none outside follows.

    DDP averages what has been accumulated in the next backward outside of `no_sync`; where the step comes first, it is
    done here. A `Reducer` for `ParallelOptimizer`.

    Args:
        module: whose gradients they are.

    Traffic: none in the backward passes; where a step finds such gradients, an all-reduce of every gradient element and
        an all-gather of one number a parameter.
    """

    def __init__(self, module: AveragingDDP) -> None:
        self.module, self.averaging = module, module.averaging
        self._params = {p: None for p in module.parameters() if p.requires_grad}  # in the order of the model
        for param in self._params:  # before DDP's own hook, which averages the bucket that this one fills
            param.register_post_accumulate_grad_hook(self.averaging.unsynced.add)

    @property
    def unreduced(self) -> bool:
        """Whether gradients have been accumulated and not averaged."""
        return bool(self.averaging.unsynced)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass of a loss, in which DDP averages unless the forward was inside `no_sync`."""
        loss.backward(**kwargs)

    def paused(self) -> AbstractContextManager[None]:
        """DDP's own `no_sync`."""
        return self.module.no_sync()

    def finish(self) -> None:
        """Average all gradients, in place: with `gradient_as_bucket_view` they are views of DDP's buckets."""
        axis = self.averaging.axis
        held = [float(p.grad is not None) for p in self._params]
        mine = torch.tensor(held, device=current_device())
        used = torch.stack(all_gather(mine, axis)).amax(0).tolist()
        under_way = []
        for param in (p for p, by_any in zip(self._params, used) if by_any):
            if param.grad is None or param.grad.is_sparse:  # which entries other ranks have is not known
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
            flat = param.grad.div_(axis.size).contiguous()
            under_way.append((param.grad, flat, all_reduce_async(flat, axis)))
        for grad, flat, work in under_way:
            wait(work, axis)
            if flat is not grad:
                grad.copy_(flat)
        self.averaging.unsynced.clear()

    def covers(self, param: nn.Parameter) -> bool:
        """Whether a parameter's gradient is averaged."""
        return param in self._params

    def forget(self) -> None:
        """The gradients have been dropped."""
        self.averaging.unsynced.clear()


def _known_to_torch(**options: Any) -> dict[str, Any]:
    """The options that say something, for torch's DistributedDataParallel.

    Raises:
        ConfigError: the installed torch does not have one of them.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    unknown = [name for name in given if name not in _DDP_OPTIONS]
    if unknown:
        raise ConfigError(
            explain(
                f"torch {torch.__version__} has no {', '.join(unknown)} in its DistributedDataParallel.",
                [("try", "a newer torch, or leave the option out")],
            )
        )
    return given
