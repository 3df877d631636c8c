"""Where the precision is said: by the plugin, by the booster, or by nobody."""

import pytest
import torch
from parity_runs import VOCAB, unequal
from torch.optim import SGD

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.errors import ConfigError
from colonnade.testing.ranks import on_ranks
from colonnade.testing.tiny import tiny_model

CLASSES = [TorchDDPPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def small():
    return tiny_model("LL", vocab_size=VOCAB, num_hidden_layers=2)


def sgd(model):
    return SGD(model.parameters(), lr=0.1)


@on_ranks(1)
def test_the_booster_says_what_the_plugin_leaves_open():
    for kind in CLASSES:
        assert Booster(plugin=kind()).plugin.precision == "bf16"
        for word, dtype in DTYPES.items():
            for plugin in (kind(), kind(precision=word)):
                booster, model = Booster(plugin=plugin, mixed_precision=word), small()
                assert plugin.precision == word and plugin.dtype is dtype
                assert f", {word}" in repr(plugin)
                model, optimizer, *_ = booster.boost(model, sgd(model))
                held = torch.float32 if kind is TorchFSDPPlugin else dtype
                assert {p.dtype for p in model.parameters()} == {held}
                assert (optimizer.loss_scaler is not None) == (word == "fp16")
                assert model(**unequal()[0]).logits.dtype is dtype
            assert Booster(plugin=kind(precision=word)).plugin.precision == word


@on_ranks(2)
def test_two_different_precisions_are_refused():
    for kind in CLASSES:
        for of_plugin, of_booster in (("bf16", "fp16"), ("fp32", "bf16"), ("fp16", "fp32")):
            plugin = kind(precision=of_plugin)
            with pytest.raises(ConfigError) as caught:
                Booster(plugin=plugin, mixed_precision=of_booster)
            text = str(caught.value)
            assert f"precision='{of_plugin}'" in text and f"mixed_precision='{of_booster}'" in text
            assert plugin.precision == of_plugin and plugin.dtype is DTYPES[of_plugin]


@on_ranks(2)
def test_unknown_words_are_refused_and_leave_the_plugin_as_it_was():
    for kind in CLASSES:
        for word in ("fp8", "float16", "FP16", "", torch.float16, 16, ["fp16"], True):
            for options in ({}, {"precision": "fp32"}):
                plugin = kind(**options)
                with pytest.raises(ConfigError) as caught:
                    Booster(plugin=plugin, mixed_precision=word)
                assert f"mixed_precision={word!r} is not available" in str(caught.value)
                assert "one of 'fp32', 'bf16', 'fp16'" in str(caught.value)
                wanted = options.get("precision", "bf16")
                assert plugin.precision == wanted and plugin.dtype is DTYPES[wanted]
                Booster(plugin=plugin)
            with pytest.raises(ConfigError, match="is not available"):
                kind(precision=word)
