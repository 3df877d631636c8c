"""The dynamic loss scale by itself: when it moves, where it stops, what it refuses, and how it is resumed."""

import math

import pytest

from colonnade.errors import ConfigError, UsageError
from colonnade.precision.loss_scale import DynamicLossScale, LossScale

GOOD, INF, NAN = 1.0, math.inf, math.nan


def run(options, *norms):
    """Scales after each of some steps with these gradient norms, and which of the steps were to be made."""
    scale = DynamicLossScale(LossScale(**options))
    made, scales = [], []
    for norm in norms:
        made.append(scale.update(norm))
        scales.append(scale.scale)
    return scales, made


def test_it_grows_after_good_steps_in_a_row():
    scales, made = run({"initial": 8, "growth_interval": 3}, *[GOOD] * 7)
    assert scales == [8, 8, 16, 16, 16, 32, 32]
    assert all(made)


def test_an_overflow_shrinks_it_leaves_the_step_out_and_begins_the_count_anew():
    scales, made = run({"initial": 8, "growth_interval": 2}, GOOD, INF, GOOD, NAN, GOOD, GOOD, -INF)
    assert scales == [8, 4, 4, 2, 2, 4, 2]
    assert made == [True, False, True, False, True, True, False]


def test_factors_are_those_given():
    scales, _ = run({"initial": 64, "growth_factor": 4, "backoff_factor": 0.25, "growth_interval": 1}, GOOD, INF, INF)
    assert scales == [256, 64, 16]


def test_an_interval_of_zero_never_grows():
    scales, _ = run({"initial": 8, "growth_interval": 0}, *[GOOD] * 50)
    assert set(scales) == {8}


def test_a_zero_gradient_is_a_good_step():
    scales, made = run({"initial": 8, "growth_interval": 1}, 0.0)
    assert (scales, made) == ([16], [True])


def test_hysteresis_is_used_up_and_restored_by_growth():
    options = {"initial": 64, "growth_interval": 2, "hysteresis": 2}
    scales, made = run(options, INF, GOOD, INF, INF, GOOD, GOOD, INF, INF)
    #   one overflow is forgiven; good steps in between do not restore it; then each shrinks; growth restores it
    assert scales == [64, 64, 32, 16, 16, 32, 32, 16]
    assert made == [False, True, False, False, True, True, False, False], "a forgiven overflow is no step either"


def test_it_stays_between_its_bounds():
    scales, _ = run({"initial": 8, "max_scale": 20, "growth_interval": 1}, *[GOOD] * 4)
    assert scales == [16, 20, 20, 20]
    scales, _ = run({"initial": 8, "min_scale": 3}, INF, INF)
    assert scales == [4, 3]


def test_an_overflow_at_the_smallest_scale_is_an_error_and_changes_nothing():
    scale = DynamicLossScale(LossScale(initial=2, min_scale=1))
    assert not scale.update(INF)
    before = scale.state_dict()
    for norm in (INF, NAN):
        with pytest.raises(UsageError) as caught:
            scale.update(norm)
        assert "loss scale of 1, the smallest allowed" in str(caught.value)
        assert 'precision="bf16"' in str(caught.value)
    assert scale.state_dict() == before
    assert scale.update(GOOD)


def test_it_counts_the_steps_left_out():
    scale = DynamicLossScale(LossScale())
    for norm in (GOOD, INF, NAN, GOOD):
        scale.update(norm)
    assert scale.skipped == 2


@pytest.mark.parametrize("stop", range(9))
def test_a_resumed_scale_goes_on_as_if_never_stopped(stop):
    options = LossScale(initial=64, growth_interval=3, hysteresis=2)
    norms = [GOOD, INF, GOOD, GOOD, GOOD, INF, INF, GOOD, GOOD]
    through = DynamicLossScale(options)
    first = DynamicLossScale(options)
    for norm in norms[:stop]:
        first.update(norm)
        through.update(norm)
    resumed = DynamicLossScale(options)
    resumed.load_state_dict(first.state_dict())
    for norm in norms[stop:]:
        assert resumed.update(norm) == through.update(norm)
        assert resumed.state_dict() == through.state_dict()


@pytest.mark.parametrize(
    "name, value",
    [
        ("initial", 0.5),
        ("initial", 2.0**33),
        ("initial", math.nan),
        ("initial", math.inf),
        ("initial", None),
        ("initial", "256"),
        ("initial", True),
        ("growth_factor", 0.5),
        ("growth_factor", math.nan),
        ("growth_factor", math.inf),
        ("backoff_factor", 0),
        ("backoff_factor", 1),
        ("backoff_factor", 2.0),
        ("backoff_factor", "half"),
        ("growth_interval", -1),
        ("growth_interval", 1.5),
        ("growth_interval", None),
        ("hysteresis", 0),
        ("hysteresis", 1.5),
        ("hysteresis", False),
        ("min_scale", 0),
        ("min_scale", -1.0),
        ("min_scale", math.nan),
        ("max_scale", math.inf),
        ("max_scale", math.nan),
        ("max_scale", "much"),
    ],
)
def test_a_number_it_cannot_work_with_is_refused_and_named(name, value):
    with pytest.raises(ConfigError, match=r"LossScale cannot work with these numbers") as caught:
        LossScale(**{name: value})
    named = [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert named == [name]
    assert f"{name}={value!r}" in str(caught.value)


def test_all_wrong_numbers_are_named_at_once():
    wrong = {
        "initial": None,
        "growth_factor": 0,
        "backoff_factor": 1,
        "growth_interval": -1,
        "hysteresis": 0,
        "min_scale": "none",
        "max_scale": math.nan,
    }
    with pytest.raises(ConfigError) as caught:
        LossScale(**wrong)
    for name, value in wrong.items():
        assert f"{name}={value!r}" in str(caught.value)


def test_a_largest_scale_below_the_smallest():
    with pytest.raises(ConfigError) as caught:
        LossScale(initial=4, min_scale=4, max_scale=2)
    assert "max_scale=2 " in str(caught.value) and "not below min_scale" in str(caught.value)


def test_whole_numbers_and_equal_bounds_are_fine():
    assert LossScale(initial=256, min_scale=256, max_scale=256).initial == 256
    assert LossScale(growth_factor=1).growth_factor == 1
