"""What happens with input that cannot work: a clear text, on every rank, at once, and the ranks can go on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.errors import ColonnadeError, ConfigError, PolicyError, ShapeError, UsageError
from colonnade.shardformer.policies.llama import LlamaPolicy
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

VOCAB = 64
PLUGINS = [HybridParallelPlugin, TorchDDPPlugin, LowLevelZeroPlugin]


def boosted(plugin=None, model=None):
    booster = Booster(plugin=plugin or HybridParallelPlugin(tp_size=2, precision="fp32"))
    model = model or tiny_model("LL", num_hidden_layers=1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def batch(**changes):
    x = ids(4, 8)
    return {"input_ids": x, "labels": x} | changes


def assert_group_still_works():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def text_of(error, call):
    """The text of the error that the call raises; afterwards the ranks still understand one another."""
    with pytest.raises(error) as caught:
        call()
    assert_group_still_works()
    return str(caught.value)


def plugin_error(kwargs):
    return text_of(ConfigError, lambda: HybridParallelPlugin(**kwargs))


@pytest.mark.parametrize(
    "kwargs, says",
    [
        ({"tp_size": 4}, ["2 ranks cannot be laid out as tp_size=4", "a multiple of 4", "--nproc-per-node 4"]),
        ({"tp_size": 3}, ["2 ranks cannot be laid out as tp_size=3", "tp_size=1 or 2", "--nproc-per-node 3"]),
        ({"tp_size": 0}, ["whole numbers of at least 1", "tp_size=0", "tp_size=1"]),
        ({"tp_size": -2}, ["tp_size=-2"]),
        ({"tp_size": 2.0}, ["tp_size=2.0"]),
        ({"tp_size": "2"}, ["tp_size='2'"]),
        ({"tp_size": True}, ["tp_size=True"]),
        ({"pp_size": 2, "pp_style": "1b1f"}, ["pp_style='1b1f'", "1f1b", "gpipe"]),
        ({"pp_size": 2, "zero_stage": 2}, ["zero_stage=2", "pp_size", "zero_stage=1"]),
        ({"num_layers_per_stage": [1, 1]}, ["num_layers_per_stage", "pp_size > 1"]),
        ({"sp_size": 2}, ["sp_size=2", "sequence parallelism is not there yet"]),
        ({"sequence_parallelism_mode": "ring"}, ["sequence_parallelism_mode='ring'", "sequence parallelism"]),
        ({"zero_stage": 3}, ["ZeRO stage 3 is not available here", "0, 1, 2", "TorchFSDPPlugin"]),
        ({"zero_stage": -1}, ["ZeRO stage -1"]),
        ({"zero_stage": True}, ["ZeRO stage True"]),
        ({"zero_stage": "1"}, ["ZeRO stage '1'"]),
        ({"pp_size": 2, "sp_size": 2}, ["sp_size=2"]),
        ({"precision": "fp8"}, ["precision='fp8' is not available", "one of 'fp32', 'bf16', 'fp16'"]),
        ({"precision": "int8"}, ["precision='int8'"]),
        ({"precision": torch.bfloat16}, ["precision=torch.bfloat16", "'bf16'"]),
        ({"precision": ["bf16"]}, ["precision=['bf16']"]),
        ({"precision": None}, ["precision=None"]),
        ({"max_norm": 1.0, "max_value": 1.0}, ["max_norm=1.0 and max_value=1.0 are both given", "one of them"]),
        ({"max_value": -1.0}, ["max_value=-1.0", "≥ 0"]),
        ({"cpu_offload": True}, ["cpu_offload", "zero_stage"]),
        ({"communication_dtype": torch.int8, "zero_stage": 1}, ["communication_dtype=torch.int8", "torch.bfloat16"]),
        ({"max_norm": -1.0}, ["max_norm=-1.0", "≥ 0"]),
        ({"max_norm": float("nan")}, ["max_norm=nan"]),
        ({"max_norm": None}, ["max_norm=None"]),
        ({"max_norm": "1"}, ["max_norm='1'"]),
        ({"microbatch_size": 0}, ["microbatch_size=0", "at least 1"]),
        ({"microbatch_size": 1.5}, ["microbatch_size=1.5"]),
        ({"num_microbatches": -1}, ["num_microbatches=-1"]),
        ({"microbatch_size": 1, "num_microbatches": 2}, ["microbatch_size and num_microbatches are both given"]),
        ({"bucket_bytes": 0}, ["bucket_bytes=0"]),
        ({"cpu_offload": "no", "zero_stage": 1}, ["cpu_offload='no'", "True or False"]),
        ({"overlap_communication": None, "zero_stage": 1}, ["overlap_communication=None", "True or False"]),
    ],
)
def test_options_that_cannot_work_are_refused_by_the_constructor(kwargs, says):
    texts = run_on_ranks(2, plugin_error, kwargs)
    assert texts[0] == texts[1], "the same text on every rank"
    for part in says:
        assert part in texts[0]


@on_ranks(1)
def test_one_process_cannot_be_two_ranks():
    with pytest.raises(
        ConfigError, match=r"1 rank cannot be laid out as tp_size=2(.|\n)*colonnade run --nproc-per-node 2"
    ):
        HybridParallelPlugin(tp_size=2)


@on_ranks(2)
def test_the_other_plugins_refuse_the_same_options():
    for kwargs, says in (
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"max_norm": 1.0, "max_value": 1.0}, "are both given"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"microbatch_size": 1, "num_microbatches": 2}, "both given"),
    ):
        for plugin in (TorchDDPPlugin, LowLevelZeroPlugin, TorchFSDPPlugin):
            assert says in text_of(ConfigError, lambda plugin=plugin, kwargs=kwargs: plugin(**kwargs))


@on_ranks(2)
def test_stages_that_are_no_low_level_zero():
    for stage in (0, 3, "2", None, True):
        text = text_of(ConfigError, lambda stage=stage: LowLevelZeroPlugin(stage=stage))
        assert f"ZeRO stage {stage!r} is not available here; there are 1, 2" in text
        assert "TorchDDPPlugin" in text and "TorchFSDPPlugin" in text


def test_a_booster_wants_a_plugin_object():
    for wrong in (None, "ddp", HybridParallelPlugin):
        with pytest.raises(UsageError, match=r"takes a plugin object such as TorchDDPPlugin\(\), and was given"):
            Booster(plugin=wrong)


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_boost_wants_a_model(plugin_class):
    booster = Booster(plugin=plugin_class(precision="fp32"))
    for wrong in ("text", None, 3, ["a", "list"], nn.Linear):
        text = text_of(ColonnadeError, lambda wrong=wrong: booster.boost(wrong))
        assert "boost" in text and type(wrong).__name__ in text


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_boost_wants_an_optimizer(plugin_class):
    booster = Booster(plugin=plugin_class(precision="fp32"))
    for wrong in ("adamw", 3, torch.optim.AdamW):
        model = tiny_model("LL", num_hidden_layers=1)
        text = text_of(ColonnadeError, lambda wrong=wrong, model=model: booster.boost(model, wrong))
        assert "optimizer" in text and type(wrong).__name__ in text


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_boosting_twice_is_refused(plugin_class):
    booster, model, optimizer = boosted(plugin_class(precision="fp32"))
    fresh = tiny_model("LL", num_hidden_layers=1)
    for again in ((model, optimizer), (model,), (fresh, optimizer)):
        assert "boost" in text_of(ColonnadeError, lambda again=again: booster.boost(*again))


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_an_optimizer_of_another_model_is_refused(plugin_class):
    """It would train weights that no forward uses, and say nothing."""
    model, other = tiny_model("LL", num_hidden_layers=1), tiny_model("LL", num_hidden_layers=1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    booster = Booster(plugin=plugin_class(precision="fp32"))
    assert "optimizer" in text_of(ColonnadeError, lambda: booster.boost(model, optimizer))


@on_ranks(2)
def test_a_policy_given_as_its_class_is_taken_or_refused_with_the_way_to_write_it():
    try:
        _, model, _ = boosted(HybridParallelPlugin(tp_size=2, precision="fp32", custom_policy=LlamaPolicy))
    except ColonnadeError as error:
        assert "LlamaPolicy()" in str(error)  # noqa: PT017
    else:
        assert model(**batch()).loss.isfinite()


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_backward_and_no_sync_want_what_boost_returned(plugin_class):
    booster, model, optimizer = boosted(plugin_class(precision="fp32"))
    loss = model(**batch()).loss
    for wrong in (torch.optim.SGD(model.parameters(), lr=0.1), optimizer.inner, None):
        text = text_of(UsageError, lambda wrong=wrong: booster.backward(loss, wrong))
        assert "the optimizer that booster.boost(...) returned" in text
        assert type(wrong).__name__ in text
    booster.backward(loss, optimizer)
    for call in (
        lambda: booster.execute_pipeline(iter([batch()]), model.unwrap(), None, optimizer),
        lambda: booster.save_model(model.unwrap(), "nowhere"),
        lambda: booster.load_model(model.unwrap(), "nowhere"),
    ):
        assert "the model that booster.boost(...) returned, and was given a LlamaForCausalLM" in text_of(
            UsageError, call
        )
    text = text_of(UsageError, lambda: booster.execute_pipeline(iter([batch()]), model, None, optimizer.inner))
    assert "and was given SGD" in text


@on_ranks(2)
def test_labels_outside_the_vocabulary():
    booster, model, optimizer = boosted()
    for wrong in (VOCAB, -1, 10**9):
        labels = ids(4, 8)
        labels[3, 5] = wrong
        says = f"labels must lie in 0..{VOCAB - 1} or be -100; found {wrong}"
        assert says in text_of(ShapeError, lambda labels=labels: model(**batch(labels=labels)))
        call = lambda labels=labels: booster.execute_pipeline(iter([batch(labels=labels)]), model, None, optimizer)  # noqa: E731
        assert says in text_of(ShapeError, call)
    assert model(**batch()).loss.isfinite()


@on_ranks(2)
def test_ids_outside_the_vocabulary():
    _, model, _ = boosted()
    for wrong in (VOCAB, -1):
        x = ids(4, 8)
        x[2, 0] = wrong
        text = text_of(ShapeError, lambda x=x: model(**batch(input_ids=x)))
        assert f"input ids must lie in 0..{VOCAB - 1}; found {wrong} at position (2, 0) (1 such)" in text
        assert "tokenizer" in text
    assert model(**batch()).loss.isfinite()


@on_ranks(2)
def test_labels_outside_the_vocabulary_without_tensor_parallelism():
    for plugin in (HybridParallelPlugin(precision="fp32"), TorchDDPPlugin(precision="fp32")):
        _, model, _ = boosted(plugin)
        text = text_of(ShapeError, lambda model=model: model(**batch(labels=torch.full((4, 8), VOCAB))))
        assert f"labels must lie in 0..{VOCAB - 1}" in text


@on_ranks(2)
def test_different_batches_inside_a_group_are_found_and_named():
    rank = dist.get_rank()
    booster, model, optimizer = boosted(HybridParallelPlugin(tp_size=2, precision="fp32", check_batches=True))
    assert model(**batch()).loss.isfinite()
    for wrong, names in (
        (batch(input_ids=ids(4, 8, 7 + rank)), ["input_ids"]),
        (batch(labels=ids(4, 8, 7 + rank)), ["labels"]),
        ({"input_ids": ids(4, 8 + rank), "labels": ids(4, 8 + rank)}, ["input_ids", "labels"]),
        (batch(attention_mask=torch.ones(4, 8, dtype=torch.long if rank else torch.float)), ["attention_mask"]),
        (batch() | ({"attention_mask": torch.ones(4, 8, dtype=torch.long)} if rank else {}), ["attention_mask"]),
    ):
        for call in (
            lambda wrong=wrong: model(**wrong),
            lambda wrong=wrong: booster.execute_pipeline(iter([wrong]), model, None, optimizer),
        ):
            text = text_of(ShapeError, call)
            assert "given different batches (ranks 0, 1)" in text
            assert "prepare_dataloader" in text
            for name in names:
                line = next(line for line in text.splitlines() if line.split()[0].endswith(name))
                assert "rank 1 has" in line and "rank 0" in line
    assert model(**batch()).loss.isfinite()


@on_ranks(4)
def test_only_the_group_with_different_batches_is_named():
    rank = dist.get_rank()
    _, model, _ = boosted(HybridParallelPlugin(tp_size=2, precision="fp32", check_batches=True))
    text = text_of(ShapeError, lambda: model(**batch(input_ids=ids(4, 8, 7 + rank))))
    assert f"(ranks {rank // 2 * 2}, {rank // 2 * 2 + 1})" in text


@pytest.mark.parametrize("plugin_class", PLUGINS)
@on_ranks(1)
def test_execute_pipeline_wants_an_iterator(plugin_class):
    booster, model, optimizer = boosted(plugin_class(precision="fp32"))
    for wrong, kind in (([batch()], "list"), (batch(), "dict"), (None, "NoneType")):
        text = text_of(UsageError, lambda wrong=wrong: booster.execute_pipeline(wrong, model, None, optimizer))
        assert f"execute_pipeline takes an iterator of batches, and was given a {kind}" in text
        assert "iter(dataloader)" in text
    with pytest.raises(StopIteration):
        booster.execute_pipeline(iter([]), model, None, optimizer)


def failing_batches():
    raise TypeError("inside the data pipeline")
    yield


@on_ranks(1)
def test_an_error_inside_the_users_iterator_is_the_users_own():
    booster, model, optimizer = boosted(HybridParallelPlugin(precision="fp32"))
    with pytest.raises(TypeError, match="inside the data pipeline"):
        booster.execute_pipeline(failing_batches(), model, None, optimizer)


class Classless(nn.Module):
    """No config, no loss, not from transformers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


@on_ranks(2)
def test_a_model_without_a_loss_needs_a_criterion():
    booster, model, optimizer = boosted(TorchDDPPlugin(precision="fp32"), Classless())
    rows = torch.ones(2, 4)
    text = text_of(UsageError, lambda: booster.execute_pipeline(iter([(rows,)]), model, None, optimizer))
    assert "the model returned no loss" in text and "criterion(outputs, inputs)" in text
    out = booster.execute_pipeline(iter([(rows,)]), model, lambda outputs, inputs: outputs.square().mean(), optimizer)
    assert out["loss"].isfinite()


@on_ranks(2)
def test_a_batch_without_labels_needs_a_criterion():
    booster, model, optimizer = boosted()
    call = lambda: booster.execute_pipeline(iter([{"input_ids": ids(4, 8)}]), model, None, optimizer)  # noqa: E731
    assert "give labels in the batch, or a criterion" in text_of(UsageError, call)


@on_ranks(1)
def test_a_batch_without_tensors_is_refused():
    booster, model, optimizer = boosted(HybridParallelPlugin(precision="fp32"))
    for wrong in ({}, {"input_ids": "text"}, "text"):
        text = text_of(ShapeError, lambda wrong=wrong: booster.execute_pipeline(iter([wrong]), model, None, optimizer))
        assert "no tensor with a batch dimension" in text


@on_ranks(1)
def test_a_closure_is_refused():
    _, _, optimizer = boosted(HybridParallelPlugin(precision="fp32"))
    assert "step(closure) is not possible" in text_of(ConfigError, lambda: optimizer.step(lambda: 0.0))


@on_ranks(2)
def test_a_data_loader_with_nothing_to_give_is_refused():
    plugin = HybridParallelPlugin(precision="fp32")
    rows = list(range(3))
    assert "batch_size=0" in text_of(ConfigError, lambda: plugin.prepare_dataloader(rows, 0))
    text = text_of(ConfigError, lambda: plugin.prepare_dataloader(rows, 2, drop_last=True))
    assert "3 rows make no batch for 2 data-parallel rank(s) with batch_size=2" in text
    assert "drop_last=False" in text


@on_ranks(2)
def test_a_model_without_a_policy_is_told_where_to_go_unless_there_is_nothing_to_split():
    text = text_of(PolicyError, lambda: boosted(model=Classless()))
    assert "no policy could be inferred for Classless" in text and "TorchDDPPlugin" in text
    booster, model, optimizer = boosted(HybridParallelPlugin(precision="fp32"), Classless())
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
