"""LoRA: a small number of trained weights beside a frozen model (Hu et al. 2021), by the peft package."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.checkpoint import Attempt, adapter_folder
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import UsageError, explain
from colonnade.model.adapters import has_adapters


def add_lora(
    model: Any,
    mesh: ParallelMesh,
    lora_config: Any = None,
    pretrained_dir: str | Path | None = None,
    bnb_quantization_config: Any = None,
    quantize: bool = False,
) -> nn.Module:
    """The model with adapters; see `Booster.enable_lora`."""
    _check_model(model)
    if bnb_quantization_config is not None or quantize or getattr(model, "is_quantized", False):
        raise UsageError(
            explain(
                "adapters on a quantized model are not available.",
                [("try", "the model in 16 bits; its frozen weights need no gradients and no optimizer states")],
            )
        )
    peft = _peft()
    if isinstance(lora_config, (str, Path)):
        raise UsageError("enable_lora takes a folder as pretrained_dir=…; its second argument is lora_config.")
    if lora_config is None and pretrained_dir is None:
        raise UsageError(
            explain(
                "enable_lora needs to know which adapters to make.",
                [("try", "lora_config=peft.LoraConfig(…), or pretrained_dir=… with an adapter that was saved")],
            )
        )
    if lora_config is not None and not isinstance(lora_config, peft.LoraConfig):
        raise UsageError(
            f"enable_lora takes a peft.LoraConfig, and was given a {type(lora_config).__name__}; other kinds of adapters "
            "can be made by peft itself before boost, for TorchDDPPlugin."
        )
    if pretrained_dir is not None:
        return _pretrained(peft, model, mesh, lora_config, pretrained_dir)
    try:
        return peft.get_peft_model(model, copy.deepcopy(lora_config))
    except ValueError as error:  # names of layers that are not there, a rank of 0
        raise UsageError(
            explain(f"peft cannot put these adapters into {type(model).__name__}.", [("reason", str(error))])
        ) from error


def _check_model(model: Any) -> None:
    if isinstance(model, BoostedModel):
        raise UsageError(
            explain(
                "enable_lora was called with a boosted model, whose parameters are placed already.",
                [("try", "model = booster.enable_lora(model, lora_config), then the optimizer, then booster.boost")],
            )
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"enable_lora takes a torch module, and was given a {type(model).__name__}.")
    if has_adapters(model):
        raise UsageError(
            explain(
                f"this {type(model).__name__} has adapters already.",
                [("try", "model.add_adapter(name, lora_config) for another one, before boost; or boost it as it is")],
            )
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            explain("LoRA needs the peft package, which is not installed.", [("try", "pip install 'colonnade[lora]'")])
        ) from error
    return peft


def _pretrained(peft: Any, model: nn.Module, mesh: ParallelMesh, lora_config: Any, path: str | Path) -> nn.Module:
    attempt = Attempt(mesh, f"no adapter was loaded from {path}.")
    config: Any = None
    with attempt:
        folder = adapter_folder(path)
        config = peft.PeftConfig.from_pretrained(str(folder))
        _check_saved(peft, config, lora_config)
    attempt.agree()  # a rank that cannot read it tells the others before any of them changes its model
    adapted: Any = None
    with attempt:
        trained = lora_config is None or not lora_config.inference_mode
        adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trained)
    attempt.agree()
    return adapted


def _check_saved(peft: Any, saved: Any, given: Any) -> None:
    if not isinstance(saved, peft.LoraConfig):
        raise UsageError(f"the folder holds adapters of type {saved.peft_type}, not LoRA.")
    names = ("r", "lora_alpha", "target_modules", "use_rslora", "bias") if given is not None else ()
    for name in names:
        mine, theirs = getattr(given, name), getattr(saved, name)
        if mine is not None and (set(mine) != set(theirs) if isinstance(mine, (list, set)) else mine != theirs):
            raise UsageError(
                explain(
                    f"lora_config and the saved adapter disagree on {name}.",
                    [("given", str(mine)), ("saved", str(theirs)), ("try", "pretrained_dir alone")],
                )
            )


def check_lora_model(model: nn.Module) -> None:
    """Refuse a model without adapters of peft around it, or with others than LoRA's.

    Raises:
        UsageError: it has none that could be saved.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        what = "its adapters were put in without a PeftModel around it" if has_adapters(model) else "it has none"
        raise UsageError(
            explain(
                f"save_lora_as_pretrained saves the adapters of a model, and for this {type(model).__name__} {what}.",
                [
                    ("try", "model = booster.enable_lora(model, lora_config) before boost"),
                    ("or", "booster.save_model(model, path), which saves all weights of a model without adapters"),
                ],
            )
        )


def check_no_adapters(model: nn.Module, what: str) -> None:
    """Refuse a model with adapters where all weights of a model are to be saved or loaded as one folder.

    Raises:
        UsageError: naming what to call instead.
    """
    if not has_adapters(model):
        return
    instead = {
        "save_model": [
            ("try", "booster.save_lora_as_pretrained(model, path): the adapters alone, in peft's format"),
            ("merge", "later, in one process: PeftModel.from_pretrained(base, path).merge_and_unload()"),
        ],
        "load_model": [
            ("try", "the base model's from_pretrained before enable_lora, and pretrained_dir=… for its adapters"),
        ],
    }[what]
    raise UsageError(
        explain(f"{what} is for models without adapters; whether adapters are merged is your choice.", instead)
    )
