"""Norms computed by one fused operator of torch instead of the model's own chain of elementwise ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from colonnade.shardformer.layer.norm_formula import formula_of, not_a_norm
from colonnade.shardformer.layer.sharding import adopt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from colonnade.cluster.mesh import Axis

_ADVICE = "enable_fused_normalization=False, or leave this norm out of the policy"


class FusedRMSNorm(nn.Module):
    """Root-mean-square norm y = x / rms(x) · weight as one operator (Zhang and Sennrich 2019, equation 4).

    Takes over the RMSNorm classes that models define for themselves. Some of them scale by 1 + weight; which
    formula a module follows is found by computing both beside it, and a module that follows neither is refused.

    Traffic: none; the weight is whole on every rank.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean square.
    """

    weight: nn.Parameter

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.unit_offset = eps, False

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None) -> FusedRMSNorm:
        """Take over a model's own RMSNorm, or `nn.RMSNorm`; the Parameter stays.

        Raises:
            PolicyError: the module computes something other than an RMS norm over its last dimension.
        """
        formula = formula_of(module, cls.__name__, _ADVICE, centred=(False,))
        if getattr(module, "weight", None) is None or getattr(module, "bias", None) is not None:
            raise not_a_norm(module, cls.__name__, "it has no epsilon or no one-dimensional weight, or a bias", _ADVICE)
        layer = cls.__new__(cls)
        layer.__dict__.update(module.__dict__)
        layer.eps, layer.unit_offset = formula.eps, formula.unit_offset
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, self.unit_offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + (", scale 1 + weight" if self.unit_offset else "")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    if unit_offset:  # those models keep the scale in float32
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm as one operator (Ba et al. 2016).

    torch's own layer_norm is such an operator on every device, so this class only fixes the interface; it takes over
    `nn.LayerNorm` and subclasses that compute the same.

    Traffic: none; weight and bias are whole on every rank.
    """

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None) -> FusedLayerNorm:
        """Take over an `nn.LayerNorm`; the Parameters stay."""
        return adopt(module, cls, nn.LayerNorm)
