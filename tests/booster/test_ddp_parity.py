"""TorchDDPPlugin: the numbers of one process, on more ranks and more ways of stepping than the matrix of all layouts has."""

import pytest
from fsdp_models import Odd, odd_batches
from parity_runs import MAX_NORM, build, rows
from test_zero_parity import MODELS, bert

from colonnade.booster.plugin import TorchDDPPlugin
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks


def compare(model_fn, batches, **plugin):
    for options in (
        {},
        {"max_norm": MAX_NORM},
        {"accumulate": 3, "max_norm": MAX_NORM},
        {"accumulate": 3, "no_sync": True},
    ):
        report = assert_same_as_single(
            model_fn,
            batches,
            lambda options=options: TorchDDPPlugin(
                precision="fp32", max_norm=options.get("max_norm", 0.0), bucket_cap_mb=0.01, **plugin
            ),
            **({"steps": 2} | options),
        )
        assert not report.undetermined, "every weight is compared"


def language_model(name):
    compare(bert if name == "BERT" else lambda: build(name), rows(6))


def odd():
    compare(Odd, odd_batches(1.0, 0.5), find_unused_parameters=True)


@pytest.mark.sample("LL-2", "BERT-2")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_the_numbers_of_one_process(name, ranks):
    run_on_ranks(ranks, language_model, name, timeout_s=120)


@pytest.mark.parametrize("ranks", [2, 3])
def test_frozen_unused_and_tied_parameters(ranks):
    run_on_ranks(ranks, odd, timeout_s=120)
