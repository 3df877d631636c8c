"""`model.pipeline.save_trace`, and `colonnade schedule --trace` of what it writes: the last batch, whatever has run since."""

import json

import pytest
import torch

from colonnade.cli.main import main
from colonnade.errors import CheckpointError, UsageError
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.testing.ranks import run_on_ranks
from tests.pipeline.test_runtime import batch, boosted

MICROBATCHES = 3


def traced(folder, style, world):
    booster, model, optimizer = boosted("llama", 2, style, num_microbatches=MICROBATCHES)
    with pytest.raises(UsageError, match="(?s)no batch has been run yet.*execute_pipeline"):
        model.pipeline.save_trace(folder / "early.json")
    x = batch(MICROBATCHES)
    for number in range(2):
        booster.execute_pipeline(iter([x]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model.pipeline.save_trace(folder / f"{number}.json")
    booster.generate(model, x["input_ids"][:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.pipeline.save_trace(folder / "generated.json")  # text is no batch: the last one is still that of training
    with torch.no_grad():
        booster.execute_pipeline(iter([x]), model)
    model.pipeline.save_trace(folder / "evaluated.json")
    with pytest.raises(CheckpointError, match="(?s)trace was not written to .*nowhere.*rank 0"):
        model.pipeline.save_trace(folder / "nowhere" / "trace.json")
    return world


@pytest.mark.sample("2-1f1b", "2-zbv", "4-interleaved")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("world", [2, 4])
def test_the_last_batch_is_written_and_drawn(world, style, tmp_path, capsys):
    """With two replicas of the pipeline too: the first one's ranks are drawn."""
    run_on_ranks(world, traced, tmp_path, style, world)
    schedule, forward = (make_schedule(style, 2, MICROBATCHES, forward_only=only) for only in (False, True))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "0.json", "1.json", "evaluated.json", "generated.json",
    ]  # fmt: skip
    for name, wanted in {"0": schedule, "1": schedule, "generated": schedule, "evaluated": forward}.items():
        found = json.loads((tmp_path / f"{name}.json").read_text())
        actions = [[], []]
        for event in sorted(found["events"], key=lambda e: e["start"]):
            assert 0 <= event["start"] <= event["end"]
            actions[event["rank"]].append((event["kind"], event["stage"], event["microbatch"]))
        assert [[tuple(action) for action in of_rank] for of_rank in wanted.actions] == actions, name
        drawing = tmp_path / f"{name}.svg"
        assert main(["schedule", "--trace", str(tmp_path / f"{name}.json"), "--out", str(drawing)]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{style} · 2 ranks · {MICROBATCHES} micro-batches")
        assert "measured" in text and "rank 1" in text
        number = sum(map(len, wanted.actions))
        assert drawing.read_text().count("<rect") >= number
    assert (tmp_path / "0.json").read_text() != (tmp_path / "1.json").read_text()
    generated, trained = ((tmp_path / f"{name}.json").read_text() for name in ("generated", "1"))
    assert generated == trained
