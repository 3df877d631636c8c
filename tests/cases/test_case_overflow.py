"""FP-1: an overflow that one rank alone sees leaves the step out on all of them, and moves the scale alike."""

import math

import pytest
import torch
import torch.distributed as dist
from field_cases import Boosted, adamw, whole_batch

from colonnade.comm.collectives import all_gather_object
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

ENGINES = [
    ("dp", 2),
    ("ddp", 2),
    ("tp2", 2),
    ("zero 1", 2),
    ("zero 2", 2),
    ("fsdp", 2),
    ("zero 2", 3),
    ("tp2", 4),
    ("tp2, zero 1", 4),
    ("tp2, zero 2", 4),
    ("pp2", 2),
    ("pp2, tp2", 4),
    ("pp2, zero 1", 4),
]
SCALE = LossScale(initial=2.0**8, backoff_factor=0.5, growth_interval=0)
DOWN = "model.layers.3.mlp.down_proj.weight"


class Overflowing:
    """Four steps of which one meets an overflow.

    Args:
        name: the parameter into whose gradient it is put, on the last rank that holds it.
        at_step: in which step, from 1.
        value: infinity, or not a number.
    """

    def __init__(self, plugin, name=DOWN, at_step=2, value=math.inf):
        model = tiny_model("LL")
        self.step_number, self.at_step, self.value = 0, at_step, value
        dict(model.named_parameters())[name].register_hook(self.spoil)
        self.run = Boosted(plugin, model, adamw, precision="fp16", loss_scale=SCALE)
        self.scales, self.kept = [], []
        held = all_gather_object(name in dict(self.run.user.named_parameters()), self.run.plugin.mesh.world)
        self.spoils = dist.get_rank() == max(rank for rank, holds in enumerate(held) if holds)

    def spoil(self, grad):
        if self.step_number != self.at_step or not self.spoils:
            return None
        grad = grad.clone()
        grad[(-1,) * grad.dim()] = self.value
        return grad

    def held(self):
        """Everything that this rank trains with: parameters, what is stepped on, and moments."""
        optimizer = self.run.optimizer
        with optimizer.stepped.swapped():
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            moments = [v for p in stepped for _, v in sorted(optimizer.state.get(p, {}).items()) if torch.is_tensor(v)]
            return [t.detach().clone() for t in (*self.run.user.parameters(), *stepped, *moments)]

    def train(self, steps=4):
        for self.step_number in range(1, steps + 1):
            before, scale = self.held(), self.run.optimizer.loss_scale
            self.run.step(whole_batch(seed=self.step_number))
            after = self.held()
            self.scales.append((scale, self.run.optimizer.loss_scale))
            self.kept.append(len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after)))
            finite = math.isfinite(self.run.optimizer.grad_norm)
            assert finite == (self.step_number != self.at_step), "the norm is what all ranks decide by"
        self.run.weights()  # every entry is there, and replicas are the same bits
        return self.scales, self.kept, self.step_counts()

    def step_counts(self):
        state = self.run.optimizer.state_dict()["state"]
        return {float(of_one["step"]) for of_one in state.values()}


def the_case(plugin):
    return Overflowing(plugin).train()


@pytest.mark.parametrize("plugin, world", ENGINES)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(plugin, world):
    for scales, kept, counts in run_on_ranks(world, the_case, plugin):
        assert scales == [(256, 256), (256, 128), (128, 128), (128, 128)]
        assert kept == [False, True, False, False], "every weight and moment of step 2 is bit-identical"
        assert counts == {3.0}


VARIATIONS = [
    {"value": math.nan},
    {"at_step": 1},  # before there are any moments
    {"at_step": 4},
    {"name": "model.norm.weight"},  # under tensor parallelism every rank holds it, and only one sees the overflow
    {"name": "model.embed_tokens.weight", "value": -math.inf},
    {"name": "lm_head.weight"},
]


def variations(plugin):
    for options in VARIATIONS:
        scales, kept, counts = Overflowing(plugin, **options).train()
        at = options.get("at_step", 2)
        wanted = [(256 if n <= at else 128, 256 if n < at else 128) for n in (1, 2, 3, 4)]
        assert (scales, kept, counts) == (wanted, [n == at for n in (1, 2, 3, 4)], {3.0}), options


@pytest.mark.sample("ddp-2", "zero 2-2", "tp2-2", "tp2, zero 1-4", "pp2-2")
@pytest.mark.parametrize("plugin, world", [engine for engine in ENGINES if engine not in (("zero 2", 3), ("tp2", 4))])
def test_whatever_overflows_where_and_when(plugin, world):
    run_on_ranks(world, variations, plugin)


def of_shared_heads():
    return [Overflowing("tp4", f"model.layers.3.self_attn.{name}.weight").train()[:2] for name in ("k_proj", "v_proj")]


def test_an_overflow_in_what_two_ranks_hold():
    """Two key/value heads on four ranks: each gradient is added up over two of them and counted on the first."""
    for results in run_on_ranks(4, of_shared_heads):
        for scales, kept in results:
            assert scales == [(256, 256), (256, 128), (128, 128), (128, 128)]
            assert kept == [False, True, False, False]
