"""TorchFSDPPlugin: the numbers of one process.

Every run of a language model has a vocabulary of 67 and batches with unequal numbers of targets.
"""

import pytest
import torch
import transformers
from fsdp_models import Odd, odd_batches
from parity_runs import MAX_NORM, build, lopsided, rows
from torch.optim import SGD, AdamW

from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.optim import CAME, Adafactor, GaLoreAdamW, HybridAdam, Lamb, Lars, Muon
from colonnade.testing.parity import assert_same_as_single, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks

MODELS = ["LL", "LT", "G2", "qwen3", "OP", "MX"]
# Mixtral's balancing loss is of a batch, not of tokens; and its fused product knows no float64, in which the reference runs
OVERRIDES = {"MX": {"output_router_logits": False, "router_aux_loss_coef": 0.0, "experts_implementation": "eager"}}
VARIANTS = {
    "plain": {},
    "clipped": {"max_norm": MAX_NORM},
    "accumulation": {"accumulate": 3, "max_norm": MAX_NORM},
    "no_sync": {"accumulate": 3, "no_sync": True},
    "pipeline": {"through": "execute_pipeline", "max_norm": MAX_NORM},
    "micro-batches": {"through": "execute_pipeline", "plugin": {"microbatch_size": 1}, "accumulate": 2},
    "blocks only": {"plugin": {"reshard_after_forward": None}, "max_norm": MAX_NORM},
    "all stay": {"plugin": {"reshard_after_forward": False}, "accumulate": 2, "no_sync": True},
    "offload": {"plugin": {"cpu_offload": True}, "max_norm": MAX_NORM},
}


def compare(model_fn, batches, plugin=None, max_norm=0.0, optimizer_fn=well_conditioned_adamw, **options):
    plugin_options = {"precision": "fp32", "max_norm": max_norm} | (plugin or {})
    report = assert_same_as_single(
        model_fn,
        batches,
        lambda: TorchFSDPPlugin(**plugin_options),
        optimizer_fn,
        **{"steps": 3, "max_norm": max_norm} | options,
    )
    assert not report.undetermined, "every weight is compared"


def run(name, **options):
    batches = options.pop("batches", None) or rows(6)
    compare(lambda: build(name, **OVERRIDES.get(name, {})), batches, **options)


def run_each(name, cases):
    for label, options in cases.items():
        try:
            run(name, **options)
        except AssertionError as error:
            raise AssertionError(f"{name}, {label}: {error}") from error


@pytest.mark.sample("*-2", "LL-[34]")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_the_numbers_of_one_process(name, ranks):
    run_on_ranks(ranks, run, name, max_norm=MAX_NORM)


@pytest.mark.sample("LL-3", "G2-2")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["LL", "LT", "G2"])
def test_every_option_trains_with_the_same_numbers(name, ranks):
    run_on_ranks(ranks, run_each, name, VARIANTS)


def test_whole_parameters_kept_by_groups_of_two_of_four_ranks():
    run_on_ranks(4, run, "LT", plugin={"reshard_after_forward": 2}, max_norm=MAX_NORM)


@pytest.mark.parametrize("through", ["loop", "execute_pipeline"])
def test_a_rank_with_hardly_any_targets(through):
    run_on_ranks(2, run, "LL", batches=lopsided(), through=through)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_different_numbers_of_micro_batches(ranks):
    for options in ({"microbatch_size": 1}, {"num_microbatches": 2}):
        run_on_ranks(ranks, run, "LL", batches=rows(5), through="execute_pipeline", plugin=options, accumulate=2)


def test_over_one_rank():
    run_on_ranks(1, run, "LT", max_norm=MAX_NORM)


def bert(checkpointing=False):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def bert_with_unused_pooler():
    """Its pooler has parameters that no forward of a loss on tokens uses."""
    model = bert()
    model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(model.config)
    return model


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=67,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def albert():
    """One block, called three times."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=67, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.AlbertForMaskedLM(config)


def checkpointed(name):
    model = build(name)
    model.gradient_checkpointing_enable()
    return model


def run_other_models():
    batches = rows(6)
    compare(bert, batches, max_norm=MAX_NORM)
    compare(bert_with_unused_pooler, batches)
    compare(t5, batches, max_norm=MAX_NORM)
    compare(albert, batches)
    compare(lambda: checkpointed("LL"), batches, max_norm=MAX_NORM)
    compare(lambda: checkpointed("LL"), batches, plugin={"reshard_after_forward": False}, accumulate=2, no_sync=True)


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_encoders_encoder_decoders_shared_blocks_and_recomputation(ranks):
    run_on_ranks(ranks, run_other_models, timeout_s=120)


def momentum(model):
    """Moves a parameter whose gradient is zero, and leaves one alone that has none."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.1)


def odd_models():
    for options in ({}, {"accumulate": 2}, {"accumulate": 2, "no_sync": True}, {"max_norm": 0.1}):
        for shares in ((0, 0), (1, 1), (1, 0), (0.3, 0), (0, 0.3)):
            compare(Odd, odd_batches(*shares), optimizer_fn=momentum, **options)
    compare(lambda: Odd(scalar=False), odd_batches(0.3, 1), optimizer_fn=momentum)


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parameters_that_are_frozen_unused_tied_short_or_without_dims(ranks):
    run_on_ranks(ranks, odd_models, timeout_s=120)


def grouped(model):
    """Two groups with their own learning rates; frozen parameters are in them too."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW([{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], eps=1e-3)


def groups():
    for options in ({}, {"max_norm": 0.1}):
        compare(Odd, odd_batches(0.3, 0), optimizer_fn=grouped, **options)
        compare(lambda: build("G2"), rows(6), optimizer_fn=grouped, **options)


def test_groups_with_their_own_rates_and_frozen_parameters_in_them():
    run_on_ranks(2, groups)


def frozen_half():
    compare(
        lambda: build("LL"),
        rows(6),
        max_norm=MAX_NORM,
        optimizer_fn=lambda m: AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3),
        frozen=lambda name: "embed" in name or "layers.0" in name,
    )


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_frozen_embedding_and_block(ranks):
    run_on_ranks(ranks, frozen_half)


def muon(model):
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "layers" not in name]
    return Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 1e-3}], lr=1e-3)


def whole_matrix_optimizers():
    for kind in (Adafactor, CAME, GaLoreAdamW, Lamb, Lars, HybridAdam):
        report = assert_same_as_single(
            lambda: build("LT"),
            rows(6),
            lambda: TorchFSDPPlugin(precision="fp32"),
            lambda model, kind=kind: kind(model.parameters(), lr=1e-3),
            steps=4,
        )
        assert sum(report.undetermined.values()) <= 4, kind.__name__
    compare(lambda: build("LL"), rows(6), optimizer_fn=muon)


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_optimizers_that_look_at_whole_matrices(ranks):
    run_on_ranks(ranks, whole_matrix_optimizers)
