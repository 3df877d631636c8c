"""Uses that are legal in plain PyTorch and easy to get wrong in parallel: the numbers of one process, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ConfigError, PolicyError, UsageError
from colonnade.model.layout import layout_of
from colonnade.testing.ranks import on_ranks
from colonnade.testing.tiny import ids, tiny_model


def boost(model, plugin, lr=0.5):
    booster = Booster(plugin=plugin)
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr))[:2]


def hybrid(tp, **options):
    return HybridParallelPlugin(tp_size=tp, precision=options.pop("precision", "fp32"), **options)


def rows(booster, batch):
    n = len(batch) // booster.plugin.mesh.size("dp")
    start = booster.plugin.mesh.rank("dp") * n
    return batch[start : start + n]


def assert_gradients(model, reference):
    wanted = dict(reference.named_parameters())
    for name, parameter in model.unwrap().named_parameters():
        share = layout_of(parameter).extract(wanted[name].grad)
        torch.testing.assert_close(parameter.grad, share, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("name", ["LL", "G2"])
@on_ranks(2)
def test_a_backward_for_inputs_only_leaves_nothing_behind(name):
    reference = tiny_model(name)
    batch = ids(4, 12)
    reference(input_ids=batch, labels=batch).loss.backward()
    booster, model, optimizer = boost(tiny_model(name), hybrid(2))
    embeds = model.get_input_embeddings()(batch)
    loss = model(inputs_embeds=embeds, labels=batch).loss
    torch.autograd.grad(loss, embeds, retain_graph=True)
    booster.backward(loss, optimizer)
    assert_gradients(model, reference)


@on_ranks(2)
def test_a_parameter_visited_twice_in_one_backward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            first = checkpoint(self.b, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
            return (first + checkpoint(self.a, x * 2, use_reentrant=True)).square().mean()

    torch.manual_seed(0)
    reference = Twice()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reference(x).backward()
    booster, model, optimizer = boost(copy.deepcopy(reference), hybrid(1, bucket_bytes=16))
    booster.backward(model(rows(booster, x.detach()).requires_grad_()), optimizer)
    optimizer.step()
    for name, parameter in model.unwrap().named_parameters():
        wanted = dict(reference.named_parameters())[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_after_a_backward_that_raised_the_next_is_whole():
    reference = tiny_model("LL")
    batch = ids(4, 12)
    reference(input_ids=batch, labels=batch).loss.backward()
    booster, model, optimizer = boost(tiny_model("LL"), hybrid(1, bucket_bytes=4096))
    first = next(model.unwrap().parameters())

    def fail(grad):
        raise RuntimeError("in the middle")

    handle = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        booster.backward(model(input_ids=rows(booster, batch), labels=rows(booster, batch)).loss, optimizer)
    handle.remove()
    optimizer.zero_grad()
    booster.backward(model(input_ids=rows(booster, batch), labels=rows(booster, batch)).loss, optimizer)
    assert_gradients(model, reference)


@pytest.mark.parametrize("plugin", [hybrid, TorchDDPPlugin])
@on_ranks(2)
def test_boosting_a_model_again(plugin):
    reference, batch = tiny_model("LL"), ids(4, 12)
    labels = batch.clone()
    labels[:2, 4:] = -100
    reference(input_ids=batch, labels=labels).loss.backward()

    def make():
        return hybrid(1) if plugin is hybrid else TorchDDPPlugin(precision="fp32")

    booster, model, optimizer = boost(tiny_model("LL"), make())
    booster, model, optimizer = boost(model.unwrap(), make())
    loss = model(input_ids=rows(booster, batch), labels=rows(booster, labels)).loss
    booster.backward(loss, optimizer)
    assert_gradients(model, reference)


@on_ranks(2)
def test_boosting_a_split_model_again_is_refused():
    _, model, _ = boost(tiny_model("LL"), hybrid(2))
    with pytest.raises(UsageError, match="split already"):
        boost(model.unwrap(), hybrid(2))


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=67,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(2)
def test_a_model_that_computes_its_own_loss(tp):
    reference, batch = t5(), ids(4, 12, vocab=67)
    labels = batch.clone()
    labels[:2, 4:] = -100
    wanted = reference(input_ids=batch, labels=labels).loss
    wanted.backward()
    booster, model, optimizer = boost(t5(), hybrid(tp))
    loss = model(input_ids=rows(booster, batch), labels=rows(booster, labels)).loss
    torch.testing.assert_close(loss, wanted)
    booster.backward(loss, optimizer)
    assert_gradients(model, reference)


class Wrapped(nn.Module):
    """A module of the user's around a model of transformers."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_model("LL")

    def forward(self, tokens, labels):
        return {"loss": self.inner(input_ids=tokens, labels=labels).loss}


@pytest.mark.parametrize("plugin", [hybrid, TorchDDPPlugin])
@on_ranks(2)
def test_a_model_inside_a_module_of_the_users(plugin):
    reference, batch = Wrapped(), ids(4, 12)
    labels = batch.clone()
    labels[:2, 4:] = -100
    wanted = reference(batch, labels)["loss"]
    wanted.backward()
    booster, model, optimizer = boost(Wrapped(), hybrid(1) if plugin is hybrid else TorchDDPPlugin(precision="fp32"))
    loss = model(tokens=rows(booster, batch), labels=rows(booster, labels))["loss"]
    torch.testing.assert_close(loss, wanted)
    booster.backward(loss, optimizer)
    assert_gradients(model, reference)


@on_ranks(2)
def test_a_step_after_no_sync_alone_averages_first():
    reference, batch = tiny_model("LL"), ids(4, 12)
    reference(input_ids=batch, labels=batch).loss.backward()
    booster, model, optimizer = boost(tiny_model("LL"), hybrid(1))
    with booster.no_sync(model, optimizer):
        booster.backward(model(input_ids=rows(booster, batch), labels=rows(booster, batch)).loss, optimizer)
    optimizer.step()
    assert_gradients(model, reference)


@pytest.mark.parametrize("plugin", [hybrid, TorchDDPPlugin])
@on_ranks(2)
def test_parameters_added_after_boost_are_noticed(plugin):
    booster, model, optimizer = boost(
        tiny_model("LL"), hybrid(1) if plugin is hybrid else TorchDDPPlugin(precision="fp32")
    )
    added = nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [added]})
    batch = rows(booster, ids(4, 12))
    booster.backward(model(input_ids=batch, labels=batch).loss * added, optimizer)
    with pytest.raises(UsageError, match="1 parameter has a gradient that is not averaged"):
        optimizer.step()


@on_ranks(2)
def test_ranks_whose_weights_are_permuted_start_alike():
    model = tiny_model("LL")
    if torch.distributed.get_rank():
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
    _, model, _ = boost(model, hybrid(1))
    weights = all_gather_object(model.unwrap().model.embed_tokens.weight.detach(), model.mesh.world)
    assert weights[0].equal(weights[1])


@on_ranks(2)
def test_what_cannot_be_split_is_refused():
    model = tiny_model("LL")
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(PolicyError):
        boost(model, hybrid(2))
    model = tiny_model("LL")
    with pytest.raises(ConfigError, match="Adafactor cannot step on split parameters"):
        Booster(plugin=hybrid(2)).boost(model, torch.optim.Adafactor(model.parameters()))


@on_ranks(2)
def test_bf16_weights_written_by_hand_and_optimizer_state_loaded():
    booster, model, optimizer = boost(tiny_model("LL"), hybrid(2, precision="bf16"), lr=0.0)
    weight = model.unwrap().model.norm.weight
    with torch.no_grad():
        weight.clamp_(max=0.5)
    batch = ids(4, 12)
    mask = torch.zeros(4, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), torch.finfo(torch.float32).min)
    loss = model(input_ids=batch, attention_mask=mask, labels=batch).loss
    assert loss.isfinite()
    booster.backward(loss, optimizer)
    optimizer.step()
    assert weight.max() <= 0.5

    model = tiny_model("LL")
    booster = Booster(plugin=hybrid(2, precision="bf16"))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        booster.backward(model(input_ids=batch, labels=batch).loss, optimizer)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(s["exp_avg"].dtype is torch.float32 for s in optimizer.state.values())


@on_ranks(1)
def test_an_optimizer_of_which_nothing_trains_is_refused():
    """As one that was made before adapters were: it would step on nothing, in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[0].requires_grad_(False)
    with pytest.raises(UsageError, match="none of the optimizer's 2 parameters trains"):
        Booster(plugin=TorchDDPPlugin()).boost(model, optimizer)
