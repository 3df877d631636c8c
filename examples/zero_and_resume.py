"""ZeRO on two processes, interrupted and gone on with: colonnade run --nproc-per-node 2 examples/zero_and_resume.py 20

Makes so many steps (20 without the argument) and writes a checkpoint of model, optimizer, learning rate and place in the data
to the folder `state`. The same command then goes on at the very row, and so it does on another number of processes, or with
another plugin. The text is the program's own.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin
from colonnade.optim import MultiStepWarmupLR

STEPS, STATE = int(sys.argv[1]) if len(sys.argv) > 1 else 20, Path("state")

colonnade.launch_from_torch(seed=1024)
rank = torch.distributed.get_rank()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = MultiStepWarmupLR(optimizer, milestones=[200], warmup_steps=10)
text = torch.tensor(list(Path(__file__).read_bytes()))
rows = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, 64, 8)]

plugin = LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=1.0)
booster = Booster(plugin=plugin)
loader = plugin.prepare_dataloader(rows, batch_size=4, shuffle=True, seed=1024)
model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

step = booster.load(STATE, model, optimizer, scheduler, loader) if STATE.is_dir() else 0
stop = step + STEPS
while step < stop:
    for batch in loader:  # begins where the loader stands
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if rank == 0:
            print(f"step {step}: epoch {loader.epoch}, loss {loss.item():.6f}")
        if step == stop:
            break

booster.save(STATE, model, optimizer, scheduler, loader, step=step, keep_last=2)
