"""Which formula a norm follows, found by computing the candidates beside it.

Models define norms for themselves, under many names. What they compute is one of few things:

    n = x / rms(x)   or   (x − mean(x)) / std(x)        with eps under the root, over the last dimension
    y = n · weight   or   n · (1 + weight)              + bias, where there is one

in float32, the scale multiplied in before or after the result is rounded to the dtype of x.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colonnade.errors import PolicyError, explain

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_NAMES = {
    (False, False): "x / rms(x) · weight",
    (False, True): "x / rms(x) · (1 + weight)",
    (True, False): "(x − mean(x)) / std(x) · weight",
    (True, True): "(x − mean(x)) / std(x) · (1 + weight)",
}
_WIDTH = 16  # of the twin of a norm that has no weight and does not say how wide it is


@dataclass(frozen=True)
class NormFormula:
    """What a norm computes.

    Args:
        eps: added to the mean square, or to the variance.
        centred: the mean is subtracted (layer norm), else not (RMS norm).
        unit_offset: the scale is 1 + weight.
        scales_wide: the scale is multiplied in before the result is rounded to the input's dtype.
    """

    eps: float
    centred: bool
    unit_offset: bool
    scales_wide: bool

    def scale(
        self, n: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What becomes of the normalised input.

        Args:
            n: normalised input, in float32 or wider.
            dtype: of the input as it was given.
        """
        if weight is None:
            return n.to(dtype)
        if not self.scales_wide:
            y = (1.0 + weight if self.unit_offset else weight) * n.to(dtype)
            return y if bias is None else y + bias
        weight = weight.to(n.dtype)
        y = n * (1.0 + weight if self.unit_offset else weight)
        return (y if bias is None else y + bias.to(n.dtype)).to(dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """The norm of x over its whole last dimension."""
        wide = widened(x)
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale(n, weight, bias, x.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def formula_of(module: nn.Module, taker: str, advice: str, centred: tuple[bool, ...] = (False, True)) -> NormFormula:
    """The formula of a norm over its last dimension, with a whole weight and bias of that width, or without.

    Args:
        module: with weights or on the meta device; it is not changed.
        taker: the class that is to take the module's place, for the error.
        advice: what to do where it cannot, for the error.
        centred: which kinds the taker can compute.

    Raises:
        PolicyError: the module computes something else.
    """

    def refusal(reason: str) -> PolicyError:
        return not_a_norm(module, taker, reason, advice)

    eps, weight = _epsilon(module), getattr(module, "weight", None)
    own = dict(module.named_parameters())
    one_dimensional = isinstance(weight, nn.Parameter) and weight.dim() == 1
    if not isinstance(eps, float) or not (one_dimensional or (weight is None and not own)):
        raise refusal("it has no epsilon or no one-dimensional weight")
    if not own.keys() <= {"weight", "bias"}:
        raise refusal(
            f"it has parameters besides weight and bias: {', '.join(sorted(own.keys() - {'weight', 'bias'}))}"
        )
    try:
        found = _matching(module, eps, centred)
    except Exception as error:  # whatever a module raises that is no norm of one tensor
        raise refusal(f"it does not take one tensor of its width: {type(error).__name__}: {error}") from error
    if found is None:
        names = [_NAMES[kind, offset] for kind in centred for offset in (False, True)]
        raise refusal(f"its output is neither {' nor '.join(names)}")
    return found


def not_a_norm(module: nn.Module, taker: str, reason: str, advice: str) -> PolicyError:
    """The error for a module whose place a norm layer cannot take."""
    return PolicyError(
        explain(f"{taker} cannot stand in for {type(module).__name__}.", [("reason", reason), ("try", advice)])
    )


def width_of(module: nn.Module) -> int | None:
    """Extent of the dimension that a norm is made for; None where it does not say."""
    weight, shape = getattr(module, "weight", None), getattr(module, "normalized_shape", None)
    if isinstance(weight, torch.Tensor):
        return weight.shape[0]
    if isinstance(shape, int):
        return shape
    return shape[0] if isinstance(shape, (tuple, list)) and len(shape) == 1 else None


def _epsilon(module: nn.Module) -> Any:
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    if eps is None and isinstance(module, nn.RMSNorm):  # torch's default
        dtype = torch.float32 if module.weight is None else torch.promote_types(module.weight.dtype, torch.float32)
        return torch.finfo(dtype).eps
    return eps


@torch.no_grad()
def _matching(module: nn.Module, eps: float, centred: tuple[bool, ...]) -> NormFormula | None:
    """Run a small float32 twin of the module on the CPU and see which formula it follows."""
    twin: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    width = width_of(module) or _WIDTH
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, width, generator=generator)
    for parameter in twin.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    weight, bias = getattr(twin, "weight", None), getattr(twin, "bias", None)
    x = x if weight is None else x.to(weight.dtype)
    y = twin(x).double()
    for kind, offset in itertools.product(centred, (False, True)):
        wide = NormFormula(eps, kind, offset, scales_wide=True)
        if torch.allclose(y, wide(x, weight, bias).double(), rtol=1e-5, atol=1e-6):
            narrow = NormFormula(eps, kind, offset, scales_wide=False)
            return min((wide, narrow), key=lambda formula: _distance(twin, formula, x))
    return None


def _distance(twin: Any, formula: NormFormula, x: torch.Tensor) -> float:
    """How far a formula is from a twin in bfloat16, where the place of the rounding shows."""
    twin, x = twin.bfloat16(), x.bfloat16()
    found = formula(x, getattr(twin, "weight", None), getattr(twin, "bias", None))
    return (twin(x).float() - found.float()).abs().sum().item()
