"""Norms inside a tensor-parallel region that normalise over the whole dimension which the region splits.

A norm of each head alone needs nothing: its dimension is whole on every rank. Some models (OLMo 2, OLMoE, BitNet) norm
all heads, or the whole inner width, together. Then each rank has a slice of the dimension and of the weight, and only the
statistic, one or two numbers a token, is common to all ranks.

[Note: pieces that several ranks hold]
Key and value heads that are fewer than the ranks are held by several ranks each. In the statistic such a piece counts
once, for the first of its holders. So does, in the backward pass, what reaches it through the statistic: its gradient is
the sum over its holders. What reaches it past the statistic is each holder's own.

Shapes: ... any dimensions, f this rank's share of the width F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather, all_reduce
from colonnade.model.layout import shard_ranges
from colonnade.shardformer.layer.norm_formula import NormFormula, formula_of, not_a_norm, widened, width_of
from colonnade.shardformer.layer.partial import sum_shared_gradient
from colonnade.shardformer.layer.sharding import ranges_of, shard_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Norm = TypeVar("Norm", bound="ShardedNorm")
_ADVICE = "leave the region around it whole, or write a layer with from_native_module(module, process_group) for it"


class _MeanSquare(Function):
    """Mean of the squares over the whole width: x_...f → [..., 1]. Backward the ranks' gradients for it are summed.

    Args:
        widths: entries that count on each rank of the axis; 0 where another rank's count for them.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, widths: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.axis, ctx.widths = axis, widths
        squares = x.square().sum(-1, keepdim=True)
        return all_reduce(squares if widths[axis.rank] else torch.zeros_like(squares), axis) / sum(widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        grad = all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis)
        return x * (grad * (2 / sum(ctx.widths))) if ctx.widths[ctx.axis.rank] else None, None, None


class _Moments(Function):
    """Mean and variance over the whole width: x_...f → [..., 1] each; arguments as of `_MeanSquare`.

    Each rank's mean and squared deviations are merged (Chan et al. 1979) rather than sums of x and x², whose difference
    is rounding where the mean is large.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, widths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.mean(-1, keepdim=True)
        deviations = (x - own).square().sum(-1, keepdim=True)
        means, squares = torch.stack(all_gather(torch.stack([own, deviations]), axis), 1)
        share = x.new_tensor(widths).view(-1, *[1] * x.dim())
        mean = (means * share).sum(0) / sum(widths)
        squares = torch.where(share > 0, squares, 0) + (means - mean).square() * share
        ctx.save_for_backward(x, mean)
        ctx.axis, ctx.widths = axis, widths
        return mean, squares.sum(0) / sum(widths)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_mean: torch.Tensor, grad_variance: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None]:
        x, mean = ctx.saved_tensors
        grad_mean, grad_variance = all_reduce(torch.stack([grad_mean, grad_variance]), ctx.axis) / sum(ctx.widths)
        counts = ctx.widths[ctx.axis.rank] > 0
        return grad_mean + (x - mean) * (2 * grad_variance) if counts else None, None, None


class ShardedNorm(nn.Module):
    """What both norms over a split width share. Its `from_native_module` chooses the one that the module's formula needs."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @classmethod
    def from_native_module(
        cls: type[Norm],
        module: nn.Module,
        process_group: Axis | ProcessGroup | None = None,
        *,
        units: int | None = None,
        heads: int | None = None,
    ) -> Norm:
        """Take over a norm of the whole width; its Parameters stay, cut to this rank's slices.

        Args:
            process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
            units, heads: the indivisible blocks of the width, as the layers say them whose output is normed.

        Raises:
            PolicyError: the module is no norm over its last dimension, or one of another kind than this class.
            ConfigError: there are fewer blocks than ranks.
        """
        kinds = {ShardedRMSNorm: (False,), ShardedLayerNorm: (True,)}
        formula = formula_of(module, cls.__name__, _ADVICE, kinds.get(cls, (False, True)))
        width = width_of(module)
        if width is None:
            raise not_a_norm(module, cls.__name__, "it has no weight and does not say how wide it is", _ADVICE)
        kind: Any = cls if cls in kinds else ShardedLayerNorm if formula.centred else ShardedRMSNorm
        layer = kind.__new__(kind)
        layer.__dict__.update(module.__dict__)
        layer._shard(Axis.of(process_group), formula, width, units, heads)
        return layer

    def _shard(self, axis: Axis, formula: NormFormula, width: int, units: int | None, heads: int | None) -> None:
        ranges = ranges_of(width, axis, f"the width of {type(self).__name__}", 1, units, heads)
        held = [shard_ranges(width, rank, axis.size, 1, units, heads) for rank in range(axis.size)]
        self.axis, self.formula, self.eps, self.width = axis, formula, formula.eps, width
        self.local_width = sum(r.size for r in ranges)
        # a piece that several ranks hold counts on the first of them
        self._widths = [0 if r.holders and r.holders[0] != rank else r.size for rank, (r,) in enumerate(held)]
        for name in ("weight", "bias"):
            parameter = getattr(self, name, None)
            if parameter is None:
                self.register_parameter(name, None)
            else:
                shard_parameter(parameter, 0, ranges, axis)
                sum_shared_gradient(parameter, self, axis, units)

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"{self.local_width} of {self.width} on {self.axis.name} {self.axis.rank}/{self.axis.size}, eps={self.eps}{bias}"


class ShardedRMSNorm(ShardedNorm):
    """Root-mean-square norm over a width that is split over the tensor-parallel axis.

    y_...f = x_...f / rms(x_...F) · w_f, or · (1 + w_f) where the module that it stands in for does so.

    Traffic: forward one all-reduce of [..., 1], backward the same; in float32 (float64 stays).
    Layout: weight dim 0.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        square = _MeanSquare.apply(wide, self.axis, self._widths)
        return self.formula.scale(wide * torch.rsqrt(square + self.eps), self.weight, self.bias, x.dtype)


class ShardedLayerNorm(ShardedNorm):
    """Layer norm over a width that is split over the tensor-parallel axis.

    y_...f = (x_...f − mean(x_...F)) / sqrt(var(x_...F) + eps) · w_f + b_f

    Traffic: forward one all-gather of [..., 2] from each rank, backward one all-reduce of [..., 2]; in float32 (float64
        stays).
    Layout: weight dim 0, bias dim 0.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        mean, variance = _Moments.apply(wide, self.axis, self._widths)
        return self.formula.scale((wide - mean) * torch.rsqrt(variance + self.eps), self.weight, self.bias, x.dtype)
