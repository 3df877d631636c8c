"""Training checkpoints: what is refused and how, precisions, random numbers, schedules, parts, and saving in the background."""

import copy
import json
import random
import threading
from pathlib import Path

import numpy
import pytest
import torch
from resume_runs import BEFORE, LAYOUTS, Run, build, same_bits, weights
from torch.optim import SGD, AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colonnade.checkpoint import manifest as checkpoint_manifest
from colonnade.checkpoint.root import steps_in
from colonnade.checkpoint.tensor_file import TensorFile, write_tensors
from colonnade.errors import CheckpointError, ConfigError, UsageError
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.parity_report import relative
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

CASE = "llama, tied"


# What is refused. Every rank says the same, and nothing has changed.


def save(layout, folder):
    run = Run(layout, CASE)
    run.train(range(2))
    run.save(folder, extra={"note": "x"})


def refused(layout, folder, words, change=None, case=CASE, **options):
    run = Run(layout, case, seed=9)
    before = weights(run), copy.deepcopy(run.optimizer.inner.state_dict()["param_groups"])
    if change is not None:
        change(run)
    with pytest.raises(CheckpointError) as caught:
        run.load(folder, **options)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert "nothing has been loaded" in text
    same_bits(weights(run), before[0])
    assert not run.optimizer.state or layout.startswith("zero")
    return text


def wrong_vocabulary(layout, folder, words):
    from resume_runs import CASES

    CASES["larger"] = ("LT", {"num_hidden_layers": 2, "intermediate_size": 80}, CASES[CASE][2])
    return refused(layout, folder, words, case="larger")


def other_optimizer(layout, folder):
    _, plugin_class, options = LAYOUTS[layout]
    booster, model = Booster(plugin=plugin_class(**{"precision": "fp32"} | options)), build(CASE)
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"(?s)state of another optimizer.*expected\s+SGD\s+found\s+AdamW"):
        booster.load(folder, model, optimizer)
    model = build(CASE)
    booster = Booster(plugin=plugin_class(**{"precision": "fp32"} | options))
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"(?s)other parameter groups.*expected\s+1 groups\s+found\s+2"):
        booster.load(folder, model, optimizer)
    model = build(CASE)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (False, True)]
    booster = Booster(plugin=plugin_class(**{"precision": "fp32"} | options))
    model, optimizer, *_ = booster.boost(model, AdamW([{"params": g} for g in groups], lr=0.1))
    with pytest.raises(CheckpointError, match=r"(?s)parameter group 0 of .* holds other parameters.*only here.*norm"):
        booster.load(folder, model, optimizer)


@pytest.mark.parametrize("layout", ["tp 2", "zero 2", "pp 2"])
def test_a_checkpoint_of_another_training_is_refused(layout, tmp_path):
    run_on_ranks(2, save, layout, str(tmp_path))
    found = run_on_ranks(
        2, wrong_vocabulary, layout, str(tmp_path), ["does not fit the model", "shape (80, 32)", "(64, 32)"]
    )
    assert found[0] == found[1]
    found = run_on_ranks(2, refused, layout, str(tmp_path), ["does not fit the model", "missing", "h.0.ln_1", "unexpected"], case="gpt-2")  # fmt: skip
    assert found[0] == found[1]
    run_on_ranks(2, other_optimizer, layout, str(tmp_path))


def first_file(folder):
    return sorted((Path(folder) / "step-00000003").glob("rank-*"))[1]


def test_damaged_files_are_named_on_every_rank(tmp_path):
    run_on_ranks(2, save, "tp 2", str(tmp_path))
    step, file = tmp_path / "step-00000003", first_file(tmp_path)
    good, manifest = file.read_bytes(), (step / "checkpoint.json").read_text()

    def all_say(*words, **options):
        for text in run_on_ranks(2, refused, "tp 2", str(tmp_path), words, **options):
            assert text

    file.write_bytes(good[:-100])
    all_say(file.name, "is damaged", f"expected  {len(good)} bytes", f"found     {len(good) - 100} bytes")
    file.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    all_say(file.name, "is damaged", "check sum", verify=True)
    file.unlink()
    all_say(file.name, "cannot be read", "No such file")
    file.write_bytes(good)
    (step / "checkpoint.json").write_text(manifest.replace('"step":3', '"step":4'))
    all_say("checkpoint.json", "damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_manifest, "VERSION", 7)
        checkpoint_manifest.Manifest(3, {}, {}, {}, ()).write(step)
    all_say("newer format", "version 7", "a newer colonnade")
    (step / "checkpoint.json").write_text(manifest[:-50])
    all_say("checkpoint.json", "no manifest of a training checkpoint")
    (step / "checkpoint.json").write_text(manifest)
    (step / "state.pt").write_bytes(b"not what it was")
    all_say("state.pt", "is damaged")


def mixture(folder):
    run = Run("tp 2", CASE, seed=9)
    with pytest.raises(CheckpointError, match=r"(?s)not what the manifest says.*expected\s+F32 of shape.*found\s+BF16"):
        run.load(folder)


def test_a_file_with_other_tensors_than_the_manifest_says_is_named(tmp_path):
    run_on_ranks(2, save, "tp 2", str(tmp_path))
    file = first_file(tmp_path)
    with TensorFile(file) as opened:
        tensors = {k: torch.empty(e.shape, dtype=e.dtype) for k, e in opened.entries.items()}
        for key, tensor in tensors.items():
            opened.read(key, (0,) * tensor.dim(), tensor)
        about = opened.about
    narrow = {k: t.bfloat16() if "model/" in k else t for k, t in tensors.items()}
    made = write_tensors(narrow, file, {"chunks": about["chunks"]})
    path = tmp_path / "step-00000003" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = [[n, made.nbytes, made.digest] if n == file.name else [n, *r] for n, *r in manifest["files"]]
    manifest.pop("crc")
    path.write_text(checkpoint_manifest._text(manifest | {"crc": checkpoint_manifest._crc(manifest)}))
    run_on_ranks(2, mixture, str(tmp_path))


def arguments(folder):
    run = Run("dp 2", CASE)
    for options, words in (
        ({"step": -1}, "step=-1"), ({"step": True}, "step=True"), ({"step": 1.5}, "step=1.5"), ({"keep_last": 0}, "keep_last=0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            run.booster.save(folder, run.model, run.optimizer, **options)
    with pytest.raises(CheckpointError, match=r"(?s)not saved.*dataloader was given as a list"):
        run.booster.save(folder, run.model, run.optimizer, None, [1, 2])
    with pytest.raises(CheckpointError, match=r"(?s)the state of extra cannot be saved.*runs no code"):
        run.booster.save(folder, run.model, run.optimizer, extra={"f": threading.Thread})
    with pytest.raises(UsageError, match="boost"):
        run.booster.save(folder, build(CASE), run.optimizer)
    assert not Path(folder).exists() or not any(Path(folder).glob("step-*"))
    run.booster.save(folder, run.model)
    with pytest.raises(CheckpointError, match=r"(?s)has no optimizer, lr_scheduler.*holds\s+model, random"):
        run.load(folder)
    with pytest.raises(CheckpointError, match=r"(?s)is itself a checkpoint of one step.*the folder it lies in"):
        run.booster.save(f"{folder}/step-00000000", run.model)


def test_arguments_that_mean_nothing_are_refused(tmp_path):
    run_on_ranks(2, arguments, str(tmp_path / "run"))


# What goes on.


def precise(source, folder):
    run = Run(source, CASE, precision="bf16")
    losses = run.train(range(5))
    again = Run(source, CASE, precision="bf16")
    again.train(range(BEFORE))
    again.save(folder)
    return losses


def in_other_precision(layout, folder, precision):
    options = {"loss_scale": LossScale(initial=64.0)} if precision == "fp16" else {}
    run = Run(layout, CASE, seed=9, precision=precision, **options)
    run.load(folder)
    return run.train(range(BEFORE, 5))


@pytest.mark.parametrize("source, target", [("zero 2", "tp 2"), ("tp 2", "zero 2"), ("dp 2", "pp 2"), ("pp 2", "dp 2")])
def test_what_16_bits_have_saved_goes_on_in_any_precision(tmp_path, source, target):
    wanted = run_on_ranks(2, precise, source, str(tmp_path))[0][BEFORE:]
    for precision in ("bf16", "fp32", "fp16"):
        for found in run_on_ranks(2, in_other_precision, target, str(tmp_path), precision):
            assert max(relative(a, b) for a, b in zip(found, wanted)) < 2e-2, precision
    same = run_on_ranks(2, in_other_precision, source, str(tmp_path), "bf16")
    assert all(found == wanted for found in same)  # the same layout: the same bits


def scaled(folder):
    options = {"precision": "fp16", "loss_scale": LossScale(initial=256.0, growth_interval=2)}
    run = Run("zero 2", CASE, **options)
    run.train(range(3))
    scale = run.optimizer.loss_scale
    run.save(folder)
    again = Run("zero 2", CASE, seed=9, **options)
    again.load(folder)
    assert again.optimizer.loss_scale == scale == 512.0
    same_bits(weights(again), weights(run))
    return run.train([3, 4]) == again.train([3, 4]) and run.optimizer.loss_scale == again.optimizer.loss_scale


def test_the_loss_scale_goes_on(tmp_path):
    assert all(run_on_ranks(2, scaled, str(tmp_path)))


def drawn(layout, folder):
    torch.manual_seed(3)
    run = Run(layout, CASE)
    torch.rand(5), random.random(), numpy.random.rand()
    run.save(folder)
    wanted = torch.rand(4), random.random(), numpy.random.rand()
    torch.manual_seed(99), random.seed(99), numpy.random.seed(99)
    run.load(folder)
    found = torch.rand(4), random.random(), numpy.random.rand()
    assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:]
    return wanted[0]


def drawn_elsewhere(layout, folder):
    run = Run(layout, CASE)
    run.load(folder)
    return torch.rand(4)


def test_random_numbers_go_on(tmp_path):
    first, second = run_on_ranks(2, drawn, "dp 2", str(tmp_path))
    assert not torch.equal(first, second)
    of_three = run_on_ranks(3, drawn_elsewhere, "dp 3", str(tmp_path))
    assert torch.equal(of_three[0], first) and len({tuple(t.tolist()) for t in of_three}) == 3
    again = run_on_ranks(3, drawn_elsewhere, "dp 3", str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(of_three, again))
    assert torch.equal(*run_on_ranks(2, drawn_elsewhere, "tp 2", str(tmp_path)))  # they draw alike


def parts(folder):
    run = Run("zero 2", CASE)
    run.train(range(2))
    run.booster.save_model(run.model, f"{folder}/model")
    run.booster.save_optimizer(run.optimizer, f"{folder}/optimizer")
    run.booster.save_lr_scheduler(run.scheduler, f"{folder}/schedule")
    wanted = run.train([2, 3])
    again = Run("tp 2", CASE, seed=9)
    again.booster.load_model(again.model, f"{folder}/model")
    again.booster.load_optimizer(again.optimizer, f"{folder}/optimizer")
    again.booster.load_lr_scheduler(again.scheduler, f"{folder}/schedule")
    found = again.train([2, 3])
    assert max(relative(a, b) for a, b in zip(found, wanted)) <= 1e-5
    run.save(f"{folder}/all", step=5)
    last = Run("dp 2", CASE, seed=9)
    last.booster.load_optimizer(last.optimizer, f"{folder}/all")  # from a whole checkpoint
    assert last.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_parts_are_saved_and_loaded_alone(tmp_path):
    run_on_ranks(2, parts, str(tmp_path))


def kept(folder):
    run = Run("dp 2", CASE)
    for step in (1, 2, 3, 10, 4):
        run.save(folder, step=step, keep_last=3)
    extra = {"old": 1}
    run.save(folder, step=4, keep_last=3, extra={"new": [1, (2, 3)], "t": torch.ones(2)})  # again
    assert run.booster.load(folder, run.model, extra=extra) == 4
    assert extra["new"] == [1, (2, 3)] and torch.equal(extra["t"], torch.ones(2)) and "old" not in extra
    assert run.booster.load(f"{folder}/step-00000003", run.model) == 3


def test_older_checkpoints_are_removed_and_any_can_be_asked_for(tmp_path):
    run_on_ranks(2, kept, str(tmp_path))
    assert list(steps_in(tmp_path)) == [3, 4, 10]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def partly(folder):
    """A model with one layer more takes what fits."""
    small, large = (tiny_model("LL", num_hidden_layers=n, noise_seed=n) for n in (2, 3))
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
    boosted, *_ = booster.boost(small)
    booster.save(folder, boosted, step=1)
    again, *_ = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2)).boost(large)
    before = large.model.layers[2].mlp.up_proj.weight.detach().clone()
    booster.load(folder, again, strict=False)
    assert torch.equal(large.model.layers[2].mlp.up_proj.weight, before)
    assert torch.equal(large.model.layers[1].mlp.up_proj.weight, small.model.layers[1].mlp.up_proj.weight)


def test_not_strict_takes_what_fits(tmp_path):
    run_on_ranks(2, partly, str(tmp_path))


def other_world(folder):
    """Trained data, too: items of the loader go on at the very row on another number of ranks (DATA-1)."""
    plugin = TorchDDPPlugin(precision="fp32") if torch.distributed.get_world_size() == 2 else LowLevelZeroPlugin()
    booster, model = Booster(plugin=plugin), torch.nn.Linear(2, 2)
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.1))
    loader = plugin.prepare_dataloader(list(range(24)), batch_size=3, shuffle=True, seed=5)
    return booster, model, optimizer, loader


def interrupted(folder):
    booster, model, optimizer, loader = other_world(folder)
    seen = [batch.tolist() for batch in loader]
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 1:
            booster.save(folder, model, optimizer, None, loader, step=1)
            break
    rest = [batch.tolist() for _ in range(3) for batch in loader]
    return seen, rest


def gone_on(folder):
    booster, model, optimizer, loader = other_world(folder)
    torch.manual_seed(12345)
    booster.load(folder, model, optimizer, None, loader)
    return [batch.tolist() for _ in range(3) for batch in loader]


def test_the_place_in_the_data_is_kept(tmp_path):
    before = run_on_ranks(2, interrupted, str(tmp_path))
    assert [rest for _, rest in before] == run_on_ranks(2, gone_on, str(tmp_path))
    first_epoch = [x for seen, _ in before for batch in seen[4:] for x in batch]
    rest = [x for rank in run_on_ranks(3, gone_on, str(tmp_path)) for batch in rank[:2] for x in batch]
    assert len(first_epoch) == 12 and sorted({*first_epoch, *rest}) == list(
        range(24)
    )  # ranks are 3 now: some come twice
