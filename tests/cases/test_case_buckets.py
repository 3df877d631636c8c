"""SHARD-1: the size of the buckets, and whether they travel during the backward pass, change no number.

gloo's all-reduce adds three ranks up in an order that depends on where in the bucket an entry lies. Where a gradient is
1e-5, what that rounds differently moves the weight by 1.2e-6 through an Adam with the usual eps of 1e-8, and one process in
fp32 is 5e-7 from its own fp64 run. Without ZeRO the optimizer on three ranks therefore has eps = 1e-3, as in all comparisons
(see colonnade/testing/parity.py). ZeRO adds up in the order of the ranks.
"""

import pytest
from field_cases import Boosted, Trained, adamw_decay, assert_close, make_plugin, whole_batch

from colonnade.errors import ConfigError
from colonnade.testing.parity import well_conditioned_adamw
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import tiny_model

# In elements. q_proj and o_proj have 1024, the matrices of the MLP and the embedding 2048; the model has 41,248.
SIZES = (1, 1023, 1024, 1025, 2048, 10**9)
BYTES = 4  # of an element in fp32
STEPS = 2


def batches():
    return [whole_batch(rows=6, seed=7 + step) for step in range(STEPS)]


def llama():
    return tiny_model("LL")


def optimizer_of(plugin, world):
    return well_conditioned_adamw if world == 3 and "zero" not in plugin else adamw_decay


def train(plugin, world, settings):
    found = {}
    for size, overlap in settings:
        options = {"bucket_bytes": size * BYTES} | ({} if overlap is None else {"overlap_communication": overlap})
        run = Boosted(plugin, llama(), optimizer_of(plugin, world), **options)
        losses = [run.step(batch) for batch in batches()]
        found[size, overlap] = losses, run.weights()
    return found


@pytest.mark.sample("zero [12]-3", "dp-2", "tp2, zero 1-4")
@pytest.mark.parametrize(
    "plugin, world",
    [
        *[(plugin, world) for plugin in ("zero 1", "zero 2", "dp", "dp, zero 1", "dp, zero 2") for world in (2, 3)],
        *[(plugin, 4) for plugin in ("tp2", "tp2, zero 1", "tp2, zero 2")],
    ],
)
def test_bucket_sizes_change_no_number(plugin, world):
    trained = Trained(llama, optimizer_of(plugin, world), batches())
    settings = [(size, overlap) for size in SIZES for overlap in ((True, False) if "zero" in plugin else (None,))]
    for found in run_on_ranks(world, train, plugin, world, settings):
        assert list(found) == settings
        _, first = found[settings[0]]
        for setting, (losses, weights) in found.items():
            assert losses == pytest.approx(trained.one.losses, abs=1e-5, rel=0), setting
            trained.assert_weights(weights)
            assert_close(weights, first, 1e-6)


@on_ranks(2)
def test_a_bucket_size_below_one_is_refused():
    for plugin in ("zero 1", "zero 2", "dp", "dp, zero 1"):
        for size in (0, -1, 2.5, "1", None):
            with pytest.raises(ConfigError, match="bucket_bytes="):
                make_plugin(plugin, bucket_bytes=size)
    assert issubclass(ConfigError, ValueError)
