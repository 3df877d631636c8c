"""Norms over a split width, each alone, against the norms that models define for themselves."""

import copy
import re

import pytest
import torch
from layer_checks import assert_holds_weights_of, assert_same_tensors, noise, with_noise
from torch import nn
from transformers.models.bitnet.modeling_bitnet import BitNetRMSNorm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.errors import ConfigError, PolicyError
from colonnade.model.layout import shard_ranges
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.layer import ShardedLayerNorm, ShardedNorm, ShardedRMSNorm
from colonnade.testing.ranks import on_ranks, run_on_ranks

WIDTH = 30
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # these models compute in float32 whatever they are given
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
RMS = {
    "OLMo 2": lambda width: Olmo2RMSNorm(width, eps=1e-3),
    "OLMoE": lambda width: OlmoeRMSNorm(width, eps=1e-3),
    "BitNet": lambda width: BitNetRMSNorm(width, eps=1e-3),
    "Llama": lambda width: LlamaRMSNorm(width, eps=1e-3),
    "Gemma": lambda width: GemmaRMSNorm(width, eps=1e-3),
    "torch RMS": lambda width: nn.RMSNorm(width, eps=1e-3),
    "torch RMS, eps left out": lambda width: nn.RMSNorm(width),
    "torch RMS without weight": lambda width: nn.RMSNorm(width, eps=1e-3, elementwise_affine=False),
}
CENTRED = {
    "Cohere": lambda width: CohereLayerNorm(width, eps=1e-3),
    "torch": lambda width: nn.LayerNorm(width, eps=1e-3),
    "torch without bias": lambda width: nn.LayerNorm(width, eps=1e-3, bias=False),
    "torch without weight": lambda width: nn.LayerNorm(width, eps=1e-3, elementwise_affine=False),
}
NORMS = RMS | CENTRED
# width, units, heads
CUTS = {
    "entries": (WIDTH, None, None),
    "uneven entries": (31, None, None),
    "heads": (35, 5, None),
    "cut blocks": (24, 1, 4),
    "shared by all": (8, 1, None),
    "shared by some": (8, 2, None),
}


class Double(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Everything(nn.Module):
    """Looks like a norm, and norms all dimensions together."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean() + self.eps) * self.weight


def check(native, width, units=None, heads=None, close=FLOAT64, dtype=torch.float64):
    """Forward and backward on this rank's entries; what several ranks hold gets another output gradient on each."""
    axis = Axis.of(None)
    ranges = [shard_ranges(width, rank, axis.size, 1, units, heads)[0] for rank in range(axis.size)]
    given = copy.deepcopy(native)
    weight = getattr(given, "weight", None)
    layer = ShardedNorm.from_native_module(given, axis, units=units, heads=heads)
    assert isinstance(layer, ShardedRMSNorm) != isinstance(layer, ShardedLayerNorm)
    assert layer.weight is weight
    assert_holds_weights_of(layer, native)
    whole = (noise(3, 5, width) * 3 + 2).to(dtype).requires_grad_()
    upstreams = [noise(3, 5, r.size, seed=10 + rank, dtype=dtype) for rank, r in enumerate(ranges)]
    upstream = torch.zeros(3, 5, width, dtype=dtype)
    for r, part in zip(ranges, upstreams):
        upstream[..., r.start : r.stop] += part
    mine = ranges[axis.rank]
    x = whole.detach()[..., mine.start : mine.stop].clone().requires_grad_()
    wanted, found = native(whole), layer(x)
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted[..., mine.start : mine.stop], **close)
    wanted.backward(upstream)
    found.backward(upstreams[axis.rank])
    pieces = [None] * axis.size
    torch.distributed.all_gather_object(pieces, x.grad)
    gradient = torch.zeros_like(whole)
    for r, piece in zip(ranges, pieces):
        gradient[..., r.start : r.stop] += piece
    torch.testing.assert_close(gradient, whole.grad, **close)
    assert_same_tensors(layer, {n: p.grad for n, p in native.named_parameters()}, lambda p: p.grad, close)
    return layer


def norm_alone(name):
    for width, units, heads in CUTS.values():
        native = with_noise(NORMS[name](width))
        layer = check(native, width, units, heads, FLOAT64 if name.startswith("torch") else FLOAT32)
        assert isinstance(layer, ShardedLayerNorm if name in CENTRED else ShardedRMSNorm)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_a_split_width_equals_the_models_own(world, name):
    run_on_ranks(world, norm_alone, name)


@pytest.mark.parametrize("name", NORMS)
@on_ranks(1)
def test_over_one_rank_it_is_the_native_one(name):
    check(with_noise(NORMS[name](WIDTH), dtype=torch.float32), WIDTH, close=FLOAT32, dtype=torch.float32)


@pytest.mark.parametrize("name", NORMS)
@on_ranks(2)
def test_fp32_is_right_to_rounding(name):
    check(with_noise(NORMS[name](31), dtype=torch.float32), 31, close=FLOAT32, dtype=torch.float32)


@pytest.mark.parametrize("name", NORMS)
@on_ranks(2)
def test_bf16_rounds_where_the_model_rounds(name):
    """The scale is multiplied in before or after rounding; doing it in the other order moves a third of the entries."""
    native = with_noise(NORMS[name](256), dtype=torch.bfloat16)
    layer = ShardedNorm.from_native_module(copy.deepcopy(native))
    x = noise(64, 256, dtype=torch.bfloat16)
    mine = slice(128 * layer.axis.rank, 128 * layer.axis.rank + 128)
    wanted, found = native(x)[..., mine], layer(x[..., mine])
    assert found.dtype is wanted.dtype
    assert (found != wanted).float().mean() < 0.01  # the statistic's last bit decides some


@pytest.mark.parametrize("name", ["OLMo 2", "OLMoE"])
@on_ranks(2)
def test_a_weight_in_fp32_gives_the_dtype_that_the_model_gives(name):
    native = with_noise(NORMS[name](WIDTH), dtype=torch.float32)
    x = noise(3, WIDTH, dtype=torch.bfloat16)
    layer = ShardedNorm.from_native_module(copy.deepcopy(native))
    assert layer(x[:, :15]).dtype is native(x).dtype


@on_ranks(2)
def test_a_large_mean_costs_no_accuracy():
    native = with_noise(nn.LayerNorm(WIDTH), dtype=torch.float32)
    layer = ShardedNorm.from_native_module(copy.deepcopy(native))
    x = noise(7, WIDTH, dtype=torch.float32) + 1000.0
    mine = slice(15 * layer.axis.rank, 15 * layer.axis.rank + 15)
    wanted = copy.deepcopy(native).double()(x.double())[..., mine]
    off = (native(x)[..., mine] - wanted).abs().max()
    assert (layer(x[..., mine]) - wanted).abs().max() <= 2 * off + 1e-6


@on_ranks(2)
def test_the_traffic_is_one_or_two_numbers_a_token_each_way():
    for name, operation, forwards, backwards in (("OLMo 2", "all_reduce", 15, 15), ("torch", "all_gather", 60, 30)):
        layer = ShardedNorm.from_native_module(NORMS[name](WIDTH))
        with ledger() as forward:
            y = layer(noise(3, 5, 15, dtype=torch.float32).requires_grad_())
        with ledger() as backward:
            y.sum().backward()
        assert forward.calls == {(operation, "tp"): 1}
        assert forward.elements == {(operation, "tp"): forwards}
        assert backward.calls == {("all_reduce", "tp"): 1}
        assert backward.elements == {("all_reduce", "tp"): backwards}


@pytest.mark.parametrize("name", NORMS)
@on_ranks(2)
def test_a_formula_is_recognised_while_everything_is_done_in_double_precision(name):
    with in_double():
        check(with_noise(NORMS[name](31)), 31)


@pytest.mark.parametrize(
    "layer, module, reason",
    [
        (ShardedRMSNorm, nn.LayerNorm(WIDTH), "its output is neither x / rms"),
        (ShardedLayerNorm, LlamaRMSNorm(WIDTH), "its output is neither .x − mean"),
        (ShardedNorm, Double(WIDTH), "its output is neither"),
        (ShardedNorm, Everything(), "its output is neither"),
        (ShardedNorm, nn.LayerNorm((5, WIDTH)), "no epsilon or no one-dimensional weight"),
        (ShardedNorm, nn.LayerNorm((5, WIDTH), elementwise_affine=False), "does not take one tensor of its width"),
        (ShardedNorm, nn.BatchNorm1d(WIDTH), "neither"),
        (ShardedNorm, nn.Linear(4, 4), "no epsilon"),
    ],
)
def test_what_is_no_norm_over_the_width_is_refused(layer, module, reason):
    with pytest.raises(PolicyError, match=f"{layer.__name__} cannot stand in for {type(module).__name__}") as caught:
        layer.from_native_module(module, Axis("tp", 2, 0, (0, 1), None))
    assert re.search(reason, str(caught.value))
    assert "try" in str(caught.value)


def test_fewer_entries_or_heads_than_ranks_are_refused():
    three = Axis("tp", 3, 0, (0, 1, 2), None)
    with pytest.raises(ConfigError, match="the width of ShardedRMSNorm has 2 entries"):
        ShardedNorm.from_native_module(nn.RMSNorm(2), three)
    with pytest.raises(ConfigError, match="the width of ShardedRMSNorm has 2 heads"):
        ShardedNorm.from_native_module(nn.RMSNorm(8), three, units=2, heads=2)


def test_its_representation_says_what_is_where():
    with torch.device("meta"):
        native = nn.LayerNorm(9)
    layer = ShardedNorm.from_native_module(native, Axis("tp", 2, 0, (0, 1), None))
    assert repr(layer) == "ShardedLayerNorm(5 of 9 on tp 0/2, eps=1e-05, bias=True)"
    assert layer.weight.is_meta
