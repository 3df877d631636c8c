"""What the tests of resuming run on the ranks: train, save in one layout, load in another, go on; and one process' run."""

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.optim import Adafactor
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.parity_report import compare_tensors, relative
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 67  # divides by no number of ranks
ROWS, TOKENS = 12, 10
BEFORE, AFTER = 3, 3  # steps
MAX_NORM = 0.8

# name: (ranks, plugin, options)
LAYOUTS = {
    "dp 1": (1, HybridParallelPlugin, {}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "dp 3": (3, HybridParallelPlugin, {}),
    "dp 4": (4, TorchDDPPlugin, {}),
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "tp 4": (4, HybridParallelPlugin, {"tp_size": 4}),
    "pp 2": (2, HybridParallelPlugin, {"pp_size": 2}),
    "tp 2 × pp 2": (4, HybridParallelPlugin, {"tp_size": 2, "pp_size": 2}),
    "tp 2 × dp 2": (4, HybridParallelPlugin, {"tp_size": 2}),
    "zero 1": (3, LowLevelZeroPlugin, {"stage": 1, "bucket_bytes": 4 << 10}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "fsdp": (3, TorchFSDPPlugin, {}),
    "tp 2 × zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "pp 2 × zero 1": (4, HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1}),
}


def two_groups(model):
    """AdamW, matrices with weight decay and the rest at half the rate without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    return AdamW(groups, lr=1e-2, eps=1e-3)


def adafactor(model):
    """With an ε₁ that keeps rounding from deciding entries whose gradient is zero in exact arithmetic (key biases)."""
    return Adafactor(model.parameters(), lr=1e-2, eps=(1e-4, 1e-3), weight_decay=0.05)


# name: (model, its options, optimizer)
CASES = {
    "llama, tied": ("LT", {"num_hidden_layers": 2}, two_groups),
    "gpt-2": ("G2", {}, two_groups),
    "llama, one kv head, adafactor": ("LT", {"num_hidden_layers": 2, "num_key_value_heads": 1}, adafactor),
    "gpt-2, adafactor": ("G2", {}, adafactor),
}


def build(case, seed=1):
    name, options, _ = CASES[case]
    return tiny_model(name, noise_seed=seed, vocab_size=VOCAB, **options)


def batches():
    found = []
    for step in range(BEFORE + AFTER):
        x = ids(ROWS, TOKENS, 20 + step, VOCAB)
        labels = x.clone()
        labels[: ROWS // 3, 3:] = -100  # ranks have unequal numbers of targets
        found.append({"input_ids": x, "labels": labels})
    return found


def falling(optimizer):
    return LambdaLR(optimizer, lambda step: 0.9**step)


class Run:
    """A boosted training.

    Args:
        seed: of the weights that it begins with.
    """

    def __init__(self, layout, case, seed=1, **options):
        _, plugin_class, layout_options = LAYOUTS[layout]
        self.plugin = plugin_class(**{"precision": "fp32", "max_norm": MAX_NORM} | layout_options | options)
        self.booster = Booster(plugin=self.plugin)
        self.user = build(case, seed)
        self.names = canonical_names(self.user)
        optimizer = CASES[case][2](self.user)
        self.scheduler = falling(optimizer)
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            self.user, optimizer, None, None, self.scheduler
        )

    def train(self, numbers):
        """Losses of some of the batches."""
        losses = []
        for number in numbers:
            share = rows_of(batches()[number], self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp"))
            out = self.booster.execute_pipeline(iter([share]), self.model, None, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(float(out["loss"]))
        return losses

    def save(self, folder, step=BEFORE, **options):
        return self.booster.save(folder, self.model, self.optimizer, self.scheduler, step=step, **options)

    def load(self, folder, **options):
        return self.booster.load(folder, self.model, self.optimizer, self.scheduler, **options)

    def weights(self):
        world = Axis.of(None, "world")
        return gather_parameters(self.model.unwrap(), lambda p: p, self.names, world)


def one_process(case):
    """Losses and final weights of the uninterrupted run of plain torch."""
    model = build(case)
    optimizer = CASES[case][2](model)
    scheduler = falling(optimizer)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_and_save(layout, folders):
    """Train each case for some steps and save it."""
    for case, folder in folders.items():
        run = Run(layout, case)
        run.train(range(BEFORE))
        run.save(folder)


def load_and_go_on(layout, case, folders, wanted):
    """Load what each layout has saved, and compare what follows with the run of one process; the worst differences."""
    losses, weights = wanted
    worst = {}
    for source, folder in folders.items():
        run = Run(layout, case, seed=9)
        run.train([5])  # other weights, and a state of its own, which has to go
        assert run.load(folder) == BEFORE
        found = run.train(range(BEFORE, BEFORE + AFTER))
        difference = max(relative(a, b) for a, b in zip(found, losses[BEFORE:]))
        of_weights = compare_tensors("weights", run.weights(), weights, 1e-5)
        assert difference <= 1e-5, f"{source} → {layout}, {case}: losses {found}, and not {losses[BEFORE:]}"
        assert of_weights.ok, f"{source} → {layout}, {case}: {of_weights}"
        worst[source] = (difference, of_weights.worst)
    return worst


def weights(run):
    found = run.weights()
    assert all(t.missing == 0 and t.spread == 0 for t in found.values())
    return {name: t.value for name, t in found.items()}


def same_bits(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
