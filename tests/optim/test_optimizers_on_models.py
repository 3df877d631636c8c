"""Boosted, a whole model trains as in one process with each of our optimizers."""

import pytest

from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colonnade.optim import CAME, Adafactor, GaLoreAdamW, Lamb, Lars, Muon
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 67


def split(model):
    """The matrices of the blocks, and all other parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if p.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name]
    inner = [p for p in inner if p.shape[0] != VOCAB]
    return inner, [p for _, p in named if all(p is not other for other in inner)]


def galore(model):
    inner, others = split(model)
    low = {"params": inner, "rank": 8, "update_proj_gap": 3, "scale": 0.5}
    return GaLoreAdamW([low, {"params": others}], lr=3e-3, eps=1e-3, weight_decay=0.1)


def muon(model):
    inner, others = split(model)
    return Muon([{"params": inner}, {"params": others, "use_muon": False, "lr": 3e-3, "eps": 1e-3}], lr=1e-2)


def two_groups(optimizer, **options):
    def make(model):
        inner, others = split(model)
        return optimizer([{"params": inner}, {"params": others, "weight_decay": 0.0}], weight_decay=0.1, **options)

    return make


# options are such that rounding decides no weight: eps is not much smaller than what it is added to
OPTIMIZERS = {
    "lamb": two_groups(Lamb, lr=1e-2, eps=1e-3),
    "lars": two_groups(Lars, lr=0.5, trust_coefficient=0.02),
    "adafactor": two_groups(Adafactor, lr=1e-2, eps=(1e-3, 1e-3)),
    "came": two_groups(CAME, lr=5e-5, eps=(1e-6, 1e-3)),
    "galore": galore,
    "muon": muon,
}


def run(name, model_name, plugin=HybridParallelPlugin, steps=20, max_norm=1.0, **options):
    batches = []
    for seed in range(steps):  # a new one at each step: nothing is learnt by heart, which would magnify rounding
        x = ids(4, 12, seed, VOCAB)
        batches.append({"input_ids": x, "labels": x.clone()})
    report = assert_same_as_single(
        lambda: tiny_model(model_name, vocab_size=VOCAB, num_hidden_layers=2),
        batches,
        lambda: plugin(precision="fp32", max_norm=max_norm, **options),
        OPTIMIZERS[name],
        steps=steps,
        max_norm=max_norm,
    )
    assert not report.undetermined, "every weight is compared"
    return str(report)


@pytest.mark.sample("G2-*")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", ["LL", "LT", "G2"])
def test_tensor_parallel_training_is_that_of_one_process(name, model_name):
    run_on_ranks(2, run, name, model_name, tp_size=2)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_so_it_is_with_data_parallel_ranks_beside(name):
    run_on_ranks(4, run, name, "LL", tp_size=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fully_sharded_training_is_that_of_one_process(name):
    run_on_ranks(2, run, name, "LL", TorchFSDPPlugin, steps=10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_parameters_are_dealt_out_under_zero(name):
    for stage in (1, 2):
        run_on_ranks(2, run, name, "LT", LowLevelZeroPlugin, steps=6, stage=stage)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_with_tensor_parallelism_deals_out_the_parameters_of_a_rank(name):
    run_on_ranks(4, run, name, "LL", steps=6, tp_size=2, zero_stage=1)
