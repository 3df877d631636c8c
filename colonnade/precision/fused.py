"""Choosing torch's fused optimizer step, where the user has left the choice open."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

FUSED = (Adam, AdamW, SGD, Adagrad)


def prefer_fused(optimizer: Optimizer) -> None:
    """Let an optimizer of torch step by one fused kernel: the same formula, one pass over memory.

    torch chooses it by itself on no device. Groups for which the user has set `fused` or `foreach`, or an option that
    the fused kernels do not have, stay as they are; so does SGD with momentum, whose kernel fails where some tensors have
    a momentum already and others do not, as when parameters come into use one after the other.
    """
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        asked = group.get("fused") is not None or group.get("foreach") is not None
        cannot = group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), torch.Tensor)
        cannot = cannot or (isinstance(optimizer, SGD) and group["momentum"])
        if not asked and not cannot:
            group["fused"] = True
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if isinstance(state.get("step"), torch.Tensor):  # kept on the host for the other kernels
                    state["step"] = state["step"].to(param.device, torch.float32)
