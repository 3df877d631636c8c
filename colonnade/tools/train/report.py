"""What rank 0 tells during a run and at its end: a progress bar on a terminal, plain lines elsewhere, a log file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from colonnade.tools.train.options import layout_in_words

PLAIN_LINES = 20  # lines printed over a run where there is no terminal


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # of the global gradient, before it is clipped
    lr: float
    tokens_per_s: float  # tokens of the global batch over the time of the step
    elapsed: float  # seconds since the first step began
    loss_scale: float | None = None  # of the next step, with fp16

    @property
    def left_out(self) -> bool:
        """Whether the step was not made, because gradients overflowed in fp16."""
        return self.loss_scale is not None and not math.isfinite(self.grad_norm)

    def line(self, steps: int) -> str:
        """The record for a person to read."""
        text = (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2e}  {self.tokens_per_s:,.0f} tokens/s  {self.elapsed:.0f} s"
        )
        if self.loss_scale is None:
            return text
        return f"{text}  loss scale {self.loss_scale:g}" + ("  left out: gradients overflowed" if self.left_out else "")

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it, which knows no infinite numbers."""
        plain = {key: value for key, value in asdict(self).items() if key != "loss_scale" or value is not None}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


class Reporter:
    """Shows the progress of a run and writes metrics.jsonl. Used on rank 0, as a context manager.

    Args:
        file: where the records go, one JSON object a line, readable while the run goes on.
        steps: number of steps of the run.
    """

    def __init__(self, file: Path, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.steps = steps
        self.losses: list[float] = []
        self.left_out = 0  # steps that were not made
        self.held_out: list[tuple[int, float]] = []
        self._file = file.open("w", encoding="utf-8")
        self._progress = self._make_progress() if self.console.is_terminal else None
        self._task = None if self._progress is None else self._progress.add_task("training", total=steps, said="")

    def _make_progress(self) -> Progress:
        return Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._file.close()

    def say(self, line: str) -> None:
        """Print a line, above the progress bar where there is one."""
        self.console.print(escape(line))

    def step(self, record: StepRecord, held_out_loss: float | None = None) -> None:
        """Take note of one step, and of the held-out loss where it was measured after it."""
        self.losses.append(record.loss)
        self.left_out += record.left_out
        entry = record.to_json()
        if held_out_loss is not None:
            entry["held_out_loss"] = held_out_loss
            self.held_out.append((record.step, held_out_loss))
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._progress is not None and self._task is not None:
            said = f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s  grad norm {record.grad_norm:.2f}"
            self._progress.update(self._task, completed=record.step, said=said)
        elif record.step in (1, self.steps) or record.step % math.ceil(self.steps / PLAIN_LINES) == 0:
            self.say(record.line(self.steps))
        if held_out_loss is not None:
            self.say(f"step {record.step}: held-out loss {held_out_loss:.4f}")


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The end of a run for a person to read; `summary` is the content of summary.json."""
    folder, loss, entropy = summary["output"], summary["held_out_loss"], summary["unigram_entropy"]
    before, left_out = summary.get("held_out_loss_before"), summary.get("steps_left_out", 0)
    relation = "below" if loss < entropy else "not below"
    lines = [
        "",
        f"held-out loss    {loss:.4f} nats per token (perplexity {math.exp(min(loss, 700)):,.1f}) over "
        f"{summary['held_out_targets']:,} tokens, {relation} the unigram entropy",
        f"unigram entropy  {entropy:.4f} nats per token: the same tokens under the training text's token frequencies",
    ]
    if before is not None:
        lines.append(f"before training  {before:.4f} nats per token held-out loss")
    pipeline = summary.get("pp", 1), summary.get("pp_style", "")
    layout = layout_in_words(summary["tp"], summary["dp"], summary.get("zero_stage", 0), *pipeline)
    speed = f"{summary['steps']} steps, {summary['tokens_per_s']:,.0f} tokens/s"
    lines += [
        f"layout           {layout}, {summary['precision']}; {summary['parameters']:,} parameters",
        f"time             {summary['seconds']:.0f} s for {speed}",
        *([f"left out         {left_out} steps in which fp16 gradients overflowed"] if left_out else []),
        "sample           " + summary["sample"].replace("\n", "\n                 "),
        f"checkpoint       {folder}",
        "load it          from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"                 model = AutoModelForCausalLM.from_pretrained({folder!r})",
        f"                 tokenizer = AutoTokenizer.from_pretrained({folder!r})",
    ]
    return lines
