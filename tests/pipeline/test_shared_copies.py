"""What a rank of a pipeline has in memory, down to the bytes of storages; and that copies of a tied matrix keep their bits."""

import pytest
import torch

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.pipeline.schedule import make_schedule
from colonnade.testing.ranks import run_on_ranks
from tests.pipeline.pipeline_models import MODELS, blocks_for, build
from tests.pipeline.test_runtime import batch, boosted


def storages(model):
    """Bytes of all that modules hold in attributes, parameters and buffers; what shares memory counts once."""
    found = {}
    for module in model.modules():
        for value in (*module.__dict__.values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(found.values())


def in_memory(name, style, precision):
    plugin = HybridParallelPlugin(pp_size=2, pp_style=style, precision=precision)
    model = build(name, blocks_for(style, 2))
    whole = storages(model)
    boosted_model = Booster(plugin=plugin).boost(model)[0]
    user = boosted_model.unwrap()
    parameters = {p: p.numel() * p.element_size() for p in user.parameters()}
    every = sum(p.numel() for p in build(name, blocks_for(style, 2)).parameters())
    hollowed = sum(not module._parameters for module in user.modules() if "weight" in module.__dict__)
    return whole, storages(user), sum(parameters.values()), sum(p.numel() for p in parameters), every, hollowed


@pytest.mark.sample("llama-*", "*-1f1b-fp32", "t5-zbv-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("style", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("name", MODELS)
def test_modules_of_other_stages_hold_nothing(name, style, precision):
    """Storages are those of the parameters, and of small buffers: one entry for each attribute that stands for a weight."""
    answers = run_on_ranks(2, in_memory, name, style, precision)
    size = 4 if precision == "fp32" else 2
    for whole, there, of_parameters, entries, every, hollowed in answers:
        assert of_parameters == size * entries
        buffers = whole - 4 * every
        assert of_parameters <= there <= of_parameters + buffers + 4 * 8 * hollowed
        assert hollowed and entries < every
    held = sum(entries for *_, entries, _, _ in answers)
    assert held >= answers[0][4], "no parameter is lost"
    if name == "llama":
        assert held == answers[0][4], "and none is there twice"


def tables(ranks, options):
    """The tied matrix after each of three steps, None where the rank does not hold it; and the rank's place."""
    options = dict(options)
    booster, model, optimizer = boosted("llama tied", ranks, options.pop("pp_style", "1f1b"), **options)
    found = []
    for seed in range(3):
        booster.execute_pipeline(iter([batch(3, seed=seed)]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        held = dict(model.unwrap().named_parameters(remove_duplicate=False))
        names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in held]
        assert all(held[name] is held[names[0]] for name in names)
        found.append(held[names[0]].detach().clone() if names else None)
    return booster.plugin.mesh.rank("tp"), found


LAYOUTS = {
    "pp 4": (4, 4, {}),
    "pp 4, zbv, bf16": (4, 4, {"pp_style": "zbv", "precision": "bf16"}),
    "pp 4, interleaved, clipped": (4, 4, {"pp_style": "interleaved", "max_norm": 0.1}),
    "tp 2, pp 2, bf16": (4, 2, {"tp_size": 2, "precision": "bf16"}),
    "dp 2, pp 2, zero 1, interleaved": (4, 2, {"zero_stage": 1, "pp_style": "interleaved"}),
    "pp 2, fp16": (2, 2, {"precision": "fp16"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_the_bits_of_their_owner(layout):
    """Of every schedule whose first and last stage are on different ranks; zbv has both on one, and needs no copy."""
    world, ranks, options = LAYOUTS[layout]
    answers = run_on_ranks(world, tables, ranks, options)
    schedule = make_schedule(options.get("pp_style", "1f1b"), ranks, 1)
    ends = {schedule.rank_of(0), schedule.rank_of(schedule.num_stages - 1)}
    for tp in {tp for tp, _ in answers}:
        held = [found for t, found in answers if t == tp and found[0] is not None]
        replicas = world // ranks // options.get("tp_size", 1)
        assert len(held) == len(ends) * replicas
        for copy in held[1:]:
            assert all(torch.equal(mine, other) for mine, other in zip(held[0], copy))
        assert not torch.equal(held[0][0], held[0][-1]), "it trains"
