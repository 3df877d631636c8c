"""The engines by name, and what tests of precision share."""

import torch

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 67

# name: (ranks, plugin, options)
ENGINES = {
    "ddp 2": (2, TorchDDPPlugin, {}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "tp 2 × dp 2": (4, HybridParallelPlugin, {"tp_size": 2}),
    "zero 1": (2, LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "zero 2, small buckets": (2, LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 4 << 10}),
    "zero 1 × 3, offloaded": (3, LowLevelZeroPlugin, {"stage": 1, "cpu_offload": True}),
    "tp 2 × dp 2, zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "tp 2 × dp 2, zero 2": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 2}),
    "fsdp 2": (2, TorchFSDPPlugin, {}),
}


def small(name="LL"):
    return tiny_model(name, vocab_size=VOCAB, num_hidden_layers=2)


def batch(seed, rows=6, tokens=10):
    """A global batch whose first rows have few targets."""
    x = ids(rows, tokens, seed, VOCAB)
    labels = x.clone()
    labels[: rows // 2, 4:] = -100
    return {"input_ids": x, "labels": labels}


class Run:
    """A boosted model on this rank.

    Args:
        engine: name of an engine.
        model: plain.
        optimizer_fn: makes its optimizer.
        options: of the plugin.
    """

    def __init__(self, engine, model, optimizer_fn, **options):
        _, plugin_class, own = ENGINES[engine]
        self.plugin = plugin_class(**own | options)
        self.booster = Booster(plugin=self.plugin)
        self.names = canonical_names(model)
        self.inner = optimizer_fn(model)
        self.model, self.optimizer, *_ = self.booster.boost(model, self.inner)

    def share(self, whole):
        return rows_of(whole, self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp"))

    def backward(self, whole, factor=1.0):
        loss = self.model(**self.share(whole)).loss
        self.booster.backward(loss * factor, self.optimizer)
        return loss.item()

    def weights(self):
        """Logical weights, of which the ranks must hold every entry, and replicas the same bits."""
        found = gather_parameters(self.model.unwrap(), lambda p: p, self.names, Axis.of(None, "world"))
        assert all(tensor.missing == 0 and tensor.spread == 0 for tensor in found.values())
        return {name: tensor.value for name, tensor in found.items()}


def largest_difference(found, wanted):
    """Relative to the largest entry of all."""
    assert found.keys() == wanted.keys()
    scale = max(float(w.abs().max()) for w in wanted.values())
    return max(float((found[n].double() - w.double()).abs().max()) for n, w in wanted.items()) / scale


def plain_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def world(engine):
    return ENGINES[engine][0]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
