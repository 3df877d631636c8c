"""BoostedModel: what `boost` returns for a model. Calls the user's own forward and sees to the loss it returns."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from colonnade.booster.plugin.batches import check_same_batch, count_targets, tensors_in
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError, explain
from colonnade.model.adapters import plain_model
from colonnade.model.layout import local_of
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.precision.precision import cast_inputs
from colonnade.shardformer.layer.loss import CausalLMLoss, LossAverage, mean_over_ranks


class BoostedModel(nn.Module):
    """The user's model, parallel inside. Attributes and methods of the user's model can be reached through it.

    Args:
        model: the user's model, sharded or not.
        mesh: where it lives.
        average: what its loss function asks over which ranks to average.
        dtype: format of its parameters; floating-point inputs are cast to it.
        config: the model's config as it was before sharding, which is what a checkpoint carries.
        runner: module to call instead of `model` (torch's DistributedDataParallel around it).
        check_batches: compare the batches of the ranks that must see the same one, at every forward.

    Attributes:
        optimizers: those boosted together with it, whose master weights follow when its weights are loaded.
        pipeline: runs global batches through the stages of a pipeline; None where there is none.
        unloaded: it was built on the meta device, and nothing has shown yet that its weights have been loaded.
        in_step: every forward or backward communicates over data-parallel ranks, so that all have to make as many.
    """

    optimizers: list[ParallelOptimizer]

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        average: LossAverage,
        *,
        dtype: torch.dtype = torch.float32,
        config: Any = None,
        runner: nn.Module | None = None,
        check_batches: bool = False,
    ) -> None:
        super().__init__()
        self.module = runner or model
        object.__setattr__(self, "_user_model", model)  # not a second registration of the same parameters
        self.mesh, self.average, self.dtype, self.original_config = mesh, average, dtype, config
        self.check_batches = check_batches
        self.optimizers = []
        self.pipeline: Any = None
        self.in_step = self.unloaded = False
        self._shifts_labels = any(isinstance(vars(m).get("_loss_function"), CausalLMLoss) for m in model.modules())
        self._takes_use_cache = "use_cache" in inspect.signature(plain_model(model).forward).parameters

    def unwrap(self) -> nn.Module:
        """The user's own model."""
        return self._user_model

    @property
    def shifts_labels(self) -> bool:
        """Whether position t is trained to predict label t + 1, so that the first label of a row is no target."""
        return self._shifts_labels

    @property
    def loss_function(self) -> Any:
        """The user's model's own; it can be set before boost."""
        return self._user_model.loss_function

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        raise UsageError("set model.loss_function before boost, which puts a loss that knows all ranks in its place.")

    def check_loaded(self) -> None:
        """Before weights are used for the first time: those of a model that was on the meta device have to be there.

        Raises:
            UsageError: on every rank, naming some that are not.
        """
        if not self.unloaded:
            return
        named = self._user_model.named_parameters()
        mine = [name for name, p in named if bool(local_of(p.detach()).isnan().any())]
        empty = sorted({name for of_rank in all_gather_object(mine, self.mesh.world) for name in of_rank})
        if empty:
            raise UsageError(
                explain(
                    f"{len(empty)} parameters have no weights yet: this {type(self._user_model).__name__} was built on the meta device.",
                    [
                        ("without weights", ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")),
                        ("try", "booster.load_model(model, path), or booster.load, before its weights are used"),
                    ],
                )
            )  # fmt: skip
        self.unloaded = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; the loss it returns is the mean over the targets of all data-parallel ranks."""
        self.check_loaded()
        with self.average.over(self.mesh.axis("dp") if self.mesh.size("dp") > 1 else None):
            output = self.run(*args, **kwargs)
        return self._averaged(output, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward with the loss of this rank's batch alone, unless `average` says otherwise."""
        if self.check_batches:
            check_same_batch((args, kwargs), self.mesh)
        if self.training and self._takes_use_cache:
            kwargs.setdefault("use_cache", False)  # a cache of keys and values serves generation only
        if self.dtype != torch.float32:
            args, kwargs = cast_inputs(args, self.dtype), cast_inputs(kwargs, self.dtype)
        return self.module(*args, **kwargs)

    def _averaged(self, output: Any, inputs: dict[str, Any]) -> Any:
        """Weigh the loss of a model that computes its own, by the labels that count."""
        if self.mesh.size("dp") == 1 or self.shifts_labels:
            return output
        first = output[0] if isinstance(output, tuple) and output else None
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", first)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            return output
        count = count_targets(inputs, shifted=False)
        total = loss.float() * count if count else zero_from(output)  # a mean over no labels is NaN
        mean = mean_over_ranks(total, count, self.mesh.axis("dp"))
        if isinstance(output, tuple):
            return (mean, *output[1:])
        output["loss"] = mean
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients, wherever they are."""
        super().zero_grad(set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict) -> Any:
        raise UsageError(
            "a boosted model cannot be copied: its shards, hooks and optimizer belong together. Copy the plain model before "
            "boost, or keep copies of the parameters (for a moving average, say)."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._user_model, name)


def zero_from(output: Any) -> torch.Tensor:
    """A zero that hangs on the graph of a model's output, so that its backward gives zeros and no NaN.

    Taken from the first tensor that is not the loss. What a rank holds of logits is enough: nothing is gathered.
    """
    raw = OrderedDict.items(output) if isinstance(output, OrderedDict) else output
    fields = dict(raw) if isinstance(output, dict) else raw
    loss = fields.pop("loss", None) if isinstance(fields, dict) else None
    tensors = [t for _, t in tensors_in(fields) if t.requires_grad]
    found = tensors[0] if tensors else loss
    if found is None:
        raise UsageError("the model's output holds no tensor that depends on its parameters.")
    return (found.float() * 0).nan_to_num(0.0).sum()
