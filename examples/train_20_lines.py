"""Train an unmodified Hugging Face model on two processes: colonnade run --nproc-per-node 2 examples/train_20_lines.py"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin

colonnade.launch_from_torch(seed=1024)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list(Path(__file__).read_bytes()))  # learns this file by heart, byte by byte
rows = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, 64, 8)]

plugin = HybridParallelPlugin(tp_size=2, precision="fp32", max_norm=1.0)
booster = Booster(plugin=plugin)
loader = plugin.prepare_dataloader(rows, batch_size=8, shuffle=True, seed=1024)
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)

for epoch in range(4):
    for batch in loader:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, gradient norm {float(optimizer.grad_norm):.3f}")
booster.save_model(model, "trained")  # transformers' from_pretrained("trained") loads it
