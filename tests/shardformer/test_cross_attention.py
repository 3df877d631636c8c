"""GPT-2 as a decoder beside an encoder: its attention to the encoder's states is split like its own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.shardformer.layer import Conv1D_Col
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids

LAYERS = 2


def decoder(**changes):
    options = {
        "vocab_size": 67, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "add_cross_attention": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**options | changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(seed=7):
    x = ids(4, 12, seed=seed, vocab=67)
    states = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1, 5:] = mask[3, 2:] = 0
    return {"input_ids": x, "labels": x.clone(), "encoder_hidden_states": states, "encoder_attention_mask": mask}


def train(tp_size, fused):
    assert_same_as_single(
        decoder, [batch(7), batch(8)],
        lambda: HybridParallelPlugin(
            tp_size=tp_size, precision="fp32", max_norm=1.0, enable_fused_normalization=fused
        ),
        steps=3, max_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("world, tp_size, fused", [(2, 2, False), (2, 2, True), (3, 3, False), (4, 2, False)])
def test_a_decoder_with_cross_attention_trains_as_in_one_process(world, tp_size, fused):
    run_on_ranks(world, train, tp_size, fused)


def train_without_encoder():
    plain = {key: value for key, value in batch().items() if "encoder" not in key}
    make = lambda: HybridParallelPlugin(tp_size=2, precision="fp32")  # noqa: E731
    assert_same_as_single(decoder, [plain], make, steps=2)


def test_the_encoders_states_may_be_left_out():
    run_on_ranks(2, train_without_encoder)


@on_ranks(2)
def test_the_encoder_gets_the_gradient_that_it_gets_in_one_process():
    plain, model = decoder().double(), decoder().double()
    ShardFormer(ShardConfig(Axis.of(None))).optimize(model)
    for block in model.transformer.h:
        assert isinstance(block.crossattention.q_attn, Conv1D_Col)
        assert block.crossattention.c_attn.weight.shape == (32, 32)
    given = {key: value for key, value in batch().items() if key != "labels"}  # transformers' loss is in fp32
    wanted, found = (given["encoder_hidden_states"].double().requires_grad_() for _ in range(2))
    plain(**given | {"encoder_hidden_states": wanted}).logits.square().mean().backward()
    with ledger() as book:
        model(**given | {"encoder_hidden_states": found}).logits.square().mean().backward()
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    # a block enters three regions, of which cross attention reads two tensors, and leaves three
    assert book.calls["all_reduce", "tp"] == 7 * LAYERS + 2
    for key, tensor in gather_parameters(model, lambda p: p.grad, {}, Axis.of(None)).items():
        wanted_grad = plain.get_parameter(key).grad
        torch.testing.assert_close(tensor.value, wanted_grad, rtol=1e-9, atol=1e-11, msg=key)


def generate(model):
    given = batch()
    states = {key: given[key] for key in ("encoder_hidden_states", "encoder_attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.eval().generate(given["input_ids"][:, :4], **states, **options).tolist()


@on_ranks(2)
def test_generation_gives_the_tokens_of_one_process():
    wanted, model = generate(decoder()), decoder()
    ShardFormer(ShardConfig(Axis.of(None))).optimize(model)
    assert generate(model) == wanted
