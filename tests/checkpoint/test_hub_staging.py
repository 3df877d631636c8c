"""How a saved folder takes the place of an earlier one, step by step. One process, no process group."""

import os
import re
import shutil

import pytest
import torch
from hub_models import build

from colonnade.checkpoint import load_model, save_model, staged_folder
from colonnade.checkpoint.hub_folder import WEIGHT_FILES, is_model_folder
from colonnade.checkpoint.staged_folder import StagedFolder
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError, ConfigError


def model_with(value):
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def save(value, path, **options):
    save_model(model_with(value), path, ParallelMesh(), **options)


def load(path):
    model = model_with(-1.0)
    load_model(model, path, ParallelMesh())
    return model.weight[0, 0].item()


def names(folder):
    return sorted(os.listdir(folder))


def test_a_new_folder_and_its_parents_are_made(tmp_path):
    save(1.0, tmp_path / "a" / "b")
    assert load(tmp_path / "a" / "b") == 1.0 and names(tmp_path / "a") == ["b"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    save(1.0, tmp_path / "model")
    assert load(tmp_path / "model") == 1.0


def test_files_that_are_not_part_of_a_save_are_kept_and_old_weights_are_not(tmp_path):
    model = torch.nn.Sequential(model_with(1.0), model_with(2.0))
    save_model(model, tmp_path / "model", ParallelMesh(), size_per_shard=16)
    assert "model-00002-of-00002.safetensors" in names(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("mine")
    (tmp_path / "model" / "logs").mkdir()
    (tmp_path / "model" / "logs" / "a.txt").write_text("too")
    os.symlink("README.md", tmp_path / "model" / "link")
    (tmp_path / "model").chmod(0o750)
    save(3.0, tmp_path / "model")
    assert names(tmp_path / "model") == ["README.md", "link", "logs", "model.safetensors"]
    assert (tmp_path / "model" / "logs" / "a.txt").read_text() == "too"
    assert (tmp_path / "model" / "link").is_symlink() and (tmp_path / "model" / "link").read_text() == "mine"
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o750
    assert load(tmp_path / "model") == 3.0 and names(tmp_path) == ["model"]


def test_files_are_kept_where_hard_links_do_not_exist(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    save(1.0, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("mine")
    monkeypatch.setattr(os, "link", no_links)
    save(2.0, tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text() == "mine" and load(tmp_path / "model") == 2.0


def test_saved_files_are_readable_like_any_other_file(tmp_path):
    save(1.0, tmp_path / "model")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_symbolic_link_stays_and_the_folder_behind_it_is_replaced(tmp_path):
    save(1.0, tmp_path / "step-1")
    os.symlink("step-1", tmp_path / "latest")
    save(2.0, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink() and load(tmp_path / "latest") == load(tmp_path / "step-1") == 2.0


def refuse(path, text, value=9.0):
    with pytest.raises(CheckpointError, match=text) as caught:
        save(value, path)
    return str(caught.value)


def test_a_folder_of_something_else_is_refused_and_stays(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    message = refuse(tmp_path / "thesis", "does not hold a checkpoint of this kind")
    assert "chapter.tex" in message and str(tmp_path / "thesis" / "model") in message
    assert names(tmp_path) == ["thesis"] and names(tmp_path / "thesis") == ["chapter.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "model").write_text("a file")
    refuse(tmp_path / "model", "is a file")
    refuse(tmp_path / "model" / "below", "Error")
    assert (tmp_path / "model").read_text() == "a file"


def test_the_working_folder_and_mount_points_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse(".", "working folder")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "disk"))
    refuse(tmp_path / "disk", "mount point")
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [0, -5, "five", "5XB", True, ""])
def test_sizes_that_are_none(size, tmp_path):
    with pytest.raises(ConfigError, match="size_per_shard"):
        save(1.0, tmp_path / "model", size_per_shard=size)
    assert names(tmp_path) == []


class Died(BaseException):
    """Stands for a kill: nothing is tidied up after it."""


def die_at_rename(count, path, value):
    """Save, and stop for good just before the rename number `count` of the commit."""
    real, done = os.rename, []

    def rename(old, new):
        if len(done) == count:
            raise Died
        done.append((old, new))
        real(old, new)

    folder = StagedFolder(path, is_model_folder, WEIGHT_FILES)
    staging = folder.open()
    save(value, staging / "inner")
    shutil.move(staging / "inner" / "model.safetensors", staging)
    (staging / "inner").rmdir()
    os.rename = rename
    try:
        with pytest.raises(Died):
            folder.commit()
    finally:
        os.rename = real


@pytest.mark.parametrize(("count", "found"), [(0, 1.0), (1, 1.0), (2, 2.0)])
def test_dying_between_the_renames_leaves_one_whole_checkpoint(count, found, tmp_path, caplog):
    path = tmp_path / "model"
    save(1.0, path)
    (path / "README.md").write_text("mine")
    die_at_rename(count, path, 2.0)
    assert load(path) == found
    assert ("interrupted save" in caplog.text) == (not path.exists())
    save(3.0, path)
    assert load(path) == 3.0 and names(path) == ["README.md", "model.safetensors"] and names(tmp_path) == ["model"]


def test_the_earlier_checkpoint_is_used_where_the_new_one_is_lost(tmp_path, caplog):
    path = tmp_path / "model"
    save(1.0, path)
    die_at_rename(2, path, 2.0)
    shutil.rmtree(tmp_path / ".model.finished")
    assert load(path) == 1.0 and ".model.previous" in caplog.text
    path.mkdir()  # what a script does that makes its output folder first
    assert load(path) == 1.0
    save(3.0, path)
    assert load(path) == 3.0 and names(tmp_path) == ["model"]


def test_a_refused_save_does_not_touch_what_an_interrupted_one_left(tmp_path):
    path = tmp_path / "model"
    save(1.0, path)
    die_at_rename(2, path, 2.0)
    before = names(tmp_path)
    model = model_with(3.0)
    model.get_extra_state = lambda: {"not": "a tensor"}
    model.__class__ = type("Stateful", (torch.nn.Linear,), {"get_extra_state": lambda self: {"not": "a tensor"}})
    with pytest.raises(CheckpointError, match="extra state"):
        save_model(model, path, ParallelMesh())
    assert names(tmp_path) == before and load(path) == 2.0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_rename_that_fails_is_undone(count, tmp_path, monkeypatch):
    path = tmp_path / "model"
    save(1.0, path)
    real, calls = os.rename, []

    def rename(old, new):
        calls.append((old, new))
        if len(calls) == count + 1:
            raise OSError(5, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    refuse(path, "Input/output error", value=2.0)
    monkeypatch.setattr(os, "rename", real)
    assert load(path) == 1.0 and names(tmp_path) == ["model"]


def test_unfinished_saves_are_never_loaded_and_those_of_live_processes_stay(tmp_path):
    path = tmp_path / "model"
    save(1.0, tmp_path / "other")
    host = staged_folder.socket.gethostname()
    dead, alive = (tmp_path / f".model.saving-{host}-{pid}-0123abcd" for pid in (2**22 + 1, os.getppid()))
    for folder in (dead, alive):
        shutil.copytree(tmp_path / "other", folder)
    with pytest.raises(CheckpointError, match=re.escape(dead.name) + ": a save that did not complete"):
        load(path)
    save(2.0, path)
    assert load(path) == 2.0 and alive.exists() and not dead.exists()


def test_a_transformers_folder_is_replaced_and_its_tokenizer_kept(tmp_path):
    build("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_model(build("tied"), tmp_path / "model", ParallelMesh())
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert names(tmp_path / "model") == expected
