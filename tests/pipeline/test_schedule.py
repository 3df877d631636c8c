"""Schedules as lists: each is complete and can be played, whatever the numbers; a broken one is found out."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import ConfigError
from colonnade.pipeline.action import Action
from colonnade.pipeline.messages import Transfer, transfers
from colonnade.pipeline.schedule import STYLES, Schedule, check, make_schedule, play_order
from colonnade.pipeline.timeline import simulate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    style = draw(st.sampled_from(sorted(STYLES)))
    chunks = draw(st.integers(2, 4)) if STYLES[style].most_chunks is None else None
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    return make_schedule(style, ranks, microbatches, chunks, forward_only=draw(st.booleans()))


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_any_numbers_give_a_schedule_that_can_be_played(schedule):
    check(schedule)
    timeline = simulate(schedule, transfer=0.5)
    assert len(play_order(schedule)) == len(schedule.kinds) * schedule.num_stages * schedule.microbatches
    for rank, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(schedule.actions[rank])
        assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))
        if not schedule.forward_only:
            assert timeline.in_flight(rank)[-1].number == 0
            assert timeline.peak_in_flight(rank) <= schedule.microbatches * schedule.chunks


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_odd_numbers_of_microbatches(style, ranks):
    for microbatches in (1, 2, 3, 5, ranks - 1, ranks + 1, 2 * ranks - 1):
        check(make_schedule(style, ranks, microbatches))


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_both_ends_of_every_message_follow_one_order(schedule):
    """Played by ranks that start the messages of each pair in that order only, as if order were all that told them apart."""
    order = transfers(schedule)
    assert len(set(order)) == len(order)
    unstarted = {(t.source, t.target): deque() for t in order} | {(t.target, t.source): deque() for t in order}
    incoming: dict[Action, list[Transfer]] = {}
    for t in order:
        unstarted[t.source, t.target].append(t)  # (this rank, its peer): one list for both directions
        unstarted[t.target, t.source].append(t)
        incoming.setdefault(Action(t.kind, t.target_stage, t.microbatch), []).append(t)
    sent: set[Transfer] = set()
    awaited: set[Transfer] = set()
    done: set[Action] = set()
    to_do = [deque(actions) for actions in schedule.actions]

    def can_start(rank: int, t: Transfer) -> bool:
        return t.target == rank or Action(t.kind, t.source_stage, t.microbatch) in done

    moved = True
    while moved:
        moved = False
        for (rank, _), queue in unstarted.items():
            while queue and can_start(rank, queue[0]):
                (sent if queue[0].source == rank else awaited).add(queue.popleft())
                moved = True
        for actions in to_do:
            while actions and sent & awaited >= set(incoming.get(actions[0], ())):
                done.add(actions.popleft())
                moved = True
    assert not any(to_do) and not any(unstarted.values())


@pytest.mark.parametrize("style", STYLES)
def test_every_border_between_ranks_is_passed_once_each_way(style):
    schedule = make_schedule(style, 4, 6)
    order = transfers(schedule)
    borders = [s for s in range(1, schedule.num_stages) if schedule.rank_of(s - 1) != schedule.rank_of(s)]
    assert {(t.kind, max(t.source_stage, t.target_stage), t.microbatch) for t in order} == {
        (kind, border, i) for kind in "FB" for border in borders for i in range(6)
    }
    assert len(order) == 2 * 6 * len(borders)
    assert len(borders) == {"gpipe": 3, "1f1b": 3, "zbh1": 3, "interleaved": 7, "zbv": 6}[style]


def test_stages_lie_on_a_loop_or_on_a_v():
    assert [make_schedule("interleaved", 3, 3).rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [make_schedule("zbv", 3, 3).rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert make_schedule("zbv", 3, 3).stages_of(0) == (0, 5)


@pytest.mark.parametrize("style", STYLES)
def test_evaluation_has_the_forwards_alone(style):
    schedule = make_schedule(style, 4, 5, forward_only=True)
    check(schedule)
    assert {action.kind for actions in schedule.actions for action in actions} == {"F"}
    assert schedule.kinds == "F"
    assert {t.kind for t in transfers(schedule)} == {"F"}


def test_an_action_prints_as_stage_kind_and_microbatch():
    assert " ".join(map(str, make_schedule("1f1b", 2, 3).actions[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_action_that_is_missing_or_doubled_or_elsewhere_is_found(style, rank):
    schedule = make_schedule(style, 4, 5)
    for index in (0, len(schedule.actions[rank]) // 2, len(schedule.actions[rank]) - 1):
        action = schedule.actions[rank][index]
        with pytest.raises(ConfigError, match=rf"{action} +is missing on rank {rank}"):
            check(changed(schedule, rank, lambda a, i=index: a[:i] + a[i + 1 :]))
        with pytest.raises(ConfigError, match=rf"{action} +on rank {rank}, is there a second time"):
            check(changed(schedule, rank, lambda a, x=action: (*a, x)))
        with pytest.raises(ConfigError, match=rf"{action} +is on rank 2, but its stage is on rank {rank}"):
            moved = changed(schedule, rank, lambda a, i=index: a[:i] + a[i + 1 :])
            check(changed(moved, 2, lambda a, x=action: (*a, x)))


@pytest.mark.parametrize("style", STYLES)
def test_actions_in_an_order_that_waits_for_ever_are_found(style):
    schedule = make_schedule(style, 4, 5)
    for rank, actions in enumerate(schedule.actions):
        first_backward = next(i for i, action in enumerate(actions) if action.kind == "B")
        swapped = changed(schedule, rank, lambda a, i=first_backward: (a[i], *a[:i], *a[i + 1 :]))
        with pytest.raises(ConfigError, match=rf"rank {rank} +waits for .* before {actions[first_backward]}, for ever"):
            check(swapped)


def test_two_ranks_that_wait_for_one_another_are_found():
    """On each rank alone the order is right: rank 0 wants the backward of 0 before it does forward 1, rank 1 forward 1 first."""
    schedule = make_schedule("gpipe", 2, 2)
    broken = changed(schedule, 0, lambda a: (a[0], a[2], a[1], a[3]))
    with pytest.raises(ConfigError) as caught:
        check(broken)
    assert "rank 0  waits for 1B0 before 0B0, for ever" in str(caught.value)
    assert "rank 1  waits for 0F1 before 1F1, for ever" in str(caught.value)


def test_a_weight_gradient_before_its_backward_is_found():
    schedule = make_schedule("zbh1", 2, 2)
    last = schedule.actions[1]
    index = last.index(Action("W", 1, 0))
    with pytest.raises(ConfigError, match="waits for 1B0 before 1W0"):
        check(changed(schedule, 1, lambda a: (a[index], *a[:index], *a[index + 1 :])))


def test_actions_that_do_not_belong_there_are_found():
    schedule = make_schedule("1f1b", 2, 2)
    for stray in (Action("W", 0, 0), Action("F", 0, 2), Action("F", 2, 0), Action("X", 0, 0)):
        with pytest.raises(ConfigError, match=f"{stray} +on rank 0, is no action of this schedule"):
            check(changed(schedule, 0, lambda a, x=stray: (*a, x)))
    with pytest.raises(ConfigError, match="2, but there are lists for 1"):
        check(replace(schedule, actions=schedule.actions[:1]))


def changed(schedule: Schedule, rank: int, change) -> Schedule:
    actions = list(schedule.actions)
    actions[rank] = tuple(change(actions[rank]))
    return replace(schedule, actions=tuple(actions))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zb", 4, 8), ["no pipeline schedule 'zb'", "gpipe ", "1f1b ", "interleaved ", "zbh1 ", "zbv "]),
        (("1f1b", 0, 8), ["ranks=0", "whole number from 1"]),
        (("1f1b", 4, 0), ["microbatches=0"]),
        (("1f1b", 4, 2.0), ["microbatches=2.0"]),
        (("1f1b", True, 2), ["ranks=True"]),
        (("interleaved", 4, 8, 0), ["chunks=0"]),
        (("1f1b", 4, 8, 2), ["1f1b", "2 stages", "needs  1 stage on each rank", "chunks=1", "interleaved or zbv"]),
        (("interleaved", 4, 8, 1), ["at least 2 stages", "gpipe or 1f1b or zbh1"]),
        (("zbv", 4, 8, 3), ["needs  2 stages on each rank", "chunks=2", "the schedule interleaved"]),
    ],
)
def test_what_cannot_be_is_said(arguments, words):
    with pytest.raises(ConfigError) as caught:
        make_schedule(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value
