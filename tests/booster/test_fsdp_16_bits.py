"""TorchFSDPPlugin in bf16 and fp16: follows one process with the same float32 weights, within rounding; FP-1."""

import pytest
import torch.distributed as dist
from parity_runs import VOCAB, unequal
from test_fsdp_checkpoint import boost, weights
from test_fsdp_use import share
from test_parity_16bit import EPS, MasterReference
from torch.optim import AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


def train_16_bits(name, precision, options):
    """Losses in 16 bits, and in one process with the same master weights; how far the weights are from those."""
    plugin = TorchFSDPPlugin(precision=precision, **options)
    booster, model = Booster(plugin=plugin), tiny_model(name, vocab_size=VOCAB, num_hidden_layers=2)
    reference = MasterReference(name, precision)
    start = {key: p.detach().clone() for key, p in reference.master.named_parameters()}
    names = canonical_names(model)
    model, optimizer, *_ = booster.boost(model, well_conditioned_adamw(model))
    losses, wanted = [], []
    for number in range(5):
        batch = unequal()[number % 2]
        loss = model(**share(batch)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        wanted.append(reference.step(batch))
    found = gather_parameters(model.unwrap(), lambda p: p, names, plugin.mesh.world)
    end = {key: p.detach() for key, p in reference.master.named_parameters()}
    off = sum((found[key].value - end[key]).square().sum() for key in end).sqrt()
    moved = sum((start[key] - end[key]).square().sum() for key in end).sqrt()
    return losses, wanted, float(off / moved)


@pytest.mark.parametrize("name", ["LT", "G2"])
def test_bf16_over_one_rank_is_the_same_bits(name):
    losses, wanted, off = run_on_ranks(1, train_16_bits, name, "bf16", {})[0]
    assert losses == wanted
    assert off == 0.0


@pytest.mark.parametrize(
    "precision, options", [("bf16", {}), ("bf16", {"reduce_dtype": "fp32"}), ("fp16", {"loss_scale": LossScale(256)})]
)
@pytest.mark.parametrize("name", ["LT", "G2", "qwen3"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_16_bits_over_several_ranks_are_the_same_within_rounding(name, ranks, precision, options):
    results = run_on_ranks(ranks, train_16_bits, name, precision, options)
    assert all(result == results[0] for result in results)
    losses, wanted, off = results[0]
    assert wanted[-1] < wanted[0] - 0.5
    for number, (loss, target) in enumerate(zip(losses, wanted)):
        assert abs(loss - target) <= 2 * EPS[precision] * target, f"step {number}"
    assert off <= (0.06 if precision == "bf16" else 0.01)


def overflow():
    """FP-1: the last rank's part of one gradient becomes infinite in the second of four steps."""
    model, step_number = tiny_model("LL"), [0]

    def spoil(grad):
        if step_number[0] == 2 and dist.get_rank() == dist.get_world_size() - 1:
            grad = grad.clone()
            grad[-1, -1] = float("inf")
        return grad

    model.model.layers[-1].mlp.down_proj.weight.register_hook(spoil)
    scale = LossScale(initial=256, backoff_factor=0.5, growth_interval=0)
    booster, model, optimizer = boost(
        model, lambda m: AdamW(m.parameters(), lr=1e-2), precision="fp16", loss_scale=scale
    )
    scales, kept = [], []
    for number in range(1, 5):
        step_number[0] = number
        before = weights(model)
        optimizer.zero_grad()
        booster.backward(model(input_ids=ids(2, 16), labels=ids(2, 16)).loss, optimizer)
        optimizer.step()
        scales.append(optimizer.loss_scale)
        kept.append(all(before[n].equal(w) for n, w in weights(model).items()))
    steps = {float(optimizer.state[p]["step"]) for p in model.unwrap().parameters()}
    return scales, kept, steps


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(ranks):
    for scales, kept, steps in run_on_ranks(ranks, overflow):
        assert scales == [256, 128, 128, 128]
        assert kept == [False, True, False, False]
        assert steps == {3.0}
