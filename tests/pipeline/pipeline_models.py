"""Tiny models whose forwards are cut in different ways, batches for them, and comparisons over stages with one process."""

import peft
import torch
import transformers

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.pipeline.schedule import STYLES
from colonnade.testing.parity import assert_same_as_single, well_conditioned_adamw
from colonnade.testing.tiny import NOISE, ids

VOCAB, TOKENS = 67, 10  # a vocabulary that divides by no number of ranks
MAX_NORM = 0.5

_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]

# name: (class, name of the entry that says how many blocks, other entries)
MODELS = {
    "llama": ("LlamaForCausalLM", "num_hidden_layers", _LLAMA | {"tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", "num_hidden_layers", _LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "num_hidden_layers", _LLAMA | {"head_dim": 8}),
    "gemma3": (
        "Gemma3ForCausalLM", "num_hidden_layers",
        _LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "GPT2LMHeadModel", "n_layer",
        {
            "vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_positions": 64, "use_cache": False,
            "bos_token_id": 1, "eos_token_id": 2,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    "falcon": (
        "FalconForCausalLM", "num_hidden_layers",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "use_cache": False, "bias": True,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "bloom": (
        "BloomForCausalLM", "n_layer",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "n_head": 4, "use_cache": False,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "bert": (
        "BertForMaskedLM", "num_hidden_layers",
        {
            "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
            "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration", "num_layers",
        {
            "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "dropout_rate": 0.0,
            "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False,
        },
    ),
    "vit": (
        "ViTForImageClassification", "num_hidden_layers",
        {
            "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 8, "patch_size": 4,
            "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
    ),
}  # fmt: skip


def build(name, blocks=4, **overrides):
    """The same model at every call, with noise on every parameter: a fresh one has biases of zero.

    Args:
        blocks: repeated blocks in all; of T5 one half is the encoder's.
    """
    model_class, entry, options = MODELS[name]
    options = options | {entry: blocks // 2 if name == "t5" else blocks}
    if name == "gemma3":
        options["layer_types"] = [_WINDOWS[number % 2] for number in range(blocks)]
    model_class = getattr(transformers, model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**options | overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model.train()


def adapted(name, blocks=4):
    """A model with adapters of peft that are not zero, on every linear layer of the blocks."""
    targets = ["c_attn", "c_proj", "c_fc"] if name == "gpt2" else ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2"
    )
    model = peft.get_peft_model(build(name, blocks), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def batches(name="llama", rows=6, tokens=TOKENS):
    """Two global batches: a row with hardly any targets, one with none, and the second of other lengths."""
    return [batch(name, seed, rows, tokens + 2 * number) for number, seed in enumerate((7, 8))]


def batch(name, seed, rows, tokens):
    if name == "vit":
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=generator)}
    x = ids(rows, tokens, seed, VOCAB)
    labels = x.clone()
    labels[0, 4:] = -100
    if rows > 2:
        labels[1] = -100
    return {"input_ids": x, "labels": labels}


def blocks_for(style, ranks):
    """Enough blocks that every stage has one."""
    return max(4, ranks * STYLES[style].chunks)


def compare(name, layout, rows=6, given=None, optimizer_fn=well_conditioned_adamw, model_fn=None, **options):
    """One comparison of training through `execute_pipeline`; the worst difference of each kind.

    Args:
        name: of the model.
        layout: options of the plugin.
        rows: of the global batch.
        given: other batches.
        model_fn: makes another model.
        options: of the comparison.
    """
    options = {"steps": 2, "max_norm": 0.0} | options
    blocks = blocks_for(layout.get("pp_style", "1f1b"), layout["pp_size"])
    report = assert_same_as_single(
        model_fn or (lambda: build(name, blocks)),
        given or batches(name, rows),
        lambda: HybridParallelPlugin(**{"precision": "fp32", "max_norm": options["max_norm"]} | layout),
        optimizer_fn,
        through="execute_pipeline",
        **options,
    )
    assert not report.undetermined, "every weight is compared"
    return {difference.kind: difference.worst for difference in report.differences}


def compare_each(cases):
    """Several comparisons in one launch; a failure says which. The worst differences of all.

    Args:
        cases: label → arguments of `compare`.
    """
    worst = {}
    for label, arguments in cases.items():
        try:
            found = compare(**arguments)
        except Exception as error:
            raise AssertionError(f"{label}: {error}") from error
        worst = {kind: max(value, worst.get(kind, 0.0)) for kind, value in found.items()}
    return worst
