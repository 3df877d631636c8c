"""What a failing rank does to the others, and what a dying one leaves behind."""

import os
import resource
import time

import pytest
import safetensors.torch
import torch
from hub_models import assert_holds_its_boxes, build, shard

from colonnade.checkpoint import load_model, save_model
from colonnade.checkpoint.tensor_file import TensorFile
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError
from colonnade.model.layout import Range, TensorLayout, set_layout
from colonnade.testing.ranks import RankFailure, run_on_ranks

QUICK_S = 20.0  # the group's own time-out is minutes


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def leftovers(folder):
    return [entry.name for entry in folder.parent.iterdir() if entry.name.startswith(f".{folder.name}.")]


class FailingWriter:
    """Replaces the safetensors writer on rank 0; its second file fails."""

    def __init__(self, mesh, fail):
        self.fail, self.active, self.calls = fail, mesh.world.rank == 0, 0
        self.original = safetensors.torch.save_file

    def __enter__(self):
        safetensors.torch.save_file = self.write

    def __exit__(self, *error):
        safetensors.torch.save_file = self.original

    def write(self, tensors, filename, metadata=None):
        self.calls += 1
        if self.active and self.calls == 2:
            self.fail()
        self.original(tensors, filename, metadata=metadata)


def disk_full():
    raise OSError(28, "No space left on device")


def expect_failure(model, path, mesh, reason, **options):
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=reason) as caught:
        save_model(model, path, mesh, size_per_shard="20KB", **options)
    assert time.monotonic() - start < QUICK_S
    return str(caught.value)


def fail_in_all_ways_then_save(axes, folder):
    mesh = ParallelMesh(**axes)
    model = shard(build("llama"), mesh)
    save_model(model, folder / "model", mesh, size_per_shard="20KB")
    good = contents(folder / "model")
    messages = [expect_failure(model, folder / "file" / "model", mesh, "file")]
    with FailingWriter(mesh, disk_full):
        messages.append(expect_failure(model, folder / "model", mesh, "No space left on device"))
    assert contents(folder / "model") == good and leftovers(folder / "model") == []
    assert_holds_its_boxes(model, build("llama"))
    save_model(model, folder / "model", mesh, size_per_shard="20KB")
    save_model(model, folder / "new", mesh, size_per_shard="20KB")
    assert contents(folder / "model") == good and contents(folder / "new") == good
    return messages


@pytest.mark.parametrize(("axes", "world"), [({"tp": 2}, 2), ({"tp": 2}, 4), ({}, 2)])
def test_a_failing_writer_ends_the_save_on_every_rank(axes, world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    reports = run_on_ranks(world, fail_in_all_ways_then_save, axes, tmp_path, timeout_s=60)
    for blocked, full in reports:  # the text of every rank carries the reason of rank 0
        assert "rank 0" in blocked and str(tmp_path / "file") in blocked
        assert "rank 0  OSError: [Errno 28] No space left on device" in full and "unchanged" in full
    assert (tmp_path / "file").read_text() == "in the way"


def save_under_a_file_size_limit(folder):
    """A write that really fails, in the operating system."""
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    save_model(model, folder, mesh, size_per_shard="20KB")
    good = contents(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    try:
        return expect_failure(model, folder, mesh, "the model was not saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert contents(folder) == good


def test_a_write_that_the_system_refuses(tmp_path):
    messages = run_on_ranks(2, save_under_a_file_size_limit, tmp_path / "model")
    assert messages[0] == messages[1] and "too large" in messages[0].lower()


def fail_on_the_other_rank(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    weight = model.model.layers[1].self_attn.q_proj.weight
    if mesh.world.rank == 1:
        set_layout(weight, TensorLayout.split((64, 32), 0, [Range(0, 32)], "tp"))  # of another model
    wrong_shape = expect_failure(model, folder, mesh, "q_proj")
    if mesh.world.rank == 1:
        set_layout(
            weight,
            TensorLayout.split((32, 32), 0, [Range(0, 16)], "tp").named("model.layers.1.self_attn.q_proj.weight"),
        )
    twice_the_same = expect_failure(model, folder, mesh, "do not hold all of")
    if mesh.world.rank == 1:
        weight.data = weight.data[:3]
    too_small = expect_failure(model, folder, mesh, "local tensor of shape")
    return wrong_shape, twice_the_same, too_small


def test_a_layout_that_does_not_add_up_is_refused_before_anything_is_written(tmp_path):
    first, second = run_on_ranks(2, fail_on_the_other_rank, tmp_path / "model")
    assert first == second and "rank 1" in first[2]
    assert list(tmp_path.iterdir()) == []


def fail_while_sending(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    if mesh.world.rank == 1:
        import colonnade.checkpoint.hub_save as hub_save

        original, first = hub_save.current_device, iter([True])

        def fail_once():
            if next(first, False):
                raise MemoryError("no room for a copy")
            return original()

        hub_save.current_device = fail_once
    try:
        return expect_failure(model, folder, mesh, "no room for a copy")
    finally:
        if mesh.world.rank == 1:
            hub_save.current_device = original


def test_a_sender_that_fails_does_not_leave_the_writer_waiting(tmp_path):
    messages = run_on_ranks(2, fail_while_sending, tmp_path / "model")
    assert all("rank 1  MemoryError: no room for a copy" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


def die_in_the_second_file(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)  # the second save has other values
    with FailingWriter(mesh, lambda: os._exit(9)):
        save_model(model, folder, mesh, size_per_shard="20KB")


def save_first(folder):
    mesh = ParallelMesh(tp=2)
    save_model(shard(build("llama"), mesh), folder, mesh, size_per_shard="20KB")


def load_first_and_save_again(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_model(model, folder, mesh)
    assert_holds_its_boxes(model, build("llama"))
    save_model(model, folder, mesh, size_per_shard="20KB")


def test_killed_while_saving_leaves_the_earlier_checkpoint_and_the_next_save_tidies_up(tmp_path):
    run_on_ranks(2, save_first, tmp_path / "model")
    good = contents(tmp_path / "model")
    with pytest.raises(RankFailure):
        run_on_ranks(2, die_in_the_second_file, tmp_path / "model")
    assert contents(tmp_path / "model") == good
    assert [name for name in leftovers(tmp_path / "model") if ".saving-" in name]
    run_on_ranks(2, load_first_and_save_again, tmp_path / "model")
    assert contents(tmp_path / "model") == good and leftovers(tmp_path / "model") == []


def fail_in_the_middle_of_a_load(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    original, calls = TensorFile._fill, []

    def read(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return original(self, *args)

    if mesh.world.rank == 1:
        TensorFile._fill = read
    try:
        with pytest.raises(CheckpointError) as caught:
            load_model(model, folder, mesh)
    finally:
        TensorFile._fill = original
    load_model(model, folder, mesh)
    assert_holds_its_boxes(model, build("llama"))
    return str(caught.value)


def test_a_read_error_on_one_rank_is_raised_on_all_with_the_file(tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    first, second = run_on_ranks(2, fail_in_the_middle_of_a_load, tmp_path)
    assert first == second
    assert "rank 1" in first and "Input/output error" in first and ".safetensors cannot be read" in first
    assert "load again before using it" in first


def interrupt_the_writer(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)

    def interrupt():
        raise KeyboardInterrupt

    error = KeyboardInterrupt if mesh.world.rank == 0 else CheckpointError
    with FailingWriter(mesh, interrupt), pytest.raises(error) as caught:
        save_model(model, folder, mesh, size_per_shard="20KB")
    return str(caught.value)


def test_an_interrupt_goes_on_where_it_came_and_ends_the_others(tmp_path):
    _, other = run_on_ranks(2, interrupt_the_writer, tmp_path / "model")
    assert "rank 0  KeyboardInterrupt" in other
    assert list(tmp_path.iterdir()) == []
