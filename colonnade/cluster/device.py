"""Which device and which communication backend this process uses. The only file that asks.

`torch.accelerator` answers for CUDA, XPU and the rest, but on a machine without one most of its calls raise; here both
worlds have the same few functions.
"""

from __future__ import annotations

import torch


def device_type() -> str:
    """Name of the device type that computes: the accelerator's where there is one, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def backend() -> str:
    """Communication backend for `device_type()`: nccl on CUDA, xccl on XPU, gloo on the CPU."""
    return {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}.get(device_type(), "gloo")


def set_device(local_rank: int) -> torch.device:
    """Bind this process to accelerator `local_rank` of its machine and return it (the CPU where there is none)."""
    if device_type() == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device_type(), index)


def current_device() -> torch.device:
    """Device on which this process allocates."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device(device_type(), torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait for the work queued on this process's device; returns at once on the CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def get_rng_state(device: torch.device) -> torch.Tensor:
    """State of the default random generator of `device`."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the default random generator of `device`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
