"""Low-rank adapters around parallel layers (LoRA, Hu et al. 2021): y = W x + s · B A dropout(x), W frozen.

Shapes: B sequences, S tokens, D input features, F output features, r the adapter's rank; d and f are this rank's shares.

[Note: adapters of split layers]
Around a column-parallel W_fD the second matrix B_fr is cut like W, by the same ranges; the first, A_rD, stays whole. Both
work inside the region, whose input the layer has entered already:

    h_BSr = dropout(x_BSD) @ A_rD.T            y_BSf = W x + s · h_BSr @ B_fr.T

Of dL/dh = s · dy @ B a rank has only what its own f columns send back, so dA = dh.T @ x and dx = dh @ A are shares. Those
of dx are added to the shares that W sends back, and one all-reduce of the region completes them all; those of dA are
summed by an all-reduce of the r · D entries of A (layer/partial.py). dB is this rank's own. A block that several ranks
hold (few key/value heads) has a dB summed over its holders, as W would have.

Around a row-parallel W_Dd it is A_rd that is cut, by W's ranges of the input, and B_Fr that stays whole:

    h_BSr = sum over ranks of dropout(x_BSd) @ A_rd.T            y_BSF = (sum of W x) + s · h_BSr @ B_Fr.T

h is completed by an all-reduce of b · s · r entries; behind it all ranks compute the same, so dh and dB are whole on each
of them, and dA, dx are this rank's own. The backward communicates nothing.

[Note: dropout in adapters]
Around a column-parallel layer all ranks drop the same entries of the x that they hold in common: the mask is drawn from the
common stream, as one process draws it, even where the region around draws from a rank's own. Around a row-parallel layer
each rank has other features of x, and draws from its own stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import copy_to_region
from colonnade.errors import PolicyError, explain
from colonnade.shardformer.layer.column_product import column_product
from colonnade.shardformer.layer.dropout import DropoutForParallelInput
from colonnade.shardformer.layer.embedding import VocabParallelEmbedding1D
from colonnade.shardformer.layer.latent import LatentLinear
from colonnade.shardformer.layer.linear import ColumnParallel, Linear1D_Col, Linear1D_Row, RowParallel
from colonnade.shardformer.layer.partial import sum_gradient
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.layer.sharding import adopt

ALONE = "tp_size=1 or TorchDDPPlugin, which train adapters of any kind as they are"


class AdapterLinear1D(nn.Linear):
    """The first linear layer of an adapter around a column-parallel one: whole on every rank, used inside the region.

    h_BSr = dropout(x_BSD) @ w_rD.T

    Traffic: forward none; backward one all-reduce of the weight's gradient. dx_BSD is summed with that of the region.
    Layout: weight whole, its gradient a share.
    """

    weight: nn.Parameter
    axis: Axis
    region: Region
    inside: bool
    dropout: nn.Dropout | None

    @classmethod
    def from_native_module(
        cls, module: nn.Module, around: ColumnParallel, dropout: nn.Module | None = None
    ) -> AdapterLinear1D:
        """Take over an `nn.Linear`; its Parameter objects stay as they are.

        Args:
            around: the column-parallel layer, whose region this one reads too.
            dropout: an `nn.Dropout` on the input; anything else stands for none.
        """
        layer = adopt(module, cls, nn.Linear)
        layer.axis, layer.region, layer.inside = around.axis, around.region, around.inside
        layer.dropout = dropout if isinstance(dropout, nn.Dropout) else None
        if not layer.inside:
            layer.region.join(layer)
        for param in layer.parameters(recurse=False):
            sum_gradient(param, layer.axis, layer)
        return layer

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return column_product(self, x_BSD, change=self._dropped)

    def _dropped(self, x_BSD: torch.Tensor) -> torch.Tensor:
        if self.dropout is None:
            return x_BSD
        with self.region.outside():
            return self.dropout(x_BSD)


def why_not(adapter: Any, target: Any) -> str:
    """Why an adapter of peft cannot stand around a layer of class `target`, in words; empty where it can."""
    kind = type(adapter).__name__
    if kind == "ModulesToSaveWrapper":
        return "modules_to_save trains a copy of it as a whole"
    lora = type(adapter).__module__ == "peft.tuners.lora.layer"
    if not lora or kind not in ("Linear", "Embedding"):
        return f"its adapter is a {kind} of {type(adapter).__module__}; what can be split is plain LoRA"
    variants = sorted({type(v).__name__ for v in adapter.lora_variant.values()})
    if variants:
        options = ", ".join(OPTION_OF.get(name, name) for name in variants)
        return f"its adapter is a variant of LoRA ({options}), which computes with the whole weight"
    if not isinstance(target, type):
        return "the policy puts something else than a layer in its place"
    kinds: tuple[type, ...] = (ColumnParallel, RowParallel, LatentLinear)
    if not issubclass(target, kinds if kind == "Linear" else VocabParallelEmbedding1D):
        return f"the policy makes a {target.__name__} of it"
    return ""


OPTION_OF = {
    "DoraLinearVariant": "use_dora=True",
    "DoraEmbeddingVariant": "use_dora=True",
    "ALoraLinearVariant": "alora_invocation_tokens",
    "ArrowLinearVariant": "arrow_config",
    "BdLoraLinearVariant": "use_bdlora",
}


def split_adapter(adapter: Any, base: nn.Module) -> None:
    """Cut the matrices of an adapter of peft like the layer it stands around, which has been replaced by `base`.

    See [Note: adapters of split layers]. The adapter of an embedding stays whole: what it reads and adds to is whole.

    Args:
        adapter: a LoRA layer of peft; its forward and its Parameter objects stay.
    """
    if isinstance(base, VocabParallelEmbedding1D):
        return
    names = list(adapter.lora_A)
    if isinstance(base, LatentLinear):
        adapter.register_forward_hook(_Enter(base.axis))  # once, behind the sum of both
        base.axis = Axis.alone(base.axis.name)
    elif isinstance(base, ColumnParallel):
        for name in names:
            _split_column(adapter, name, base)
        base.region.watch(adapter)  # a head's, which no module around it watches
    elif isinstance(base, RowParallel):
        for name in names:
            _split_row(adapter, name, base)
    else:
        raise PolicyError(
            explain(f"an adapter cannot stand around a {type(base).__name__} that is split.", [("try", ALONE)])
        )


def _split_column(adapter: Any, name: str, base: ColumnParallel) -> None:
    adapter.lora_A[name] = AdapterLinear1D.from_native_module(adapter.lora_A[name], base, adapter.lora_dropout[name])
    adapter.lora_dropout[name] = nn.Identity()
    adapter.lora_B[name] = Linear1D_Col.from_native_module(
        adapter.lora_B[name],
        base.axis,
        gather_output=base.gather_output,
        pieces=base._pieces,
        units=base._units,
        heads=base._heads,
        inside=True,
        region=base.region,
    )


def _split_row(adapter: Any, name: str, base: RowParallel) -> None:
    adapter.lora_A[name] = Linear1D_Row.from_native_module(
        adapter.lora_A[name],
        base.axis,
        parallel_input=base.parallel_input,
        units=base._units,
        heads=base._heads,
    )
    dropout = adapter.lora_dropout[name]
    if base.parallel_input and isinstance(dropout, nn.Dropout):
        adapter.lora_dropout[name] = DropoutForParallelInput.from_native_module(dropout, base.axis)


def follow_gathering(adapter: Any, base: nn.Module) -> None:
    """Let an adapter collect its output where the layer that it stands around does, which may be decided late."""
    if isinstance(base, ColumnParallel):
        for up in adapter.lora_B.values():
            up.gather_output = base.gather_output


class _Enter:
    """Forward hook: what the module returns is read inside a region."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return copy_to_region(output, self.axis)
