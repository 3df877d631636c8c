"""Models built on the meta device: memory for them, and the buffers that no checkpoint carries.

[Note: buffers that no checkpoint carries]
Rotary frequencies, position numbers and the like are computed when a module is built, and left out of its state dict. On
the meta device there is nothing to compute, and fresh memory would hold whatever was there before. So they are filled with
a mark, then computed by transformers' own initialisation of that module; a buffer that still has the mark is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from colonnade.errors import UsageError, explain
from colonnade.model.layout import local_of


def check_all_or_none_meta(model: nn.Module) -> bool:
    """Whether a model's parameters are on the meta device.

    Raises:
        UsageError: some of them are, and others are not.
    """
    names = {flag: [n for n, p in model.named_parameters() if p.is_meta == flag] for flag in (True, False)}
    if names[True] and names[False]:
        raise UsageError(
            explain(
                f"{len(names[True])} parameters of this {type(model).__name__} are on the meta device, {len(names[False])} are not.",
                [
                    ("on meta", names[True][0] + ", …"),
                    ("try", "build the whole model under torch.device('meta'), or none of it"),
                ],
            )
        )
    return bool(names[True])


@torch.no_grad()
def materialise(
    model: nn.Module, parameters_on: torch.device, buffers_on: torch.device, *, keep_objects: bool = True
) -> None:
    """Give a model on the meta device memory: parameters become NaN, buffers that no checkpoint carries are computed.

    Other buffers become NaN (integers 0) and are to be loaded, as the parameters are.

    Args:
        keep_objects: the Parameter objects, which an optimizer has, stay; not possible for DTensors.

    Raises:
        UsageError: nothing computes some of the buffers.
    """
    places = [(module, name) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    real = {place: place[0]._buffers[place[1]] for place in places if not place[0]._buffers[place[1]].is_meta}  # type: ignore[union-attr]
    if keep_objects:
        for param in model.parameters():
            _give_memory(param, parameters_on)
    else:
        model.to_empty(device=parameters_on)
    for module, name in places:
        empty: Any = real.get((module, name), module._buffers[name])
        module._buffers[name] = torch.empty_like(empty, device=buffers_on) if empty.is_meta else empty.to(buffers_on)
    for param in model.parameters():
        _fill(local_of(param.detach()), computed=False)
    lost = [(module, name) for module, name in places if (module, name) not in real]
    for module, name in lost:
        _fill(module._buffers[name], computed=name in module._non_persistent_buffers_set)
    computed = [(module, name) for module, name in lost if name in module._non_persistent_buffers_set]
    for module in dict.fromkeys(module for module, _ in computed):
        _initialise_buffers(model, module)
    names = {module: path for path, module in model.named_modules()}
    missing = [f"{names[module]}.{name}" for module, name in computed if _is_marked(module._buffers[name])]
    if missing:
        raise UsageError(
            explain(
                f"nothing computes {len(missing)} buffers of this {type(model).__name__}, which was built on the meta device.",
                [
                    ("buffers", ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")),
                    ("rule", "they are not in its state dict, so that no checkpoint carries them"),
                    ("try", "build the model on the CPU, or the modules that have them"),
                ],
            )
        )


def _give_memory(param: nn.Parameter, device: torch.device) -> None:
    """Put memory into a parameter on the meta device; the object stays, with its attributes."""
    if not param.is_meta:
        return
    made = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, made)


def _mark(tensor: torch.Tensor, computed: bool) -> float | int | bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    if tensor.dtype == torch.bool or not computed:
        return 0
    return torch.iinfo(tensor.dtype).max


def _fill(tensor: Any, computed: bool) -> None:
    tensor.fill_(_mark(tensor, computed))


def _is_marked(tensor: Any) -> bool:
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    mark = _mark(tensor, True)
    return bool((tensor.isnan() if mark != mark else tensor == mark).any())


def _initialise_buffers(model: nn.Module, module: nn.Module) -> None:
    """Let the transformers model that a module belongs to initialise it, its parameters and persistent buffers untouched."""
    owner = _owner(model, module)
    if owner is None:
        return
    from transformers.initialization import guard_torch_init_functions

    with _kept(module), guard_torch_init_functions():
        owner._init_weights(module)


def _owner(model: nn.Module, module: nn.Module) -> Any:
    """The innermost module around a module that knows how to initialise it."""
    around = [
        m for m in model.modules() if hasattr(m, "_init_weights") and any(child is module for child in m.modules())
    ]
    return around[-1] if around else None


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Inside the block transformers passes over what is not to be initialised: it looks at this flag."""
    buffers = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
    kept: list[Any] = [t for t in [*module.parameters(), *buffers] if t is not None]
    for tensor in kept:
        tensor._is_hf_initialized = True
    try:
        yield
    finally:
        for tensor in kept:
            del tensor._is_hf_initialized
