"""LoRA under every engine: the numbers of plain peft in one process, and the traffic of a step."""

import pytest
import torch
from lora_runs import LAYOUTS, TARGETS, adapted, batch, run_each_lora, run_lora, trained
from parity_runs import lopsided, padded, unequal

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.model.adapters import plain_model
from colonnade.model.layout import layout_of
from colonnade.shardformer.description import ModulePolicyDescription, SubModuleReplacementDescription
from colonnade.shardformer.layer import Linear1D_Row
from colonnade.shardformer.policies.llama import LlamaPolicy
from colonnade.shardformer.words import col, lm_head
from colonnade.testing.ranks import on_ranks, run_on_ranks

FAMILIES = {
    "llama, 2 key/value heads": {"name": "LL"},
    "llama, tied": {"name": "LT"},
    "gpt2, Conv1D with q, k and v fused": {"name": "G2"},
    "opt, biases": {"name": "OP"},
    "qwen3, head norms": {"name": "qwen3"},
    "bert, inferred": {"name": "bert"},
}
KINDS = {
    "some layers": {"name": "LL", "lora": {"target_modules": ["q_proj", "v_proj"]}},
    "row-parallel layers alone": {"name": "LL", "lora": {"target_modules": ["o_proj", "down_proj"]}},
    "scaled by the root of the rank": {"name": "LL", "lora": {"use_rslora": True}},
    "all biases": {"name": "G2", "lora": {"bias": "all"}},
    "the biases of adapted layers": {"name": "OP", "lora": {"bias": "lora_only"}},
    "biases in the adapters": {"name": "OP", "lora": {"lora_bias": True}},
    "different ranks": {"name": "LL", "lora": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 2}}},
    "a second adapter, not active": {"name": "LL", "second": {"r": 2}},
    "embedding and head": {"name": "LL", "lora": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}},
    "an embedding with padding": {
        "name": "LL", "overrides": {"pad_token_id": 40}, "lora": {"target_modules": ["embed_tokens"]},
    },
    "an embedding tied to the head": {"name": "LT", "lora": {"target_modules": ["embed_tokens", "q_proj"]}},
    "a norm trained whole": {"name": "LL", "lora": {"modules_to_save": ["norm"]}},
    "no task type": {"name": "LL", "lora": {"task_type": None}},
    "unequal targets": {"name": "LL", "batches": unequal()},
    "padding": {"name": "LL", "batches": padded("left")},
    "accumulated": {"name": "LL", "accumulate": 3, "no_sync": True},
    "by execute_pipeline": {"name": "LL", "through": "execute_pipeline"},
}  # fmt: skip


@pytest.mark.sample("tp 2", "tp 2 × zero 1", "fsdp 2", "ddp 2")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dp 2, small buckets"])
def test_every_family_trains_as_plain_peft_does(layout):
    run_on_ranks(LAYOUTS[layout][0], run_each_lora, layout, FAMILIES)


@pytest.mark.sample("tp 2")
@pytest.mark.parametrize("layout", ["tp 2", "tp 4", "ddp 2", "zero 1", "fsdp 2"])
def test_every_kind_of_lora_trains_as_plain_peft_does(layout):
    run_on_ranks(LAYOUTS[layout][0], run_each_lora, layout, KINDS)


SCARCE = {
    "1 key/value head": {"name": "LL", "overrides": {"num_key_value_heads": 1}},
    "5 heads": {
        "name": "LL",
        "overrides": {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "intermediate_size": 37},
    },
    "gpt2, 5 heads": {"name": "G2", "overrides": {"n_head": 5, "n_embd": 40, "n_inner": 37}},
}


def test_heads_that_do_not_divide_or_are_fewer_than_ranks():
    run_on_ranks(4, run_each_lora, "tp 4", SCARCE)


def test_one_data_parallel_rank_with_few_targets():
    run_on_ranks(4, run_lora, "tp 2 × dp 2", "LL", lopsided())


def dropped(name, lora, overrides, tp_size):
    """Losses and gradients of two steps with dropout in the adapters, split and in one process."""
    losses = []
    grads = {}
    for split in (False, True):
        model = adapted(name, overrides, **lora)
        torch.manual_seed(11)
        if split:
            booster = Booster(plugin=HybridParallelPlugin(tp_size=tp_size, precision="fp32"))
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            torch.manual_seed(11)
            boosted, optimizer, *_ = booster.boost(model, optimizer)
        torch.manual_seed(13)
        found = []
        for _ in range(2):
            loss = (boosted if split else model)(**batch()).loss
            loss.backward()
            found.append(loss.item())
        losses.append(found)
        for key, p in model.named_parameters():
            if p.grad is None:
                continue
            if not split:
                grads[key] = p.grad
                continue
            wanted = layout_of(p).extract(grads[key])
            assert torch.allclose(p.grad, wanted, rtol=1e-4, atol=1e-5 * grads[key].abs().max().item()), key
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class GatheringPolicy(LlamaPolicy):
    """Collects the output of columns on every rank, and gives rows a whole input."""

    def module_policy(self):
        row = SubModuleReplacementDescription("down_proj", Linear1D_Row, {"parallel_input": False})
        feed_forward = col("gate_proj", "up_proj", gather=True) + ModulePolicyDescription(sub_module_replacement=[row])
        return super().module_policy() | {"LlamaMLP": feed_forward, "LlamaForCausalLM": lm_head("lm_head", gather=True)}


def test_layers_whose_output_is_gathered():
    options = {"plugin_options": {"custom_policy": GatheringPolicy}}
    head = {"lora": {"target_modules": [*TARGETS["LL"], "lm_head"]}}
    run_on_ranks(2, run_lora, "tp 2", "LL", **options, **head)
    run_on_ranks(4, run_lora, "tp 4", "LL", overrides={"intermediate_size": 37}, **options, **head)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_dropout_before_column_parallel_layers_draws_what_one_process_draws(tp_size):
    lora = {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"], "lora_dropout": 0.3}
    run_on_ranks(tp_size, dropped, "LL", lora, {}, tp_size)
    lora = {"target_modules": ["c_attn", "c_fc"], "lora_dropout": 0.3}
    run_on_ranks(tp_size, dropped, "G2", lora, {}, tp_size)


@on_ranks(2)
def test_dropout_before_row_parallel_layers_differs_on_the_ranks_and_leaves_the_common_stream_alone():
    model = adapted("LL", {"attention_dropout": 0.2}, target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model, *_ = booster.boost(model)
    masks = {}
    for name, module in model.unwrap().named_modules():
        if type(module).__name__ == "DropoutForParallelInput":
            module.register_forward_hook(lambda m, x, y, name=name: masks.update({name: (y == 0).detach()}))
    seen = {}
    first = model.unwrap().get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    first.register_forward_hook(lambda m, x, y: seen.update(h=y.detach()))
    loss = model(**batch()).loss
    loss.backward()
    world = Axis.of(None, "world")
    everywhere = all_gather_object((masks, seen["h"], torch.get_rng_state(), loss.item()), world)
    (masks_0, h_0, state_0, loss_0), (masks_1, h_1, state_1, loss_1) = everywhere
    assert masks_0 and all(not torch.equal(masks_0[name], masks_1[name]) for name in masks_0)
    assert torch.equal(h_0, h_1), "one mask before a column-parallel layer, though attention draws its own"
    assert torch.equal(state_0, state_1) and loss_0 == loss_1


def counted(name, lora):
    booster, model, optimizer = trained(name, HybridParallelPlugin(tp_size=2, precision="fp32"), steps=1, **lora)
    with colonnade.ledger() as forward:
        loss = model(**batch()).loss
    with colonnade.ledger() as backward:
        booster.backward(loss, optimizer)
    config = plain_model(model.unwrap()).config
    return forward, backward, config


@on_ranks(2)
def test_traffic_of_a_step():
    """Columns add r · D for each adapter's first matrix in the backward, rows b · s · r in the forward; nothing else."""
    rank, tokens = 3, 2 * 12
    forward, backward, config = counted("LL", {"r": rank})
    layers, width = config.num_hidden_layers, config.hidden_size
    wide = tokens * width
    columns, rows = 5, 2
    assert forward.calls["all_reduce", "tp"] == (2 + rows) * layers + 1
    assert forward.elements["all_reduce", "tp"] == (2 * layers + 1) * wide + rows * layers * tokens * rank
    # the first block's input needs no gradient: the embedding is frozen. Its feed-forward part's does
    assert backward.calls["all_reduce", "tp"] == (2 + columns) * layers - 1 + 1
    assert backward.elements["all_reduce", "tp"] == 2 * layers * wide + columns * layers * rank * width


def recomputed():
    booster, model, optimizer = trained("LL", HybridParallelPlugin(tp_size=2, precision="fp32"), steps=0)
    wanted = model(**batch()).loss
    booster.backward(wanted, optimizer)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    inner = plain_model(model.unwrap())
    inner.enable_input_require_grads()
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model(**batch()).loss
    booster.backward(loss, optimizer)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name


def test_recomputation_gives_the_same_gradients():
    run_on_ranks(2, recomputed)
