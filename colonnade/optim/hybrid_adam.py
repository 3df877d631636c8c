"""HybridAdam: Adam for parameters that live on the host, on a device, or on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from colonnade.errors import ConfigError, explain


class HybridAdam(Adam):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or Adam, that updates each parameter where it lives.

    torch's fused kernels are used, of the host for parameters on the host and of the device for those on a device; groups
    may hold both. With `state_device="cpu"` the state of all parameters stays on the host in float32: at each step a
    parameter on a device, or in 16 bits, and its gradient are copied to the host, updated there, and the value is copied back.

    State: `step`, `exp_avg`, `exp_avg_sq` of the local shape.

    Traffic: none; each entry is updated by itself.

    Args:
        lr, betas, eps, weight_decay: as Adam's.
        adamw_mode: weight decay is decoupled from the gradient (AdamW), not added to it (Adam).
        state_device: None to keep the state where the parameter is, "cpu" to keep it on the host.

    Raises:
        ConfigError: `state_device` is neither.
    """

    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        state_device: str | None = None,
    ) -> None:
        if state_device not in (None, "cpu"):
            raise ConfigError(
                explain(
                    f"HybridAdam cannot keep its state on {state_device!r}.",
                    [("try", 'state_device="cpu" for the host, or None for the device of each parameter')],
                )
            )
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)
        for group in self.param_groups:  # saved and copied with the optimizer
            group.setdefault("state_device", state_device)
        self.defaults["state_device"] = state_device

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients anew.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._on_host(gradients=True):
            _unhooked(Adam.step)(self)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        with self._on_host(gradients=False):  # torch moves state to where it finds the parameters
            super().load_state_dict(state_dict)

    @contextmanager
    def _on_host(self, gradients: bool) -> Iterator[None]:
        """Inside the block parameters whose state is elsewhere are replaced by copies on the host."""
        groups = [(group, group["params"]) for group in self.param_groups]
        copies: dict[torch.Tensor, torch.Tensor] = {}
        for group, params in groups:
            if group.get("state_device") is not None:
                copies |= {p: _host_copy(p, gradients) for p in params if _is_elsewhere(p)}
        self._exchange(groups, copies)
        try:
            yield
        finally:
            # load_state_dict makes new groups of the same parameters
            for group, (_, params) in zip(self.param_groups, groups):
                group["params"] = params
            for param, copy in copies.items():
                if copy in self.state:
                    self.state[param] = self.state.pop(copy)
                if copy.grad is not None:
                    param.detach().copy_(copy)

    def _exchange(self, groups: list[tuple[dict[str, Any], list]], copies: dict[torch.Tensor, torch.Tensor]) -> None:
        for group, params in groups:
            group["params"] = [copies.get(p, p) for p in params]
        for param, copy in copies.items():
            if param in self.state:
                self.state[copy] = self.state.pop(param)


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch calls the hooks of an optimizer around the `step` of every class of which there is an instance: not twice."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _is_elsewhere(param: torch.Tensor) -> bool:
    return param.device.type != "cpu" or param.dtype not in (torch.float32, torch.float64)


def _host_copy(param: torch.Tensor, gradients: bool) -> torch.Tensor:
    """The parameter on the host in float32 (float64 if it is), with its gradient."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    if not gradients or param.grad is None:  # nothing will be written to it
        return torch.empty_like(param, dtype=dtype, device="cpu", requires_grad=True)
    copy = param.detach().to("cpu", dtype, copy=True).requires_grad_()
    copy.grad = param.grad.to("cpu", dtype)
    return copy
