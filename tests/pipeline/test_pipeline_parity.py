"""Training over pipeline stages has the numbers of one process: every schedule, layout, model and number of micro-batches."""

import pytest

from colonnade.pipeline.schedule import STYLES
from colonnade.testing.ranks import run_on_ranks
from tests.pipeline.pipeline_models import MAX_NORM, MODELS, compare_each

# name: (ranks, options of the plugin)
LAYOUTS = {
    "pp 2": (2, {"pp_size": 2}),
    "pp 4": (4, {"pp_size": 4}),
    "tp 2, pp 2": (4, {"pp_size": 2, "tp_size": 2}),
    "dp 2, pp 2": (4, {"pp_size": 2}),
    "dp 2, pp 2, zero 1": (4, {"pp_size": 2, "zero_stage": 1}),
}


def run(layout, cases):
    """Comparisons on the ranks of a layout; prints the worst figures, which `pytest -s` shows."""
    ranks, options = LAYOUTS[layout]
    cases = {label: case | {"layout": options | case.get("layout", {})} for label, case in cases.items()}
    worst = run_on_ranks(ranks, compare_each, cases, timeout_s=115)[0]
    print(layout, ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items()))


def numbers_of_microbatches(layout, name):
    """1, p, 2p and odd ones, of 10 rows (5 on each of two replicas), the last often shorter; more than rows once."""
    p = LAYOUTS[layout][1]["pp_size"]
    for number in sorted({1, 3, 5, p, 2 * p, 7}):
        yield f"{name}, {number} micro-batches", {"name": name, "rows": 10, "layout": {"num_microbatches": number}}
    yield f"{name}, a micro-batch of 3", {"name": name, "rows": 10, "layout": {"microbatch_size": 3}}
    yield f"{name}, as many as there are rows", {"name": name, "rows": 6, "layout": {}}


@pytest.mark.sample("llama tied-pp 2-*")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_any_number_of_micro_batches(name, layout, style):
    cases = dict(numbers_of_microbatches(layout, name))
    for case in cases.values():
        case["layout"]["pp_style"] = style
    run(layout, cases)


@pytest.mark.sample("dp 2, pp 2, zero 1-1f1b", "tp 2, pp 2-1f1b")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_model(layout, style):
    """Each with clipping and an odd number of micro-batches."""
    run(layout, {
        name: {"name": name, "layout": {"pp_style": style, "num_microbatches": 3}, "max_norm": MAX_NORM}
        for name in MODELS if name != "llama"
    })  # fmt: skip
