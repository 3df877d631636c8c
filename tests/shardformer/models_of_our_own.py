"""Models that are in no library: one as remote code ships it, with a config of its own, and two plain modules without one.

Written for these tests after the *structure* of models that people train: nothing here knows of parallelism.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

NOISE = 0.15
VOCAB = 67


class SequenceFirstConfig(PretrainedConfig):
    """Sizes of a `SequenceFirstForCausalLM`, under the names that such a model's own code uses."""

    model_type = "chatglm2-like"
    attribute_map = {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size"}

    def __init__(
        self,
        padded_vocab_size=VOCAB,
        hidden_size=64,
        ffn_hidden_size=88,
        kv_channels=16,
        num_layers=2,
        num_attention_heads=4,
        multi_query_group_num=2,
        seq_length=64,
        layernorm_epsilon=1e-5,
        add_qkv_bias=True,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.kv_channels = kv_channels
        self.num_layers = num_layers
        self.num_attention_heads = num_attention_heads
        self.multi_query_group_num = multi_query_group_num
        self.seq_length = seq_length
        self.layernorm_epsilon = layernorm_epsilon
        self.add_qkv_bias = add_qkv_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RootMeanSquareNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 at least."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def turned_by_position(x, table, pairs_of):
    """Rotary positions on the first dimensions of each head; `pairs_of` is "neighbours" or "halves".

    x [..., heads, dim], table [..., 1, turned / 2, 2] with cosine and sine.
    """
    turned = 2 * table.shape[-2]
    head, rest = x[..., :turned], x[..., turned:]
    if pairs_of == "neighbours":
        a, b = head.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = head.chunk(2, dim=-1)
    cosine, sine = table.to(x.dtype).unbind(-1)
    new = (a * cosine - b * sine, b * cosine + a * sine)
    joined = torch.stack(new, -1).flatten(-2) if pairs_of == "neighbours" else torch.cat(new, -1)
    return torch.cat((joined, rest), -1)


def rotary_table(positions, turned, base=10000.0):
    """Cosine and sine for each position and pair: [positions, turned / 2, 2]."""
    steps = torch.arange(0, turned, 2, device=positions.device, dtype=torch.float32) / turned
    angles = positions[..., None].float() / base**steps
    return torch.stack((angles.cos(), angles.sin()), -1)


class SequenceFirstAttention(nn.Module):
    """Multi-query attention over [sequence, batch, hidden] with one fused projection, [all queries | keys | values]."""

    def __init__(self, config):
        super().__init__()
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.num_multi_query_groups_per_partition = config.multi_query_group_num
        self.hidden_size_per_attention_head = config.kv_channels
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.group_width = config.kv_channels * config.multi_query_group_num
        self.query_key_value = nn.Linear(
            config.hidden_size, self.projection_size + 2 * self.group_width, bias=config.add_qkv_bias
        )
        self.dense = nn.Linear(self.projection_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb):
        """hidden_states [S, B, D], attention_mask [B or 1, 1, S, S] True where nothing is to be seen."""
        mixed = self.query_key_value(hidden_states)
        query, key, value = mixed.split([self.projection_size, self.group_width, self.group_width], dim=-1)
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        width = self.hidden_size_per_attention_head
        query = query.view(query.size()[:-1] + (heads, width))
        key = key.view(key.size()[:-1] + (groups, width))
        value = value.view(value.size()[:-1] + (groups, width))
        query = turned_by_position(query, rotary_pos_emb, "neighbours")
        key = turned_by_position(key, rotary_pos_emb, "neighbours")
        cache = (key, value)
        key, value = (self._for_each_head(x) for x in cache)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, H, S, C]
        scores = (query @ key.transpose(-1, -2)) / math.sqrt(width)
        scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        context = (scores.softmax(-1) @ value).permute(2, 0, 1, 3).contiguous()
        return self.dense(context.view(context.size()[:-2] + (self.projection_size,))), cache

    def _for_each_head(self, x):
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        repeated = x.unsqueeze(-2).expand(-1, -1, -1, heads // groups, -1)
        return repeated.contiguous().view(x.size()[:2] + (heads, self.hidden_size_per_attention_head))


class PackedSwiGLU(nn.Module):
    """Gate and up in one layer, [gate | up]."""

    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        gate, up = torch.chunk(self.dense_h_to_4h(hidden_states), 2, dim=-1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class SequenceFirstBlock(nn.Module):
    """Pre-norm block; returns a tuple."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SequenceFirstAttention(config)
        self.post_attention_layernorm = RootMeanSquareNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = PackedSwiGLU(config)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb):
        attended, cache = self.self_attention(self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), cache


class SequenceFirstEmbedding(nn.Module):
    """Tokens [B, S] to hidden states [S, B, D]."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids):
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


class SequenceFirstEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(SequenceFirstBlock(config) for _ in range(config.num_layers))
        self.final_layernorm = RootMeanSquareNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb):
        caches = ()
        for layer in self.layers:
            hidden_states, cache = layer(hidden_states, attention_mask, rotary_pos_emb)
            caches += (cache,)
        return self.final_layernorm(hidden_states), caches


class SequenceFirstPreTrainedModel(PreTrainedModel):
    config_class = SequenceFirstConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["SequenceFirstBlock"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


class SequenceFirstModel(SequenceFirstPreTrainedModel):
    """Embedding, blocks, and the output layer, which is a part of the inner model here."""

    def __init__(self, config):
        super().__init__(config)
        self.embedding = SequenceFirstEmbedding(config)
        self.encoder = SequenceFirstEncoder(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value):
        self.embedding.word_embeddings = value

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)[None, None]
        if attention_mask is not None:
            later = later | (attention_mask[:, None, None, :] == 0)
        positions = torch.arange(length, device=input_ids.device)
        rotary = rotary_table(positions, self.config.kv_channels // 2)[:, None, None]  # [S, 1, 1, pairs, 2]
        return self.encoder(self.embedding(input_ids), later, rotary)


class SequenceFirstForCausalLM(SequenceFirstPreTrainedModel):
    """Computes its loss itself, from logits in float32, by a plain CrossEntropyLoss."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer = SequenceFirstModel(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden_states, _ = self.transformer(input_ids, attention_mask)
        logits = self.transformer.output_layer(hidden_states).transpose(0, 1).contiguous()
        loss = None
        if labels is not None:
            logits = logits.to(torch.float32)
            shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss(ignore_index=-100)(shifted.view(-1, shifted.size(-1)), targets.view(-1))
            logits, loss = logits.to(hidden_states.dtype), loss.to(hidden_states.dtype)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class FusedAttention(nn.Module):
    """Attention of a small GPT: one layer for queries, keys and values, each `n_embd` wide."""

    def __init__(self, n_embd, n_head, bias):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x):
        rows, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class FeedForward(nn.Module):
    """The MLP of a small GPT."""

    def __init__(self, n_embd, bias):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class SmallGPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, bias):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, bias=bias)
        self.attn = FusedAttention(n_embd, n_head, bias)
        self.ln_2 = nn.LayerNorm(n_embd, bias=bias)
        self.mlp = FeedForward(n_embd, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT(nn.Module):
    """A GPT as people write it for themselves: no config, a tied head, `forward(idx, targets)` → (logits, loss)."""

    def __init__(self, vocab_size=VOCAB, block_size=64, n_layer=2, n_head=4, n_embd=64, bias=True):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(SmallGPTBlock(n_embd, n_head, bias) for _ in range(n_layer)),
                "ln_f": nn.LayerNorm(n_embd, bias=bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        _, length = idx.size()
        if length > self.block_size:
            raise ValueError(f"{length} tokens are more than block_size={self.block_size}")
        positions = torch.arange(length, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class GroupedAttention(nn.Module):
    """Attention whose keys and values are shared by groups of heads."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, table):
        rows, length, _ = x.shape
        q = self.wq(x).view(rows, length, self.n_heads, self.head_dim)
        k = self.wk(x).view(rows, length, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(rows, length, self.n_kv_heads, self.head_dim)
        q, k = turned_by_position(q, table, "halves"), turned_by_position(k, table, "halves")
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class GatedFeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class GroupedBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden_dim):
        super().__init__()
        self.attention = GroupedAttention(dim, n_heads, n_kv_heads)
        self.feed_forward = GatedFeedForward(dim, hidden_dim)
        self.attention_norm = RootMeanSquareNorm(dim)
        self.ffn_norm = RootMeanSquareNorm(dim)

    def forward(self, x, table):
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class SmallGroupedLM(nn.Module):
    """A Llama-shaped model without a config; `forward(input_ids)` → logits, and the loss is the caller's."""

    def __init__(self, vocab_size=VOCAB, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=88):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(GroupedBlock(dim, n_heads, n_kv_heads, hidden_dim) for _ in range(n_layers))
        self.norm = RootMeanSquareNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.turned = dim // n_heads

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        table = rotary_table(positions, self.turned)[:, None]
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))


# name: (class, whether it is made from a SequenceFirstConfig)
OWN = {
    "sequence-first": (SequenceFirstForCausalLM, True),
    "small-gpt": (SmallGPT, False),
    "grouped": (SmallGroupedLM, False),
}


def own_model(name, **sizes):
    """One of the models in training mode; every parameter of it matters, and is the same at every call."""
    kind, configured = OWN[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(SequenceFirstConfig(**sizes)) if configured else kind(**sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model.train()
