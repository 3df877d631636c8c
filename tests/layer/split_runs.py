"""Runs of a forward and backward pass, in one piece and in two, with the products that they make counted."""

from collections import Counter

import peft
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM

from colonnade.shardformer.layer.deferred import WeightGradients
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 67
RELATIVE = 1e-6  # of the largest entry of a gradient


class Products(TorchDispatchMode):
    """Counts the matrix products inside, by the operator."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def total(self):
        return sum(self.counts.values())


def bert():
    options = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(**options))


def lora(name="LL", targets=("q_proj", "v_proj", "o_proj", "down_proj")):
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    options["fan_in_fan_out"] = name == "G2"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(build(name), peft.LoraConfig(**options, target_modules=list(targets)))
    model.enable_input_require_grads()  # or the first adapters' input would need no gradient: nothing waits for them
    return model


def build(name):
    """A model by its name: one of the tiny ones, `bert`, or `lora`: Llama with adapters."""
    if name in ("bert", "lora"):
        return {"bert": bert, "lora": lora}[name]()
    return tiny_model(name, vocab_size=VOCAB)


def batch(seed=7):
    x = ids(2, 8, seed, VOCAB)
    return {"input_ids": x, "labels": x}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ordinary(model, *batches):
    """Gradients and products of ordinary steps over some batches."""
    with Products() as products:
        for inputs in batches or (batch(),):
            model(**inputs).loss.backward()
    return gradients(model), products


def in_two(model, inputs=None):
    """F, B and W of one batch: the gradients after B, those after W, and the products of each."""
    weights = WeightGradients()
    with weights.deferring(), Products() as forward:
        loss = model(**(inputs or batch())).loss
    with weights.deferring(), Products() as b:
        loss.backward()
    after_b = gradients(model)
    with Products() as w:
        weights.run()
    return after_b, gradients(model), (forward, b, w)


def linears(model):
    """Native and parallel linear layers whose weight trains."""
    kinds = ("Linear", "Conv1D")
    found = {n: m for n, m in model.named_modules() if any(c.__name__ in kinds for c in type(m).__mro__)}
    found |= {n: m for n, m in model.named_modules() if type(m).__name__.startswith(("Conv1D_", "FusedLinearConv1D"))}
    return {n: m for n, m in found.items() if m.weight.requires_grad}


def embedding_weights(model):
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name] - value).abs().max().item()
        assert error <= RELATIVE * value.abs().max().item(), f"{name} is off by {error}"
