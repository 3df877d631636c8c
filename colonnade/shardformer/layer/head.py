"""The language-model head with its vocabulary dealt out over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.shardformer.layer.linear import Linear1D_Col
from colonnade.shardformer.layer.sharding import adopt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class VocabParallelLMHead1D(Linear1D_Col):
    """Head that leaves each rank with the logits of its own part of the vocabulary: logits_BSv = x_BSD @ w_vD.T.

    `cross_entropy_1d` computes the loss from such logits without gathering them. A weight tied to a
    `VocabParallelEmbedding1D` is recognised and stays one Parameter.

    Traffic: forward none; backward one all-reduce of dx_BSD. With `gather_output` an all-gather of logits_BSV.
    Layout: weight dim 0, bias dim 0, dealt out unevenly where the vocabulary does not divide.
    """

    uneven = True

    @classmethod
    def from_native_module(  # type: ignore[override]
        cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None, *, gather_output: bool = False
    ) -> VocabParallelLMHead1D:
        """Take over an `nn.Linear` of out_features = vocabulary size."""
        layer = adopt(module, cls, nn.Linear)
        layer._shard(Axis.of(process_group), gather_output, None, None, None, False, None)
        return layer

    @property
    def vocab_size(self) -> int:
        """Size of the whole vocabulary."""
        return self._whole
