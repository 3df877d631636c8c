"""bf16: training over ranks follows one process that has the same master weights, within the rounding of bf16.

bf16 keeps 8 bits, so one rounding is off by at most 2⁻⁹ of a number. Layouts add in another order and round
elsewhere; over one rank nothing differs, and there the numbers must be the same bits.
"""

import pytest
import torch
from parity_runs import LAYOUTS, VOCAB, unequal

from colonnade.booster import Booster
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

STEPS = 5
BF16_EPS = 2**-8


def small(name):
    return tiny_model(name, vocab_size=VOCAB, num_hidden_layers=2)


class MasterReference:
    """Plain PyTorch: a bf16 model, and a float32 copy of its weights on which the optimizer steps."""

    def __init__(self, name):
        self.master = small(name)
        self.optimizer = well_conditioned_adamw(self.master)
        self.model = small(name)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16()

    def step(self, batch):
        loss = self.model(**batch).loss
        loss.backward()
        for master, parameter in zip(self.master.parameters(), self.model.parameters()):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        for master, parameter in zip(self.master.parameters(), self.model.parameters()):
            parameter.data.copy_(master.data)
        return loss.item()


def train(layout, name):
    """Losses over ranks and in one process, and how far the master weights are from those of one process, measured by
    how far they have moved (both as Euclidean norms over all weights).
    """
    _, plugin_class, options = LAYOUTS[layout]
    plugin = plugin_class(**options)
    assert plugin.precision == "bf16"
    booster, model, reference = Booster(plugin=plugin), small(name), MasterReference(name)
    start = {key: p.detach().clone() for key, p in reference.master.named_parameters()}
    model, optimizer, *_ = booster.boost(model, well_conditioned_adamw(model))
    losses, wanted = [], []
    for number in range(STEPS):
        batch = unequal()[number % 2]
        loss = model(**rows_of(batch, plugin.mesh.rank("dp"), plugin.mesh.size("dp"))).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        wanted.append(reference.step(batch))
    for parameter, master in optimizer.stepped.master.items():
        assert parameter.dtype is torch.bfloat16 and master.dtype is torch.float32
        assert parameter.data.equal(master.bfloat16()), "what the model computes with is the rounded master"
    masters = gather_parameters(
        model.unwrap(), optimizer.stepped.master.get, canonical_names(small(name)), plugin.mesh.world
    )
    end = {key: p.detach() for key, p in reference.master.named_parameters()}
    assert masters.keys() == end.keys()
    for key, master in masters.items():
        assert master.missing == 0, key
        assert master.spread == 0.0, f"ranks have drifted apart in {key}, by {master.spread:.1e}"
    off = sum((masters[key].value - end[key]).square().sum() for key in end).sqrt()
    moved = sum((start[key] - end[key]).square().sum() for key in end).sqrt()
    return losses, wanted, float(off / moved)


@pytest.mark.parametrize("name", ["LT", "G2"])
def test_over_one_rank_it_is_the_same_bits(name):
    for layout in ("dp 2", "ddp 2"):
        losses, wanted, off = run_on_ranks(1, train, layout, name)[0]
        assert losses == wanted
        assert off == 0.0


@pytest.mark.parametrize("layout", ["tp 2", "dp 2", "ddp 2", "tp 2 × dp 2"])
@pytest.mark.parametrize("name", ["LT", "G2", "qwen3"])
def test_over_several_ranks_it_is_the_same_within_rounding(layout, name):
    results = run_on_ranks(LAYOUTS[layout][0], train, layout, name)
    assert all(result == results[0] for result in results), "every rank reports the same numbers"
    losses, wanted, off = results[0]
    assert wanted[-1] < wanted[0] - 0.5, "the reference has learned"
    for number, (loss, target) in enumerate(zip(losses, wanted)):
        assert abs(loss - target) <= 2 * BF16_EPS * target, f"step {number}"
    assert off <= 0.1
