"""Every optimizer goes on in another layout as in one process, with frozen, unused and tied parameters; and every precision."""

import pytest
import torch
from resume_runs import LAYOUTS, MAX_NORM, VOCAB, batches
from torch import nn

from colonnade.booster import Booster
from colonnade.cluster.mesh import Axis
from colonnade.optim import CAME, Adafactor, GaLoreAdamW, HybridAdam, Lamb, Lars, Muon
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.parity_report import compare_tensors, relative
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

BEFORE, AFTER = 2, 2


def galore(params):
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return GaLoreAdamW([{"params": matrices, "rank": 3, "update_proj_gap": 3}, {"params": rest}], lr=1e-2, eps=1e-3)


def muon(params):
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return Muon([{"params": matrices}, {"params": rest, "use_muon": False, "eps": 1e-3}], lr=1e-2)


OF_ENTRIES = {
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2, momentum=0.5, centered=True),
    "HybridAdam": lambda p: HybridAdam(p, lr=1e-2, eps=1e-3, state_device="cpu"),
}
OF_MATRICES = {
    "Adafactor": lambda p: Adafactor(p, lr=1e-2),
    "CAME": lambda p: CAME(p, lr=1e-3),
    "GaLore": galore,
    "Lamb": lambda p: Lamb(p, lr=1e-2, eps=1e-3),
    "Lars": lambda p: Lars(p, lr=1e-1, momentum=0.9),
    "Muon": muon,
}
TORCHS_OWN = {
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
OPTIMIZERS = OF_ENTRIES | OF_MATRICES | TORCHS_OWN


def build(name):
    return tiny_model("LT", vocab_size=VOCAB, num_hidden_layers=2)


def trained(model, name, freeze=True):
    """The optimizer over what trains; an inner norm and a bias-like weight are frozen."""
    if freeze:
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


class Run:
    def __init__(self, layout, name, **options):
        _, plugin_class, layout_options = LAYOUTS[layout]
        self.plugin = plugin_class(**{"precision": "fp32", "max_norm": MAX_NORM} | layout_options | options)
        self.booster, user = Booster(plugin=self.plugin), build(name)
        self.names = canonical_names(user)
        self.model, self.optimizer, *_ = self.booster.boost(user, trained(user, name))

    def train(self, numbers):
        losses = []
        for number in numbers:
            share = rows_of(batches()[number], self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp"))
            losses.append(float(self.booster.execute_pipeline(iter([share]), self.model, None, self.optimizer)["loss"]))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def weights(self):
        return gather_parameters(self.model.unwrap(), lambda p: p, self.names, Axis.of(None, "world"))


def one_process(name):
    model = build(name)
    optimizer = trained(model, name)
    losses = []
    for batch in batches()[: BEFORE + AFTER]:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def save_each(layout, folder, names):
    for name in names:
        run = Run(layout, name)
        run.train(range(BEFORE))
        run.booster.save(f"{folder}/{name}", run.model, run.optimizer, step=BEFORE)


def load_each(layout, folder, wanted, names):
    for name in names:
        run = Run(layout, name)
        assert run.booster.load(f"{folder}/{name}", run.model, run.optimizer) == BEFORE
        losses, weights = wanted[name]
        found = run.train(range(BEFORE, BEFORE + AFTER))
        assert max(relative(a, b) for a, b in zip(found, losses[BEFORE:])) <= 1e-5, (name, found, losses)
        difference = compare_tensors("weights", run.weights(), weights, 1e-5)
        assert difference.ok, f"{name}: {difference}"


@pytest.fixture(scope="module")
def wanted():
    return {name: one_process(name) for name in OPTIMIZERS}


@pytest.mark.sample("zero 2-tp 2 * pp 2")
@pytest.mark.parametrize("target", ["tp 4", "zero 1", "fsdp", "tp 2 × pp 2", "tp 2 × zero 1", "dp 1"])
@pytest.mark.parametrize("source", ["tp 4", "zero 2", "fsdp", "tp 2 × zero 1", "dp 4"])
def test_optimizers_of_entries_and_of_matrices_go_on(tmp_path, source, target, wanted):
    names = [*OF_ENTRIES, *OF_MATRICES]
    run_on_ranks(LAYOUTS[source][0], save_each, source, str(tmp_path), names, timeout_s=200)
    run_on_ranks(LAYOUTS[target][0], load_each, target, str(tmp_path), wanted, names, timeout_s=200)


@pytest.mark.parametrize("source, target", [("zero 1", "dp 2"), ("dp 1", "zero 2"), ("pp 2", "zero 1")])
def test_an_optimizer_that_takes_whole_parameters_only_goes_on(tmp_path, source, target, wanted):
    run_on_ranks(LAYOUTS[source][0], save_each, source, str(tmp_path), list(TORCHS_OWN))
    run_on_ranks(LAYOUTS[target][0], load_each, target, str(tmp_path), wanted, list(TORCHS_OWN))
