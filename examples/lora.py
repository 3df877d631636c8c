"""Adapters for a model that two processes share: colonnade run --nproc-per-node 2 examples/lora.py

A small model learns to write Python, byte by byte, and is saved. Then adapters, three percent of its parameters, teach it the
Zen of Python; they are saved in peft's format and loaded by plain peft. Needs peft: pip install 'colonnade[lora]'
"""

import codecs
import contextlib
import inspect
import io
import textwrap

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin

with contextlib.redirect_stdout(io.StringIO()):  # the module prints itself
    import this

colonnade.launch_from_torch(seed=1024)
first = torch.distributed.get_rank() == 0
plugin = HybridParallelPlugin(tp_size=2, precision="fp32", max_norm=1.0)
booster = Booster(plugin=plugin)


def rows_of(text):
    pieces = torch.tensor(list(text.encode())).unfold(0, 64, 16)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(model, rows, steps, lr, name):
    """Train whatever of a plain model is not frozen; the boosted model."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model, optimizer, *_ = booster.boost(model, optimizer)
    loader = plugin.prepare_dataloader(rows, batch_size=8, shuffle=True, drop_last=True)
    step = 0
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if first and step in (1, steps):
                print(f"{name}, step {step}: loss {loss.item():.3f}")
            if step == steps:
                break
    return model


config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
base = train(LlamaForCausalLM(config), rows_of(inspect.getsource(textwrap)), steps=100, lr=5e-3, name="base")
booster.save_model(base, "base")

zen = rows_of(codecs.decode(this.s, "rot13"))
lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
adapted = booster.enable_lora(LlamaForCausalLM.from_pretrained("base").train(), lora_config=lora)
if first:
    adapted.print_trainable_parameters()
model = train(adapted, zen, steps=60, lr=1e-2, name="adapters")
booster.save_lora_as_pretrained(model, "adapter")

model.eval()
batch = {key: torch.stack([row[key] for row in zen[:8]]) for key in zen[0]}
with torch.no_grad():
    ours = model(**batch).loss.item()  # every process takes part
if first:
    plain = LlamaForCausalLM.from_pretrained("base")
    before = plain(**batch).loss.item()
    after = peft.PeftModel.from_pretrained(plain, "adapter")(**batch).loss.item()
    print(
        f"the Zen of Python: loss {before:.3f} without adapters, {after:.3f} with them by plain peft, {ours:.3f} here"
    )
