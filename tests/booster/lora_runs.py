"""Models with adapters of peft for the tests: the same weights at every call, adapters that are not zero."""

import peft
import torch
from parity_runs import LAYOUTS as SPLIT_OR_REPEATED
from parity_runs import build, plain
from transformers import BertConfig, BertForMaskedLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.tiny import ids

# name: (ranks, plugin, options)
LAYOUTS = SPLIT_OR_REPEATED | {
    "zero 1": (2, LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (2, LowLevelZeroPlugin, {"stage": 2}),
    "tp 2 × zero 1": (4, HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}),
    "fsdp 2": (2, TorchFSDPPlugin, {}),
}

# what is adapted: every linear layer of the blocks
TARGETS = {
    "LL": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "LT": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "G2": ["c_attn", "c_proj", "c_fc"],
    "OP": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],
}


def bert(**overrides):
    options = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(**(options | overrides)))


def base(name, **overrides):
    return bert(**overrides) if name == "bert" else build(name, **overrides)


def lora_config(name, **options):
    task = None if name == "bert" else "CAUSAL_LM"
    return peft.LoraConfig(
        **{
            "r": 3, "lora_alpha": 5, "target_modules": TARGETS[name], "init_lora_weights": False, "task_type": task,
            "fan_in_fan_out": name == "G2",
        } | options
    )  # fmt: skip


def adapted(name, overrides=None, second=None, **options):
    """A peft model whose adapters are not zero.

    Args:
        second: options of another adapter, which is there and not active.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = peft.get_peft_model(base(name, **(overrides or {})), lora_config(name, **options))
        if second is not None:
            model.add_adapter("second", lora_config(name, **second))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key or "modules_to_save" in key:
                    parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model.train()


def run_lora(layout, name, batches=None, overrides=None, plugin_options=None, second=None, lora=None, **options):
    """One comparison with plain peft in one process; returns the report as text."""
    plugin_class, layout_options = LAYOUTS[layout][1:]
    options = {"steps": 3, "max_norm": 0.5} | options
    plugin_options = layout_options | {"precision": "fp32", "max_norm": options["max_norm"]} | (plugin_options or {})
    report = assert_same_as_single(
        lambda: adapted(name, overrides, second, **(lora or {})),
        batches or plain(),
        lambda: plugin_class(**plugin_options),
        **options,
    )
    assert not report.undetermined, "every weight is compared"
    return str(report)


def run_each_lora(layout, cases):
    """Several comparisons in one launch; a failure says which."""
    for label, kwargs in cases.items():
        try:
            run_lora(layout, **kwargs)
        except Exception as error:
            raise AssertionError(f"{layout}, {label}: {error}") from error


def batch(rank=0, rows=2, tokens=12):
    x = ids(rows, tokens, 7 + rank, 67)
    return {"input_ids": x, "labels": x}


def trained(name, plugin, steps=2, **lora):
    """A boosted model after some steps."""
    model = adapted(name, **lora)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(steps):
        booster.backward(model(**batch(step)).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer


def logits_of(model, name):
    with torch.no_grad():
        return model.eval()(input_ids=batch()["input_ids"]).logits
