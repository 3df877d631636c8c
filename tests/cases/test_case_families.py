"""ALG-1 and HEAD-2 over the families: whose row-parallel layers have biases, and whose projections are fused.

The field cases name one model each; the fault can be anybody's. Policies are inferred where no file is there.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.model.default_configs import default_config
from colonnade.model.layout import layout_of
from colonnade.model.twin import shrink, twin_model
from colonnade.shardformer.layer.linear import RowParallel
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids

VOCAB = 67
# family: fields of its configuration that are not the default
BIASED = {
    "gpt2": {},
    "opt": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gpt_neox": {},
    "gptj": {},
    "bloom": {},
    "falcon": {"bias": True, "multi_query": False},
    "phi": {},
    "starcoder2": {},
    "codegen": {},
    "biogpt": {},
    "gpt_oss": {},
    "gpt_bigcode": {},
    "bert-generation": {},
}
FUSED = {
    "gpt2": {},
    "gpt_neox": {},
    "bloom": {},
    "falcon": {},
    "phi3": {},
    "codegen": {},
    "mpt": {},
    "gpt_bigcode": {},
    "persimmon": {},
    "glm": {},
    "deepseek_v3": {},
}


def build(family, fields, ranks=2):
    config = default_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    model = twin_model(shrink(config, ranks))
    if getattr(model.config, "_experts_implementation", None):
        model.config._experts_implementation = (
            "batched_mm"  # grouped products exist in fp32 only, not in the fp64 reference
        )
    return model


def padded_batch():
    """As ALG-1 says: the first row begins with five padded tokens, which are no targets either."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    x = ids(2, 12, vocab=VOCAB).clamp(min=3)
    return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, -100)}


def plugin():
    return HybridParallelPlugin(tp_size=2, precision="fp32")


def with_biases(family, fields):
    """Parity on a padded batch; how many row-parallel layers with a bias the split model has."""
    assert_same_as_single(lambda: build(family, fields), [padded_batch()], plugin, steps=2)
    booster = Booster(plugin=plugin())
    model, *_ = booster.boost(build(family, fields))
    return sum(isinstance(m, RowParallel) and m.bias is not None for m in model.unwrap().modules())


@pytest.mark.parametrize("family", BIASED)
def test_a_bias_behind_a_row_parallel_layer_is_added_once(family):
    for biased in run_on_ranks(2, with_biases, family, BIASED[family]):
        assert biased > 0


def saved_after_no_step(family, fields, path):
    """Save a split model that an optimizer with lr 0 has stepped; names of the parameters that were split."""
    booster = Booster(plugin=plugin())
    model = build(family, fields)
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.0))
    x = ids(2, 12, vocab=VOCAB)
    booster.backward(model(input_ids=x, labels=x).loss, optimizer)
    optimizer.step()
    booster.save_model(model, path)
    return {name for name, p in model.unwrap().named_parameters() if layout_of(p).local_shape != layout_of(p).shape}


@pytest.mark.parametrize("family", FUSED)
def test_fused_projections_are_split_by_parts_and_saved_whole(family, tmp_path):
    split = run_on_ranks(2, saved_after_no_step, family, FUSED[family], tmp_path / "model")[0]
    model = build(family, FUSED[family])
    wanted = {name: p for name, p in model.named_parameters() if p.dim() == 2 and name in split}
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert wanted.keys() & saved.keys(), "the split weights are in the file under their names"
    for name in wanted.keys() & saved.keys():
        assert torch.equal(saved[name], wanted[name]), name
    loaded, x = type(model).from_pretrained(tmp_path / "model").eval(), ids(2, 12, vocab=VOCAB)
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, loaded.state_dict()[n])] == []
    with torch.no_grad():  # weights that lie elsewhere in memory may be multiplied by another kernel
        torch.testing.assert_close(loaded(x).logits, model.eval()(x).logits, rtol=1e-5, atol=1e-5)
