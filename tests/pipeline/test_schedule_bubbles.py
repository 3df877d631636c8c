"""Idle time and activations of each schedule against the formulas of its paper, exactly, with F = B = W = 1."""

from __future__ import annotations

from fractions import Fraction

import pytest

from colonnade.errors import ConfigError
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import Timeline, simulate

SIZES = [(p, m) for p in (2, 4, 8) for m in range(p, 4 * p + 1)]


def played(style: str, ranks: int, microbatches: int, chunks: int | None = None) -> Timeline:
    return simulate(make_schedule(style, ranks, microbatches, chunks))


def bubble(timeline: Timeline) -> int:
    """Time that a rank waits; all ranks have the same work."""
    return int(timeline.makespan - timeline.busy(0))


def share(timeline: Timeline) -> Fraction:
    """Bubble as a share of the step."""
    return Fraction(bubble(timeline), int(timeline.makespan))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b(p, m):
    gpipe, one = played("gpipe", p, m), played("1f1b", p, m)
    assert share(gpipe) == share(one) == Fraction(p - 1, m + p - 1)
    assert one.idle_share == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert [gpipe.peak_in_flight(r) for r in range(p)] == [m] * p
    assert [one.peak_in_flight(r) for r in range(p)] == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
def test_interleaved(p, m, v):
    """The bubble is a share of the ideal time here. With one group of micro-batches all of them are in flight, and no more."""
    timeline = played("interleaved", p, m, v)
    ideal = 3 * v * m
    assert Fraction(bubble(timeline), ideal) == Fraction(p - 1, v * m)
    in_1f1b = p * v  # on the first rank, in stages of this size
    assert timeline.peak_in_flight(0) == min(m * v, in_1f1b * (1 + Fraction(p - 1, p * v)))
    assert all(timeline.peak_in_flight(r) <= timeline.peak_in_flight(0) for r in range(p))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p])
def test_interleaved_with_a_group_that_is_not_full(p, m):
    """It waits longer than with full groups, but never as long as 1F1B, and keeps no more."""
    timeline = played("interleaved", p, m, 2)
    assert 3 * (p - 1) < bubble(timeline) < 3 * (p - 1) * 2  # the latter: 1F1B, whose stages are twice as large
    assert timeline.peak_in_flight(0) <= 2 * p * (1 + Fraction(p - 1, 2 * p))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbh1(p, m):
    timeline, one = played("zbh1", p, m), played("1f1b", p, m)
    assert 3 * bubble(timeline) == bubble(one)
    assert [timeline.peak_in_flight(r) for r in range(p)] == [one.peak_in_flight(r) for r in range(p)]
    # with what waits for its "W", every rank keeps as many as the first rank of 1F1B
    assert max(timeline.peak_kept(r) for r in range(p)) == one.peak_in_flight(0)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zbv(p, m):
    """No rank waits between its first action and its last. What is left: the input reaches rank r after r forwards.

    So the whole takes 6 m + p - 1 of these units, the work of a rank and the way to the last one: nothing can be shorter.
    """
    timeline = played("zbv", p, m)
    assert [timeline.idle_between(r) for r in range(p)] == [0] * p
    assert [spans[0].start for spans in timeline.spans] == list(range(p))
    assert timeline.makespan == 6 * m + p - 1
    # 2 p stages of half the size: what the first rank of 1F1B keeps; gradients of weights that are due included
    assert max(timeline.peak_kept(r) for r in range(p)) <= 2 * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m < 2 * p - 1])
def test_zbv_with_fewer_microbatches_than_fill_it(p, m):
    """Then the second stage of rank 0 has nothing to do for a while. It still waits less than ZB-H1, and keeps no more."""
    timeline, half = played("zbv", p, m), played("zbh1", p, m)
    in_halves = 2 * bubble(half)
    assert bubble(timeline) < in_halves
    assert max(timeline.peak_kept(r) for r in range(p)) <= 2 * p


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("p", "m"), [(4, 1), (4, 2), (4, 3), (8, 5)])
def test_fewer_microbatches_than_ranks_keep_no_more_than_there_are(style, p, m):
    timeline = played(style, p, m)
    stages = timeline.schedule.chunks
    assert all(timeline.peak_kept(r) <= m * stages for r in range(p))


@pytest.mark.parametrize("style", STYLES)
def test_one_rank_never_waits(style):
    assert played(style, 1, 3).idle_share == 0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 8), (4, 6)])
def test_evaluation_is_as_short_as_it_can_be(p, m):
    """The work of a rank and the way to the last one; on a V, also its way up again."""
    for style in ("gpipe", "1f1b", "zbh1"):
        assert simulate(make_schedule(style, p, m, forward_only=True)).makespan == m + p - 1
    if m % p == 0:
        assert simulate(make_schedule("interleaved", p, m, forward_only=True)).makespan == 2 * m + p - 1
    assert simulate(make_schedule("zbv", p, m, forward_only=True)).makespan == 2 * m + 2 * p - 2


def test_costs_of_kinds_of_stages_and_of_transfers():
    schedule = make_schedule("1f1b", 2, 1)
    timeline = simulate(schedule, {"F": 2, ("F", 1): 5, "B": 3, "W": 0.5}, transfer=10)
    (f0, b0), (f1, b1) = timeline.spans
    assert (f0.start, f0.end) == (0, 2)
    assert (f1.start, f1.end) == (12, 17)
    assert (b1.start, b1.end) == (17, 20.5)
    assert (b0.start, b0.end) == (30.5, 34)
    assert timeline.idle_share_of(0) == pytest.approx(1 - 5.5 / 34)
    assert timeline.idle_between(1) == 0


def test_levels_of_activations_and_of_weight_gradients_over_time():
    timeline = simulate(make_schedule("zbh1", 2, 2))
    assert [str(span.action) for span in timeline.spans[1]] == ["1F0", "1B0", "1F1", "1B1", "1W0", "1W1"]
    assert timeline.in_flight(1) == [(0, 0), (1, 1), (5, 0)]  # 1F1 starts as 1B0 ends
    assert timeline.weights_due(1) == [(0, 0), (3, 1), (5, 2), (6, 1), (7, 0)]
    assert timeline.peak_kept(1) == 2


@pytest.mark.parametrize("costs", [{"F": -1}, {"F": float("nan")}, {"B": float("inf")}, {"X": 1}, {("F", 9): 1}])
def test_costs_that_cannot_be_are_refused(costs):
    with pytest.raises(ConfigError, match="costs of a pipeline schedule cannot be"):
        simulate(make_schedule("1f1b", 2, 2), costs)
    with pytest.raises(ConfigError, match="transfer"):
        simulate(make_schedule("1f1b", 2, 2), transfer=-1)
