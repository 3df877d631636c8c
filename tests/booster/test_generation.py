"""booster.generate: what transformers' generate writes in one process, whatever the layout."""

import pytest
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
LAYOUTS = {
    "pp 2": (2, {"pp_size": 2}),
    "tp 2": (2, {"tp_size": 2}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "tp 2 × pp 2": (4, {"tp_size": 2, "pp_size": 2}),
    "pp 2 × dp 2": (4, {"pp_size": 2}),
}


def boosted(plugin, name="LL"):
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(tiny_model(name))
    return booster, model


def written(options, name, prompt, **settings):
    booster, model = boosted(HybridParallelPlugin(precision="fp32", **options), name)
    model.train()
    found = booster.generate(model, prompt, **settings)
    assert model.training, "the mode is as it was"
    return found, booster.plugin.mesh.rank("dp")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_writes_what_one_process_writes(layout):
    ranks, options = LAYOUTS[layout]
    for name in ("LL", "LT", "G2") if layout == "tp 2 × pp 2" else ("LT", "LL") if ranks == 2 else ("LL",):
        prompt, model = ids(2, 5), tiny_model(name).eval()
        wanted = model.generate(prompt, **GREEDY)
        for found, _ in run_on_ranks(ranks, written, options, name, prompt, **GREEDY):
            assert torch.equal(found, wanted), name
    beams = {**GREEDY, "num_beams": 3}
    wanted = tiny_model("LL").eval().generate(ids(2, 5), **beams)
    assert all(
        torch.equal(found, wanted) for found, _ in run_on_ranks(ranks, written, options, "LL", ids(2, 5), **beams)
    )


@on_ranks(2)
def test_padding_on_the_left_is_masked_on_all_stages():
    booster, model = boosted(HybridParallelPlugin(pp_size=2, precision="fp32"), "OP")
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    wanted = tiny_model("OP").eval().generate(ids(2, 6), attention_mask=mask, **GREEDY)
    assert torch.equal(booster.generate(model, ids(2, 6), attention_mask=mask, **GREEDY), wanted)
    unmasked = tiny_model("OP").eval().generate(ids(2, 6), **GREEDY)
    assert not torch.equal(unmasked, wanted), "the mask does something"


@on_ranks(4)
def test_random_draws_are_the_same_on_all_ranks_of_a_replica():
    booster, model = boosted(HybridParallelPlugin(pp_size=2, tp_size=2, precision="fp32"))
    torch.manual_seed(torch.distributed.get_rank())  # as after some dropout
    before = torch.random.get_rng_state()
    drawn = {**GREEDY, "do_sample": True}
    first, second = (booster.generate(model, ids(2, 5), **drawn) for _ in range(2))
    assert not torch.equal(first, second)
    of_ranks = all_gather_object((first, second), booster.plugin.mesh.world)
    assert all(torch.equal(a, b) for other in of_ranks for a, b in zip(other, (first, second)))
    assert not torch.equal(torch.random.get_rng_state(), before), "the next call draws anew"


@on_ranks(2)
def test_replicas_may_write_different_texts_of_different_lengths():
    rank = torch.distributed.get_rank()
    settings = {**GREEDY, "eos_token_id": 36}
    wanted = tiny_model("LL").eval().generate(ids(2, 4)[rank : rank + 1], **settings)
    assert wanted.shape[1] == (5, 12)[rank]
    for plugin in (LowLevelZeroPlugin(1, precision="fp32"), TorchFSDPPlugin(precision="fp32")):
        booster, model = boosted(plugin)
        assert torch.equal(booster.generate(model, ids(2, 4)[rank : rank + 1], **settings), wanted)


@on_ranks(2)
def test_what_cannot_go_through_stages_is_refused():
    booster, model = boosted(HybridParallelPlugin(pp_size=2, precision="fp32"))
    with pytest.raises(UsageError, match="use_cache=True"):
        booster.generate(model, ids(2, 5), use_cache=True, **GREEDY)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, precision="fp32"))
    model, *_ = booster.boost(T5ForConditionalGeneration(config))
    with pytest.raises(UsageError, match="an encoder, which generate calls by itself"):
        booster.generate(model, ids(2, 5), **GREEDY)


@on_ranks(1)
def test_a_model_that_cannot_generate_is_named():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    model, *_ = booster.boost(BertModel(config))
    with pytest.raises(UsageError, match="BertModel"):
        booster.generate(model, ids(2, 5))
