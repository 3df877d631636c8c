"""What the tests of field cases share: plugins by name, the run in one process, and the same run on ranks.

Functions of this file that take a `Boosted` run on the ranks; `Single` is the reference and runs in the test process.
"""

from dataclasses import dataclass, field

import torch
from torch.optim import SGD, AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.tiny import ids

LOSS = GRADIENT = 1e-5  # largest absolute differences, in fp32
WEIGHT = 2e-5  # after a few steps of AdamW
IGNORED = -100


# name: (plugin, its options). "dp" is the hybrid plugin with nothing split; ranks that are left make the data-parallel axis.
PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero 1": (LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (LowLevelZeroPlugin, {"stage": 2}),
    "dp": (HybridParallelPlugin, {}),
    "dp, zero 1": (HybridParallelPlugin, {"zero_stage": 1}),
    "dp, zero 2": (HybridParallelPlugin, {"zero_stage": 2}),
    "tp2": (HybridParallelPlugin, {"tp_size": 2}),
    "tp4": (HybridParallelPlugin, {"tp_size": 4}),
    "tp2, zero 1": (HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "tp2, zero 2": (HybridParallelPlugin, {"tp_size": 2, "zero_stage": 2}),
    "pp2": (HybridParallelPlugin, {"pp_size": 2}),
    "pp4": (HybridParallelPlugin, {"pp_size": 4}),
    "pp2, zero 1": (HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1}),
    "pp2, tp2": (HybridParallelPlugin, {"pp_size": 2, "tp_size": 2}),
}
DATA_PARALLEL = [name for name in PLUGINS if not name.startswith(("tp", "pp"))]
WITH_TENSOR_PARALLEL = ["tp2", "tp2, zero 1", "tp2, zero 2"]
# for tests of two data-parallel replicas: (name, ranks)
TWO_REPLICAS = [(name, 2) for name in DATA_PARALLEL] + [(name, 4) for name in WITH_TENSOR_PARALLEL]
WITH_STAGES = [("pp2", 2), ("pp4", 4), ("pp2", 4), ("pp2, zero 1", 4), ("pp2, tp2", 4)]  # (name, ranks)


def make_plugin(name, **options):
    """The plugin of that name, in fp32 where `options` say nothing else."""
    plugin, own = PLUGINS[name]
    return plugin(**{"precision": "fp32"} | own | options)


def sgd(model):
    """The optimizer whose step shows the gradient: weights before − weights after."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def adamw(model, weight_decay=0.0):
    return AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)


def adamw_decay(model):
    return adamw(model, 0.1)


def whole_batch(rows=4, tokens=16, seed=7):
    """Global batch of random ids that are their own labels."""
    return {"input_ids": ids(rows, tokens, seed), "labels": ids(rows, tokens, seed)}


@dataclass
class Single:
    """Plain PyTorch in one process, on whole global batches.

    Args:
        model: the model to train, in place.
        optimizer_fn: makes its optimizer.
        max_norm: clip to this gradient norm; 0 does not clip.
    """

    model: torch.nn.Module
    optimizer_fn: object = sgd
    max_norm: float = 0.0
    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    gradients: dict = field(default_factory=dict)

    def __post_init__(self):
        self.optimizer = self.optimizer_fn(self.model)

    def step(self, *batches):
        """One optimizer step on the mean loss of some batches; keeps loss, norm and gradients before clipping."""
        self.optimizer.zero_grad()
        loss = sum(self.model(**batch).loss for batch in batches) / len(batches)
        loss.backward()
        self.losses.append(loss.item())
        named = [(name, p) for name, p in self.model.named_parameters() if p.grad is not None]
        self.gradients = {name: p.grad.clone() for name, p in named}
        grads = [p for _, p in named]
        self.norms.append(torch.nn.utils.clip_grad_norm_(grads, self.max_norm or float("inf")).item())
        self.optimizer.step()
        return self

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Trained:
    """Some steps in one process, in fp32 and, to know what rounding does, in fp64.

    Where a gradient is nearly zero, Adam divides rounding error by itself, and one process in fp32 is already further
    from the exact weight than a parallel run may be from it. Such entries, a handful, are left out of the comparison.

    Args:
        model_fn, optimizer_fn, max_norm: as for `Single`.
        batches: one global batch a step.
        scheduler_fn: makes a learning-rate scheduler, which steps after each optimizer step.
    """

    def __init__(self, model_fn, optimizer_fn, batches, max_norm=0.0, scheduler_fn=None):
        self.one = Single(model_fn(), optimizer_fn, max_norm)
        exact = Single(model_fn().double(), optimizer_fn, max_norm)
        for run in (self.one, exact):
            scheduler = scheduler_fn(run.optimizer) if scheduler_fn else None
            for batch in batches:
                run.step(batch)
                if scheduler:
                    scheduler.step()
        self.weights = self.one.weights()
        exact_weights = exact.weights()
        self.decided = {n: (w - exact_weights[n]).abs() <= WEIGHT / 2 for n, w in self.weights.items()}
        assert sum(int((~mask).sum()) for mask in self.decided.values()) <= 4

    def assert_weights(self, found):
        """The weights of a parallel run are these, entry by entry."""
        assert found.keys() == self.weights.keys()
        for name, wanted in self.weights.items():
            difference = ((found[name] - wanted) * self.decided[name]).abs().max().item()
            assert difference <= WEIGHT, f"{name}: {difference:.3g} > {WEIGHT:g}"


class Boosted:
    """A model and its optimizer after `booster.boost`, on this rank.

    Args:
        plugin: a plugin or its name.
        model: an unmodified model.
        optimizer_fn: makes the optimizer, before boosting.
        scheduler_fn: makes a learning-rate scheduler from the optimizer, before boosting.
        options: of the plugin, where it is given by name.
    """

    def __init__(self, plugin, model, optimizer_fn=sgd, scheduler_fn=None, **options):
        self.plugin = make_plugin(plugin, **options) if isinstance(plugin, str) else plugin
        self.booster = Booster(plugin=self.plugin)
        optimizer = optimizer_fn(model)
        scheduler = scheduler_fn(optimizer) if scheduler_fn else None
        self.model, self.optimizer, _, _, self.lr_scheduler = self.booster.boost(
            model, optimizer, lr_scheduler=scheduler
        )

    @property
    def user(self):
        """The user's own model, parallel inside."""
        return self.model.unwrap()

    def share(self, batch):
        """This data-parallel rank's rows of a global batch."""
        return rows_of(batch, self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp"))

    def backward(self, batch, scale=1.0):
        """Forward and backward of this rank's share by the plain loop, or over stages by `execute_pipeline`; the loss the
        user reads, before scaling.
        """
        if self.plugin.mesh.size("pp") > 1:
            return self.pipeline(batch, lambda outputs, _: outputs.loss * scale) / scale
        loss = self.model(**self.share(batch)).loss
        self.booster.backward(loss * scale, self.optimizer)
        return loss.item()

    def step(self, batch):
        """One whole step; the loss."""
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        self.optimizer.step()
        return loss

    def pipeline(self, batch, criterion=None):
        """Forward and backward by `execute_pipeline`; the loss."""
        out = self.booster.execute_pipeline(iter([self.share(batch)]), self.model, criterion, self.optimizer)
        return out["loss"].item()

    def weights(self):
        """The logical weights, put together from all ranks, which must hold every entry, and replicas the same bits."""
        found = gather_parameters(self.user, lambda p: p, {}, Axis.of(None, "world"))
        assert all(tensor.missing == 0 for tensor in found.values())
        assert {name: t.spread for name, t in found.items() if t.spread} == {}
        return {name: tensor.value for name, tensor in found.items()}

    def steps(self):
        """The steps that Adam has counted, by name of the parameter: one number, on which all ranks that count agree."""
        names = {p: name for name, p in self.user.named_parameters()}
        units = [unit for group in getattr(self.optimizer.stepped, "units", []) for unit in group]  # ZeRO's
        counted = [(names[p], unit.tensor) for unit in units for p in unit.params]
        counted = counted or [(name, p) for p, name in names.items()]
        mine = {(name, float(self.optimizer.state[t].get("step", 0))) for name, t in counted if t.numel()}
        found = set().union(*all_gather_object(mine, self.plugin.mesh.world))
        assert len(found) == len(dict(found)), found
        return dict(found)

    def gradients_by_step(self):
        """Take the step of SGD with lr 1 and return what it subtracted: the gradients (after clipping)."""
        before = self.weights()
        self.optimizer.step()
        after = self.weights()
        return {name: before[name] - after[name] for name in before}


def norm_of(tensors):
    """Euclidean norm over all tensors of a dict."""
    return torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt().item()


def largest_difference(found, wanted):
    """(largest |difference|, name of the tensor) over two dicts of tensors with the same keys."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - wanted[name]).abs().max().item(), name) for name in wanted)


def assert_close(found, wanted, limit):
    """Two dicts of tensors agree entry by entry; a difference that is not a number counts as one."""
    worst, name = largest_difference(found, wanted)
    assert worst <= limit, f"{name}: {worst:.3g} > {limit:g}"
    assert all(tensor.isfinite().all() for tensor in found.values())


def assert_equal_bits(found, wanted):
    """Two dicts hold the same tensors, bit for bit."""
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
