"""TIE-2: the tie between embedding and head survives the split of the vocabulary."""

import pytest
import torch
from field_cases import LOSS, Boosted, Trained, adamw_decay, assert_equal_bits, whole_batch
from safetensors.torch import load_file
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

STEPS = 3


def is_one_tensor(user):
    embedding, head = user.get_input_embeddings().weight, user.get_output_embeddings().weight
    return embedding is head and embedding.data_ptr() == head.data_ptr()


def conditioned_adamw(model):
    """AdamW whose epsilon keeps rounding from being divided by itself, so that the logits after it can be compared."""
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


def train_tied(path, optimizer_fn):
    run = Boosted("tp2", tiny_model("LT"), optimizer_fn)
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


@pytest.mark.parametrize("optimizer_fn", [adamw_decay, conditioned_adamw])
@pytest.mark.parametrize("world", [2, 4])
def test_embedding_and_head_stay_one_sharded_tensor(world, optimizer_fn, tmp_path):
    trained = Trained(lambda: tiny_model("LT"), optimizer_fn, [whole_batch()] * STEPS)
    answers = run_on_ranks(world, train_tied, tmp_path / "model", optimizer_fn)
    for rank in answers:
        assert rank["rows"] == (32, 32)
        assert rank["tied"] == [True] * (STEPS + 1)
        assert rank["entries"] == rank["states"] == 38
        assert rank["losses"] == pytest.approx(trained.one.losses, abs=LOSS, rel=0)
        trained.assert_weights(rank["weights"])
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert len(saved) == 38 and "lm_head.weight" not in saved
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_equal_bits(dict(loaded.named_parameters()), answers[0]["weights"])
    if optimizer_fn is conditioned_adamw:
        with torch.no_grad():
            wanted = trained.one.model(ids(4, 16)).logits
            difference = (loaded(ids(4, 16)).logits - wanted).abs().max()
        # of the largest logit, 3.8: one process in fp32 is itself 1.1e-5 away from fp64 here
        assert difference <= 1e-5 * wanted.abs().max()
