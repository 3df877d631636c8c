"""Plugin: one parallel strategy. DPPluginBase: what strategies without a pipeline share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade import checkpoint
from colonnade.booster.plugin.batches import check_microbatching
from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.booster.plugin.checks import boosted_model, boosted_optimizer, kind_of
from colonnade.booster.plugin.dataloader import StatefulDataLoader, make_dataloader
from colonnade.booster.plugin.generation import generate
from colonnade.booster.plugin.lora import add_lora, check_lora_model, check_no_adapters
from colonnade.booster.plugin.microbatch import run_microbatches
from colonnade.booster.plugin.training_state import (
    Training,
    finish_saving,
    load_part,
    load_training_state,
    save_part,
    save_training_state,
)
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import ConfigError, UsageError
from colonnade.precision.clipping import Clipping
from colonnade.precision.fused import prefer_fused
from colonnade.precision.loss_scale import DynamicLossScale, LossScale
from colonnade.precision.master import MasterWeights
from colonnade.precision.optimizer import ParallelOptimizer, bind_to_mesh, shard_optimizer_state
from colonnade.precision.precision import chosen, parse_precision
from colonnade.precision.stepped import Stepped
from colonnade.zero.options import ZeroOptions
from colonnade.zero.shards import FlatShards

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
    def use_precision(self, precision: str | None) -> None:
        """Take the booster's `mixed_precision` for a precision that was not given to the plugin."""

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

    @abstractmethod
    def save(self, path: str | Path, *parts: Any, **kwargs: Any) -> Path:
        """Write a training checkpoint."""

    @abstractmethod
    def finish_saving(self) -> None:
        """Wait for a save in the background."""

    @abstractmethod
    def load(self, path: str | Path, *parts: Any, **kwargs: Any) -> int:
        """Take a training checkpoint back."""

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Write what the optimizer keeps."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Take it back."""

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Write the state of a scheduler."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Take it back."""

    @abstractmethod
    def generate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model, all ranks together."""

    @abstractmethod
    def support_lora(self) -> bool:
        """Whether `enable_lora` can be called."""

    @abstractmethod
    def enable_lora(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """The model with adapters, to be boosted."""

    @abstractmethod
    def save_lora_as_pretrained(self, model: nn.Module, path: str | Path, use_safetensors: bool = True) -> None:
        """Write the adapters as a folder that peft loads."""


class DPPluginBase(Plugin):
    """Base of strategies in which every rank runs the whole forward: loop, data, saving and loading.

    Args:
        mesh: every rank's place.
        precision: "fp32", "bf16" or "fp16": format of parameters, activations and gradients. With 16 bits the optimizer
            steps on float32 master weights; with fp16 the loss is scaled.
        clipping: how gradients are clipped.
        loss_scale: how the scale of fp16 starts and moves; by default `LossScale()`.
        microbatch_size: rows of a micro-batch in `execute_pipeline`; by default the whole local batch.
        num_microbatches: number of micro-batches instead.
        check_batches: at every forward compare the batches of the ranks that must see the same one (for debugging).
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        precision: str,
        clipping: Clipping,
        loss_scale: LossScale | None = None,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        check_batches: bool = False,
    ) -> None:
        check_microbatching(microbatch_size, num_microbatches)
        self.mesh, self.precision, self.dtype = mesh, precision, parse_precision(precision)
        self.clipping, self.loss_scale = clipping, LossScale() if loss_scale is None else loss_scale
        if not isinstance(self.loss_scale, LossScale):
            raise ConfigError(
                f"loss_scale={loss_scale!r} must be a LossScale, such as LossScale(initial=256.0), or left out."
            )
        self.microbatch_size, self.num_microbatches = microbatch_size, num_microbatches
        self.check_batches = check_batches

    def use_precision(self, precision: str | None) -> None:
        """Take the booster's `mixed_precision` for a precision that was not given to the plugin.

        Raises:
            ConfigError: another one was given.
        """
        self.precision = chosen(self.precision, precision)
        self.dtype = parse_precision(self.precision)

    def supported_devices(self) -> list[str]:
        return ["cpu", "cuda", "xpu"]

    def supported_precisions(self) -> list[str]:
        return ["fp32", "bf16", "fp16"]

    def support_no_sync(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"backward needs a loss, and was given {kind_of(loss)}. Does the batch hold labels, from which the model makes one?"
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
            no_sync=lambda: self.no_sync(model, optimizer) if self.support_no_sync() else nullcontext(),
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
        boosted.check_loaded()
        check_no_adapters(boosted.unwrap(), "save_model")
        checkpoint.save_model(boosted.unwrap(), path, self.mesh, config=boosted.original_config, **kwargs)

    def load_model(self, model: nn.Module, path: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        boosted = boosted_model(model)
        check_no_adapters(boosted.unwrap(), "load_model")
        checkpoint.load_model(boosted.unwrap(), path, self.mesh, **kwargs)
        for optimizer in boosted.optimizers:
            optimizer.stepped.refresh()

    def save(  # type: ignore[override]
        self, path: str | Path, *parts: Any, extra: Any = None, **kwargs: Any
    ) -> Path:
        return save_training_state(self._training(*parts, extra=extra), path, self.mesh, **kwargs)

    def finish_saving(self) -> None:
        finish_saving(self.mesh)

    def load(self, path: str | Path, *parts: Any, extra: Any = None, **kwargs: Any) -> int:
        return load_training_state(self._training(*parts, extra=extra), path, self.mesh, **kwargs)

    def _training(
        self, model: Any, optimizer: Any = None, lr_scheduler: Any = None, dataloader: Any = None, *, extra: Any
    ) -> Training:
        stepping = None if optimizer is None else boosted_optimizer(optimizer)
        return Training(boosted_model(model), stepping, lr_scheduler, dataloader, extra)

    def save_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        save_part(Training(optimizer=boosted_optimizer(optimizer)), path, self.mesh)

    def load_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        load_part(Training(optimizer=boosted_optimizer(optimizer)), path, self.mesh)

    def save_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        save_part(Training(lr_scheduler=lr_scheduler), path, self.mesh)

    def load_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        load_part(Training(lr_scheduler=lr_scheduler), path, self.mesh)

    def generate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        boosted_model(model).check_loaded()
        return generate(boosted_model(model), self.mesh, *args, **kwargs)

    def support_lora(self) -> bool:
        return True

    def enable_lora(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return add_lora(model, self.mesh, **kwargs)

    def save_lora_as_pretrained(self, model: nn.Module, path: str | Path, use_safetensors: bool = True) -> None:
        boosted = boosted_model(model)
        boosted.check_loaded()
        check_lora_model(boosted.unwrap())
        checkpoint.save_adapters(boosted.unwrap(), path, self.mesh, use_safetensors=use_safetensors)

    def parallel(self, optimizer: Optimizer, stepped: Stepped | None = None) -> ParallelOptimizer:
        """The user's optimizer with this plugin's clipping and loss scale.

        Args:
            stepped: what it steps on; by default the parameters, or float32 copies of them as they are now where the
                model is about to be cast to 16 bits.
        """
        shard_optimizer_state(optimizer)
        bind_to_mesh(optimizer, self.mesh)
        if stepped is None and self.dtype != torch.float32:
            stepped = MasterWeights(optimizer, self.mesh)
        scale = DynamicLossScale(self.loss_scale) if self.dtype == torch.float16 else None
        return ParallelOptimizer(optimizer, self.mesh, stepped, self.clipping, scale)

    def sharded(self, optimizer: Optimizer, model: nn.Module, stage: int, options: ZeroOptions) -> ParallelOptimizer:
        """The user's optimizer with its states dealt out over data-parallel ranks (ZeRO).

        Args:
            model: on its device and split already, but not cast.
        """
        shard_optimizer_state(optimizer)
        prefer_fused(optimizer)
        shards = FlatShards(optimizer, model, self.mesh, stage, self.dtype, options)
        boosted = self.parallel(optimizer, shards)
        boosted.reducer = shards.reducer
        return boosted

    def wrap(
        self,
        model: nn.Module,
        average: Any,
        optimizer: ParallelOptimizer | None,
        config: Any,
        runner: nn.Module | None = None,
        *,
        unloaded: bool = False,
    ) -> BoostedModel:
        """The boosted model around a model that has been split and placed.

        Args:
            unloaded: it was on the meta device, and its weights are still to be loaded.
        """
        boosted = BoostedModel(
            model, self.mesh, average, dtype=self.dtype, config=config, runner=runner, check_batches=self.check_batches
        )
        boosted.train(model.training)
        boosted.unloaded = unloaded
        boosted.optimizers = [] if optimizer is None else [optimizer]
        if optimizer is not None:
            named = checkpoint.named_tensors(model)
            optimizer.names = {p: names for names, p in named if isinstance(p, nn.Parameter)}
        boosted.in_step = not self.support_no_sync()
        return boosted
