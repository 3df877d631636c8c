"""RNG-1: common dropout masks where ranks hold the same activations, different ones where they do not."""

import pytest
import torch
from field_cases import GRADIENT, LOSS, Boosted, assert_close, whole_batch

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

OUTSIDE = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}  # on activations that every rank holds whole
INSIDE = {"attn_pdrop": 0.5}  # on heads
SEED = 11


def boosted(world_seed=SEED, checkpointing=None, copies_of_head_0=False, **dropout):
    model = tiny_model("G2", **dropout)
    if copies_of_head_0:
        copy_head_0(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    torch.manual_seed(world_seed)
    run = Boosted("tp2", model)
    run.model.train()
    return run


def copy_head_0(model):
    """Make every head of every layer the same: q, k and v of all heads are those of head 0."""
    with torch.no_grad():
        for block in model.transformer.h:
            for parameter in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                heads = parameter.view(-1, 3, 4, 8)  # inputs, parts, heads, channels
                heads.copy_(heads[:, :, :1].expand_as(heads).clone())


def captured(module, run, batch):
    """The first input of a module of this rank's model in one forward, and the logits."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    logits = run.model(**batch).logits.detach()
    hook.remove()
    return seen[0], logits


def two_forwards():
    """Two forwards; what enters the head is local, while logits are gathered, and so the same anyway."""
    run = boosted(**OUTSIDE)
    forwards = [captured(run.user.lm_head, run, {"input_ids": ids(2, 16)}) for _ in range(2)]
    return run.plugin.mesh.rank("dp"), forwards, torch.get_rng_state()


def test_masks_outside_regions_are_common_to_the_ranks():
    (_, first, first_state), (_, second, second_state) = run_on_ranks(2, two_forwards)
    for (hidden, logits), (other_hidden, other_logits) in zip(first, second):
        assert torch.equal(hidden, other_hidden)
        assert torch.equal(logits, other_logits)
    assert not torch.equal(first[0][1], first[1][1])
    assert torch.equal(first_state, second_state)


def test_data_parallel_replicas_draw_different_masks():
    answers = run_on_ranks(4, two_forwards)
    assert [dp for dp, *_ in answers] == [0, 0, 1, 1]
    hidden = [forwards[0][0] for _, forwards, _ in answers]
    logits = [forwards[0][1] for _, forwards, _ in answers]
    for tensors in (hidden, logits):
        assert torch.equal(tensors[0], tensors[1])
        assert torch.equal(tensors[2], tensors[3])
        assert not torch.equal(tensors[0], tensors[2])


def attention_outputs():
    """What enters the attention output projection, in eval and in train mode, and the state that is left."""
    run = boosted(copies_of_head_0=True, **INSIDE)
    projection = run.user.transformer.h[0].attn.c_proj
    found = []
    for training in (False, True, True):
        run.model.train(training)
        found.append(captured(projection, run, {"input_ids": ids(2, 16)})[0])
    return found, torch.get_rng_state()


def test_masks_inside_regions_differ_from_rank_to_rank():
    (first, first_state), (second, second_state) = run_on_ranks(2, attention_outputs)
    assert first[0].shape == (2, 16, 16)
    assert torch.equal(first[0], second[0])
    assert (first[1] - second[1]).abs().max() > 1e-3
    assert (first[1] - first[2]).abs().max() > 1e-3  # each forward draws anew
    assert (first[1][..., :8] - first[1][..., 8:]).abs().max() > 1e-3  # so does each head of a rank
    assert torch.equal(first_state, second_state)  # and outside they are still together


def gradients(checkpointing):
    run = boosted(checkpointing=checkpointing, **OUTSIDE, **INSIDE)
    losses = [run.step(whole_batch(2)) for _ in range(2)]
    run.optimizer.zero_grad()
    losses.append(run.backward(whole_batch(2)))
    return losses, run.gradients_by_step()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_recomputation_draws_the_same_masks(way):
    for (losses, plain), (again, recomputed) in zip(run_on_ranks(2, gradients, None), run_on_ranks(2, gradients, way)):
        assert again == pytest.approx(losses, abs=LOSS, rel=0)
        assert_close(recomputed, plain, GRADIENT)


def losses_outside():
    run = boosted(**OUTSIDE)
    return [run.step(whole_batch(2)) for _ in range(3)]


def test_outside_regions_ranks_draw_what_one_process_draws():
    model = tiny_model("G2", **OUTSIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**whole_batch(2)).loss
            loss.backward()
            optimizer.step()
            wanted.append(loss.item())
    for losses in run_on_ranks(2, losses_outside):
        assert losses == pytest.approx(wanted, abs=LOSS, rel=0)
