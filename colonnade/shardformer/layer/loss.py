"""The loss of a causal language model, through the door transformers leaves open: `model.loss_function`.

[Note: the mean over the global batch]
The loss is the mean over the target tokens of the *global* batch, whatever the layout and however unequal the shares.
Each data-parallel rank has a sum over its own targets and their count; the two are exchanged in the forward, every rank
returns the same mean, and the gradient is scaled by (ranks / global count), so that the average over ranks that the
gradient reduction takes is the gradient of that mean. Where the caller gives `num_items_in_batch` the denominator is
the caller's and the reduction is exactly a division by the number of data-parallel ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather
from colonnade.shardformer.layer.cross_entropy import cross_entropy_1d
from colonnade.shardformer.layer.embedding import check_ids


class LossAverage:
    """Over which data-parallel ranks a loss is averaged at present; shared by a boosted model and its loss function."""

    def __init__(self) -> None:
        self.axis: Axis | None = None

    @contextmanager
    def over(self, axis: Axis | None) -> Iterator[None]:
        """Average over `axis` inside the block; None for this rank alone."""
        before, self.axis = self.axis, axis
        try:
            yield
        finally:
            self.axis = before


class _GlobalMean(Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, axis: Axis) -> torch.Tensor:
        # gathered rather than summed by the backend: every rank then adds the same numbers in the same order
        mine = torch.stack([total.detach().double(), count.to(total.device, torch.float64)])
        sums = torch.stack(all_gather(mine, axis)).sum(0)
        count_all = sums[1].clamp(min=1.0)
        ctx.scale = (axis.size / count_all).to(total.dtype)
        return (sums[0] / count_all).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.scale, None, None


def mean_over_ranks(total: torch.Tensor, count: torch.Tensor | int, axis: Axis) -> torch.Tensor:
    """Σ total / Σ count over the ranks of an axis, the same number on each; 0 where nothing counts.

    Its gradient is that of the mean, up to the division by axis.size that averaging gradients over the axis does.
    Traffic: forward one all-gather of two scalars.
    """
    return _GlobalMean.apply(total, torch.as_tensor(count), axis)


class CausalLMLoss:
    """Next-token cross entropy with transformers' calling convention, over whole or vocabulary-parallel logits.

    Args:
        average: says over which data-parallel ranks the mean is taken.
        tp: axis over which the logits' vocabulary is split; None where they are whole.
        vocab_size: size of the whole vocabulary, needed with `tp`.
    """

    def __init__(self, average: LossAverage, tp: Axis | None = None, vocab_size: int | None = None) -> None:
        self.average, self.tp, self.vocab_size = average, tp, vocab_size

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Loss of logits [B, S, V or v] for labels [B, S], shifted here unless `shift_labels` [B, S] is given."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]  # one is given
        targets = shift_labels.to(logits.device)
        total = self._sum(logits, targets, ignore_index)
        axis = self.average.axis
        count: torch.Tensor | int
        if num_items_in_batch is not None:
            total, count = total / num_items_in_batch, 1
        else:
            count = targets_that_count = (targets != ignore_index).sum()
            if axis is None:
                return total / targets_that_count.clamp(min=1)
        return total if axis is None else mean_over_ranks(total, count, axis)

    def _sum(self, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        if self.tp is not None:
            return cross_entropy_1d(logits, targets, ignore_index, self.tp, self.vocab_size, reduction="sum")
        check_ids(targets, logits.shape[-1], "labels", ignore_index)
        flat = logits.float().reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, targets.reshape(-1), ignore_index=ignore_index, reduction="sum")


def causal_loss_owner(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module whose forward calls transformers' causal-LM loss function, which `CausalLMLoss` can replace.

    The model itself, or the one inside a wrapper; None where the loss is computed otherwise. What a forward does is read
    off its code: a class may inherit the function and never call it.
    """
    return next(
        (module for module in model.modules() if _calls_loss_function(type(module)) and _is_causal(module)), None
    )


def average_causal_loss(model: torch.nn.Module, average: LossAverage) -> None:
    """Let a causal language model that is not split take its loss over the ranks that `average` says."""
    owner: Any = causal_loss_owner(model)
    if owner is not None:
        owner.loss_function = CausalLMLoss(average)


def _is_causal(module: torch.nn.Module) -> bool:
    function = getattr(module, "loss_function", None)
    native = getattr(function, "__name__", None) == "ForCausalLMLoss"
    return isinstance(function, CausalLMLoss) or (native and function.__module__.startswith("transformers."))


def _calls_loss_function(kind: type) -> bool:
    for ancestor in kind.__mro__:
        forward = inspect.unwrap(vars(ancestor).get("forward", _nothing))
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if "loss_function" in names:
            return True
        if forward is not _nothing and "super" not in names:
            return False
    return False


def _nothing() -> None:
    """Stands for a class without a forward of its own."""
