"""HANG-1: where saving fails on rank 0, every rank raises its reason at once, and the same objects can be saved again."""

from time import monotonic
from unittest.mock import patch

import pytest
import safetensors.torch
from field_cases import Boosted, adamw, whole_batch

from colonnade.errors import CheckpointError
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

SECONDS = 30


def save(run, path):
    run.booster.save_model(run.model, path, size_per_shard="20KB")


def failure(run, path):
    """(message, seconds) of a save that must fail."""
    start = monotonic()
    with pytest.raises(CheckpointError) as caught:
        save(run, path)
    return str(caught.value), monotonic() - start


def fail_twice_then_save(folder):
    run = Boosted("tp2", tiny_model("LL"), adamw)
    run.step(whole_batch())
    under_a_file = failure(run, folder / "file" / "model")
    calls, write = [], safetensors.torch.save_file

    def fails_on_second_file(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk-full-17")
        return write(*args, **kwargs)

    if run.plugin.mesh.world.rank == 0:
        with patch.object(safetensors.torch, "save_file", fails_on_second_file):
            second_file = failure(run, folder / "model")
    else:
        second_file = failure(run, folder / "model")
    left = sorted(path.name for path in folder.iterdir())
    save(run, folder / "model")
    weights = run.weights()
    again = Boosted("tp2", tiny_model("LL", noise_seed=2), adamw)
    again.booster.load_model(again.model, folder / "model")
    return under_a_file, second_file, left, weights, again.weights()


def test_a_failure_on_rank_0_is_raised_by_every_rank(tmp_path):
    (tmp_path / "file").write_text("an ordinary file")
    answers = run_on_ranks(2, fail_twice_then_save, tmp_path)
    assert answers[0][2] == ["file"]  # the writer tidies up before it raises
    for under_a_file, second_file, _, weights, loaded in answers:
        for message, seconds in (under_a_file, second_file):
            assert "rank 0" in message
            assert seconds < SECONDS
        assert str(tmp_path / "file") in under_a_file[0]
        assert "disk-full-17" in second_file[0]
        assert all((weights[name] == loaded[name]).all() for name in weights)
