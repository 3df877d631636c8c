"""fp16 in use: its loss scale is in no number that is seen, and a step left out disturbs nothing."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from parity_runs import VOCAB, unequal
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.logical import canonical_names, gather_parameters
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import tiny_model

FP16_EPS = 2**-11

# name: (ranks, plugin, options)
ENGINES = {
    "ddp 2": (2, TorchDDPPlugin, {}),
    "tp 2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "dp 2": (2, HybridParallelPlugin, {}),
    "zero 1": (2, LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "tp 2 × dp 2, zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "fsdp 2": (2, TorchFSDPPlugin, {}),
}
every_engine = pytest.mark.parametrize("engine", ENGINES)


def small():
    return tiny_model("LL", vocab_size=VOCAB, num_hidden_layers=2)


def sgd(model):
    return SGD(model.parameters(), lr=0.1)


class Run:
    """A boosted model on this rank, in fp16 with a scale that stays where it is unless `scale` says otherwise."""

    def __init__(self, engine, optimizer_fn=sgd, scale=256.0, scheduler_fn=None, **options):
        _, plugin_class, own = ENGINES[engine]
        if not isinstance(scale, LossScale):
            scale = LossScale(initial=scale, growth_interval=0)
        self.plugin = plugin_class(**{"precision": "fp16", "loss_scale": scale} | own | options)
        self.booster, model = Booster(plugin=self.plugin), small()
        self.names, self.inner = canonical_names(model), optimizer_fn(model)
        scheduler = scheduler_fn(self.inner) if scheduler_fn else None
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(model, self.inner, lr_scheduler=scheduler)

    def share(self, batch):
        return rows_of(batch, self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp"))

    def backward(self, batch, factor=1.0, spoil=False):
        """`spoil` makes the gradients of one rank infinite: a loss beyond every number."""
        loss = self.model(**self.share(batch)).loss
        if spoil and dist.get_rank() == 0:
            factor = float("inf")
        self.booster.backward(loss * factor, self.optimizer)
        return loss.item()

    def step(self, batch, spoil=False):
        self.optimizer.zero_grad()
        loss = self.backward(batch, spoil=spoil)
        self.optimizer.step()
        return loss

    def weights(self):
        found = gather_parameters(self.model.unwrap(), lambda p: p, self.names, Axis.of(None, "world"))
        assert all(tensor.missing == 0 and tensor.spread == 0 for tensor in found.values())
        return {name: tensor.value for name, tensor in found.items()}


def same_everywhere(value):
    of_ranks = all_gather_object(value, Axis.of(None, "world"))
    assert all(other == value for other in of_ranks), of_ranks


def distance(a, b):
    """Of two sets of weights, in the size of the one."""
    off = sum((a[name].double() - b[name].double()).square().sum() for name in b).sqrt()
    return float(off / sum(t.double().square().sum() for t in b.values()).sqrt())


def norms_of_scales(engine):
    """Losses, norms and weights do not depend on the scale."""
    found = []
    for scale in (1.0, 2.0**12):
        run = Run(engine, scale=scale, max_norm=1.0)
        losses = [run.step(batch) for batch in unequal()]
        found.append((losses, run.optimizer.grad_norm, run.weights()))
        assert run.optimizer.loss_scale == scale
    exact = Run(engine, precision="fp32", max_norm=1.0)
    for batch in unequal():
        exact.step(batch)
    (losses, norm, weights), (other_losses, other_norm, other_weights) = found
    assert losses[0] == other_losses[0], "what the user sees is the loss itself"
    assert other_norm == pytest.approx(norm, rel=4 * FP16_EPS)
    assert norm == pytest.approx(exact.optimizer.grad_norm, rel=16 * FP16_EPS)
    assert distance(weights, other_weights) <= FP16_EPS
    assert distance(weights, exact.weights()) <= FP16_EPS
    same_everywhere(norm)


@every_engine
def test_the_loss_scale_is_in_no_number_that_is_seen(engine):
    run_on_ranks(ENGINES[engine][0], norms_of_scales, engine)


def micro_batches(engine):
    """The loss of `execute_pipeline` in micro-batches is that of the plain loop, and so are norm and weights."""
    for scale in (1.0, 2.0**12):
        plain, piped, by_criterion = (
            Run(engine, scale=scale, **options) for options in ({}, {"microbatch_size": 1}, {"num_microbatches": 2})
        )
        for batch in unequal():
            loss = plain.step(batch)
            for run, criterion in ((piped, None), (by_criterion, lambda outputs, inputs: outputs.loss)):
                run.optimizer.zero_grad()
                out = run.booster.execute_pipeline(iter([run.share(batch)]), run.model, criterion, run.optimizer)
                run.optimizer.step()
                assert out["loss"].item() == pytest.approx(loss, rel=4 * FP16_EPS), scale
                same_everywhere(out["loss"].item())
                assert run.optimizer.grad_norm == pytest.approx(plain.optimizer.grad_norm, rel=16 * FP16_EPS)
        for run in (piped, by_criterion):
            assert distance(run.weights(), plain.weights()) <= FP16_EPS


@every_engine
def test_execute_pipeline_returns_the_loss_unscaled(engine):
    run_on_ranks(ENGINES[engine][0], micro_batches, engine)


def accumulated(engine):
    with_sync, without = Run(engine), Run(engine)
    for first, second in (unequal(), unequal()[::-1]):
        for run in (with_sync, without):
            run.optimizer.zero_grad()
        with_sync.backward(first, 0.5)
        with without.booster.no_sync(without.model, without.optimizer):
            without.backward(first, 0.5)
        for run in (with_sync, without):
            run.backward(second, 0.5)
            run.optimizer.step()
        assert with_sync.optimizer.grad_norm == pytest.approx(without.optimizer.grad_norm, rel=16 * FP16_EPS)
    assert distance(with_sync.weights(), without.weights()) <= FP16_EPS


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "zero 2"])  # which has no no_sync
def test_gradients_accumulate_scaled_without_communication(engine):
    run_on_ranks(ENGINES[engine][0], accumulated, engine)


def overflow_while_accumulating(engine):
    """An overflow in the first micro-batch stays until the step; after it everything begins anew."""
    run = Run(engine)
    before = run.weights()
    run.backward(unequal()[0], spoil=True)
    run.backward(unequal()[1])
    run.optimizer.step()
    assert run.optimizer.loss_scale == 128 and run.optimizer.loss_scaler.skipped == 1
    assert all(w.equal(before[name]) for name, w in run.weights().items())
    run.step(unequal()[0])
    assert torch.tensor(run.optimizer.grad_norm).isfinite()
    assert any(not w.equal(before[name]) for name, w in run.weights().items())


@every_engine
def test_an_overflow_is_remembered_until_the_step(engine):
    run_on_ranks(ENGINES[engine][0], overflow_while_accumulating, engine)


def a_scheduler(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def scheduled(engine):
    """The schedule follows the calls of the training loop, and nobody warns of a step that was left out."""
    for made_of in ("the user's optimizer", "the boosted one"):
        run = Run(engine, scheduler_fn=a_scheduler if made_of == "the user's optimizer" else None)
        scheduler = run.scheduler or a_scheduler(run.optimizer)
        rates = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):
                run.step(unequal()[0], spoil=number == 0)
                scheduler.step()
                rates.append(run.optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([0.1 / 2, 0.1 / 3, 0.1 / 4])
        assert run.optimizer.loss_scaler.skipped == 1


@every_engine
def test_a_scheduler_goes_on_when_the_first_step_is_left_out(engine):
    run_on_ranks(ENGINES[engine][0], scheduled, engine)


def adamw(model):
    return AdamW(model.parameters(), lr=1e-3)


def resumed(engine):
    options = LossScale(initial=256, growth_interval=3, hysteresis=2)
    through = Run(engine, adamw, options)
    for number in range(4):
        through.step(unequal()[number % 2], spoil=number == 1)
    state = copy.deepcopy(through.optimizer.state_dict())  # torch's shares its tensors
    again = Run(engine, adamw, options)
    again.optimizer.load_state_dict(state)
    assert again.optimizer.loss_scaler.state_dict() == through.optimizer.loss_scaler.state_dict()
    assert again.optimizer.loss_scaler.skipped == 1
    for number in range(4):
        for run in (through, again):
            run.step(unequal()[number % 2], spoil=number == 2)
        assert again.optimizer.loss_scale == through.optimizer.loss_scale
    assert through.optimizer.loss_scaler.skipped == 2
    counts = [[float(s["step"]) for s in run.optimizer.state_dict()["state"].values()] for run in (through, again)]
    assert counts[0] == counts[1]
    assert set(counts[0]) == {6.0}


@every_engine
def test_the_scale_is_saved_and_loaded_with_the_optimizer(engine):
    run_on_ranks(ENGINES[engine][0], resumed, engine)


@on_ranks(2)
def test_states_of_other_precisions_load_and_damaged_ones_change_nothing():
    for engine in ("ddp 2", "zero 1"):
        fp16, bf16 = Run(engine, adamw), Run(engine, adamw, precision="bf16")
        for run in (fp16, bf16):
            run.step(unequal()[0], spoil=run is fp16)
            run.step(unequal()[0])
        assert "loss_scale" not in bf16.optimizer.state_dict()
        from_fp16, from_bf16 = fp16.optimizer.state_dict(), bf16.optimizer.state_dict()
        kept = dict(from_fp16)
        bf16.optimizer.load_state_dict(from_fp16)
        assert from_fp16.keys() == kept.keys(), "what was given is not changed"
        assert bf16.optimizer.loss_scale == 1
        fp16.optimizer.load_state_dict(from_bf16)
        assert fp16.optimizer.loss_scale == 128, "it says nothing of a scale"
        damaged = from_fp16 | {"param_groups": [], "loss_scale": from_fp16["loss_scale"] | {"scale": 4.0}}
        with pytest.raises(ValueError, match="different number of parameter groups"):
            fp16.optimizer.load_state_dict(damaged)
        assert fp16.optimizer.loss_scale == 128
        fp16.step(unequal()[1])


def plain_backward(engine):
    """Gradients of a loss that was not scaled would be divided by the scale all the same."""
    run = Run(engine)
    run.optimizer.step()  # no gradient is no mistake
    before = run.weights()
    run.model(**run.share(unequal()[0])).loss.backward()
    with pytest.raises(UsageError, match=r"gradients of a loss that was not scaled(.|\n)*booster.backward"):
        run.optimizer.step()
    assert all(w.equal(before[name]) for name, w in run.weights().items())
    assert run.optimizer.loss_scale == 256
    assert run.optimizer.param_groups[0]["params"][0] is next(iter(run.model.unwrap().parameters()))
    run.step(unequal()[0])
    assert run.optimizer.loss_scaler.skipped == 0


@every_engine
def test_a_plain_backward_in_fp16_is_refused(engine):
    run_on_ranks(ENGINES[engine][0], plain_backward, engine)


def at_the_smallest_scale(engine):
    run = Run(engine, scale=LossScale(initial=2, min_scale=1))
    run.step(unequal()[0], spoil=True)
    assert run.optimizer.loss_scale == 1
    before = run.weights()
    with pytest.raises(UsageError, match="not finite at a loss scale of 1, the smallest allowed"):
        run.step(unequal()[0], spoil=True)
    dist.barrier()  # raised on every rank
    assert all(w.equal(before[name]) for name, w in run.weights().items())
    run.step(unequal()[0])  # the user may go on
    assert torch.tensor(run.optimizer.grad_norm).isfinite()


@every_engine
def test_an_overflow_at_the_smallest_scale_ends_training_on_every_rank(engine):
    run_on_ranks(ENGINES[engine][0], at_the_smallest_scale, engine)


def growing(engine):
    """Growth by powers of two changes the numbers no more than underflow does."""
    fixed, grown = Run(engine), Run(engine, scale=LossScale(initial=256, growth_interval=1, max_scale=2048))
    scales = []
    for number in range(5):
        for run in (fixed, grown):
            run.step(unequal()[number % 2])
        scales.append(grown.optimizer.loss_scale)
    assert scales == [512, 1024, 2048, 2048, 2048]
    assert distance(grown.weights(), fixed.weights()) <= FP16_EPS


@every_engine
def test_a_scale_that_grows_does_not_show_in_the_weights(engine):
    run_on_ranks(ENGINES[engine][0], growing, engine)


class Regression(nn.Module):
    """No transformers model: returns its prediction in the format it computes in."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        return self.net(x)


def squared_error(outputs, inputs):
    return (outputs - inputs[1]).square().mean()


def criterion_of_ones_own(kind, options):
    """A criterion computed in fp16 itself, at the scale at which 1 · scale is no number of fp16 any more."""
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    targets = rows.sum(1, keepdim=True).tanh()
    reference = Regression()
    losses, wanted = [], []
    plugin = kind(precision="fp16", loss_scale=LossScale(initial=2.0**17), **options)
    booster, model = Booster(plugin=plugin), Regression()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    plain = sgd(reference)
    share = rows_of({"x": rows, "y": targets}, plugin.mesh.rank("dp"), plugin.mesh.size("dp"))
    scales = []
    while len(losses) < 4:
        optimizer.zero_grad()
        batch = (share["x"], share["y"].half())
        prediction = model(batch[0])
        loss = squared_error(prediction, batch)
        assert loss.dtype is torch.float16
        booster.backward(loss, optimizer)
        optimizer.step()
        scales.append(optimizer.loss_scale)
        assert len(scales) < 10
        if not torch.tensor(optimizer.grad_norm).isfinite():
            continue
        losses.append(float(sum(all_gather_object(loss.item(), plugin.mesh.axis("dp")))) / plugin.mesh.size("dp"))
        plain.zero_grad()
        target = squared_error(reference(rows), (None, targets))
        target.backward()
        plain.step()
        wanted.append(target.item())
    assert scales[-1] < 2.0**16, "such a loss limits the scale, and training goes on below"
    assert losses == pytest.approx(wanted, rel=16 * FP16_EPS)
    same_everywhere((losses, scales))


@on_ranks(2)
def test_a_loss_computed_in_fp16_finds_its_scale():
    for kind, options in ((TorchDDPPlugin, {}), (LowLevelZeroPlugin, {"stage": 2}), (TorchFSDPPlugin, {})):
        criterion_of_ones_own(kind, options)
