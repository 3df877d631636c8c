"""Models that are legal but seldom: edited after they were built, flagged without a config, with numbers that coincide.

The ranks are threads of this process. Everything is compared with the same model in one piece, in double precision.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from inferred_families import small
from models_of_our_own import NOISE
from torch import nn
from unusual_models import Normed, Plain, Remote, RemoteConfig

from colonnade.cluster.mesh import Axis
from colonnade.comm.threads import run_as_ranks
from colonnade.errors import PolicyError
from colonnade.model.layout import layout_of
from colonnade.shardformer import ModelSharder, ShardConfig
from colonnade.shardformer.inference import infer, infer_policy
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.inference.probe import loss_of

NO_DROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
ONE_KEY = {"head_dim": 8, "num_key_value_heads": 1}


def noisy(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model.train()


def family(name, kind="AutoModelForCausalLM", **changes):
    config = transformers.AutoConfig.for_model(name, **small(**NO_DROP | changes))
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager")
    model.config.use_cache = False
    if getattr(model.config, "_experts_implementation", None):
        model.config._experts_implementation = "batched_mm"
    return noisy(model)


def tokens(rows=3, length=12, seed=3, vocab=67):
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows=3, seed=3, **targets):
    """Rows that are padded differently; what is padded is no target, nor is the token after it."""
    x = tokens(rows, seed=seed)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    labels = x.masked_fill(mask == 0, -100)
    labels[0, 5] = -100
    return {"input_ids": x, "attention_mask": mask} | (targets or {"labels": labels})


def policy_for(model, ranks):
    return infer_policy(model, Axis("tp", ranks, 0, tuple(range(ranks)), None))


def assert_same(model, batches, ranks, prepare=None, before=None, single=False):
    """Train with momentum, split and in one piece: losses, every gradient of every step, weights at the end.

    Args:
        prepare: what is done to each copy first.
        before: called with a model and the number of the step.
        single: in float32; recomputation in the backward pass leaves the mode that widens its casts.

    Returns:
        The inferred policy.
    """
    policy, tolerance = policy_for(model, ranks), 2e-5 if single else 1e-9
    copies = [copy.deepcopy(model).to(torch.float32 if single else torch.float64) for _ in range(ranks + 1)]

    def train(model):
        if prepare:
            prepare(model)
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        for number, batch in enumerate(batches):
            if before:
                before(model, number)
            optimizer.zero_grad()
            loss = loss_of(model(**batch))
            loss.backward()
            steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            steps[-1]["the loss"] = loss.detach()
            optimizer.step()
        return [*steps, {n: p.detach().clone() for n, p in model.named_parameters()}]

    def on_rank(axis):
        with nullcontext() if single else in_double(), torch.enable_grad():
            ModelSharder(copies[axis.rank], copy.copy(policy), ShardConfig(axis)).shard()
            return train(copies[axis.rank])

    with nullcontext() if single else in_double():
        wanted = train(copies[-1])
    for rank, found in enumerate(run_as_ranks(ranks, on_rank)):
        layouts = {name: layout_of(p) for name, p in copies[rank].named_parameters()}
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            largest = max(value.abs().max() for value in theirs.values())
            for name, value in ours.items():
                whole = theirs[name]
                share = layouts[name].extract(whole) if name in layouts else whole
                assert (value - share).abs().max() <= tolerance * largest, (rank, name)
    return policy


def levels(policy):
    return {pattern.rpartition(".")[2]: level for pattern, level in policy.levels.items()}


# numbers that coincide


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", ["gpt_neox", "phi"])
def test_a_mask_of_as_many_rows_as_heads_is_no_bias_for_each_head(name, rows):
    policy = assert_same(family(name, num_attention_heads=2, num_key_value_heads=2), [padded(rows)], 2)
    assert not any(region.arguments for region in policy.regions) and len(policy.split_regions) == 4


@pytest.mark.parametrize("heads", [2, 4])
def test_a_bias_by_distance_is_cut_by_heads_where_there_are_as_many_rows(heads):
    config = transformers.T5Config(
        vocab_size=67,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    batch = padded(heads, labels=tokens(heads, 7))
    policy = assert_same(noisy(transformers.T5ForConditionalGeneration(config)), [batch], 2)
    assert 5 not in levels(policy).values()


def test_entries_for_each_head_are_told_from_what_is_as_wide_as_a_head():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    policy = assert_same(family("gpt_oss", head_dim=8, num_attention_heads=8, **experts), [padded()], 2)
    assert levels(policy)["o_proj"] < 5


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("glm", {"head_dim": 8, "intermediate_size": 67}),
        ("qwen3", {"hidden_size": 67, "head_dim": 4, "intermediate_size": 67}),
        ("smollm3", {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 64}),
    ],
)
def test_widths_that_coincide(name, sizes):
    policy = assert_same(family(name, **sizes), [padded(4)], 2)
    assert len(policy.split_regions) == 4 and policy.vocabulary == "split"


@pytest.mark.parametrize(
    ("name", "sizes"), [("olmo2", {}), ("phi3", {}), ("gpt_neox", {"num_key_value_heads": None}), ("cohere", {})]
)
def test_four_heads_on_three_ranks(name, sizes):
    assert 5 not in levels(assert_same(family(name, **sizes), [padded()], 3)).values()


# other heads than a language model's, and none


@pytest.mark.parametrize(
    ("name", "kind", "targets", "ranks"),
    [
        ("gpt_neox", "AutoModelForSequenceClassification", {"labels": torch.tensor([0, 2, 1])}, 2),
        ("qwen2", "AutoModelForTokenClassification", {"labels": tokens(vocab=8) - 3}, 3),
        (
            "qwen2",
            "AutoModelForQuestionAnswering",
            {"start_positions": torch.arange(3), "end_positions": torch.arange(4, 7)},
            4,
        ),
        ("phi", "AutoModel", {"use_cache": False}, 2),
    ],
)
def test_a_model_with_another_head(name, kind, targets, ranks):
    changes = {"num_labels": 5 if "Token" in kind else 3} if "Classification" in kind else {}
    policy = assert_same(family(name, kind, **changes), [padded(**targets)], ranks)
    assert len(policy.split_regions) == 4


# what trains, and when


def freeze(model, *words, frozen=True):
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(not frozen)


@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_inside_attention_that_are_frozen_thawed_and_frozen_again(ranks):
    def before(model, step):
        freeze(model, "q_norm", "k_norm", frozen=step != 1)

    assert_same(family("qwen3", **ONE_KEY), [padded(seed=s) for s in range(3)], ranks, before=before)


def test_sinks_that_are_thawed_later():
    model = family("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **ONE_KEY)
    before = lambda model, step: freeze(model, "sinks", frozen=step == 0)  # noqa: E731
    assert_same(model, [padded(), padded(seed=4)], 4, before=before)


def test_a_model_in_which_nothing_trains_yet():
    model = family("gemma2", head_dim=8, sliding_window=8, query_pre_attn_scalar=8).requires_grad_(False)
    policy = assert_same(model, [padded()], 2, before=lambda model, _: model.requires_grad_(True))
    assert len(policy.split_regions) == 4
    assert not any(p.requires_grad for p in model.parameters()), "a look leaves the model as it was"


def test_only_the_last_block_and_the_head_train():
    def prepare(model):
        freeze(model.requires_grad_(False), "layers.1", "lm_head", frozen=False)

    assert_same(family("phi3", num_key_value_heads=1), [padded(), padded(seed=4)], 4, prepare=prepare)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 4), ("olmo2", 2)])
def test_recomputation_with_one_key_for_all_heads(name, ranks, reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    sizes = ONE_KEY if name == "qwen3" else {"num_key_value_heads": 1}
    assert_same(family(name, **sizes), [padded(), padded(seed=4)], ranks, prepare=prepare, single=True)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_generation_between_steps_with_fewer_keys_than_ranks(name):
    model = family(name, **ONE_KEY if name == "qwen3" else {"num_key_value_heads": 1}).double()
    policy, prompt = policy_for(model, 4), tokens(2, 6)

    def generate(model):
        loss_of(model(**padded())).backward()
        found = model.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        return found, loss_of(model.train()(**padded())).detach()

    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(axis):
        with in_double(), torch.enable_grad():
            ModelSharder(copies[axis.rank], copy.copy(policy), ShardConfig(axis)).shard()
            return generate(copies[axis.rank])

    with in_double():
        ids, loss = generate(copy.deepcopy(model))
    for found, its_loss in run_as_ranks(4, on_rank):
        assert torch.equal(found, ids) and abs(its_loss - loss) < 1e-9


def test_a_policy_for_a_model_in_bf16():
    policy = assert_same(family("olmo2", num_key_value_heads=1).to(torch.bfloat16), [padded()], 4)
    assert 5 not in levels(policy).values()


# models that are not what their config says


def repeat_a_block(model):
    model.model.layers[1] = model.model.layers[0]


def share_weights(model):
    first, second = model.model.layers
    for name in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj"):
        getattr(second.self_attn, name).weight = getattr(first.self_attn, name).weight


def drop_a_block(model):
    del model.model.layers[1]


def norm_the_queries(model):
    for block in model.model.layers:
        block.self_attn.q_proj.__class__ = Normed


@pytest.mark.parametrize("edit", [repeat_a_block, share_weights, drop_a_block, norm_the_queries])
def test_a_model_that_was_edited_is_looked_at_as_it_is(edit):
    model = (
        family("qwen3", **ONE_KEY) if edit is not norm_the_queries else family("qwen2")
    )  # whose queries have no norm
    edit(model)
    policy = assert_same(model, [padded(), padded(seed=4)], 2)
    assert levels(policy) == {"o_proj": 5 if edit is norm_the_queries else 0, "down_proj": 0}


def test_an_edited_model_too_large_to_be_tried_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(infer, "LARGEST_TWIN", 10)
    model = family("qwen3", **ONE_KEY)
    norm_the_queries(model)
    with pytest.raises(PolicyError, match=r"q_proj is Normed, and its config makes Linear"):
        policy_for(model, 2)


# models of one's own


def plain(*args, **kwargs):
    torch.manual_seed(0)
    return noisy(Plain(*args, **kwargs))


def test_two_models_of_equal_weights_that_differ_in_a_flag_are_two_models():
    batch = {"idx": tokens()}
    each = assert_same(plain("norm of each head"), [batch], 2)
    both = assert_same(plain("norm of all heads"), [batch], 2)
    assert (levels(each)["o"], levels(both)["o"]) == (1, 5)


def test_dropout_leaves_a_check_nothing_to_chance():
    model = plain(dropout=0.1)
    assert len(assert_same(model, [{"idx": tokens()}], 2, prepare=nn.Module.eval).split_regions) == 4
    assert model.drop.p == 0.1


@pytest.mark.parametrize("mode", ["scaled", "gated"])
@pytest.mark.parametrize(("heads", "width", "ranks"), [(2, 32, 2), (8, 64, 3), (11, 44, 4), (13, 52, 2)])
def test_entries_for_each_head(mode, heads, width, ranks):
    policy = assert_same(plain(mode, heads, width), [{"idx": tokens(heads)}], ranks)
    assert levels(policy)["o"] < 5


@pytest.mark.parametrize(
    ("sizes", "level"), [({"hidden_size": 96, "num_attention_heads": 6}, 1), ({"mode": "eight wide"}, 5)]
)
def test_remote_code_that_is_written_for_one_size(sizes, level):
    torch.manual_seed(0)
    policy = assert_same(noisy(Remote(RemoteConfig(**sizes))), [padded()], 2)
    assert levels(policy) == {"o": level, "down": level % 5}


def test_remote_code_of_one_size_that_is_too_large_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(infer, "LARGEST_TWIN", 10)
    model = Remote(RemoteConfig(hidden_size=96, num_attention_heads=6))
    with pytest.raises(PolicyError, match="its tiny twin does not run .*there is no such size"):
        policy_for(model, 2)


def test_a_config_class_derived_from_a_known_one():
    class Config(transformers.Qwen2Config):
        model_type = "qwen2-of-ours"

        def __init__(self, temperature=2.0, **kwargs):
            self.temperature = temperature
            super().__init__(**kwargs)

    class Model(transformers.Qwen2ForCausalLM):
        config_class = Config

    policy = assert_same(noisy(Model(Config(**small()))), [padded()], 3)
    assert len(policy.split_regions) == 4
