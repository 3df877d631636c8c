"""ZeRO stages 1 and 2: the numbers of one process.

Every run of a language model has a vocabulary of 67 and batches with unequal numbers of targets on the ranks.
"""

import pytest
import torch
import transformers
from fsdp_models import Odd, odd_batches
from parity_runs import MAX_NORM, build, lopsided, one_rank_without_targets, rows, run, unequal, world
from torch.optim import SGD, AdamW

from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from colonnade.testing.parity import assert_same_as_single, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import NOISE

SMALL = {"bucket_bytes": 5000}

# how a step is made: options of the comparison, and of the plugin
WAYS = {
    "plain": ({}, {}),
    "clipped": ({"max_norm": MAX_NORM}, {}),
    "accumulation": ({"accumulate": 3, "max_norm": MAX_NORM}, SMALL),
    "no_sync": ({"accumulate": 3, "no_sync": True, "max_norm": MAX_NORM}, SMALL),
    "no_sync, not clipped": ({"accumulate": 3, "no_sync": True}, {}),
    "pipeline": ({"through": "execute_pipeline", "max_norm": MAX_NORM}, {}),
    "micro-batches": ({"through": "execute_pipeline", "accumulate": 3}, SMALL | {"microbatch_size": 1}),
    "no overlap": ({"max_norm": MAX_NORM}, SMALL | {"overlap_communication": False}),
    "offload": ({"max_norm": MAX_NORM, "accumulate": 3}, {"cpu_offload": True}),
}

SOME = ("plain", "accumulation", "no_sync", "micro-batches")
MODELS = ["LL", "LT", "G2", "BERT"]


def bert():
    """With noise on every parameter, as the tiny models have it: a fresh one has biases of zero."""
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model


def model_fn(name, **overrides):
    return bert if name == "BERT" else lambda: build(name, **overrides)


def compare(tp_size, stage, model_fn, batches, plugin=None, optimizer_fn=well_conditioned_adamw, **options):
    options = {"steps": 2, "max_norm": 0.0} | options
    plugin_options = {"precision": "fp32", "max_norm": options["max_norm"]} | (plugin or {})

    def make():
        if tp_size == 1:
            return LowLevelZeroPlugin(stage, **plugin_options)
        return HybridParallelPlugin(tp_size=tp_size, zero_stage=stage, **plugin_options)

    report = assert_same_as_single(model_fn, batches, make, optimizer_fn, **options)
    assert not report.undetermined, "every weight is compared"
    return {difference.kind: difference.worst for difference in report.differences}


def all_ways(tp_size, stage, name, overrides, ways=tuple(WAYS)):
    """The worst differences of each kind."""
    worst = {}
    for way in ways:
        options, plugin = WAYS[way]
        if stage == 2 and options.get("no_sync"):
            continue
        try:
            found = compare(tp_size, stage, model_fn(name, **overrides), rows(6), plugin, **options)
        except AssertionError as error:
            raise AssertionError(f"tp {tp_size}, stage {stage}, {name}, {way}: {error}") from error
        worst = {kind: max(value, worst.get(kind, 0.0)) for kind, value in found.items()}
    return worst


@pytest.mark.sample("LL-[12]", "BERT-2", "G2-1")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_the_numbers_of_one_process(name, stage):
    run_on_ranks(2, all_ways, 1, stage, name, {}, timeout_s=120)


@pytest.mark.sample("LL-3-[12]", "G2-4-1")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_on_more_ranks(name, ranks, stage):
    run_on_ranks(ranks, all_ways, 1, stage, name, {}, SOME, timeout_s=120)


@pytest.mark.sample("LT-1")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_under_tensor_parallelism(name, stage):
    run_on_ranks(4, all_ways, 2, stage, name, {}, SOME, timeout_s=120)


@pytest.mark.sample("*-zero 2", "*-tp 2 × zero 1")
@pytest.mark.parametrize("layout", ["zero 1", "zero 2", "tp 2 × zero 1", "tp 2 × zero 2"])
@pytest.mark.parametrize("name", ["qwen3", "OP"])
def test_other_families(name, layout):
    run_on_ranks(world(layout), run, layout, name, unequal(), max_norm=MAX_NORM)


def scarce_heads(tp_size, stage):
    for overrides in ({"num_key_value_heads": 1, "attention_bias": True}, {"num_key_value_heads": 2}):
        for options in ({"max_norm": MAX_NORM}, {"max_norm": 0.3, "accumulate": 3}):
            compare(tp_size, stage, model_fn("LL", **overrides), rows(6), SMALL, **options)


@pytest.mark.sample("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_key_value_heads_that_several_ranks_hold(stage):
    """Each counts once in the norm, however flat ranges cut it."""
    run_on_ranks(4, scarce_heads, 4, stage)
    run_on_ranks(4, scarce_heads, 2, stage)


def momentum(model):
    """Moves a parameter whose gradient is zero, and leaves one alone that has none."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.1)


def odd_models(stage):
    cases = [{}, {"accumulate": 3, "max_norm": 0.1}] + [{"accumulate": 3, "no_sync": True}] * (stage == 1)
    for options in cases:
        for plugin in ({}, {"bucket_bytes": 1}):
            for shares in ((0, 0), (1, 0), (0.3, 0), (0, 0.3)):
                for optimizer_fn in (momentum, well_conditioned_adamw):
                    compare(1, stage, Odd, odd_batches(*shares), plugin, optimizer_fn, **options)


@pytest.mark.sample("2-1")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_that_are_frozen_unused_tied_short_or_without_dims(ranks, stage):
    run_on_ranks(ranks, odd_models, stage, timeout_s=120)


def lopsided_batches(stage):
    for batches in (lopsided(), one_rank_without_targets()):
        for options, plugin in (({}, {}), ({"through": "execute_pipeline"}, {"microbatch_size": 1})):
            compare(1, stage, model_fn("LL"), batches, plugin, **options)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_with_hardly_any_targets_and_one_with_none(stage):
    run_on_ranks(2, lopsided_batches, stage)


def ragged(stage):
    """Ranks with different numbers of rows, and so of micro-batches."""
    for plugin in ({"microbatch_size": 1}, {"num_microbatches": 2}):
        compare(1, stage, model_fn("LT"), rows(5), plugin, through="execute_pipeline", accumulate=2)


@pytest.mark.sample("3-*")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_different_numbers_of_micro_batches(ranks, stage):
    run_on_ranks(ranks, ragged, stage)


def grouped(model):
    """Two groups with their own rates; frozen parameters are in them too."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW([{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], eps=1e-3)


def below_the_second_block(name):
    return "embed_tokens" in name or "layers.0" in name


def groups_and_frozen(tp_size, stage):
    for options in ({}, {"max_norm": 0.5, "accumulate": 2}):
        compare(tp_size, stage, model_fn("LL"), rows(6), SMALL, grouped, frozen=below_the_second_block, **options)
        compare(tp_size, stage, model_fn("G2"), rows(6), {}, grouped, **options)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_groups_with_their_own_rates_and_frozen_parameters(tp_size, stage):
    run_on_ranks(2 * tp_size, groups_and_frozen, tp_size, stage)


def plain_adamw(model):
    return AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def recomputed(stage):
    for reentrant in (False, True):

        def make(reentrant=reentrant):
            model = build("LL")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            return model

        compare(1, stage, make, rows(6), SMALL, plain_adamw, max_norm=MAX_NORM)


@pytest.mark.parametrize("stage", [1, 2])
def test_recomputation(stage):
    run_on_ranks(2, recomputed, stage)


def test_over_one_rank():
    run_on_ranks(1, all_ways, 1, 1, "LT", {})
    run_on_ranks(1, all_ways, 1, 2, "G2", {})
