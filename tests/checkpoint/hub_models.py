"""Tiny models for the checkpoint tests, cut into shards by hand."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from colonnade.model.layout import TensorLayout, layout_of, set_layout, shard_ranges

LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = LLAMA | {"intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
# What each parameter is cut along, by the end of its name: (dim, number of fused parts).
CUTS = {
    "q_proj.weight": (0, 1), "k_proj.weight": (0, 1), "v_proj.weight": (0, 1), "o_proj.weight": (1, 1),
    "gate_proj.weight": (0, 1), "up_proj.weight": (0, 1), "down_proj.weight": (1, 1),
    "embed_tokens.weight": (0, 1), "lm_head.weight": (0, 1), "wte.weight": (0, 1),
    "c_attn.weight": (1, 3), "c_attn.bias": (0, 3), "c_fc.weight": (1, 1), "c_fc.bias": (0, 1), "c_proj.weight": (0, 1),
    "experts.gate_up_proj": (1, 2), "experts.down_proj": (2, 1),
}  # fmt: skip


def with_noise(model: nn.Module) -> nn.Module:
    """The model with every parameter different from its neighbours, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def build(family: str, **changes) -> nn.Module:
    """A tiny model: "llama", "tied" (a tied llama), "gpt2" or "mixtral"."""
    torch.manual_seed(0)
    if family == "gpt2":
        return with_noise(GPT2LMHeadModel(GPT2Config(**GPT2 | changes)))
    if family == "mixtral":
        return with_noise(MixtralForCausalLM(MixtralConfig(**MIXTRAL | changes)))
    return with_noise(LlamaForCausalLM(LlamaConfig(**LLAMA | {"tie_word_embeddings": family == "tied"} | changes)))


def shard(model: nn.Module, mesh, pad_rows: int = 0) -> nn.Module:
    """Leave this rank's shard of every parameter that tensor parallelism cuts, with the layout that says so.

    Args:
        pad_rows: rows of NaN below each vocabulary shard, which belong to no box.
    """
    rank, ranks = mesh.rank("tp"), mesh.size("tp")
    for name, parameter in model.named_parameters():
        cut = next((cut for end, cut in CUTS.items() if name.endswith(end)), None)
        if cut is None or ranks == 1:
            continue
        dim, pieces = cut
        ranges = shard_ranges(parameter.shape[dim], rank, ranks, pieces)
        layout = TensorLayout.split(parameter.shape, dim, ranges, "tp").named(*names_of(model, parameter))
        parameter.data = layout.extract(parameter.data)
        if pad_rows and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            parameter.data = torch.cat([parameter.data, parameter.new_full((pad_rows, parameter.shape[1]), torch.nan)])
        set_layout(parameter, layout)
    return model


def names_of(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    """All state-dict names of a parameter."""
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def assert_holds_its_boxes(model: nn.Module, reference: nn.Module) -> None:
    """Check that every local tensor of `model` is the part of `reference` that its layout names, bit for bit."""
    whole = reference.state_dict()
    for name, tensor in model.state_dict(keep_vars=True).items():
        layout = layout_of(tensor)
        expected = layout.extract(whole[name].to(tensor.dtype))
        actual = tensor.detach()[tuple(slice(n) for n in layout.local_shape)]
        assert torch.equal(actual, expected), name
