"""RNG-1 over pipeline stages: each layer draws masks of its own, and what is recomputed draws the same ones again."""

import pytest
import torch
from field_cases import Boosted, assert_equal_bits, whole_batch

from colonnade.booster.plugin import PipelineGradientCheckpointConfig
from colonnade.comm.collectives import all_gather_object
from colonnade.pipeline.schedule import STYLES
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}


def masks(plugin):
    """For each layer the masks of its two micro-batches, as this rank drew them; and its place on the mesh."""
    model = tiny_model("G2", n_layer=4, **DROPOUT)
    torch.manual_seed(3)
    run = Boosted(plugin, model, num_microbatches=2)
    found = {}
    for number, block in enumerate(run.user.transformer.h):
        block.mlp.dropout.register_forward_hook(
            lambda _, args, out, number=number: found.setdefault(number, []).append(out == 0)
        )
    run.model.train()
    rows = ids(4, 16).repeat(run.plugin.mesh.size("dp"), 1)
    run.pipeline({"input_ids": rows, "labels": rows})
    return run.plugin.mesh.rank("dp"), run.plugin.mesh.rank("tp"), found


@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp4", 4), ("pp2", 4), ("pp2, tp2", 4)])
def test_every_layer_of_every_replica_draws_masks_of_its_own(plugin, world):
    answers = run_on_ranks(world, masks, plugin)
    of_first = [mask for _, tp, found in answers if tp == 0 for of_layer in found.values() for mask in of_layer]
    assert len(of_first) == 4 * 2 * (2 if (plugin, world) == ("pp2", 4) else 1)
    for number, mask in enumerate(of_first):
        for other in of_first[:number]:
            assert 0.4 < (mask == other).float().mean() < 0.6
    if plugin == "pp2, tp2":  # outside of regions the ranks of a tensor-parallel group draw alike
        for stage in (0, 1):
            pair = [found for _, _, found in answers[2 * stage : 2 * stage + 2]]
            assert all(torch.equal(a, b) for n in pair[0] for a, b in zip(pair[0][n], pair[1][n]))


def gradients(plugin, style, recompute, dropout):
    model = tiny_model("G2", n_layer=4, **dict.fromkeys(DROPOUT, dropout))
    torch.manual_seed(3)
    config = None if recompute is None else PipelineGradientCheckpointConfig(recompute)
    run = Boosted(plugin, model, microbatch_size=1, pp_style=style, gradient_checkpoint_config=config)
    run.model.train()
    losses = [run.step(whole_batch()) for _ in range(2)]
    run.optimizer.zero_grad()
    losses.append(run.backward(whole_batch()))
    return losses, run.gradients_by_step(), all_gather_object(torch.get_rng_state().sum().item(), run.plugin.mesh.world)


@pytest.mark.sample("1f1b-*")
@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp2, tp2", 4)])
@pytest.mark.parametrize("style", [style for style, found in STYLES.items() if found.chunks <= 2])
def test_recomputation_draws_the_same_masks(style, plugin, world):
    for dropout in (0.1, 0.5):
        for (losses, plain, state), *others in zip(
            *(run_on_ranks(world, gradients, plugin, style, recompute, dropout) for recompute in (None, 1.0, 0.5))
        ):
            for again, recomputed, other_state in others:
                assert again == losses
                assert_equal_bits(recomputed, plain)
                assert other_state == state, "and leaves the random state where it was"
