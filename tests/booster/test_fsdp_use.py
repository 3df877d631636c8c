"""TorchFSDPPlugin in use: what people do around the training step is right, or refused; never silently wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_models import Odd, odd_batches
from parity_runs import VOCAB, build, rows
from test_fsdp_checkpoint import boost, step, weights
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from colonnade.booster import Booster
from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ConfigError, UsageError
from colonnade.model.layout import layout_of, local_of
from colonnade.testing.parity import rows_of, well_conditioned_adamw
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


def share(batch=None):
    return rows_of(batch or rows(6)[0], dist.get_rank(), dist.get_world_size())


def backward(booster, model, optimizer, batch=None):
    booster.backward(model(**share(batch)).loss, optimizer)


def sgd(model):
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@on_ranks(3)
def test_the_groups_the_optimizer_the_scheduler_and_the_model_stay_the_users_own():
    model = build("LT")
    kind, names = type(model), [n for n, _ in model.named_parameters()]
    optimizer = AdamW([{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "lr": 1e-3}])
    scheduler = LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1.0])
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    booster = Booster(plugin=TorchFSDPPlugin(precision="fp32"))
    boosted, wrapped, _, _, same_scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    assert boosted.unwrap() is model
    assert isinstance(model, kind)
    assert [n for n, _ in model.named_parameters()] == names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert wrapped.inner is optimizer
    assert same_scheduler is scheduler
    assert all(a is b for a, b in zip(optimizer.param_groups, groups))
    assert all(group["params"] is params for group, params in zip(optimizer.param_groups, lists))
    assert [p for params in lists for p in params] == list(model.parameters()), "in the old order, tied ones once"
    for name, param in model.named_parameters():
        assert layout_of(param).names[0] == name
        assert layout_of(param).sharded_axes == ("dp",)
    step(booster, boosted, wrapped)
    scheduler.step()
    assert [group["lr"] for group in wrapped.param_groups] == [5e-4, 1e-3]


def continue_training(optimizer_fn):
    """Two steps in one process, boost, two more; and four in one process."""
    runs = [(model, optimizer_fn(model)) for model in (build("LT"), build("LT"))]
    for model, optimizer in runs:
        for batch in rows(6):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    (model, optimizer), (one, alone) = runs
    booster = Booster(plugin=TorchFSDPPlugin(precision="fp32"))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    for batch in rows(6):
        wrapped.zero_grad()
        backward(booster, boosted, wrapped, batch)
        wrapped.step()
        alone.zero_grad()
        one(**batch).loss.backward()
        alone.step()
    found = weights(boosted)
    for name, wanted in one.named_parameters():
        assert (found[name] - wanted).abs().max() < 1e-5, name
    state = {k: v for k, v in optimizer.state[model.lm_head.weight].items() if torch.is_tensor(v) and v.dim()}
    assert all(v.shape == local_of(model.lm_head.weight.detach()).shape for v in state.values())
    assert state


@pytest.mark.parametrize("optimizer_fn", [well_conditioned_adamw, sgd])
def test_an_optimizer_that_has_stepped_before_goes_on_with_its_state(optimizer_fn):
    if optimizer_fn is sgd:
        optimizer_fn = momentum
    run_on_ranks(2, continue_training, optimizer_fn)
    run_on_ranks(3, continue_training, optimizer_fn)


def momentum(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def fused(model):
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3, fused=True)


def foreach(model):
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3, foreach=True)


@on_ranks(2)
def test_fused_and_foreach_optimizers_step_on_plain_tensors():
    found = []
    for optimizer_fn in (fused, foreach):
        booster, model, optimizer = boost(Odd(), optimizer_fn)
        for batch in odd_batches(0.3, 0):
            optimizer.zero_grad()
            backward(booster, model, optimizer, batch)
            optimizer.step()
        found.append(weights(model))
    assert all((found[0][n] - found[1][n]).abs().max() < 1e-5 for n in found[0])


@on_ranks(2)
def test_the_state_of_the_optimizer_is_loaded_again():
    booster, model, optimizer = boost(build("LL"))
    step(booster, model, optimizer)
    state, start = copy.deepcopy(optimizer.state_dict()), weights(model)
    step(booster, model, optimizer)
    after = weights(model)
    with torch.no_grad():
        for name, p in model.unwrap().named_parameters():
            local_of(p.detach()).copy_(layout_of(p).extract(start[name]))
    optimizer.load_state_dict(state)
    step(booster, model, optimizer)
    assert all(after[n].equal(w) for n, w in weights(model).items())


@pytest.mark.parametrize("twice", [False, True])
@on_ranks(2)
def test_a_plain_backward_is_completed_by_the_step(twice):
    found = []
    for through_booster in (True, False):
        booster, model, optimizer = boost(Odd(), momentum_decay)
        for shares in ((0.3, 0.3), (0, 0), (0, 1)):
            for batch in odd_batches(*shares)[: 1 + twice]:
                loss = model(**share(batch)).loss
                booster.backward(loss, optimizer) if through_booster else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert all(found[0][n].equal(found[1][n]) for n in found[0])


def momentum_decay(model):
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": None}, {"reshard_after_forward": False}])
@on_ranks(2)
def test_a_forward_without_a_backward_leaves_nothing_stale(options):
    losses = []
    for extra in (False, True):
        booster, model, optimizer = boost(build("LL"), sgd, **options)
        for _ in range(2):
            backward(booster, model, optimizer)
            if extra:
                model(**share())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(model(**share()).loss.item())
        if extra:
            model.eval()
            with torch.no_grad():
                assert abs(model(**share()).loss.item() - losses[-1]) < 1e-6
            assert all(layout_of(p).sharded_axes == ("dp",) for p in model.unwrap().parameters()), (
                "nothing stays gathered"
            )
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_step_after_gradients_that_were_never_reduced_is_refused_and_zero_grad_drops_them():
    booster, model, optimizer = boost(build("LL"), sgd)
    with booster.no_sync(model, optimizer):
        backward(booster, model, optimizer)
    with pytest.raises(UsageError, match=r"(?s)accumulated on this rank only.*outside of booster.no_sync"):
        optimizer.step()
    optimizer.zero_grad()
    backward(booster, model, optimizer)
    optimizer.step()
    found = weights(model)
    booster, model, optimizer = boost(build("LL"), sgd)
    backward(booster, model, optimizer)
    optimizer.step()
    assert all(found[n].equal(w) for n, w in weights(model).items())


@on_ranks(2)
def test_gradients_accumulated_in_another_format_cannot_be_dropped():
    booster, model, optimizer = boost(build("LL"), sgd, precision="bf16", reduce_dtype="fp32")
    with booster.no_sync(model, optimizer):
        backward(booster, model, optimizer)
    with pytest.raises(UsageError, match="reduce_dtype"):
        optimizer.zero_grad()


@on_ranks(2)
def test_after_an_error_in_the_forward_or_the_backward_training_goes_on():
    booster, model, optimizer = boost(build("LL"), sgd)
    with pytest.raises(ValueError, match="labels"):
        model(input_ids=ids(2, 8), labels=torch.full((2, 8), 1000))
    loss = model(**share()).loss
    loss.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        booster.backward(loss, optimizer)
    optimizer.zero_grad()
    backward(booster, model, optimizer)
    optimizer.step()
    found = weights(model)
    booster, model, optimizer = boost(build("LL"), sgd)
    backward(booster, model, optimizer)
    optimizer.step()
    assert all(found[n].equal(w) for n, w in weights(model).items())


def fail(grad):
    raise RuntimeError("on purpose")


@on_ranks(2)
def test_hooks_and_attributes_of_parameters_are_carried_over():
    model = build("LL")
    seen = []
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.register_hook(lambda grad: seen.append(grad.shape) or grad * 2)
    weight.no_decay = True
    booster, boosted, optimizer = boost(model, sgd)
    backward(booster, boosted, optimizer)
    assert seen == [weight.shape], "called with the whole gradient of this rank's batch, once"
    assert model.model.layers[1].mlp.down_proj.weight.no_decay
    doubled = local_of(model.model.layers[1].mlp.down_proj.weight.grad)
    booster, plain, optimizer = boost(build("LL"), sgd)
    backward(booster, plain, optimizer)
    assert doubled.equal(2 * local_of(plain.unwrap().model.layers[1].mlp.down_proj.weight.grad))


@on_ranks(2)
def test_what_is_thawed_after_boost_trains():
    model = build("LL")
    model.lm_head.requires_grad_(False)
    booster, boosted, optimizer = boost(model, lambda m: SGD(m.parameters(), lr=0.1))
    backward(booster, boosted, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    before = weights(boosted)["lm_head.weight"]
    assert before.equal(build("LL").lm_head.weight)
    model.lm_head.requires_grad_(True)
    backward(booster, boosted, optimizer)
    optimizer.step()
    assert not weights(boosted)["lm_head.weight"].equal(before)


def generate(name, options):
    model = t5() if name == "t5" else build(name)
    with torch.no_grad():
        wanted = model.eval().generate(ids(2, 5, vocab=VOCAB), max_new_tokens=6, do_sample=False, pad_token_id=0)
    _booster, boosted, optimizer = boost(model, **options)
    boosted.eval()
    with torch.no_grad():
        found = boosted.generate(ids(2, 5, vocab=VOCAB), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found.equal(wanted)
    boosted.train()
    batch = {"input_ids": ids(2, 5, vocab=VOCAB), "labels": ids(2, 5, vocab=VOCAB)}
    _booster.backward(boosted(**batch).loss, optimizer)
    optimizer.step()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("name", ["LL", "G2", "t5"])
def test_generation_gives_the_same_tokens(name, options):
    run_on_ranks(2, generate, name, options)


@on_ranks(2)
def test_the_loss_is_evaluated_without_gradients():
    _, model, _ = boost(build("LL"))
    wanted = build("LL").eval()(**rows(6)[0]).loss.item()
    model.eval()
    with torch.no_grad():
        assert abs(model(**share()).loss.item() - wanted) < 1e-6
    with torch.inference_mode():
        assert abs(model(**share()).loss.item() - wanted) < 1e-6


@on_ranks(3)
def test_ranks_that_built_different_weights_start_with_those_of_rank_0():
    model = tiny_model("LL", noise_seed=1 + dist.get_rank())
    _, boosted, _ = boost(model)
    wanted = dict(tiny_model("LL").named_parameters())
    assert all(w.equal(wanted[n]) for n, w in weights(boosted).items())


@on_ranks(2)
def test_gradients_are_clipped_by_value():
    booster, model, optimizer = boost(build("LL"), lambda m: SGD(m.parameters(), lr=1.0), max_value=1e-3)
    before = weights(model)
    backward(booster, model, optimizer)
    optimizer.step()
    moved = max((before[n] - w).abs().max().item() for n, w in weights(model).items())
    assert moved == pytest.approx(1e-3, rel=1e-3)


class WholeMatrix(SGD):
    elementwise = False


@on_ranks(2)
def test_options_and_objects_that_cannot_work_are_refused_before_anything_has_changed():
    for options, text in (
        ({"reshard_after_forward": 3}, r"(?s)do not form groups of 3.*1 or 2"),
        ({"reshard_after_forward": "yes"}, "True, False, None or a number"),
        ({"cpu_offload": "yes"}, "CPUOffloadPolicy"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8' is not available"),
        ({"max_norm": -1.0}, "max_norm"),
    ):
        with pytest.raises(ConfigError, match=text):
            TorchFSDPPlugin(**options)
    model = build("LL")
    booster = Booster(plugin=TorchFSDPPlugin(precision="fp32"))
    with pytest.raises(ConfigError, match="whole matrices"):
        booster.boost(model, WholeMatrix(model.parameters(), lr=0.1))
    boosted, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="split already"):
        Booster(plugin=TorchFSDPPlugin()).boost(boosted.unwrap())
    assert all(all_gather_object(True, booster.plugin.mesh.world))


@on_ranks(2)
def test_a_group_that_is_added_after_boost_trains():
    model = build("LL")
    booster, boosted, optimizer = boost(model, lambda m: SGD(m.model.parameters(), lr=0.1))
    before = weights(boosted)["lm_head.weight"]
    optimizer.add_param_group({"params": [model.lm_head.weight]})
    backward(booster, boosted, optimizer)
    optimizer.step()
    assert not weights(boosted)["lm_head.weight"].equal(before)


@on_ranks(2)
def test_a_model_without_blocks_is_one_unit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    booster, boosted, optimizer = boost(model, sgd)
    loss = boosted(torch.ones(2, 4)).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    assert boosted(torch.ones(2, 4)).square().mean() < loss
