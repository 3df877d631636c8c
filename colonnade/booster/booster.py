"""Booster: the one object that users touch. It implements no parallelism and forwards everything to its plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.plugin_base import Boosted, Plugin
from colonnade.errors import UsageError


class Booster:
    """Trains a model by the strategy of a plugin.

    Args:
        plugin: the strategy.
        mixed_precision: "fp32", "bf16" or "fp16", where the plugin was not given a `precision`.

    Raises:
        ConfigError: plugin and booster are given different precisions.

    Example:
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
        model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer)
        booster.backward(model(**batch).loss, optimizer)
    """

    def __init__(self, plugin: Plugin, mixed_precision: str | None = None) -> None:
        if not isinstance(plugin, Plugin):
            raise UsageError(
                f"Booster(plugin=…) takes a plugin object such as TorchDDPPlugin(), and was given {plugin!r}."
            )
        plugin.use_precision(mixed_precision)
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Turn plain torch objects into their distributed forms.

        The Parameter objects stay the same, so optimizer groups and schedulers stay valid.

        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), None where None was given.

        Raises:
            ConfigError, PolicyError: on every rank, before the model has been changed.
        """
        return self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Backward pass of a loss that the boosted model returned, with the reduction of gradients."""
        self.plugin.backward(loss, optimizer)

    def execute_pipeline(
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One global batch: forward, and backward where an optimizer is given and gradients are on. For every plugin.

        Args:
            data_iter: iterator over this data-parallel rank's shares of global batches.
            criterion: (outputs, inputs) → loss, a mean over what the batch's labels count; None for the model's own.
            return_loss, return_outputs: what to return.

        Returns:
            {"loss": mean over the target tokens of the global batch, the same scalar on every rank; "outputs": this
            rank's outputs}; None for what was not asked for.
        """
        return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients inside the block without communication over data-parallel ranks.

        Both the forward and the backward of a micro-step belong inside.

        Raises:
            UsageError: the plugin cannot do that.
        """
        if not self.plugin.support_no_sync():
            raise UsageError(f"{type(self.plugin).__name__} reduces gradients in every backward; leave no_sync out.")
        return self.plugin.no_sync(model, optimizer)

    def save_model(
        self,
        model: nn.Module,
        path: str | Path,
        shard: bool = True,
        size_per_shard: int | str = "5GB",
        tokenizer: Any = None,
    ) -> None:
        """Write the model as a folder that transformers' `from_pretrained` loads. All ranks call it.

        Args:
            path: a new folder, or one that holds an earlier model; that one stays whole until the new one is complete.
            shard: several files with an index, or one.
            size_per_shard: largest size of a file, in bytes or as "500MB".
            tokenizer: saved beside the model where given.

        Raises:
            CheckpointError: on every rank, with the reason of the rank that failed.
        """
        self.plugin.save_model(model, path, shard=shard, size_per_shard=size_per_shard, tokenizer=tokenizer)

    def load_model(self, model: nn.Module, path: str | Path, strict: bool = True) -> None:
        """Read a folder in the hub's format into the model; each rank reads only the bytes it needs.

        Raises:
            CheckpointError: on every rank, when files are missing or damaged or belong to another model.
        """
        self.plugin.load_model(model, path, strict=strict)

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        step: int = 0,
        extra: Any = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Write a training checkpoint, which `load` takes back in any layout. All ranks call it.

        It lies in a folder of its own, `path/step-…`, which is put in place when all of it is on disk. Whenever a job dies,
        `path/latest` names the last whole one. States of random generators are part of it.

        Args:
            path: a folder of checkpoints, on a file system that all ranks share.
            lr_scheduler, dataloader: anything with `state_dict` and `load_state_dict`.
            step: number of steps made; a checkpoint of the same step is replaced.
            extra: a dict of your own (numbers, text, tensors, lists and dicts of these), or anything with `state_dict`.
            keep_last: so many checkpoints are left in the folder, older ones removed; None keeps all.
            asynchronous: return as soon as tensors are copied to host memory, and write beside the training. Errors are
                raised by the next `save` or `load`, by `finish_saving`, and end the program with code 1 at its end.

        Returns:
            The folder of this checkpoint.

        Raises:
            CheckpointError: on every rank, with the reason of the rank that failed; earlier checkpoints are whole.
        """
        return self.plugin.save(
            path,
            model,
            optimizer,
            lr_scheduler,
            dataloader,
            step=step,
            extra=extra,
            keep_last=keep_last,
            asynchronous=asynchronous,
        )

    def finish_saving(self) -> None:
        """Wait for a save in the background. All ranks call it.

        Raises:
            CheckpointError: it failed; earlier checkpoints are whole.
        """
        self.plugin.finish_saving()

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        extra: Any = None,
        strict: bool = True,
        verify: bool = False,
    ) -> int:
        """Go on from a training checkpoint, whatever layout wrote it. All ranks call it.

        Each rank reads the bytes it needs. Learning rates and other options of the optimizer's groups are those saved.

        Args:
            path: a folder of checkpoints, of which the latest is taken; or the folder of one.
            extra: a dict, of which the entries become those saved, or anything with `load_state_dict`.
            strict: raise where the model has tensors that the checkpoint lacks, or the other way round.
            verify: read every file and compare its check sum before anything is loaded.

        Returns:
            The step that was given to `save`.

        Raises:
            CheckpointError: on every rank, naming file and tensor, what was expected and what was found; then nothing has
                been changed, or the error says that it has.
        """
        return self.plugin.load(
            path, model, optimizer, lr_scheduler, dataloader, extra=extra, strict=strict, verify=verify
        )

    def save_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Write what the optimizer keeps into a folder, for any layout to load. All ranks call it.

        Raises:
            CheckpointError: on every rank, with the reason of the rank that failed.
        """
        self.plugin.save_optimizer(optimizer, path)

    def load_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Take back what `save_optimizer`, or `save`, has written. All ranks call it; load the model first.

        Raises:
            CheckpointError: on every rank, where files are missing or damaged, or of another optimizer or model.
        """
        self.plugin.load_optimizer(optimizer, path)

    def save_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Write the state of a learning-rate scheduler into a folder. All ranks call it."""
        self.plugin.save_lr_scheduler(lr_scheduler, path)

    def load_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Take back what `save_lr_scheduler`, or `save`, has written. All ranks call it."""
        self.plugin.load_lr_scheduler(lr_scheduler, path)

    def enable_lora(
        self,
        model: nn.Module,
        lora_config: Any = None,
        pretrained_dir: str | Path | None = None,
        *,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Freeze a model and put adapters (LoRA) into it, which are what is trained. All ranks call it, before boost.

        The optimizer is made after it, from the model that it returns.

        Args:
            model: changed in place, as peft does.
            lora_config: a `peft.LoraConfig`.
            pretrained_dir: folder with an adapter that was saved, to be trained on; its own config then holds.
            bnb_quantization_config, quantize: not available; leave them as they are.

        Returns:
            A peft model.

        Raises:
            UsageError: peft is not installed, the model is boosted, quantized or has adapters, or the config is none.
            CheckpointError: on every rank, where one of them cannot read the folder.
        """
        if not self.plugin.support_lora():
            raise UsageError(f"{type(self.plugin).__name__} cannot train adapters; try HybridParallelPlugin.")
        return self.plugin.enable_lora(
            model,
            lora_config=lora_config,
            pretrained_dir=pretrained_dir,
            bnb_quantization_config=bnb_quantization_config,
            quantize=quantize,
        )

    def save_lora_as_pretrained(self, model: nn.Module, path: str | Path, use_safetensors: bool = True) -> None:
        """Write the adapters of a boosted model as a folder that `peft.PeftModel.from_pretrained(base, path)` loads.

        All ranks call it. The adapter called "default" lies in the folder, others in folders of their names below it.

        Args:
            path: a new folder, or one that holds earlier adapters; these stay whole until the new ones are complete.
            use_safetensors: as safetensors, or else as a pickle.

        Raises:
            UsageError: the model has no adapters.
            CheckpointError: on every rank, with the reason of the rank that failed.
        """
        self.plugin.save_lora_as_pretrained(model, path, use_safetensors)

    def generate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Generate by the model's own `generate`, in evaluation mode and without gradients. All ranks call it.

        The ranks that share a replica of the model (tp, pp) pass the same prompts; data-parallel replicas may pass
        different ones. With a pipeline keys and values are not kept, which costs time for long texts.

        Args:
            *args, **kwargs: as of transformers' `generate`.

        Returns:
            What that returns, the same on every rank of a replica.

        Raises:
            UsageError: the model has no `generate`, or this way of generating cannot go through stages.
        """
        return self.plugin.generate(model, *args, **kwargs)

    def prepare_dataloader(self, dataset: Any, batch_size: int, **kwargs: Any) -> DataLoader:
        """The plugin's data loader; see `plugin.prepare_dataloader`."""
        return self.plugin.prepare_dataloader(dataset, batch_size, **kwargs)
