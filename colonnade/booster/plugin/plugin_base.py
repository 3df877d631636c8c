"""Plugin: one parallel strategy. DPPluginBase: what strategies without a pipeline share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade import checkpoint
from colonnade.booster.plugin.batches import check_microbatching
from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.booster.plugin.dataloader import StatefulDataLoader, make_dataloader
from colonnade.booster.plugin.microbatch import run_microbatches
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import UsageError, explain
from colonnade.precision.optimizer import ParallelOptimizer, check_max_norm
from colonnade.precision.precision import parse_precision

Boosted = tuple[nn.Module, Any, Any, Any, Any]


class Plugin(ABC):
    """A parallel strategy. `Booster` forwards every call to it.

    Attributes:
        mesh: every rank's place on the axes dp, pp, sp and tp.
    """

    mesh: ParallelMesh

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Turn plain torch objects into their distributed forms, in the same order."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Backward pass of a loss the boosted model returned."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One global batch forward, and backward where an optimizer is given."""

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients inside the block without communication over data-parallel ranks."""

    @abstractmethod
    def support_no_sync(self) -> bool:
        """Whether `no_sync` can be entered."""

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Device types this strategy runs on."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Values of `precision` this strategy takes."""

    @abstractmethod
    def prepare_dataloader(self, dataset: Any, batch_size: int, **kwargs: Any) -> DataLoader:
        """A data loader that gives each data-parallel rank its share."""

    @abstractmethod
    def save_model(self, model: nn.Module, path: str | Path, **kwargs: Any) -> None:
        """Write the model as a folder that transformers loads."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: str | Path, **kwargs: Any) -> None:
        """Read such a folder into the model, each rank its own part."""


class DPPluginBase(Plugin):
    """Base of strategies in which every rank runs the whole forward: loop, data, saving and loading.

    Args:
        precision: "fp32" or "bf16"; format of parameters, activations and gradients. With bf16 the optimizer steps on
            float32 master weights.
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        microbatch_size: rows of a micro-batch in `execute_pipeline`; by default the whole local batch.
        num_microbatches: number of micro-batches instead.
        check_batches: at every forward compare the batches of the ranks that must see the same one (for debugging).
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        precision: str,
        max_norm: float,
        microbatch_size: int | None,
        num_microbatches: int | None,
        check_batches: bool,
    ) -> None:
        check_microbatching(microbatch_size, num_microbatches)
        self.mesh, self.precision, self.dtype = mesh, precision, parse_precision(precision)
        self.max_norm = check_max_norm(max_norm)
        self.microbatch_size, self.num_microbatches = microbatch_size, num_microbatches
        self.check_batches = check_batches

    def supported_devices(self) -> list[str]:
        return ["cpu", "cuda", "xpu"]

    def supported_precisions(self) -> list[str]:
        return ["fp32", "bf16"]

    def support_no_sync(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"backward needs a loss, and was given {_kind(loss)}. Does the batch hold labels, from which the model makes one?"
            )
        boosted_optimizer(optimizer).backward(loss)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        return boosted_optimizer(optimizer).no_sync()

    def execute_pipeline(
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        return run_microbatches(
            data_iter,
            boosted_model(model),
            criterion,
            None if optimizer is None else boosted_optimizer(optimizer),
            microbatch_size=self.microbatch_size,
            num_microbatches=self.num_microbatches,
            return_loss=return_loss,
            return_outputs=return_outputs,
            no_sync=lambda: self.no_sync(model, optimizer),
        )

    def prepare_dataloader(  # type: ignore[override]
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 1024,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> StatefulDataLoader:
        """A data loader that gives each data-parallel rank its share, in an order that the seed alone decides.

        Args:
            dataset: with `__len__` and `__getitem__`.
            batch_size: rows of a batch on one data-parallel rank.
            shuffle: a new order each epoch.
            seed: of the order; must be the same on all ranks.
            drop_last: leave out a last global batch that is not full.
            **kwargs: as torch's DataLoader (num_workers, collate_fn, pin_memory, …).
        """
        return make_dataloader(
            dataset, batch_size, self.mesh.axis("dp"), shuffle=shuffle, seed=seed, drop_last=drop_last, **kwargs
        )

    def save_model(self, model: nn.Module, path: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        boosted = boosted_model(model)
        checkpoint.save_model(boosted.unwrap(), path, self.mesh, config=boosted.original_config, **kwargs)

    def load_model(self, model: nn.Module, path: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        boosted = boosted_model(model)
        checkpoint.load_model(boosted.unwrap(), path, self.mesh, **kwargs)
        for optimizer in boosted.optimizers:
            optimizer.master.refresh()

    def wrap(
        self,
        model: nn.Module,
        average: Any,
        optimizer: ParallelOptimizer | None,
        config: Any,
        runner: nn.Module | None = None,
    ) -> BoostedModel:
        """The boosted model around a model that has been split and placed."""
        boosted = BoostedModel(
            model, self.mesh, average, dtype=self.dtype, config=config, runner=runner, check_batches=self.check_batches
        )
        boosted.train(model.training)
        boosted.optimizers = [] if optimizer is None else [optimizer]
        return boosted


def check_boostable(model: Any, optimizer: Any) -> None:
    """Refuse what cannot be boosted, before anything is changed.

    Raises:
        UsageError: no module, no optimizer, one that has been boosted before, or an optimizer of another model.
    """
    if isinstance(model, BoostedModel) or isinstance(optimizer, ParallelOptimizer):
        what = "model" if isinstance(model, BoostedModel) else "optimizer"
        raise UsageError(
            f"this {what} has been boosted already; boost takes the plain one (boosted.unwrap(), optimizer.inner)."
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"boost takes a torch module as the model, and was given {_kind(model)}.")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"boost takes a torch optimizer, and was given {_kind(optimizer)}.")
    own = set(model.parameters())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(p not in own for p in params)
    if foreign:
        raise UsageError(
            explain(
                f"{foreign} of the optimizer's {len(params)} parameters are not parameters of this {type(model).__name__}.",
                [
                    ("reason", "it was made from another model, or before the model's parameters were replaced"),
                    ("try", "make the optimizer from model.parameters() right before boost"),
                ],
            )
        )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}: {value!r:.60}"


def pristine_config(model: nn.Module) -> Any:
    """A copy of the model's config, to be saved with it whatever a policy does to the original."""
    return copy.deepcopy(getattr(model, "config", None))


def boosted_model(model: Any) -> BoostedModel:
    """The model, if it is one that `boost` returned.

    Raises:
        UsageError: it is not.
    """
    if isinstance(model, BoostedModel):
        return model
    raise UsageError(f"this needs the model that booster.boost(...) returned, and was given a {type(model).__name__}.")


def boosted_optimizer(optimizer: Any) -> ParallelOptimizer:
    """The optimizer, if it is one that `boost` returned.

    Raises:
        UsageError: it is not.
    """
    if isinstance(optimizer, ParallelOptimizer):
        return optimizer
    raise UsageError(
        f"this needs the optimizer that booster.boost(...) returned, and was given {type(optimizer).__name__}."
    )
