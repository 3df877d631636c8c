"""Traffic of a pipeline, exactly: when shapes travel, what the optimizer's step moves; and activations in flight by formula.

p ranks, m micro-batches of b rows and s tokens, h width, V tokens of the vocabulary, e borders between stages on different
ranks that one rank is at, on the side of the sender or of the receiver.

- The first micro-batch of some shapes: for each border one message of DIMS + 2 whole numbers for each tensor, forth.
- Each micro-batch: b·s·h elements forth, and in training the same back.
- Each training step: the loss, one number. Evaluation: the loss, none where it is not wanted.
- `optimizer.step()`: the square of the norm, one number; a tied matrix besides, V·h from its owner to the copy.
"""

from collections import Counter

import pytest
import torch

import colonnade
from colonnade.pipeline.mailbox import MAX_DIMS
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import simulate
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids
from tests.pipeline.pipeline_models import VOCAB
from tests.pipeline.test_runtime import HIDDEN, boosted

WIDTH = MAX_DIMS + 2
SHAPES = [(6, 10), (6, 10), (6, 7), (6, 10), (5, 7), (2, 7)]  # rows and tokens of batches cut into rows of 2
NEW = [1, 0, 1, 0, 1, 0]  # shapes of micro-batches that are new: (2, 10), then (2, 7), then (1, 7)
TABLE = VOCAB * HIDDEN


def borders(schedule, rank):
    """Borders over which a rank sends hidden states, and over which it receives them."""
    pairs = [(schedule.rank_of(n - 1), schedule.rank_of(n)) for n in range(1, schedule.num_stages)]
    return sum(a == rank != b for a, b in pairs), sum(b == rank != a for a, b in pairs)


def moved(ledger):
    """(calls, elements) by operation and axis, without what did not happen."""
    return {key: (calls, ledger.elements[key]) for key, calls in ledger.calls.items() if calls}


def rows_of_parts(rows):
    return [min(2, rows - start) for start in range(0, rows, 2)]


def due(schedule, rank, rows, tokens, new, kinds):
    """Calls and elements of a step, but for the loss and tied matrices."""
    forth, back = borders(schedule, rank)
    parts = rows_of_parts(rows)
    count, elements = Counter(), Counter()
    sides = {"F": (forth, back), "B": (back, forth)}
    for kind in kinds:
        for operation, number in zip(("send", "receive"), sides[kind]):
            count[operation] += number * len(parts)
            elements[operation] += number * sum(parts) * tokens * HIDDEN
    for operation, number in zip(("send", "receive"), (forth, back)):
        count[operation] += number * new
        elements[operation] += number * new * WIDTH
    return {(operation, "pp"): (calls, elements[operation]) for operation, calls in count.items() if calls}


def with_loss(found):
    return found | {("broadcast", "pp"): (1, 1)}


def steps(name, ranks, style):
    booster, model, optimizer = boosted(name, ranks, style, microbatch_size=2)
    rank = booster.plugin.mesh.rank("pp")
    schedule = make_schedule(style, ranks, 1)
    ends = {schedule.rank_of(0), schedule.rank_of(schedule.num_stages - 1)}
    tied = name == "llama tied" and len(ends) == 2 and rank in ends
    for (rows, tokens), new in zip(SHAPES, NEW):
        x = ids(rows, tokens, 3, VOCAB)
        batch = {"input_ids": x, "labels": x}
        with colonnade.ledger() as run:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        wanted = with_loss(due(schedule, rank, rows, tokens, new, "FB"))
        if tied:  # the flag and the gradient, from the last stage to the first
            key = ("receive" if rank == 0 else "send", "pp")
            calls, elements = wanted[key]
            wanted[key] = calls + 2, elements + 1 + TABLE
        assert moved(run) == wanted, (rows, tokens)
        with colonnade.ledger() as end:
            optimizer.step()
        norm = {("all_gather", "pp"): (1, ranks)}  # the ledger counts what is received
        copied = {("send" if rank == 0 else "receive", "pp"): (1, TABLE)} if tied else {}
        assert moved(end) == norm | copied
        with colonnade.ledger() as nothing:
            optimizer.zero_grad()
        assert not moved(nothing)
        with torch.no_grad():
            with colonnade.ledger() as told:
                booster.execute_pipeline(iter([batch]), model)
            with colonnade.ledger() as untold:
                booster.execute_pipeline(iter([batch]), model, return_loss=False, return_outputs=True)
        assert moved(told) == with_loss(due(schedule, rank, rows, tokens, 0, "F"))
        assert moved(untold) == due(schedule, rank, rows, tokens, 0, "F")
    return True


@pytest.mark.sample("llama-2-interleaved", "llama tied-2-1f1b", "llama tied-4-zbh1")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_shapes_travel_once_and_a_step_moves_one_number(name, ranks, style):
    """SHAPES come back after others, and in other batches: nobody is told of them again."""
    run_on_ranks(ranks, steps, name, ranks, style, timeout_s=110)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_activations_in_flight_of_schedules_with_several_stages_or_two_backwards(ranks):
    """In micro-batches × stages: zbh1 as 1f1b; interleaved its v − 1 rounds more; zbv 2p on every rank, once there are enough."""
    for microbatches in (1, ranks, 2 * ranks, 2 * ranks + 1, 4 * ranks):
        for rank in range(ranks):
            zbh1 = simulate(make_schedule("zbh1", ranks, microbatches))
            assert zbh1.peak_in_flight(rank) == min(microbatches, ranks - rank)
            assert zbh1.peak_kept(rank) <= min(microbatches, ranks), "of the gradients of weights no more are put off"
            if microbatches >= 2 * ranks:
                assert simulate(make_schedule("zbv", ranks, microbatches)).peak_in_flight(rank) == 2 * ranks
            for chunks in (2, 3):
                found = simulate(make_schedule("interleaved", ranks, microbatches, chunks)).peak_in_flight(rank)
                formula = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
                assert found <= min(formula, chunks * microbatches)
                if microbatches % ranks == 0 and microbatches > ranks:
                    assert found == formula
