"""Batches as they come: padded, ragged, accumulated, cut into micro-batches, with few targets or none."""

import pytest
from parity_runs import (
    LAYOUTS,
    MAX_NORM,
    build,
    lopsided,
    one_rank_without_targets,
    padded,
    plain,
    rows,
    run,
    run_each,
    unequal,
    world,
)

from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks

DATA_PARALLEL = ["dp 2", "ddp 2", "tp 2 × dp 2"]
ALL = ["tp 2", *DATA_PARALLEL]


def accumulated(name):
    return {
        "without no_sync": {"name": name, "batches": unequal() + lopsided(), "accumulate": 3, "max_norm": MAX_NORM},
        "with no_sync": {"name": name, "batches": unequal() + lopsided(), "accumulate": 3, "no_sync": True},
        "through execute_pipeline": {
            "name": name,
            "batches": unequal(),
            "accumulate": 2,
            "no_sync": True,
            "through": "execute_pipeline",
        },
    }


@pytest.mark.parametrize("layout", ALL)
def test_accumulation_over_three_batches(layout):
    run_on_ranks(world(layout), run_each, layout, accumulated("LT" if layout != "ddp 2" else "G2"))


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize(
    "cut",
    [{"microbatch_size": 1}, {"num_microbatches": 2}, {"microbatch_size": 3}, {"num_microbatches": 3}, {}],
    ids=["one row each", "two", "uneven size", "uneven number", "uncut"],
)
def test_a_batch_in_micro_batches(layout, cut):
    """Rows with three targets, one and none, so that micro-batches weigh differently and one weighs nothing."""
    case = {"name": "LL", "plugin_options": cut, "through": "execute_pipeline", "steps": 2, "max_norm": MAX_NORM}
    cases = {
        "unequal": case | {"batches": unequal()},
        "a micro-batch without targets": case | {"batches": lopsided()},
        "five rows": case | {"batches": rows(5)},
    }
    run_on_ranks(world(layout), run_each, layout, cases, timeout_s=30)


@pytest.mark.parametrize("layout", ALL)
def test_the_last_micro_batch_of_one_rank_has_no_target(layout):
    """The one in which gradients are reduced: the ranks have to meet all the same."""
    batches = plain()
    for batch in batches:
        batch["labels"][1] = -100  # the last row of the first data-parallel rank
    case = {"name": "LL", "plugin_options": {"microbatch_size": 1}, "through": "execute_pipeline", "steps": 2}
    run_on_ranks(world(layout), run_each, layout, {"last": case | {"batches": batches}}, timeout_s=30)


@pytest.mark.parametrize("layout", DATA_PARALLEL)
@pytest.mark.parametrize("through", ["loop", "execute_pipeline"])
def test_one_rank_has_no_target_at_all(layout, through):
    case = {"name": "LL", "batches": one_rank_without_targets(), "through": through, "steps": 2}
    run_on_ranks(world(layout), run_each, layout, {"none": case}, timeout_s=30)


@pytest.mark.parametrize("layout", ALL)
def test_padded_batches(layout):
    cases = {}
    for name in ("LL", "G2", "OP"):
        for side in ("left", "right"):
            cases[f"{name}, padded on the {side}"] = {"name": name, "batches": padded(side), "steps": 2}
    cut = {"plugin_options": {"microbatch_size": 1}, "through": "execute_pipeline", "steps": 2}
    cases["OP in micro-batches"] = cut | {"name": "OP", "batches": padded("left")}
    run_on_ranks(world(layout), run_each, layout, cases)


@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_rows_that_do_not_divide_by_the_ranks(layout):
    cases = {f"{number} rows": {"name": "LL", "batches": rows(number), "steps": 2} for number in (3, 5)}
    run_on_ranks(world(layout), run_each, layout, cases)


@pytest.mark.parametrize("layout", ["tp 2", "dp 2"])
def test_positions_given_by_the_caller(layout):
    batches = plain()
    for batch in batches:
        batch["position_ids"] = (batch["input_ids"] * 0 + 3) + batch["input_ids"].new_tensor(range(12))
    run_on_ranks(2, run_each, layout, {name: {"name": name, "batches": batches, "steps": 2} for name in ("LL", "G2")})


def recompute(layout, name, use_reentrant):
    _, plugin_class, options = LAYOUTS[layout]

    def model():
        made = build(name)
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return made

    assert_same_as_single(model, unequal(), lambda: plugin_class(precision="fp32", **options), steps=2)


@pytest.mark.parametrize("layout", ["tp 2", "dp 2", "ddp 2"])
def test_recomputation(layout):
    for name in ("LT", "G2"):
        run_on_ranks(2, recompute, layout, name, use_reentrant=False)


def test_recomputation_with_the_older_kind():
    for layout in ("tp 2", "dp 2"):
        run_on_ranks(2, recompute, layout, "LT", use_reentrant=True)


@pytest.mark.parametrize("layout", ["tp 2", "dp 2"])
def test_a_single_comparison_is_as_strict_as_it_says(layout):
    """The run that all of these are made of fails where the layout is right and the reference is another model."""
    run_on_ranks(2, fails_for_other_weights, layout)


def fails_for_other_weights(layout):
    seeds = iter((1, 1, 2, 2, 2, 2))  # fp32 and fp64 of one process, then the parallel run

    def model():
        return build("LL", noise_seed=next(seeds))

    _, plugin_class, options = LAYOUTS[layout]
    with pytest.raises(AssertionError, match="NOT the numbers of one process"):
        assert_same_as_single(model, plain(), lambda: plugin_class(precision="fp32", **options), steps=1)
    run(layout, "LL", plain(), steps=1)
