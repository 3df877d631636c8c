"""Models that are in no library: remote code with a config of its own, and plain modules without one.

Nobody wrote a policy for them and no `model_type` names them: all that is known is their forward.
"""

import inspect

import pytest
import torch
from models_of_our_own import OWN, own_model
from torch import nn
from torch.nn import functional

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.model.layout import layout_of
from colonnade.shardformer.inference.probe import TOKENS, loss_of, probe_inputs
from colonnade.testing.logical import canonical_names, gather_parameters, largest
from colonnade.testing.parity import assert_same_as_single, well_conditioned_adamw
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.verify.batches import make_batches

CPU, META = torch.device("cpu"), torch.device("meta")
MAX_NORM, STEPS, TOLERANCE = 1.0, 3, 1e-5


def plugin():
    return HybridParallelPlugin(tp_size=Axis.of(None).size, precision="fp32", max_norm=MAX_NORM)


def train(sizes):
    batches = make_batches(own_model("sequence-first", **sizes))
    assert_same_as_single(lambda: own_model("sequence-first", **sizes), batches, plugin, steps=STEPS, max_norm=MAX_NORM)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "sizes", [{"multi_query_group_num": 4}, {}, {"multi_query_group_num": 1, "add_qkv_bias": False}]
)
def test_remote_code_trains_as_in_one_process(sizes, tp):
    run_on_ranks(tp, train, sizes, timeout_s=100)


def loss_by_hand(name, model, tokens):
    """The loss as such a model's own training script has it."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, TOKENS // 2 :] = -1  # the first row has fewer targets than the others
    if name == "small-gpt":
        return model(inputs, targets)[1]
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1)


def train_by_hand(name, sizes):
    """Train in one process and over the ranks; the largest difference of each kind, and the fraction of a model held."""
    tokens = [torch.randint(67, (4, TOKENS), generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]
    one, names = own_model(name, **sizes), canonical_names(own_model(name, **sizes))
    optimizer, wanted = well_conditioned_adamw(one), []
    for batch in tokens:
        optimizer.zero_grad()
        loss = loss_by_hand(name, one, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM)
        optimizer.step()
        wanted.append((loss.item(), norm.item()))
    booster, model = Booster(plugin=plugin()), own_model(name, **sizes)
    model, optimizer, *_ = booster.boost(model, well_conditioned_adamw(model))
    worst = {"loss": 0.0, "norm": 0.0}
    for batch, (loss_of_one, norm_of_one) in zip(tokens, wanted):
        optimizer.zero_grad()
        loss = loss_by_hand(name, model, batch)
        booster.backward(loss, optimizer)
        optimizer.step()
        worst["loss"] = max(worst["loss"], abs(loss.item() / loss_of_one - 1))
        worst["norm"] = max(worst["norm"], abs(float(optimizer.grad_norm) / norm_of_one - 1))
    parts = gather_parameters(model.unwrap(), lambda parameter: parameter, names, Axis.of(None, "world"))
    weights = {name: p for name, p in one.named_parameters() if name in parts}
    assert {names[name] for name in weights} == set(parts)
    worst["weights"] = max(largest(parts[name].value - p.detach()) / largest(p.detach()) for name, p in weights.items())
    held = sum(p.numel() for p in model.unwrap().parameters()) / sum(p.numel() for p in one.parameters())
    kept = all(layout_of(p).shape == one.get_parameter(n).shape for n, p in model.unwrap().named_parameters())
    return worst, held, kept


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("small-gpt", {}), ("small-gpt", {"bias": False}), ("grouped", {}), ("grouped", {"n_kv_heads": 4})],
)
def test_a_plain_module_trains_as_in_one_process(name, sizes, tp):
    for worst, held, kept in run_on_ranks(tp, train_by_hand, name, sizes, timeout_s=100):
        assert max(worst.values()) <= TOLERANCE, worst
        assert held < 0.9 and kept


@pytest.mark.parametrize("name", OWN)
def test_inputs_are_found_from_the_forward_alone(name):
    model = own_model(name)
    inputs = probe_inputs(model, CPU)
    first = next(iter(inspect.signature(model.forward).parameters))
    assert inputs[first].shape == (2, TOKENS) and inputs[first].max() < 67
    loss_of(model(**inputs)).backward()
    assert all(p.grad.any() for p in model.parameters())
    shadow = own_model(name).to(META)
    assert next(iter(probe_inputs(shadow, META).values())).device.type == "meta"
    shadow(**probe_inputs(shadow, META))


class TwoTables(nn.Module):
    """Looks its ids up in the smaller one of two tables, and has positions in the other."""

    def __init__(self):
        super().__init__()
        self.positions, self.tokens, self.head = nn.Embedding(512, 8), nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, idx, targets=None):
        return self.head(self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device)))


class NeedsMore(TwoTables):
    def forward(self, idx, lengths):
        return super().forward(idx)


def test_ids_fit_the_table_that_they_are_looked_up_in():
    inputs = probe_inputs(TwoTables(), CPU)
    assert inputs["idx"].max() < 11 and inputs["targets"].shape == inputs["idx"].shape
    with pytest.raises(ValueError, match="also needs lengths"):
        probe_inputs(NeedsMore(), CPU)
    with pytest.raises(ValueError, match="reads no token ids|looked up in no"):
        probe_inputs(nn.Identity(), CPU)
