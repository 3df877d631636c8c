"""`colonnade explain --pp`: what it says of stages is held against really cut models, the ledger and the formulas."""

from __future__ import annotations

import json
import time
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, LlamaConfig

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.booster.plugin.pipeline_options import PipelineOptions
from colonnade.cli.main import main
from colonnade.errors import ConfigError, PolicyError, UsageError
from colonnade.model.default_configs import default_config
from colonnade.model.twin import shrink, twin_model
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.explain.explanation import explain_config
from colonnade.tools.explain.stages import PipelineChoice, in_runs, plan_stages, shrink_for, size_of
from colonnade.tools.explain.stages_text import stage_lines
from colonnade.tools.explain.text import plain_text, rich_tree
from tests.tools.test_explain import LLAMA_8B

ROWS, TOKENS = 6, 10


def choice(ranks=2, style="1f1b", chunks=None, counts=None, microbatches=None):
    return PipelineChoice(ranks, PipelineOptions(style, chunks, counts), microbatches)


def stages_of(config, pipeline, tp=1):
    return explain_config(config, tp, pipeline=pipeline).stages


def test_eight_billion_parameters_are_cut_without_memory_and_in_little_time():
    start = time.process_time()
    stages = stages_of(LlamaConfig(**LLAMA_8B), choice(4))
    assert time.process_time() - start < 10
    first, *_, last = stages.stages
    assert [stage.number for stage in stages.stages] == [stage.rank for stage in stages.stages] == [0, 1, 2, 3]
    assert sum(stage.count for stage in stages.stages) == 32
    assert first.blocks == f"model.layers.0–{first.count - 1}" and first.beside == ("model.embed_tokens",)
    assert last.beside == ("model.norm", "lm_head") and last.count < first.count, "the head costs as much as blocks"
    assert sum(stage.parameters for stage in stages.stages) == sum(stages.local_parameters) == 8_030_261_248
    assert sum(stage.cost for stage in stages.stages) == pytest.approx(1)
    assert [border.size for stage in stages.stages for border in stage.receives] == ["b·s·4096"] * 3
    assert stages.stages[1].receives[0].name == f"model.layers.{first.count - 1}" and not stages.shared


def test_tied_weights_have_one_owner():
    stages = stages_of(GPT2Config(), choice(4))
    (shared,) = stages.shared
    assert shared.names == ("transformer.wte.weight", "lm_head.weight")
    assert (shared.stages, shared.ranks) == ((0, 3), (0, 3))
    assert sum(stages.local_parameters) == 124_439_808 + 50257 * 768, "the copy is held too"
    (line,) = [line for line in stage_lines(stages, 1) if line.startswith("shared")]
    assert line.endswith("transformer.wte.weight = lm_head.weight: stages 0, 3; rank 0 owns it, rank 3 holds a copy")


def test_what_stays_on_one_rank_needs_no_copy():
    stages = stages_of(GPT2Config(), choice(2, "interleaved", 2))
    assert [stage.rank for stage in stages.stages] == [0, 1, 0, 1]
    assert stages.shared[0].ranks == (0, 1)
    assert len(stages.stages) == 4 and len(stages.local_parameters) == 2
    down_and_up = stages_of(GPT2Config(), choice(2, "zbv"))
    assert [stage.rank for stage in down_and_up.stages] == [0, 1, 1, 0]
    assert down_and_up.shared[0].stages == (0, 3) and down_and_up.shared[0].ranks == (0,)
    assert sum(down_and_up.local_parameters) == 124_439_808
    lines = stage_lines(down_and_up, 1)
    assert any(line.endswith("stages 0, 3, all on rank 0") for line in lines)
    assert [line[:12] for line in lines if line.endswith("; stays on rank 1")] == ["border 1 → 2"]


def test_blocks_that_are_called_again_and_what_travels_beside_hidden_states():
    albert = stages_of(shrink(default_config("albert")), choice())
    assert [stage.blocks for stage in albert.stages] == ["albert.encoder.albert_layer_groups.0"] * 2
    assert len(albert.shared) > 10 and all(shared.ranks == (0, 1) for shared in albert.shared)
    t5 = stages_of(shrink(default_config("t5"), layers=4), choice(4))
    sizes = [[border.size for border in stage.receives] for stage in t5.stages]
    assert sizes[1:] == [["b·s·64", "s·s·4"], ["b·s·64"], ["b·s·64", "b·s·64", "s·s·4", "s·s·4"]]
    assert t5.check == "its tiny twin, cut, computes what it computes whole"


@pytest.mark.parametrize(("microbatches", "bubble"), [(None, 3 / 11), (4, 3 / 7), (32, 3 / 35)])
def test_the_bubble_is_that_of_the_formula(microbatches, bubble):
    stages = stages_of(LlamaConfig(**LLAMA_8B), choice(4, microbatches=microbatches, counts=[8, 8, 8, 8]))
    assert stages.bubble == pytest.approx(bubble)
    assert stages.bubble_of_costs > stages.bubble, "the head makes the last stage slower"
    assert stages.in_flight == (4, 3, 2, 1)
    assert [stage.count for stage in stages.stages] == [8, 8, 8, 8]


def cut(family, layers, tp, options):
    """Parameters of this rank of a really cut model, and what it sends over the pipeline in its second step."""
    model = twin_model(shrink(default_config(family), tp, layers))
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp, precision="fp32", microbatch_size=2, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(3, 60, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # shapes are told in the first
        with colonnade.ledger() as book:
            booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, None, optimizer)
    return sum(p.numel() for p in model.parameters()), book.elements["send", "pp"]


REAL = {
    "llama": ("llama", 3, 1, choice()),
    "gpt2": ("gpt2", 2, 1, choice(style="gpipe")),
    "gemma3n_text": ("gemma3n_text", 2, 1, choice()),
    "interleaved": ("olmo2", 4, 1, choice(style="interleaved")),
    "zbv": ("gpt2", 4, 1, choice(style="zbv")),
    "tp 2": ("llama", 2, 2, choice()),
}


@pytest.mark.sample("llama", "gpt2")
@pytest.mark.parametrize("case", REAL)
def test_parameters_and_traffic_are_those_of_a_real_step(case):
    family, layers, tp, pipeline = REAL[case]
    stages = stages_of(shrink(default_config(family), tp, layers), pipeline, tp)
    options = {"pp_size": 2, "pp_style": pipeline.options.style}
    real = run_on_ranks(2 * tp, cut, family, layers, tp, options)
    assert list(stages.local_parameters) == [held for held, _ in real[::tp]]
    pairs = zip(stages.stages, stages.stages[1:])
    borders = [border for before, stage in pairs if before.rank != stage.rank for border in stage.receives]
    told = sum(elements(border.size) * ROWS * (1 + border.gradient) for border in borders)
    assert told + sum(copied(stages, family, layers)) == sum(sends for _, sends in real[::tp])


def elements(size):
    """Elements of a size in letters, for each row."""
    product = 1
    for factor in size.split("·"):
        product *= {"b": 1, "s": TOKENS}.get(factor) or int(factor)
    return product


def copied(stages, family, layers):
    """For each copy of a shared parameter the entries of its gradient, and the number that says whether there is one."""
    for shared in stages.shared:
        model = twin_model(shrink(default_config(family), 1, layers))
        yield (model.get_parameter(shared.names[0]).numel() + 1) * (len(shared.ranks) - 1)


def test_names_and_sizes_in_short():
    assert in_runs([f"h.{i}" for i in range(4)]) == "h.0–3"
    assert in_runs(["enc.0", "enc.1", "dec.0", "dec.2", "head"]) == "enc.0–1, dec.0, dec.2, head"
    assert in_runs(["group.0", "group.0", "group.0", "group.1"]) == "group.0 × 3, group.1"
    assert (size_of((11, 13, 64)), size_of((13 * 11, 2, 4)), size_of((11,)), size_of(())) == (
        "b·s·64",
        "b·s·8",
        "b",
        "1",
    )


def test_a_twin_has_a_block_for_each_stage():
    assert shrink_for(LlamaConfig(), 2, None).num_hidden_layers == 2
    assert shrink_for(LlamaConfig(), 2, choice(2)).num_hidden_layers == 2
    assert shrink_for(LlamaConfig(), 2, choice(4, "interleaved", 3)).num_hidden_layers == 12
    with pytest.raises(ConfigError, match="cannot be cut into 64 pipeline stages"):
        shrink_for(LlamaConfig(), 2, choice(64))


def test_a_small_model_that_needs_values_is_looked_at_with_weights():
    config = shrink(default_config("dbrx"))
    plan = plan_stages(config, choice(), check=False)
    assert sum(plan.cut.counts) == config.n_layers


def test_text_for_pipes_and_terminals_and_json(capsys):
    assert main(["explain", "gpt2", "--pp", "2"]) == 0
    alone = capsys.readouterr().out
    assert (
        "GPT2LMHeadModel, tp 1, pp 2" in alone
        and "stage  rank  blocks" in alone
        and "policy" not in alone.split("\n")[1]
    )
    assert "border 0 → 1      b·s·64 elements of transformer.h.0, and as many gradients back" in alone
    assert "1f1b, 4 micro-batches: ranks idle for 20.0% of a step where stages take equally long" in alone
    assert "c_attn" not in alone, "one rank holds each layer: nothing is said of them"
    assert main(["explain", "gpt2", "--pp", "2", "--tp", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tp"] == 2 and told["stages"]["ranks"] == 2
    for stage in told["stages"]["stages"]:
        assert stage["parameters"] > stage["local_parameters"] > stage["parameters"] // 3
    both = explain_config(shrink(GPT2Config()), 2, pipeline=choice())
    assert "c_attn" in plain_text(both, "") and "stage  rank  blocks" in plain_text(both, "")
    for explanation in (both, explain_config(shrink(GPT2Config()), 1, pipeline=choice())):
        console = Console(file=StringIO(), force_terminal=True, width=300)
        console.print(rich_tree(explanation, "sizes"))
        assert "stage  rank  blocks" in console.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama", "--pp", "64"], "at most 32 stages: pp_size × num_model_chunks ≤ 32"),
        (["llama", "--pp", "0"], "--pp 0: a pipeline has at least 2 ranks"),
        (["llama", "--pp", "2", "--pp-style", "zigzag"], "'zigzag' is no pipeline schedule"),
        (["llama", "--pp", "2", "--chunks", "3"], "cannot work with 3 stages on each rank"),
        (["llama", "--pp", "2", "--microbatches", "0"], "microbatches=0"),
        (["llama", "--pp", "2", "--layers-per-stage", "1,2"], "2 whole numbers of at least 1"),
        (["llama", "--pp", "2", "--layers-per-stage", "1;1"], "whole numbers with commas"),
        (
            ["llama", "--layers-per-stage", "1,1", "--microbatches", "4"],
            "--layers-per-stage 1,1, --microbatches 4: needs --pp",
        ),
        (["resnet", "--pp", "2"], "it has no list of repeated blocks"),
    ],
)
def test_what_cannot_be_cut_is_explained(arguments, said, capsys):
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_cut_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr("colonnade.booster.plugin.pipeline.difference", lambda *args: "the loss is another")
    config = shrink(default_config("olmo2"))
    with pytest.raises(PolicyError, match="the loss is another"):
        plan_stages(config, choice(style="gpipe"))
    assert plan_stages(config, choice(style="gpipe"), check=False).check == "not checked"
    with pytest.raises(UsageError, match="at least 2 ranks"):
        choice(1)
