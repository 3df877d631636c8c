"""plan_storages: every element that trains is owned by exactly one rank, whatever the sizes."""

from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.model.layout import Range, TensorLayout, set_layout
from colonnade.zero.plan import ALIGNMENT, SMALLEST_CUT, plan_storages

LARGE = 3 * SMALLEST_CUT  # elements of a parameter that is worth cutting


def parameter(numel, trains=True):
    return nn.Parameter(torch.empty(numel, device="meta"), requires_grad=trains)


def plan(params, ranks, bucket_bytes, itemsize=4, whole=False, groups=None):
    order = {param: index for index, param in enumerate(params)}
    return plan_storages(groups or [params], order, ranks, bucket_bytes, itemsize, whole)


def owned_by(plans, ranks):
    """By parameter, the intervals (start, stop, rank) of its elements that ranks own."""
    found = {}
    for storage in plans:
        for bucket in storage.buckets:
            for rank in range(ranks):
                start, stop = bucket.part(rank)
                for place in storage.places:
                    first, last = max(start, place.start), min(stop, place.stop)
                    if first < last:
                        found.setdefault(place.param, []).append((first - place.start, last - place.start, rank))
    return found


def assert_plan(plans, groups, ranks, itemsize):
    trained = [p for group in groups for p in group if p.requires_grad and p.numel()]
    placed = Counter(place.param for storage in plans for place in storage.places if place.param.numel())
    assert placed == Counter(trained), "each trained parameter lies in one storage, and no other does"
    owned = owned_by(plans, ranks)
    for param in trained:
        end = 0
        for start, stop, _ in sorted(owned[param]):
            assert start == end, "an element is owned by nobody, or twice"
            end = stop
        assert end == param.numel()
    for storage in plans:
        assert_storage(storage, groups, ranks, max(ALIGNMENT // itemsize, 1))


def assert_storage(storage, groups, ranks, unit):
    assert {place.param for place in storage.places} <= set(groups[storage.group])
    end = 0
    for place in storage.places:
        assert place.start >= end
        assert place.start % unit == 0
        end = place.stop
    assert end <= storage.numel
    end = 0
    for bucket in storage.buckets:
        assert bucket.start == end, "buckets tile the storage"
        assert len(bucket.sizes) == ranks
        inside = [p for p in storage.places if bucket.start < p.stop and p.start < bucket.start + bucket.numel]
        assert inside or not bucket.numel, "a bucket of padding alone"
        for rank in range(ranks):
            start, stop = bucket.part(rank)
            assert start == end, "parts tile the bucket"
            assert start % unit == 0
            end = stop
    assert end == storage.numel


def names(plans, params):
    """The plans' parameters by their position in the model."""
    position = {param: index for index, param in enumerate(params)}
    return [[position[place.param] for place in storage.places] for storage in plans]


sizes = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, LARGE))
params_and_groups = st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 2)), max_size=12)
bucket_sizes = st.one_of(st.integers(1, 5000), st.integers(1, 4 * SMALLEST_CUT))


@given(params_and_groups, st.integers(1, 7), bucket_sizes, st.sampled_from([2, 4]), st.booleans())
def test_every_element_that_trains_has_one_owner(described, ranks, bucket_bytes, itemsize, whole):
    groups = [[], [], []]
    params = []
    for numel, trains, group in described:
        params.append(parameter(numel, trains))
        groups[group].append(params[-1])
    plans = plan(params, ranks, bucket_bytes, itemsize, whole, groups)
    assert_plan(plans, groups, ranks, itemsize)
    if whole:
        assert all(len(pieces) == 1 for pieces in owned_by(plans, ranks).values())


@given(st.lists(sizes, min_size=1, max_size=12), st.integers(1, 7), bucket_sizes)
def test_ranks_own_equal_parts_and_padding_is_little(numels, ranks, bucket_bytes):
    params = [parameter(numel) for numel in numels]
    for storage in plan(params, ranks, bucket_bytes):
        assert all(len(set(bucket.sizes)) == 1 for bucket in storage.buckets)
        inside = sum(place.param.numel() for place in storage.places)
        unit = ALIGNMENT // 4
        assert storage.numel - inside < unit * (len(storage.places) + ranks * len(storage.buckets))


@given(st.lists(sizes, min_size=1, max_size=12), st.integers(1, 4), bucket_sizes, st.sampled_from([2, 4]))
def test_a_bucket_is_about_as_large_as_asked(numels, ranks, bucket_bytes, itemsize):
    params = [parameter(numel) for numel in numels]
    limit = 1.5 * max(bucket_bytes, SMALLEST_CUT)
    for storage in plan(params, ranks, bucket_bytes, itemsize):
        padding = ranks * ALIGNMENT + ALIGNMENT * len(storage.places)
        if len(storage.places) > 1:
            assert sum(place.param.numel() for place in storage.places) * itemsize <= bucket_bytes
        assert all(bucket.numel * itemsize <= limit + padding for bucket in storage.buckets)


def test_a_parameter_just_as_large_as_a_bucket_and_one_element_more():
    """1024 float32 in buckets of 4096 bytes, as in the edge that loses a gradient elsewhere."""
    for numel, together in ((1023, [2, 1]), (1024, [2, 1]), (1025, [1, 1, 1])):
        params = [parameter(numel) for _ in range(3)]
        assert [len(s.places) for s in plan(params, 2, 2 * 4096)] == together, numel
        assert [len(s.places) for s in plan(params, 2, 1)] == [1, 1, 1]
        assert [len(s.places) for s in plan(params, 2, 1 << 40)] == [3]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_huge_parameter_is_cut_into_buckets_of_about_the_size_asked(ranks):
    param = parameter(10 * SMALLEST_CUT)
    (storage,) = plan([param], ranks, 4 * SMALLEST_CUT)
    assert len(storage.buckets) == 10
    assert all(abs(bucket.numel - SMALLEST_CUT) <= ranks * 16 for bucket in storage.buckets)
    (storage,) = plan([param], ranks, 1)
    assert len(storage.buckets) == 40, "no bucket is much smaller than a mebibyte for the sake of a cut"


def test_no_bucket_holds_padding_alone():
    """Parts are rounded up to a cache line on each of many ranks, so that the elements are used up before the cuts are."""
    param = parameter(64 * SMALLEST_CUT)
    (storage,) = plan([param], 3000, 1)
    assert storage.buckets[-1].start < param.numel() <= storage.numel
    assert storage.numel - param.numel() < storage.buckets[-1].numel


def test_storages_come_in_the_order_in_which_gradients_become_complete():
    """From the last parameter to the first; a storage of another group comes when its last one is ready."""
    params = [parameter(100) for _ in range(6)]
    groups = [params[0::2], params[1::2]]
    plans = plan(params, 2, 400, groups=groups)
    assert names(plans, params) == [[5], [4], [3], [2], [1], [0]]
    plans = plan(params, 2, 1 << 20, groups=groups)
    assert [s.group for s in plans] == [1, 0]
    assert names(plans, params) == [[5, 3, 1], [4, 2, 0]]


def test_what_does_not_train_and_what_has_no_elements_takes_no_place():
    assert plan([parameter(5, trains=False), parameter(0)], 2, 100) == []
    frozen, empty, trained = parameter(5, trains=False), parameter(0), parameter(7)
    (storage,) = plan([frozen, empty, trained], 2, 1000)
    assert [place.param for place in storage.places] == [trained]


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=14)


@given(shapes, st.integers(1, 5), st.integers(1, 400), st.integers(2, 4))
def test_whole_parameters_are_dealt_out_alike_on_all_tensor_parallel_ranks(logical, ranks, bucket_bytes, tp):
    """Whatever a tensor-parallel rank holds of them: an optimizer that compares notes over tp needs the same on all."""
    owners = []
    for rank in range(tp):
        params = []
        for rows, columns in logical:
            own = [index for index in range(rows) if index % tp == rank]  # some hold none where rows are few
            ranges = [Range(index, index + 1) for index in own] or [Range(0, 0)]
            params.append(parameter(len(own) * columns))
            set_layout(params[-1], TensorLayout.split((rows, columns), 0, ranges, "tp"))
        plans = plan(params, ranks, bucket_bytes, whole=True)
        assert_plan(plans, [params], ranks, 4)
        owners.append(names(plans, params))
    assert all(found == owners[0] for found in owners)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 10_000))
def test_whole_parameters_are_dealt_out_evenly(numels, ranks, bucket_bytes):
    """No rank has more than the least loaded one and the largest parameter: what greedy dealing promises."""
    params = [parameter(numel) for numel in numels]
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for param, pieces in owned_by(plan(params, ranks, bucket_bytes, whole=True), ranks).items():
        loads[pieces[0][2]] += param.numel()
    assert max(loads.values()) - min(loads.values()) <= max(numels)


def test_the_logical_size_decides_where_ranks_hold_different_amounts():
    big, small = parameter(4), parameter(9)
    set_layout(big, TensorLayout.split((100, 1), 0, [Range(0, 4)], "tp"))
    assert prod(big.tensor_layout.shape) == 100
    plans = plan([small, big], 2, 1 << 20, whole=True)
    assert owned_by(plans, 2)[big][0][2] == 0, "the larger one is dealt first"
