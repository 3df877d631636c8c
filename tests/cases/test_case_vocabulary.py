"""VOC-1: a vocabulary that tp does not divide trains, is read and generates as in one process."""

import copy

import pytest
import torch
from field_cases import GRADIENT, LOSS, Boosted, Single, Trained, adamw_decay, assert_close, norm_of

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

VOCABULARY = 67
EMBEDDING = "model.embed_tokens.weight"


def batch():
    x = ids(4, 16, vocab=VOCABULARY)
    x[0, 5], x[1, 7] = 64, 66
    return {"input_ids": x, "labels": x.clone()}


def model():
    return tiny_model("LT", vocab_size=VOCABULARY)


def train():
    run = Boosted("tp2", model())
    loss = run.backward(batch())
    gradients = run.gradients_by_step()
    run = Boosted("tp2", model(), adamw_decay)
    losses = [run.step(batch()) for _ in range(3)]
    return loss, gradients, losses, run.weights()


def test_no_padding_takes_part_in_the_loss():
    one = Single(model()).step(batch())
    trained = Trained(model, adamw_decay, [batch()] * 3)
    assert one.norms[0] == pytest.approx(4.334238, rel=1e-6)
    for loss, gradients, losses, weights in run_on_ranks(2, train):
        assert loss == pytest.approx(4.529266, abs=LOSS)
        assert norm_of(gradients) == pytest.approx(4.334238, rel=1e-5)
        assert gradients[EMBEDDING].shape == weights[EMBEDDING].shape == (VOCABULARY, 32)
        assert gradients[EMBEDDING][64:].norm(dim=1).tolist() == pytest.approx([0.127139, 0.161407, 0.159508], abs=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)
        assert losses == pytest.approx(trained.one.losses, abs=LOSS, rel=0)
        trained.assert_weights(weights)


READERS = {
    "attribute": lambda out: out.logits,
    "key": lambda out: out["logits"],
    "index": lambda out: out[1 if out.loss is not None else 0],
    "get": lambda out: out.get("logits"),
    "to_tuple": lambda out: out.to_tuple()[1 if out.loss is not None else 0],
    "values": lambda out: list(out.values())[1 if out.loss is not None else 0],
    "items": lambda out: dict(out.items())["logits"],
    "unpacking": lambda out: {**out}["logits"],
}


def read_logits(how):
    """The logits in train and eval mode, with and without labels."""
    run = Boosted("tp2", model())
    found = {}
    for training in (True, False):
        run.model.train(training)
        for labels in (True, False):
            given = batch() if labels else {"input_ids": batch()["input_ids"]}
            if how == "tuple":
                logits = run.model(**given, return_dict=False)[1 if labels else 0]
            else:
                logits = READERS[how](run.model(**given))
            found["train" if training else "eval", "labels" if labels else "no labels"] = logits.detach()
    return found


@pytest.mark.parametrize("how", [*READERS, "tuple"])
def test_logits_are_whole_however_they_are_read(how):
    with torch.no_grad():
        wanted = model()(**batch()).logits
    for found in run_on_ranks(2, read_logits, how):
        for mode, logits in found.items():
            assert logits.shape == (4, 16, VOCABULARY), mode
            assert (logits - wanted).abs().max() <= 1e-5, mode


def dropped_and_copied_outputs():
    """What callers do with outputs: drop the logits to free memory, make the same output of changed tensors, copy it."""
    run = Boosted("tp2", model())
    out = run.model(**batch())
    copied = copy.copy(out).logits.shape
    rebuilt = type(out)(**{key: value.double() for key, value in out.items()})
    out = run.model(**batch())
    out.logits = None
    return tuple(copied), tuple(rebuilt.logits.shape), out.logits, out.loss.item()


def test_outputs_can_be_copied_rebuilt_and_changed():
    for copied, rebuilt, dropped, loss in run_on_ranks(2, dropped_and_copied_outputs):
        assert copied == rebuilt == (4, 16, VOCABULARY)
        assert dropped is None
        assert loss == pytest.approx(4.529266, abs=LOSS)


def criterion_gradient():
    """A criterion of the user's own reads the logits and trains through them."""
    run = Boosted("tp2", model())
    logits = run.model(**batch()).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch()["labels"][:, 1:].flatten())
    run.booster.backward(loss, run.optimizer)
    return run.gradients_by_step()


def test_a_loss_made_from_the_logits_has_the_same_gradient():
    one = Single(model()).step(batch())
    for gradients in run_on_ranks(2, criterion_gradient):
        assert_close(gradients, one.gradients, GRADIENT)


def generate(owner, use_cache):
    owner.eval()
    mask = torch.ones(2, 4, dtype=torch.long)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    return owner.generate(ids(2, 4), attention_mask=mask, **options)


def generate_boosted():
    run = Boosted("tp2", model())
    found = [generate(owner, use_cache) for owner in (run.model, run.user) for use_cache in (True, False)]
    return found, run.step(batch())


def test_generation_gives_the_tokens_of_one_process_and_training_goes_on():
    wanted = generate(model(), use_cache=True)
    for found, loss in run_on_ranks(2, generate_boosted):
        assert [tokens.tolist() for tokens in found] == [wanted.tolist()] * 4
        assert loss == pytest.approx(4.529266, abs=LOSS)
