"""Precision: the number format a model computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colonnade.errors import ConfigError, explain

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Default(str):
    """A precision that nobody has asked for."""


DEFAULT_PRECISION = _Default("bf16")


def chosen(asked_of_plugin: str, mixed_precision: str | None) -> str:
    """The precision where it can be said in two places.

    Raises:
        ConfigError: both say something, and not the same, or `mixed_precision` is no format.
    """
    if mixed_precision is not None:
        parse_precision(mixed_precision, "mixed_precision")
    if mixed_precision is None or mixed_precision == asked_of_plugin:
        return asked_of_plugin
    if isinstance(asked_of_plugin, _Default):
        return mixed_precision
    raise ConfigError(
        explain(
            f"the plugin has precision={asked_of_plugin!r}, and the booster mixed_precision={mixed_precision!r}.",
            [("rule", "both mean the format of parameters and activations"), ("try", "only one of them")],
        )
    )


def parse_precision(precision: str, option: str = "precision") -> torch.dtype:
    """The dtype for "fp32", "bf16" or "fp16".

    Args:
        option: which option says it, for the error.

    Raises:
        ConfigError: any other word.
    """
    if isinstance(precision, str) and precision in FORMATS:
        return FORMATS[precision]
    raise ConfigError(
        explain(f"{option}={precision!r} is not available.", [("try", "one of " + ", ".join(map(repr, FORMATS)))])
    )


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters in place. Buffers keep their format: rotary frequencies rounded to 16 bits are wrong."""
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            param.grad = None if grad is None else grad.to(dtype)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another format, without turning the largest finite numbers (of a mask, say) into infinite ones."""
    limits = torch.finfo(dtype)
    return torch.where(value.isinf(), value, value.clamp(limits.min, limits.max)).to(dtype)


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors among a model's inputs, in the model's format; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return _cast(value, dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_inputs(item, dtype) for item in value)
    return value
