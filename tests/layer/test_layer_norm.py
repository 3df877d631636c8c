"""Fused norms against the norms that models define for themselves."""

import copy

import pytest
import torch
from layer_checks import assert_same_as_native, noise, with_noise
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from colonnade.errors import PolicyError
from colonnade.shardformer.layer import FusedLayerNorm, FusedRMSNorm
from colonnade.testing.ranks import on_ranks

WIDTH = 13
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # the models compute in float32 whatever they are given
NORMS = {
    "llama": lambda: LlamaRMSNorm(WIDTH, eps=1e-3),
    "qwen3": lambda: Qwen3RMSNorm(WIDTH, eps=1e-3),
    "gemma": lambda: GemmaRMSNorm(WIDTH, eps=1e-3),
    "torch": lambda: nn.RMSNorm(WIDTH, eps=1e-3),
    "torch, eps left out": lambda: nn.RMSNorm(WIDTH),
}


class Centred(nn.Module):
    """Looks like an RMS norm from outside, and subtracts the mean."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class DoublesItsOutput(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@on_ranks(1)
def one_rank_norm(name, dtype, close):
    native = with_noise(NORMS[name](), dtype=dtype)
    given = copy.deepcopy(native)
    weight = given.weight
    layer = FusedRMSNorm.from_native_module(given)
    assert layer.weight is weight
    assert layer.unit_offset == (name == "gemma")
    x = noise(3, 5, WIDTH, dtype=dtype)
    assert layer(x).dtype is native(x).dtype
    assert_same_as_native(layer, native, x, close=close)


@pytest.mark.parametrize("name", NORMS)
def test_a_fused_rms_norm_equals_the_models_own(name):
    one_rank_norm(name, torch.float32, FLOAT32)


@pytest.mark.parametrize("name", NORMS)
def test_a_fused_rms_norm_follows_the_models_own_in_bf16(name):
    one_rank_norm(name, torch.bfloat16, {"rtol": 2**-6, "atol": 2**-5})


@on_ranks(2)
def test_a_norm_is_whole_on_every_rank_and_needs_no_traffic():
    native = with_noise(LlamaRMSNorm(WIDTH), dtype=torch.float32)
    layer = FusedRMSNorm.from_native_module(copy.deepcopy(native))
    assert_same_as_native(layer, native, noise(3, 5, WIDTH, dtype=torch.float32), close=FLOAT32)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_norm_on_the_meta_device_is_recognised_and_stays_there(name):
    with torch.device("meta"):
        native = NORMS[name]()
    layer = FusedRMSNorm.from_native_module(native)
    assert layer.weight is native.weight
    assert layer.weight.is_meta
    assert layer.unit_offset == (name == "gemma")


def test_taking_over_draws_nothing_and_changes_no_weight():
    native = with_noise(LlamaRMSNorm(WIDTH), dtype=torch.float32)
    before, state = native.weight.detach().clone(), torch.get_rng_state()
    FusedRMSNorm.from_native_module(native)
    assert native.weight.equal(before)
    assert torch.get_rng_state().equal(state)


def test_a_norm_made_by_its_constructor_starts_as_torchs():
    layer, native = FusedRMSNorm(WIDTH, eps=1e-3, dtype=torch.float64), nn.RMSNorm(WIDTH, eps=1e-3, dtype=torch.float64)
    x = noise(3, WIDTH)
    torch.testing.assert_close(layer(x), native(x))
    assert repr(layer) == f"FusedRMSNorm({WIDTH}, eps=0.001)"


@pytest.mark.parametrize(
    "module, reason",
    [
        (Centred(), "its output is neither"),
        (nn.Linear(4, 4), "it has no epsilon or no one-dimensional weight"),
        (nn.RMSNorm(WIDTH, elementwise_affine=False), "it has no epsilon or no one-dimensional weight"),
        (nn.RMSNorm((3, WIDTH)), "it has no epsilon or no one-dimensional weight"),
        (nn.LayerNorm(WIDTH), "its output is neither"),
    ],
)
def test_anything_but_an_rms_norm_is_refused_with_the_reason(module, reason):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    with pytest.raises(PolicyError) as caught:
        FusedRMSNorm.from_native_module(module)
    text = str(caught.value)
    assert f"FusedRMSNorm cannot stand in for {type(module).__name__}" in text
    assert reason in text
    assert "try" in text and "enable_fused_normalization=False" in text


@on_ranks(2)
def test_a_fused_layer_norm_equals_torchs():
    x = noise(3, 5, WIDTH)
    for native in (nn.LayerNorm(WIDTH, eps=1e-3), nn.LayerNorm((5, WIDTH)), nn.LayerNorm(WIDTH, bias=False)):
        native = with_noise(native)
        given = copy.deepcopy(native)
        weight = given.weight
        layer = FusedLayerNorm.from_native_module(given)
        assert layer.weight is weight
        assert_same_as_native(layer, native, x)
    torch.testing.assert_close(FusedLayerNorm(WIDTH, dtype=torch.float64)(x), nn.LayerNorm(WIDTH).double()(x))
    native = with_noise(nn.LayerNorm(WIDTH), dtype=torch.bfloat16)
    x = x.bfloat16()
    assert FusedLayerNorm.from_native_module(copy.deepcopy(native))(x).equal(native(x))


def test_a_subclass_of_layer_norm_keeps_its_forward():
    native = with_noise(DoublesItsOutput(WIDTH))
    x = noise(3, WIDTH)
    wanted = native(x)
    assert FusedLayerNorm.from_native_module(native)(x).equal(wanted)


def test_a_fused_layer_norm_refuses_an_rms_norm():
    with pytest.raises(PolicyError, match="FusedLayerNorm replaces a LayerNorm, and was given a LlamaRMSNorm"):
        FusedLayerNorm.from_native_module(LlamaRMSNorm(WIDTH))
