"""Models written for `test_unusual_models`: a module with flags and no known config, and remote code of fixed sizes."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Normed(nn.Linear):
    """Norms its whole output, without a parameter."""

    def forward(self, x):
        return 4 * functional.normalize(super().forward(x), dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads, mode):
        super().__init__()
        self.heads, self.mode = heads, mode
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        if mode == "scaled":
            self.scale = nn.Parameter(torch.ones(1, heads, 1, 1))
        if mode == "gated":
            self.gate = nn.Linear(width, heads)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.mode == "norm of all heads":
            q, k = (4 * functional.normalize(y, dim=-1) for y in (q, k))
        if self.mode == "eight wide":
            q, k, v = (y.view(rows, length, 4, 8).transpose(1, 2) for y in (q, k, v))
        else:
            q, k, v = (y.view(rows, length, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        if self.mode == "norm of each head":
            q, k = (4 * functional.normalize(y, dim=-1) for y in (q, k))
        q = q * self.scale if self.mode == "scaled" else q
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y * self.gate(x).sigmoid().unsqueeze(-1) if self.mode == "gated" else y
        return self.o(y.reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width, heads, mode):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, mode)
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(x)))


class Plain(nn.Module):
    def __init__(self, mode="", heads=4, width=32, dropout=0.0):
        super().__init__()
        self.config = SimpleNamespace(heads=heads, width=width)  # as people keep one who know no transformers
        self.tokens, self.head = nn.Embedding(67, width), nn.Linear(width, 67)
        self.layers, self.drop = nn.ModuleList(Block(width, heads, mode) for _ in range(2)), nn.Dropout(dropout)

    def forward(self, idx):
        x = self.drop(self.tokens(idx))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RemoteConfig(PretrainedConfig):
    model_type = "unusual"

    def __init__(self, hidden_size=32, num_attention_heads=4, mode="", **kwargs):
        self.hidden_size, self.num_attention_heads, self.mode = hidden_size, num_attention_heads, mode
        self.vocab_size = 67
        super().__init__(**kwargs)


class Remote(PreTrainedModel):
    """Comes in one size only."""

    config_class = RemoteConfig

    def __init__(self, config):
        if config.hidden_size != 32 + 64 * (config.mode == ""):
            raise ValueError("there is no such size")
        super().__init__(config)
        self.inner = Plain(config.mode, config.num_attention_heads, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.inner.tokens

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.inner(input_ids)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
