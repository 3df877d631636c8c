"""Cross entropy over a vocabulary that is dealt out over ranks; the logits are never gathered.

Shapes: N tokens, V vocabulary, v this rank's share, R ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather
from colonnade.errors import ShapeError
from colonnade.model.layout import deal
from colonnade.shardformer.layer.embedding import check_ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: torch.Tensor, labels_N: torch.Tensor, start: int, axis: Axis) -> torch.Tensor:
        width = logits_Nv.shape[1]
        local_N = labels_N - start
        elsewhere_N = (local_N < 0) | (local_N >= width)
        local_N = local_N.masked_fill(elsewhere_N, 0)
        target_N = logits_Nv.gather(1, local_N.unsqueeze(1)).squeeze(1).masked_fill(elsewhere_N, 0.0)
        top_N = logits_Nv.amax(1).clamp_(min=torch.finfo(logits_Nv.dtype).min)  # finite where all are minus infinity
        exp_Nv = (logits_Nv - top_N.unsqueeze(1)).exp_()
        # one exchange: each rank's maximum, its log-sum-exp above that, and its logit of the target if it holds it
        stats_3N = torch.stack([top_N, exp_Nv.sum(1).log_(), target_N])
        tops_RN, lses_RN, targets_RN = torch.stack(all_gather(stats_3N, axis)).unbind(1)
        top_all_N = tops_RN.amax(0)
        # everything is kept relative to the maximum: what is common to all logits must not cost digits
        lse_N = (tops_RN - top_all_N + lses_RN).logsumexp(0)
        ctx.save_for_backward(exp_Nv, (top_N - top_all_N - lse_N).exp_(), local_N, elsewhere_N)
        return lse_N - (targets_RN.sum(0) - top_all_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exp_Nv, scale_N, local_N, elsewhere_N = ctx.saved_tensors
        grad_Nv = exp_Nv * (scale_N * grad_N).unsqueeze(1)  # the softmax over the whole vocabulary, own columns
        grad_Nv.scatter_add_(1, local_N.unsqueeze(1), -grad_N.masked_fill(elsewhere_N, 0.0).unsqueeze(1))
        return grad_Nv, None, None, None


def cross_entropy_1d(
    vocab_logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    process_group: Axis | ProcessGroup | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of logits whose last dimension is split over the tensor-parallel axis.

    Computed in float32. Equals `torch.nn.functional.cross_entropy` on the gathered logits. (Megatron-LM,
    Shoeybi et al. 2019, section 3: the fused vocabulary-parallel loss.)

    Traffic: forward one all-gather of 3 scalars a token from each rank; backward none.

    Args:
        vocab_logits: [..., v], this rank's columns.
        labels: [...], ids in the whole vocabulary, or `ignore_index`.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
        vocab_size: V; by default v times the number of ranks. Must be given where V does not divide.
        reduction: "mean" over the labels that count (NaN if there are none, as in torch), "sum", or "none".

    Raises:
        ShapeError: shapes that do not belong together, or labels outside the vocabulary.
    """
    axis = Axis.of(process_group)
    width = vocab_logits.shape[-1]
    vocab_size = width * axis.size if vocab_size is None else vocab_size
    start, stop = deal(vocab_size, axis.size)[axis.rank]
    if stop - start != width or vocab_logits.shape[:-1] != labels.shape:
        raise ShapeError(
            f"logits {tuple(vocab_logits.shape)} and labels {tuple(labels.shape)} do not fit: rank {axis.rank} of "
            f"{axis.size} should hold {stop - start} of {vocab_size} columns, one row for each label."
        )
    check_ids(labels, vocab_size, "labels", ignore_index)
    labels_N = labels.reshape(-1).to(vocab_logits.device)
    ignored_N = labels_N == ignore_index
    logits_Nv = vocab_logits.reshape(-1, width).float()
    loss_N = _VocabParallelCrossEntropy.apply(logits_Nv, labels_N.masked_fill(ignored_N, 0), start, axis)
    loss_N = loss_N.masked_fill(ignored_N, 0.0)
    if reduction == "none":
        return loss_N.view(labels.shape)
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / (~ignored_N).sum()
