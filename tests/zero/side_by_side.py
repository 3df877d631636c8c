"""The same training in one process, on the rows of all ranks, and under ZeRO, on this rank's rows, side by side."""

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin

WIDTH = 9
LAYERS = "abcd"
CLOSE = 1e-6
SMALL = {"bucket_bytes": 400}  # a bucket for each layer
STAGES = [{"stage": 1}, {"stage": 2}]


class Net(nn.Module):
    """Layers that a forward may use in any order, repeatedly or not at all, and a parameter without dims."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for name in LAYERS:
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
            self.scale = nn.Parameter(torch.tensor(0.7))
        self.recomputed = ""

    def forward(self, x, use=LAYERS):
        for name in use:
            layer = getattr(self, name)
            if name in self.recomputed:
                x = checkpoint(lambda value, layer=layer: torch.tanh(layer(value)), x, use_reentrant=True)
            else:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return (self.scale * x).float().square().mean()


def adamw(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3)


def momentum(model):
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.1)


class SideBySide:
    """Both trainings.

    Args:
        optimizer_fn: makes the optimizer of a model.
        before_boost: is called with both plain models and their optimizers.
        **options: of the plugin.
    """

    def __init__(self, optimizer_fn=adamw, before_boost=None, model_fn=Net, max_norm=0.0, **options):
        self.max_norm = max_norm
        self.one, self.plain = model_fn(), model_fn()
        self.one_optimizer, inner = optimizer_fn(self.one), optimizer_fn(self.plain)
        if before_boost is not None:
            for model, optimizer in ((self.one, self.one_optimizer), (self.plain, inner)):
                before_boost(model, optimizer)
        self.plugin = LowLevelZeroPlugin(**{"precision": "fp32", "max_norm": max_norm} | options)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(self.plain, inner)
        self.rank, self.ranks = self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp")

    @property
    def both(self):
        return ((self.one, self.one_optimizer), (self.plain, self.optimizer))

    def rows(self, seed, rank):
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))

    def loss(self, seed=0, use=LAYERS):
        """This rank's loss; `use` may say for each rank which layers it uses."""
        return self.model(self.rows(seed, self.rank), self._of(use, self.rank))

    def _of(self, use, rank):
        return use if isinstance(use, str) else use[rank]

    def backward(self, seed=0, use=LAYERS, plainly=False, only_one=False):
        for rank in range(self.ranks):
            (self.one(self.rows(seed, rank), self._of(use, rank)) / self.ranks).backward()
        if only_one:
            return
        loss = self.loss(seed, use)
        if plainly:
            loss.backward()
        else:
            self.booster.backward(loss, self.optimizer)

    def step(self, zero=True):
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.one.parameters(), self.max_norm)
        for _, optimizer in self.both:
            optimizer.step()
        if zero:
            self.zero_grad()

    def zero_grad(self):
        for _, optimizer in self.both:
            optimizer.zero_grad()

    def train(self, *uses, first_seed=0):
        """One step for each entry of `uses`."""
        for seed, use in enumerate(uses, first_seed):
            self.backward(seed, use)
            self.step()
        self.assert_same()
        return self

    def assert_same(self, close=CLOSE):
        wanted = dict(self.one.named_parameters())
        for name, parameter in self.plain.named_parameters():
            difference = (parameter.detach().double() - wanted[name].detach().double()).abs()
            assert (difference <= close).all(), f"{name} differs by {difference.max():.3g}"

    def units(self):
        """What this rank steps on."""
        return [unit for units in self.optimizer.stepped.units for unit in units]

    def counts(self):
        """By parameter of which this rank owns some, the number of steps that the optimizer has made with it."""
        names = {p: name for name, p in self.plain.named_parameters()}
        return {
            names[param]: float(self.optimizer.state[unit.tensor]["step"]) if self.optimizer.state[unit.tensor] else 0.0
            for unit in self.units()
            for param in unit.params
        }


def each(cases, check, *args):
    """Run a check with several options of the plugin in one launch; a failure says which."""
    for options in cases:
        try:
            check(*args, **options)
        except Exception as error:
            raise AssertionError(f"{check.__name__}{args} with {options}: {type(error).__name__}: {error}") from error
