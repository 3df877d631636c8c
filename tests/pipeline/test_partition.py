"""How blocks are dealt out to stages."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import ConfigError
from colonnade.pipeline.partition import check_counts, partition


def test_equal_blocks_are_dealt_out_evenly():
    assert partition([1.0] * 8, 4) == [2, 2, 2, 2]
    assert sorted(partition([1.0] * 7, 3)) == [2, 2, 3]


def test_what_the_first_and_the_last_stage_do_besides_counts():
    assert partition([1.0] * 8, 2, last=4.0) == [6, 2]
    assert partition([1.0] * 8, 2, first=4.0) == [2, 6]


def test_costs_count():
    assert partition([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1, 5]


def test_bound_blocks_stay_together():
    assert partition([1.0] * 4, 2, bound=[(1, 2)]) in ([1, 3], [3, 1])
    assert partition([1.0] * 6, 2, bound=[(0, 3)]) == [4, 2]


@pytest.mark.parametrize("bound, groups", [([], "3 blocks"), ([(0, 2)], "1 group$")])
def test_too_few_blocks(bound, groups):
    with pytest.raises(ConfigError, match=f"(?m){groups}"):
        partition([1.0] * 3, 4, bound=bound)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_other_way_has_a_faster_slowest_stage(costs, stages, first, last):
    if len(costs) < stages:
        return

    def slowest(cuts):
        edges = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    counts = partition([float(c) for c in costs], stages, first, last)
    found = slowest([sum(counts[:n]) for n in range(1, stages)])
    assert found == min(slowest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))


def test_chosen_counts_that_fit():
    assert check_counts([1, 3], 4, 2) == [1, 3]


@pytest.mark.parametrize("counts", [[2, 1], [4], [0, 4], [-1, 5], [2.0, 2.0]])
def test_chosen_counts_that_do_not_fit(counts):
    with pytest.raises(ConfigError, match=r"try +\[2, 2\]"):
        check_counts(counts, 4, 2)


def test_chosen_counts_that_cut_what_is_bound():
    with pytest.raises(ConfigError, match="cuts before block 2"):
        check_counts([2, 2], 4, 2, bound=[(1, 2)])
