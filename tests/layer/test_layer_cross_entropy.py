"""The loss over a vocabulary dealt out over ranks, against torch's cross entropy on the whole logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layer_checks import noise, positions

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.errors import ShapeError
from colonnade.shardformer.layer import cross_entropy_1d
from colonnade.testing.ranks import on_ranks, run_on_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = (3, 8)


def targets(vocab, ignored=()):
    labels = torch.randint(0, vocab, SHAPE, generator=torch.Generator().manual_seed(2))
    labels[0, :3] = torch.tensor([0, vocab - 1, vocab // 2])
    for place in ignored:
        labels[place] = -100
    return labels


def compare(logits, labels, axis, reduction, ignore_index=-100):
    """Loss and gradient of this rank's columns, against torch in float64 on the same float32 logits."""
    vocab = logits.shape[-1]
    held = positions(vocab, axis)
    whole = logits.double().requires_grad_()
    wanted = F.cross_entropy(whole.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction=reduction)
    mine = logits[..., held].clone().requires_grad_()
    found = cross_entropy_1d(mine, labels, ignore_index, axis, vocab, reduction)
    if reduction == "none":
        assert found.shape == labels.shape
        wanted = wanted.view(labels.shape)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted.float(), equal_nan=True, **CLOSE)
    upstream = noise(*wanted.shape) if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
    wanted.backward(upstream)
    found.backward(upstream.float())
    torch.testing.assert_close(mine.grad, whole.grad[..., held].float(), equal_nan=True, **CLOSE)


@pytest.mark.parametrize("world", [2, 3])
def test_it_equals_torchs_cross_entropy(world):
    run_on_ranks(world, every_reduction)


def every_reduction():
    axis = Axis.of(None)
    for vocab in (66, 67, 3):
        logits = noise(*SHAPE, vocab, dtype=torch.float32)
        for reduction in ("mean", "sum", "none"):
            for ignored in ([], [(0, 1), (1, slice(4, None))]):
                compare(logits, targets(vocab, ignored), axis, reduction)


@on_ranks(2)
def test_any_value_can_be_the_one_that_is_ignored():
    logits = noise(*SHAPE, 67, dtype=torch.float32)
    for ignore_index in (0, 66, -1):
        labels = targets(67)
        labels[2] = ignore_index
        for reduction in ("mean", "sum", "none"):
            compare(logits, labels, Axis.of(None), reduction, ignore_index)


@on_ranks(2)
def test_where_nothing_counts_the_sum_is_zero_and_the_mean_is_not_a_number():
    axis = Axis.of(None)
    logits, labels = noise(*SHAPE, 67, dtype=torch.float32), torch.full(SHAPE, -100)
    for reduction in ("sum", "none"):
        compare(logits, labels, axis, reduction)
    mine = logits[..., positions(67, axis)]
    assert cross_entropy_1d(mine, labels, process_group=axis, vocab_size=67).isnan()


LARGE = {
    "far apart": lambda logits: 1e4 * logits,
    "all high": lambda logits: logits + 1e4,
    "all low": lambda logits: logits - 1e4,
    "one rank high, one rank low": lambda logits: logits + torch.where(torch.arange(67) < 34, 1e4, -1e4),
    "only the last column high": lambda logits: logits + torch.where(torch.arange(67) == 66, 1e4, 0.0),
    "far below float32's exp": lambda logits: logits * 1e30,
    "minus infinity in places": lambda logits: logits.masked_fill(logits < -0.5, -torch.inf),
    "a rank with nothing but minus infinity": lambda logits: logits.masked_fill(torch.arange(67) >= 34, -torch.inf),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_logits_lose_nothing(kind):
    run_on_ranks(2, large_logits, kind)


def large_logits(kind):
    logits = LARGE[kind](noise(*SHAPE, 67, dtype=torch.float32))
    labels = targets(67)
    if "infinity" in kind:  # a target of probability 0 has no finite loss
        labels = logits.argmax(-1)
    for reduction in ("mean", "none"):
        compare(logits, labels, Axis.of(None), reduction)


@on_ranks(2)
def test_group_axis_and_vocabulary_size_may_be_left_out():
    axis = Axis.of(None)
    logits, labels = noise(*SHAPE, 66, dtype=torch.float32), targets(66)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    mine = logits[..., positions(66, axis)]
    for group in (None, dist.group.WORLD, axis):
        torch.testing.assert_close(cross_entropy_1d(mine, labels, process_group=group), wanted, **CLOSE)


@on_ranks(2)
def test_bf16_logits_are_summed_in_float32_and_their_gradient_is_bf16():
    axis = Axis.of(None)
    logits, labels = noise(*SHAPE, 67, dtype=torch.bfloat16), targets(67)
    held = positions(67, axis)
    whole, mine = logits.float().requires_grad_(), logits[..., held].clone().requires_grad_()
    wanted = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    wanted.backward()
    found = cross_entropy_1d(mine, labels, process_group=axis, vocab_size=67)
    found.backward()
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert mine.grad.dtype is torch.bfloat16
    assert mine.grad.equal(whole.grad[..., held].bfloat16())


@on_ranks(3)
def test_at_most_three_numbers_a_token_travel_and_none_in_the_backward():
    axis = Axis.of(None)
    logits = noise(*SHAPE, 67, dtype=torch.float32)[..., positions(67, axis)].requires_grad_()
    with ledger() as forward:
        loss = cross_entropy_1d(logits, targets(67), process_group=axis, vocab_size=67)
    with ledger() as backward:
        loss.backward()
    tokens = SHAPE[0] * SHAPE[1]
    assert forward.elements["all_gather", "tp"] / 3 + forward.elements["all_reduce", "tp"] <= 3 * tokens
    assert not backward.calls


@on_ranks(2)
def test_labels_outside_the_vocabulary_are_named_on_every_rank():
    axis = Axis.of(None)
    logits = noise(*SHAPE, 67, dtype=torch.float32)[..., positions(67, axis)]
    for wrong in (67, -1, 10**9):
        labels = targets(67)
        labels[2, 5] = wrong
        with pytest.raises(
            ShapeError, match=rf"labels must lie in 0\.\.66 or be -100; found {wrong} at position \(2, 5\)"
        ):
            cross_entropy_1d(logits, labels, process_group=axis, vocab_size=67)


@on_ranks(2)
def test_shapes_that_do_not_belong_together_are_refused():
    axis = Axis.of(None)
    logits = noise(*SHAPE, 67, dtype=torch.float32)
    held = positions(67, axis)
    for wrong, labels, vocab in (
        (logits[..., held], targets(67)[:, 1:], 67),
        (logits, targets(67), 67),
        (logits[..., held[1:]], targets(67), 67),
        (logits[..., held[:5]], targets(21), 21),
    ):
        with pytest.raises(ShapeError, match=rf"rank {axis.rank} of 2 should hold \d+ of {vocab} columns"):
            cross_entropy_1d(wrong, labels, process_group=axis, vocab_size=vocab)


@on_ranks(1)
def test_over_one_rank_it_is_torchs_own():
    compare(noise(*SHAPE, 67, dtype=torch.float32), targets(67), Axis.of(None), "mean")
