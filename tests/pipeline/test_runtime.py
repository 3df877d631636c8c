"""What a pipeline communicates and holds while it runs, counted; and what is refused.

p ranks, m micro-batches of b rows and s tokens, h width. Each border between stages on different ranks is crossed by one
tensor of b·s·h elements for each micro-batch, forth and, in training, back. Besides: the loss, one number, from the last stage;
the norm, one number; and where embedding and head are tied, the gradient and the weights of that matrix, and one flag.
"""

import pytest
import torch
from pipeline_models import TOKENS, VOCAB, blocks_for, build
from torch.optim import AdamW

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cli.main import main
from colonnade.errors import ConfigError, PolicyError, UsageError
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import simulate
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids

HIDDEN = 32


def boosted(name, ranks, style, **options):
    plugin = HybridParallelPlugin(pp_size=ranks, pp_style=style, **{"precision": "fp32"} | options)
    model = build(name, sum(options.get("num_layers_per_stage", ())) or blocks_for(style, ranks))
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def batch(microbatches, rows=2, seed=3):
    x = ids(microbatches * rows, TOKENS, seed, VOCAB)
    return {"input_ids": x, "labels": x}


def due(schedule, rank, kinds):
    """Messages that a rank sends and receives, of these kinds, in a step."""
    sent = received = 0
    for border in range(1, schedule.num_stages):
        before, after = schedule.rank_of(border - 1), schedule.rank_of(border)
        if before == after:
            continue
        for kind in kinds:
            source, target = (before, after) if kind == "F" else (after, before)
            sent += schedule.microbatches * (source == rank)
            received += schedule.microbatches * (target == rank)
    return sent, received


def count(name, ranks, style, numbers):
    for microbatches in numbers:
        booster, model, optimizer = boosted(name, ranks, style, num_microbatches=microbatches)
        rank = booster.plugin.mesh.rank("pp")
        schedule = make_schedule(style, ranks, microbatches)
        message = 2 * TOKENS * HIDDEN

        def step(microbatches=microbatches, booster=booster, model=model, optimizer=optimizer):
            booster.execute_pipeline(iter([batch(microbatches)]), model, None, optimizer)

        step()
        optimizer.step()
        optimizer.zero_grad()
        with colonnade.ledger() as run:
            step()
        tied = name == "llama tied" and rank in (first_and_last := {schedule.rank_of(0), schedule.rank_of(schedule.num_stages - 1)}) and len(first_and_last) == 2  # fmt: skip
        table = VOCAB * HIDDEN + 1
        for operation, messages, copies in zip(
            ("send", "receive"), due(schedule, rank, "FB"), (tied and rank != 0, tied and rank == 0)
        ):
            assert run.calls[operation, "pp"] == messages + 2 * copies, (style, microbatches, operation, run)
            assert run.elements[operation, "pp"] == messages * message + copies * table
        assert run.calls["broadcast", "pp"] == run.elements["broadcast", "pp"] == 1
        assert {key for key in run.calls if run.calls[key]} <= {(o, "pp") for o in ("send", "receive", "broadcast")}
        assert model.pipeline.runtime.record.peak_in_flight == simulate(schedule).peak_in_flight(rank)
        with colonnade.ledger() as end:
            optimizer.step()
            optimizer.zero_grad()
        moved = end.calls["send", "pp"] + end.calls["receive", "pp"]
        assert moved == tied and end.elements["all_reduce", "pp"] <= 2, end
        with torch.no_grad(), colonnade.ledger() as evaluation:
            step()
        for operation, messages in zip(("send", "receive"), due(schedule, rank, "F")):
            assert evaluation.calls[operation, "pp"] == messages
            assert evaluation.elements[operation, "pp"] == messages * message
        if style == "gpipe":
            assert model.pipeline.runtime.record.peak_in_flight == 0
    return True


@pytest.mark.sample("llama tied-2-*", "llama-4-zbv")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_one_message_each_way_for_each_border_and_micro_batch(name, ranks, style):
    run_on_ranks(ranks, count, name, ranks, style, (1, ranks, 2 * ranks, 2 * ranks + 1), timeout_s=120)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_in_flight_are_those_of_the_formulas(ranks, microbatches):
    for rank in range(ranks):
        assert simulate(make_schedule("gpipe", ranks, microbatches)).peak_in_flight(rank) == microbatches
        assert simulate(make_schedule("1f1b", ranks, microbatches)).peak_in_flight(rank) == min(
            microbatches, ranks - rank
        )
        assert simulate(make_schedule("zbv", ranks, microbatches)).peak_kept(rank) <= 2 * ranks


def held(ranks, style, options):
    booster, model, _ = boosted("llama tied", ranks, style, **options)
    mesh = booster.plugin.mesh
    return mesh.rank("pp"), sum(p.numel() * p.element_size() for p in model.unwrap().parameters())


@pytest.mark.parametrize("style, counts", [("1f1b", [1, 3]), ("zbv", [1, 2, 1, 1])])
def test_a_rank_holds_the_parameters_of_its_stages_and_no_more(style, counts):
    whole = build("llama tied", sum(counts))
    of_block = sum(p.numel() for p in whole.model.layers[0].parameters())
    table, norm = whole.lm_head.weight.numel(), whole.model.norm.weight.numel()
    answers = run_on_ranks(2, held, 2, style, {"num_layers_per_stage": counts})
    schedule = make_schedule(style, 2, 1)
    for rank, nbytes in answers:
        stages = schedule.stages_of(rank)
        wanted = sum(counts[stage] for stage in stages) * of_block
        wanted += table if {0, schedule.num_stages - 1} & set(stages) else 0
        wanted += norm if schedule.num_stages - 1 in stages else 0
        assert nbytes == 4 * wanted


def copies_after_steps(options):
    style = options.pop("pp_style", "1f1b")
    booster, model, optimizer = boosted("llama tied", 2, style, **options)
    mesh, found = booster.plugin.mesh, []
    for seed in range(3):
        booster.execute_pipeline(iter([batch(2, seed=seed)]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        user = model.unwrap()
        table = user.model.embed_tokens.weight if mesh.rank("pp") == 0 else user.lm_head.weight
        found.append(table.detach().clone())
    return mesh.rank("tp"), mesh.rank("dp"), found


@pytest.mark.parametrize(
    "world, options",
    [
        (2, {}),
        (2, {"precision": "bf16"}),
        (4, {"zero_stage": 1}),
        (4, {"zero_stage": 1, "precision": "bf16"}),
        (4, {"tp_size": 2}),
        (2, {"pp_style": "zbh1", "max_norm": 0.1}),
    ],
)
def test_the_copies_of_a_tied_matrix_have_the_same_bits_after_every_step(world, options):
    answers = run_on_ranks(world, copies_after_steps, options)
    for tp in {tp for tp, _, _ in answers}:
        tables = [found for t, _, found in answers if t == tp]
        for others in tables[1:]:
            assert all(torch.equal(a, b) for a, b in zip(tables[0], others))
        assert not torch.equal(tables[0][0], tables[0][1])


def used_otherwise():
    booster, model, optimizer = boosted("llama", 2, "1f1b")
    x = batch(2)
    for call in (lambda: model(**x), lambda: model.unwrap()(**x), lambda: booster.backward(torch.ones(()), optimizer)):
        with pytest.raises(UsageError, match="execute_pipeline"):
            call()
    # and nothing is broken by it; shapes may change from batch to batch, rows need not divide
    for rows, tokens in ((4, 6), (3, 9), (1, 9), (7, 5)):
        y = ids(rows, tokens, 3, VOCAB)
        out = booster.execute_pipeline(iter([{"input_ids": y, "labels": y}]), model, None, optimizer)
        assert out["loss"].isfinite()
        optimizer.step()
        optimizer.zero_grad()


def test_calls_that_a_stage_cannot_answer_say_what_to_call():
    run_on_ranks(2, used_otherwise)


def refusals():
    for options, words in (
        ({"pp_size": 2, "pp_style": "2f2b"}, "gpipe.*1f1b.*interleaved.*zbh1.*zbv"),
        ({"pp_size": 2, "num_model_chunks": 2}, "1f1b cannot work with 2 stages"),
        ({"pp_size": 2, "zero_stage": 2}, "zero_stage=1"),
        ({"pp_size": 2, "num_microbatches": 2, "microbatch_size": 1}, "num_microbatches"),
        ({"pp_size": 3}, "2 ranks cannot be laid out"),
        ({"num_layers_per_stage": [4]}, "pp_size > 1"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            HybridParallelPlugin(**options)
    for options, words in (
        ({"num_layers_per_stage": [3, 2]}, "add up to 4"),
        ({"num_layers_per_stage": [4]}, "2 whole numbers"),
        ({"pp_style": "interleaved", "num_model_chunks": 3}, "4 blocks.*at most 4 stages"),
    ):
        model = build("llama")
        before = dict(model.named_parameters())
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            Booster(plugin=HybridParallelPlugin(pp_size=2, precision="fp32", **options)).boost(model)
        assert all(before[name] is p for name, p in model.named_parameters())
    with pytest.raises(PolicyError, match="no list of repeated blocks"):
        Booster(plugin=HybridParallelPlugin(pp_size=2, precision="fp32")).boost(torch.nn.Linear(3, 3))


def test_what_cannot_be_is_refused_on_every_rank_before_anything_changes():
    run_on_ranks(2, refusals)


def traced(path):
    booster, model, optimizer = boosted("llama", 2, "zbv", num_microbatches=3)
    booster.execute_pipeline(iter([batch(3)]), model, None, optimizer)
    model.pipeline.save_trace(path)


def test_a_step_that_was_played_is_drawn_by_the_command(tmp_path, capsys):
    run_on_ranks(2, traced, str(tmp_path / "trace.json"))
    assert main(["schedule", "--trace", str(tmp_path / "trace.json"), "--out", str(tmp_path / "run.svg")]) == 0
    out = capsys.readouterr().out
    assert "zbv" in out and "measured" in out
    drawing = (tmp_path / "run.svg").read_text()
    assert drawing.count("<rect") >= 2 * 2 * 3 * 3  # ranks × stages × kinds × micro-batches
