"""TIE-2: the tie between embedding and head survives the split of the vocabulary."""

import pytest
import torch
from field_cases import LOSS, WEIGHT, Boosted, Single, adamw_decay, assert_close, whole_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

STEPS = 3


def is_one_tensor(user):
    embedding, head = user.get_input_embeddings().weight, user.get_output_embeddings().weight
    return embedding is head and embedding.data_ptr() == head.data_ptr()


def train_tied(path):
    run = Boosted("tp2", tiny_model("LT"), adamw_decay)
    rows = run.user.get_input_embeddings().weight.shape
    tied = [is_one_tensor(run.user)]
    losses = []
    for _ in range(STEPS):
        losses.append(run.step(whole_batch()))
        tied.append(is_one_tensor(run.user))
    entries = sum(len(group["params"]) for group in run.optimizer.param_groups)
    run.booster.save_model(run.model, path)
    return {
        "rows": tuple(rows), "tied": tied, "losses": losses, "entries": entries, "states": len(run.optimizer.state),
        "weights": run.weights(),
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_embedding_and_head_stay_one_sharded_tensor(world, tmp_path):
    one = Single(tiny_model("LT"), adamw_decay)
    for _ in range(STEPS):
        one.step(whole_batch())
    for rank in run_on_ranks(world, train_tied, tmp_path / "model"):
        assert rank["rows"] == (32, 32)
        assert rank["tied"] == [True] * (STEPS + 1)
        assert rank["entries"] == rank["states"] == 38
        assert rank["losses"] == pytest.approx(one.losses, abs=LOSS, rel=0)
        assert_close(rank["weights"], one.weights(), WEIGHT)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert len(saved) == 38 and "lm_head.weight" not in saved
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        difference = loaded(ids(4, 16)).logits - one.model(ids(4, 16)).logits
    assert difference.abs().max() <= 1e-5
