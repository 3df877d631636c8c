"""What is decided before anything is sent or written. No ranks, no files."""

import pytest
import torch

from colonnade.checkpoint.hub_plan import Held, covers, parse_size, plan_files, plan_gathers
from colonnade.errors import CheckpointError
from colonnade.model.layout import Box, TensorLayout, shard_ranges


def held(name, layout, *others, dtype=torch.float32, is_parameter=True):
    return Held((name, *others), dtype, layout, is_parameter)


def half(rank, shape=(6, 4)):
    return TensorLayout.split(shape, 0, shard_ranges(shape[0], rank, 2), "tp")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (20, 20),
        ("20", 20),
        ("20KB", 20_000),
        ("5GB", 5 * 10**9),
        ("1.5 MB", 1_500_000),
        ("2kib", 2048),
        ("1tb", 10**12),
    ],
)
def test_sizes(size, nbytes):
    assert parse_size(size) == nbytes


def test_boxes_cover_a_tensor_or_leave_a_hole():
    def box(logical, extent):
        return Box(logical, logical, extent)

    assert covers((4, 4), [box((0, 0), (2, 4)), box((2, 0), (2, 3)), box((2, 3), (2, 1))])
    assert not covers((4, 4), [box((0, 0), (2, 4)), box((2, 0), (2, 3))])
    assert covers((4,), [box((0,), (3,)), box((1,), (3,))])  # overlapping
    assert not covers((4,), [box((0,), (3,)), box((0,), (2,))])  # enough entries, not the right ones
    assert covers((), [box((), ())]) and not covers((), []) and covers((0, 3), [])


def test_ranks_that_bring_no_new_box_send_nothing():
    whole = TensorLayout.whole((6, 4))
    (gather,) = plan_gathers([[held("w", half(0))], [held("w", half(1))], [held("w", half(1))], [held("w", half(0))]])
    assert [source.rank for source in gather.sources] == [0, 1]
    (gather,) = plan_gathers([[held("w", whole)], [held("w", whole)]])
    assert [source.rank for source in gather.sources] == [0]


def test_tied_on_any_rank_is_tied():
    whole = TensorLayout.whole((2,))
    gathers = plan_gathers([[held("a", whole), held("c", whole)], [held("b", whole, "c")], [held("a", whole, "b")]])
    assert [set(gather.names) for gather in gathers] == [{"a", "b", "c"}]


def test_tensors_that_do_not_add_up_are_named():
    with pytest.raises(CheckpointError, match=r"do not hold all of w \(6, 4\)"):
        plan_gathers([[held("w", half(0))], [held("w", half(0))]])
    with pytest.raises(CheckpointError, match="float16"):
        plan_gathers([[held("w", half(0))], [held("w", half(1), dtype=torch.float16)]])
    with pytest.raises(CheckpointError, match=r"\(8, 4\) on rank 1"):
        plan_gathers([[held("w", half(0))], [held("w", half(1, (8, 4)))]])


def plan(sizes, limit, split_into=1):
    gathers = plan_gathers([[held(name, TensorLayout.whole((n,)), dtype=torch.uint8) for name, n in sizes.items()]])

    def stored(gather):
        name = gather.names[0]
        keys = [f"{name}{index}" for index in range(split_into)] if split_into > 1 else [name]
        return dict.fromkeys(keys, gather.nbytes // split_into)

    return plan_files(gathers, stored, limit)


def test_files_are_filled_in_order():
    made = plan({"a": 5, "b": 5, "c": 30, "d": 4, "e": 4}, limit=10)
    assert [file.keys for file in made.files] == [("a", "b"), ("c",), ("d", "e")]
    assert [file.name for file in made.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert (made.total_size, made.total_parameters) == (48, 48)


def test_one_file_has_no_number():
    assert [file.name for file in plan({"a": 5, "b": 6}, limit=None).files] == ["model.safetensors"]
    assert [file.name for file in plan({"a": 5, "b": 5}, limit=10).files] == ["model.safetensors"]


def test_keys_of_one_tensor_may_spill_into_the_next_file():
    made = plan({"a": 12, "b": 12}, limit=10, split_into=3)
    assert [file.keys for file in made.files] == [("a0", "a1"), ("a2", "b0"), ("b1", "b2")]
    assert [[gather.names for gather in file.gathers] for file in made.files] == [[("a",)], [("b",)], []]


def test_two_tensors_under_one_key_are_refused():
    gathers = plan_gathers([[held("a", TensorLayout.whole((1,))), held("b", TensorLayout.whole((1,)))]])
    with pytest.raises(CheckpointError, match="a and b would both be stored as same"):
        plan_files(gathers, lambda gather: {"same": 4}, None)
