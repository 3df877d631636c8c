"""Embeddings split by vocabulary or by width.

Shapes: B sequences, S tokens, D width, V vocabulary; v and d are this rank's shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import gather_from_region, reduce_from_region
from colonnade.errors import PolicyError, ShapeError
from colonnade.shardformer.layer.sharding import adopt, ranges_of, shard_parameter, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class VocabParallelEmbedding1D(nn.Embedding):
    """Embedding whose rows (the vocabulary) are dealt out over the tensor-parallel axis.

    Each rank looks up the ids it holds, writes zeros for the others, and the ranks' results are summed. A vocabulary
    that does not divide is dealt out unevenly: nothing is padded.

    Traffic: forward one all-reduce of y_BSD; backward none.
    Layout: weight dim 0.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Axis | ProcessGroup | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._shard(Axis.of(process_group))

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None
    ) -> VocabParallelEmbedding1D:
        """Take over an `nn.Embedding` (or a subclass that scales its output); its Parameter stays, cut to this rank's rows."""
        layer = adopt(module, cls, nn.Embedding)
        layer._shard(Axis.of(process_group))
        return layer

    def _shard(self, axis: Axis) -> None:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise PolicyError(
                "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split by vocabulary."
            )
        self.axis, self.vocab_size = axis, self.num_embeddings
        ranges = ranges_of(self.num_embeddings, axis, "the vocabulary")
        self.vocab_start, self.vocab_stop, _ = ranges[0]
        shard_parameter(self.weight, 0, ranges, axis)
        self.num_embeddings = self.vocab_stop - self.vocab_start
        # the row that gets no gradient is known by its local number, on the rank that holds it
        pad = self.padding_idx
        held = pad is not None and self.vocab_start <= pad < self.vocab_stop
        self._local_padding = pad - self.vocab_start if pad is not None and held else None

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        check_ids(ids_BS, self.vocab_size)
        if self.axis.size == 1:
            return F.embedding(ids_BS, self.weight, self._local_padding)
        local_BS = ids_BS - self.vocab_start
        elsewhere_BS = (local_BS < 0) | (local_BS >= self.num_embeddings)
        y_BSD = F.embedding(local_BS.masked_fill(elsewhere_BS, 0), self.weight, self._local_padding)
        y_BSD = y_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)
        return reduce_from_region(y_BSD, self.axis, in_place=True)

    def extra_repr(self) -> str:
        return (
            f"rows {self.vocab_start}..{self.vocab_stop - 1} of {self.vocab_size} on {self.axis.name} "
            f"{self.axis.rank}/{self.axis.size}, embedding_dim={self.embedding_dim}"
        )


class Embedding1D(nn.Embedding):
    """Embedding whose columns (the width) are split over the tensor-parallel axis.

    Traffic: forward one all-gather of y_BSD unless `gather_output` is off; backward none.
    Layout: weight dim 1.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
        gather_output: return y_BSD on every rank, else this rank's y_BSd.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Axis | ProcessGroup | None = None,
        gather_output: bool = True,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._shard(Axis.of(process_group), gather_output)

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None, *, gather_output: bool = True
    ) -> Embedding1D:
        """Take over an `nn.Embedding`; its Parameter stays, cut to this rank's columns."""
        layer = adopt(module, cls, nn.Embedding)
        layer._shard(Axis.of(process_group), gather_output)
        return layer

    def _shard(self, axis: Axis, gather_output: bool) -> None:
        if self.max_norm is not None:
            raise PolicyError("an embedding with max_norm cannot be split by width: the norm of a row spans all ranks.")
        self.axis, self.gather_output, self._sizes = axis, gather_output, sizes_of(self.embedding_dim, axis)
        shard_parameter(self.weight, 1, ranges_of(self.embedding_dim, axis, "the embedding width"), axis)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        y_BSd = F.embedding(ids_BS, self.weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)
        return gather_from_region(y_BSd, self.axis, -1, self._sizes) if self.gather_output else y_BSd

    def extra_repr(self) -> str:
        mine = self._sizes[self.axis.rank]
        return f"{self.num_embeddings}, {mine} of {self.embedding_dim} columns on {self.axis.name} {self.axis.rank}/{self.axis.size}"


def check_ids(ids: torch.Tensor, vocab_size: int, what: str = "input ids", ignore_index: int | None = None) -> None:
    """Refuse ids outside the vocabulary, which a sharded table would otherwise read as zeros.

    Checked on the CPU only: on an accelerator it would make the host wait for the device at every step.

    Raises:
        ShapeError: with the first offending id and where it stands.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ShapeError(
            f"{what} must lie in 0..{vocab_size - 1}"
            + (f" or be {ignore_index}" if ignore_index is not None else "")
            + f"; found {ids[place].item()} at position {place} ({int(wrong.sum())} such)."
            + "\n  try  the tokenizer that belongs to this model, or model.resize_token_embeddings before boost"
        )
