"""A model cut into stages, all of them in this process, gives the loss and every gradient of the whole model."""

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, family
from odd_models import (
    ChangedByGlue,
    ChangesItsInput,
    Detached,
    DropsByModule,
    DropsTwice,
    InPlaceAlone,
    Leaks,
    LeaksNumber,
    LooksAtValues,
    MaskOfStates,
    Plain,
    Skips,
    SkipsBlocks,
    TakesTurns,
    TiedInGlue,
)

from colonnade.errors import ConfigError, PolicyError, UsageError
from colonnade.pipeline.check import difference, one_stage, run_all_stages
from colonnade.pipeline.cut import blocks_bound, cut_chain
from colonnade.pipeline.partition import partition
from colonnade.pipeline.stage import StagedModel, hollow
from colonnade.shardformer.inference.chain import chain_of
from colonnade.shardformer.inference.check import in_double
from colonnade.shardformer.inference.probe import loss_of, probe_inputs

IDS = {"ids": torch.arange(10).view(2, 5)}


def cut_of(model, stages):
    """A cut with blocks dealt out evenly."""
    chain = chain_of(model)
    return cut_chain(chain, partition([1.0] * len(chain.blocks), stages, bound=blocks_bound(chain)))


def difference_of(model, stages, inputs=None):
    """Of a model in double precision, cut in so many."""
    with in_double():
        inputs = inputs or probe_inputs(model, torch.device("cpu"))
        return difference(model, cut_of(model, stages), inputs, loss_of)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_family_is_the_whole_one(name, stages):
    assert difference_of(family(name), stages) == ""


def test_a_model_with_adapters_is_cut_as_it_is_without():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(family("llama"), config).double()
    cut = cut_of(model, 2)
    inputs = probe_inputs(family("llama"), torch.device("cpu"))
    assert cut.counts == (2, 2)
    with in_double():
        assert difference(model, cut, inputs, loss_of) == ""


class Configured(TiedInGlue):
    """With a config, which adapters need."""

    config = {"model_type": "own"}


@pytest.mark.parametrize(
    "options", [{"target_modules": ["embed", "up"]}, {"target_modules": ["up"], "modules_to_save": ["embed"]}]
)
def test_a_parameter_used_by_glue_is_found_inside_an_adapter(options):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Configured(), peft.LoraConfig(r=2, init_lora_weights=False, **options)).double()
    cut = cut_of(model, 2)
    assert cut.chain.everywhere and all("embed" in name for name in cut.chain.everywhere)
    assert difference(model, cut, IDS, loss_of) == ""


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    "kind", [Plain, TiedInGlue, Skips, MaskOfStates, Detached, ChangedByGlue, ChangesItsInput, LooksAtValues]
)
def test_plain_modules(kind, stages):
    assert difference_of(kind().double(), stages, IDS) == ""


def test_what_is_made_of_a_result_travels_even_if_no_gradient_does():
    cut = cut_of(MaskOfStates(), 4)
    names = [[cut.chain.calls[leaf.call].path for leaf in crossing] for crossing in cut.crossing]
    assert names == [[], ["blocks.0"], ["blocks.0", "blocks.1"], ["blocks.0", "blocks.2"]]


def test_a_value_that_decides_travels_to_every_stage():
    cut = cut_of(LooksAtValues(), 4)
    assert all(cut.chain.calls[crossing[0].call].path == "blocks.0" for crossing in cut.crossing[1:])


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.detach(), lambda x: (x > 0).long()])
def test_a_tensor_left_in_a_shared_place_keeps_its_blocks_together(change):
    model = Leaks(change).double()
    assert blocks_bound(chain_of(model)) == [(1, 2)]
    assert difference_of(model, 3, IDS) == "", "cut elsewhere it is the same"
    with pytest.raises(ConfigError, match="have to stay together"):
        cut_of(model, 4)


def test_a_number_left_in_a_shared_place_is_found_by_the_check():
    model = LeaksNumber().double()
    assert "the loss is" in difference_of(model, 2, IDS)


def test_blocks_that_return_nothing_stay_together():
    with pytest.raises(ConfigError, match="(?m)1 group$"):
        cut_of(InPlaceAlone(), 2)


def test_a_router_loss_needs_all_blocks():
    chain = chain_of(family("mixtral with router loss"))
    assert blocks_bound(chain)[0] == (0, 3)
    with pytest.raises(ConfigError, match="pipeline stages"):
        cut_of(family("mixtral with router loss"), 2)


def test_outputs_that_were_not_asked_for_before_the_cut_are_refused():
    model = family("mixtral")
    inputs = probe_inputs(model, torch.device("cpu"))
    with in_double():
        cut = cut_of(model, 2)
        with pytest.raises(UsageError, match="output_router_logits=True was not set"):
            difference(model, cut, inputs | {"output_router_logits": True}, loss_of)
        stages = [one_stage(model, cut, stage) for stage in range(2)]
        stages[0].model.config.output_router_logits = True
        with pytest.raises(UsageError, match="in the config before boost"):
            run_all_stages(stages, inputs, loss_of)


class Captures(Plain):
    """Takes the first block's result from a hook's notes."""

    def __init__(self):
        super().__init__()
        self.notes = []
        self.blocks[0].register_forward_hook(self.note)

    def note(self, module, args, output):
        self.notes.append(output)

    def through(self, x):
        self.notes.clear()
        return self.blocks[-1](super().through(x), self.notes[0])


def test_results_that_hooks_note_travel():
    model = Captures().double()
    cut = cut_of(model, 4)
    assert not cut.chain.bound and difference(model, cut, IDS, loss_of) == ""
    assert all("blocks.0" in {cut.chain.calls[leaf.call].path for leaf in crossing} for crossing in cut.crossing[1:])


def test_what_a_stage_does_not_have_is_no_number():
    model = Plain().double()
    cut = cut_of(model, 2)
    blind = replace(cut, crossing=((), ()))
    stages = [one_stage(model, blind, stage) for stage in range(2)]
    result = stages[1].forward(1, (), lambda: stages[1].model(**IDS))
    assert result.output.isnan().all()


def test_entries_dropped_by_a_module_are_dropped_once():
    model = DropsByModule().double()
    cut = cut_of(model, 2)
    stages = [one_stage(model, cut, stage) for stage in range(2)]
    found = run_all_stages(stages, IDS, loss_of)
    assert torch.isfinite(found)
    assert "dropout" in [cut.chain.calls[leaf.call].path for leaf in cut.crossing[1]]


def test_blocks_that_see_the_same_dropped_entries_stay_together():
    assert blocks_bound(chain_of(DropsTwice())) == [(0, 2)]


def test_a_model_that_leaves_out_blocks_at_random_is_refused():
    with pytest.raises(PolicyError, match="layerdrop=0"):
        chain_of(SkipsBlocks(0.3))
    assert difference_of(SkipsBlocks(0.0).double(), 2, IDS) == ""


def test_a_forward_that_takes_another_way_is_refused():
    model = TakesTurns().double()
    cut = cut_of(model, 2)
    model.turned = True
    with pytest.raises(PolicyError, match="not the one by which it was cut"):
        difference(model, cut, IDS, loss_of)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PolicyError, match="no list of repeated blocks"):
        chain_of(torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)))


class TestHollow:
    def test_attributes_stay_and_take_the_memory_of_one_entry(self):
        layer = torch.nn.Linear(300, 200)
        hollow(layer)
        assert list(layer.parameters()) == [] and layer.state_dict() == {}
        assert layer.weight.shape == (200, 300) and layer.weight.untyped_storage().nbytes() == 4
        assert (layer.weight == 0).all() and layer.weight.dtype == torch.float32

    def test_what_is_kept_stays_a_parameter(self):
        layer = torch.nn.Linear(3, 2)
        hollow(layer, {layer.weight})
        assert [name for name, _ in layer.named_parameters()] == ["weight"]

    def test_buffers_keep_their_values_outside_of_the_state(self):
        norm = torch.nn.BatchNorm1d(3)
        hollow(norm)
        assert norm.state_dict() == {} and (norm.running_var == 1).all()

    def test_a_parameter_used_by_glue_stays_everywhere(self):
        cut = cut_of(TiedInGlue(), 2)
        assert cut.chain.everywhere == {"embed.weight"}
        first, last = (one_stage(TiedInGlue(), cut, stage).model for stage in range(2))
        assert "embed.weight" in dict(first.named_parameters()) and "embed.weight" in dict(last.named_parameters())
        assert "blocks.0.up.weight" not in dict(last.named_parameters())


class TestGates:
    def test_class_names_and_copies_stay_as_they_are(self):
        model = Plain()
        kind = type(model.norm)
        StagedModel(model, cut_of(Plain(), 2), (0, 1))
        assert isinstance(model.norm, kind) and type(model.norm).__name__ == "LayerNorm"
        assert type(model.norm).__module__ == kind.__module__
        twice = copy.deepcopy(model)
        assert twice(IDS["ids"]).shape == (2, 5, 19)
        assert list(model.state_dict()) == list(Plain().state_dict())

    def test_a_rank_with_all_stages_runs_the_whole_model(self):
        model, ids = Plain(), IDS["ids"]
        before = model(ids)
        StagedModel(model, cut_of(Plain(), 2), (0, 1))
        assert torch.equal(model(ids), before)

    def test_a_rank_with_some_stages_does_not(self):
        model = Plain()
        StagedModel(model, cut_of(Plain(), 2), (0,))
        with pytest.raises(UsageError, match="execute_pipeline"):
            model(IDS["ids"])

    def test_the_newest_cut_counts(self):
        model = Plain()
        StagedModel(model, cut_of(Plain(), 2), (0,))
        StagedModel(model, cut_of(Plain(), 2), (0, 1))
        assert model(IDS["ids"]).shape == (2, 5, 19)
        assert len([kind for kind in type(model.norm).__mro__ if kind.__name__ == "_Gated"]) == 1

    def test_recomputed_blocks_give_the_same_gradients(self):
        cut = cut_of(Plain(), 2)
        losses, gradients = [], []
        for recomputed in ((), ("blocks.0", "blocks.3")):
            model = Plain().double()
            staged = StagedModel(model, cut, (0, 1), recomputed)
            losses.append(run_all_stages([staged, staged], IDS, loss_of))
            gradients.append([p.grad for p in model.parameters()])
        assert torch.equal(*losses) and all(map(torch.equal, *gradients))
