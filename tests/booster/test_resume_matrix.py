"""A training that is saved in one layout goes on in any other as if nothing had been: losses and weights of one process.

All pairs of layouts: each saves after three steps, and each loads what each has saved, in other processes, into a model with
other weights, and makes three more. Kept are weights, the optimizer's state and options, and the learning-rate schedule.
"""

import pytest
from resume_runs import CASES, LAYOUTS, load_and_go_on, one_process, train_and_save

from colonnade.testing.ranks import close_pools, run_on_ranks

SOME = ("tp 4", "pp 2", "zero 1")  # what `make test` saves, of these cases:
SHORT = {"llama, tied": tuple(LAYOUTS), "llama, one kv head, adafactor": ("dp 3", "fsdp")}


def saved(tmp_path_factory, layouts, cases):
    root = tmp_path_factory.mktemp("checkpoints")
    for layout in layouts:
        run_on_ranks(LAYOUTS[layout][0], train_and_save, layout, {c: str(root / layout / c) for c in cases})
    return root


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Written by some layouts."""
    return saved(tmp_path_factory, SOME, SHORT)


@pytest.fixture(scope="module")
def all_checkpoints(tmp_path_factory):
    """Written by all layouts, by processes that have ended."""
    root = saved(tmp_path_factory, LAYOUTS, CASES)
    close_pools()
    return root


@pytest.fixture(scope="module")
def wanted():
    return {case: one_process(case) for case in CASES}


@pytest.mark.parametrize("case, layout", [(case, layout) for case, layouts in SHORT.items() for layout in layouts])
def test_what_some_layouts_have_saved_goes_on_in_any(case, layout, checkpoints, wanted):
    folders = {source: str(checkpoints / source / case) for source in SOME}
    run_on_ranks(LAYOUTS[layout][0], load_and_go_on, layout, case, folders, wanted[case])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_what_any_layout_has_saved_goes_on_in_any(case, layout, all_checkpoints, wanted):
    folders = {source: str(all_checkpoints / source / case) for source in LAYOUTS}
    answers = run_on_ranks(LAYOUTS[layout][0], load_and_go_on, layout, case, folders, wanted[case], timeout_s=300)
    losses, weights = zip(*answers[0].values())
    print(f"{case}, all → {layout}: losses ≤ {max(losses):.1e}, weights ≤ {max(weights):.1e}")
