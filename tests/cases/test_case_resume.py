"""RES-1, RES-2, RES-3: a training goes on on other numbers of ranks, with its schedule, and with the weights that were loaded."""

import pytest
import torch
from field_cases import Boosted, Trained, adamw, whole_batch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from colonnade.checkpoint.training_load import open_checkpoint, read_into
from colonnade.cluster.mesh import Axis
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

BEFORE, STEPS = 2, 5
ENGINES = ["zero 1", "zero 2", "fsdp", "ddp"]


def twelve(seed=7):
    x = ids(12, 16, seed)
    return {"input_ids": x, "labels": x}


def moments(run):
    """What Adam keeps, as logical tensors, put together from all ranks."""
    found = {}
    for state in run.optimizer.states():
        name = run.optimizer.names[state.param][0]
        for key, shard in state.tensors.items():
            for offset, tensor in shard.pieces:
                found.setdefault((name, key, shard.shape), []).append((offset, tensor.clone()))
    gathered = [None] * run.plugin.mesh.world_size
    torch.distributed.all_gather_object(gathered, found)
    whole = {}
    for of_rank in gathered:
        for (name, key, shape), pieces in of_rank.items():
            logical = whole.setdefault((name, key), torch.full(shape, float("nan")))
            for offset, tensor in pieces:
                logical[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))] = tensor
    return whole


def first_half(plugin, folder):
    run = Boosted(plugin, tiny_model("LL"), adamw)
    for _ in range(BEFORE):
        run.step(twelve())
    run.booster.save(folder, run.model, run.optimizer, step=BEFORE)
    return moments(run)


def second_half(plugin, folder):
    run = Boosted(plugin, tiny_model("LL", noise_seed=4), adamw)
    run.booster.load(folder, run.model, run.optimizer)
    kept, steps = moments(run), run.steps()
    losses = [run.step(twelve()) for _ in range(STEPS - BEFORE)]
    return kept, steps, losses, run.weights()


@pytest.mark.sample("zero 1-3-zero 2", "fsdp-4-zero 1", "zero 2-1-ddp", "zero 2-3-fsdp")
@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("source", ENGINES)
def test_moments_keep_their_bits_on_other_numbers_of_ranks(tmp_path, source, ranks, target):
    trained = Trained(lambda: tiny_model("LL"), adamw, [twelve()] * STEPS)
    saved = run_on_ranks(2, first_half, source, str(tmp_path))[0]
    assert len(saved) == 2 * 39 and not any(t.isnan().any() for t in saved.values())
    in_file = open_checkpoint(tmp_path, Axis.alone("world"))
    for key, stored in in_file.manifest.of_part("optimizer").items():
        whole = torch.empty(stored.shape)
        read_into(in_file, [(key, Shard(stored.shape, stored.dtype, [Piece((0,) * whole.dim(), whole)]))])
        assert torch.equal(whole, saved[key.name, key.state])
    for kept, steps, losses, weights in run_on_ranks(ranks, second_half, target, str(tmp_path)):
        assert all(torch.equal(kept[key], saved[key]) for key in saved)
        assert set(steps.values()) == {float(BEFORE)}
        assert losses == pytest.approx(trained.one.losses[BEFORE:], abs=2e-5)
        trained.assert_weights(weights)


def falling(optimizer):
    return LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 4) * 0.9**t)


def plain_sgd(model):
    return SGD(model.parameters(), lr=0.1)


def scheduled(plugin, folder, resumed):
    run = Boosted(plugin, tiny_model("LL"), plain_sgd, falling)
    if resumed:
        run.booster.load(folder, run.model, run.optimizer, run.lr_scheduler)
    rates, moved = [], []
    for _ in range(3):
        rates.append(run.optimizer.param_groups[0]["lr"])
        before = run.weights()
        run.step(whole_batch())
        after = run.weights()
        moved.append(sum((before[n] - after[n]).double().square().sum() for n in before).sqrt().item())
        moved[-1] /= run.optimizer.grad_norm
        run.lr_scheduler.step()
    if not resumed:
        run.booster.save(folder, run.model, run.optimizer, run.lr_scheduler, step=3)
    return rates, moved, run.weights()


@pytest.mark.parametrize("plugin, world", [("zero 1", 2), ("tp2", 2), ("pp2", 2), ("fsdp", 2)])
def test_the_schedule_goes_on_with_the_very_next_step(tmp_path, plugin, world):
    trained = Trained(lambda: tiny_model("LL"), plain_sgd, [whole_batch()] * 6, scheduler_fn=falling)
    wanted = [0.025, 0.045, 0.06075, 0.0729, 0.06561, 0.059049]
    first = run_on_ranks(world, scheduled, plugin, str(tmp_path), False)
    second = run_on_ranks(world, scheduled, plugin, str(tmp_path), True)
    for (early, moved_early, _), (late, moved_late, weights) in zip(first, second):
        assert early + late == pytest.approx(wanted, rel=1e-12)
        assert moved_early + moved_late == pytest.approx(wanted, rel=1e-4)
        trained.assert_weights(weights)


def weights_of_b(plugin, folder, precision, how):
    run = Boosted(plugin, tiny_model("LL"), lambda m: torch.optim.AdamW(m.parameters(), lr=0.0, weight_decay=0.0), precision=precision)  # fmt: skip
    if how == "hub":
        run.booster.load_model(run.model, f"{folder}/hub")
    else:  # the weights of a training, without its optimizer
        run.booster.load(f"{folder}/training", run.model)
    run.step(whole_batch())
    run.booster.save_model(run.model, f"{folder}/out")
    return True


def write_b(folder):
    run = Boosted("dp", tiny_model("LL", noise_seed=2), adamw)
    run.booster.save(f"{folder}/training", run.model, run.optimizer)


@pytest.mark.sample("bf16-hub-zero 1-2", "fp16-training-tp2-2", "bf16-training-pp2-2")
@pytest.mark.parametrize(
    "plugin, world", [("zero 1", 2), ("zero 2", 2), ("tp2", 2), ("pp2", 2), ("ddp", 2), ("fsdp", 2)]
)
@pytest.mark.parametrize("how", ["hub", "training"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_are_those_that_were_loaded(tmp_path, plugin, world, precision, how):
    from safetensors.torch import load_file

    wanted = tiny_model("LL", noise_seed=2)
    wanted.save_pretrained(tmp_path / "hub")
    run_on_ranks(1, write_b, str(tmp_path))
    run_on_ranks(world, weights_of_b, plugin, str(tmp_path), precision, how)
    found = load_file(tmp_path / "out" / "model.safetensors")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for name, tensor in wanted.state_dict().items():
        kept = tensor if plugin == "fsdp" else tensor.to(dtype)  # whose parameters are the masters
        assert torch.equal(found[name], kept), name
