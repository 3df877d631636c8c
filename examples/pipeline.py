"""A pipeline of two stages: colonnade run --nproc-per-node 2 examples/pipeline.py

Each process holds half of the blocks. The model has its embedding and its head in one weight, which both stages need; it
stays one parameter. The text is the program's own.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin

colonnade.launch_from_torch(seed=1024)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                     tie_word_embeddings=True)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
text = torch.tensor(list(Path(__file__).read_bytes()))
rows = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, 64, 8)]

plugin = HybridParallelPlugin(pp_size=2, microbatch_size=2, precision="fp32", max_norm=1.0)
booster = Booster(plugin=plugin)
loader = plugin.prepare_dataloader(rows, batch_size=16, shuffle=True, seed=1024, drop_last=True)
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)

for epoch in range(6):
    batches = iter(loader)
    for _ in range(len(loader)):
        out = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"epoch {epoch}: loss {out['loss'].item():.3f}")

prompt = torch.tensor([list(b"import ")])
written = booster.generate(model, prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
booster.save_model(model, "trained")  # one ordinary folder, put together from both stages
if torch.distributed.get_rank() == 0:
    print(repr(bytes(written[0].tolist()).decode(errors="replace")))
    plain = LlamaForCausalLM.from_pretrained("trained").eval()
    print("plain transformers writes the same:", torch.equal(plain.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0), written))  # fmt: skip
