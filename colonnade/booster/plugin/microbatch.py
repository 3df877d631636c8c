"""execute_pipeline where there is no pipeline: one batch in micro-batches, one reduction, one loss.

[Note: unequal micro-batches]
Each micro-batch's loss is a mean over its own targets. It is weighed by (its targets / targets of the global batch), so
that the sum over micro-batches and ranks is the mean over the global batch, whatever the cut. A micro-batch without a
target has no mean and weighs nothing; its backward is left out, or that of a zero where gradients are to be reduced.

[Note: in step]
Where every forward or backward communicates over the data-parallel ranks, all of them have to make as many. A rank with
fewer micro-batches runs its first one again, as often as it takes, and counts it as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from colonnade.booster.plugin.batches import batch_rows, count_targets, join_outputs, next_batch, split_rows, take_rows
from colonnade.booster.plugin.boosted_model import BoostedModel, zero_from
from colonnade.cluster.device import current_device
from colonnade.comm.collectives import all_gather
from colonnade.errors import ShapeError, UsageError, explain
from colonnade.precision.optimizer import ParallelOptimizer


def run_microbatches(
    data_iter: Any,
    model: BoostedModel,
    criterion: Callable[[Any, Any], torch.Tensor] | None,
    optimizer: ParallelOptimizer | None,
    *,
    microbatch_size: int | None,
    num_microbatches: int | None,
    return_loss: bool,
    return_outputs: bool,
    no_sync: Callable[[], Any],
) -> dict[str, Any]:
    """Forward, and backward if an optimizer is given and gradients are on, over the next batch of `data_iter`.

    Returns:
        {"loss": the mean over the global batch, the same scalar on every rank, or None; "outputs": of the whole local
        batch, or None}.
    """
    model.check_loaded()
    batch = next_batch(data_iter)
    rows = batch_rows(batch)
    if rows == 0:
        raise ShapeError("this rank's share of the batch has no rows: every rank needs at least one in each step.")
    cuts = split_rows(rows, microbatch_size, num_microbatches)
    parts = [take_rows(batch, rows, *cut) for cut in cuts]
    shares = Shares(batch, parts, model)
    idle = shares.most - len(parts)  # see [Note: in step]
    parts, weights = parts[:1] * idle + parts, [0.0] * idle + shares.weights
    trained = optimizer if torch.is_grad_enabled() else None
    outputs, total = [], None
    for index, part in enumerate(parts):
        with ExitStack() as stack:
            if trained is not None and index + 1 < len(parts):
                stack.enter_context(no_sync())
            output = run_on(model, part)
            loss = loss_from(criterion, output, part) if return_loss or trained is not None else None
            weight = weights[index]
            if weight and loss is not None:
                loss = loss.float() * weight  # in 16 bits the sum over micro-batches would be rounded
                total = loss.detach() if total is None else total + loss.detach()
                if trained is not None:
                    trained.backward(loss)
            elif trained is not None and (model.in_step or index + 1 == len(parts)):
                trained.backward(zero_from(output))  # the other ranks count on this one's part in the reduction
        if return_outputs and index >= idle:
            outputs.append(detached(output))
    return {
        "loss": shares.mean(total, model) if return_loss else None,
        "outputs": join_outputs(outputs, [stop - start for start, stop in cuts]) if return_outputs else None,
    }


class Shares:
    """What each micro-batch weighs in the loss of the global batch; see [Note: unequal micro-batches]."""

    def __init__(self, batch: Any, parts: list[Any], model: BoostedModel) -> None:
        self.dp = model.mesh.axis("dp")
        self.most = len(parts)
        if model.in_step:
            self.most = max(int(number) for number in self._of_all(len(parts)))
        if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
            self.weights = [1.0] * len(parts)  # the caller's denominator stands in every loss already
            return
        counts = [count_targets(part, model.shifts_labels) for part in parts]
        everywhere = max(sum(self._of_all(sum(counts))), 1.0)
        self.weights = [count * self.dp.size / everywhere for count in counts]

    def _of_all(self, mine: int) -> list[float]:
        number = torch.tensor([float(mine)], dtype=torch.float64, device=current_device())
        return torch.cat(all_gather(number, self.dp)).tolist()

    def mean(self, total: torch.Tensor | None, model: BoostedModel) -> torch.Tensor:
        """The losses of all ranks as one number."""
        device = current_device()
        mine = torch.zeros((), dtype=torch.float64, device=device) if total is None else total.double()
        return (torch.stack(all_gather(mine, self.dp)).sum(0) / self.dp.size).float()


def run_on(model: BoostedModel, part: Any) -> Any:
    if isinstance(part, Mapping):
        return model.run(**part)
    return model.run(*part) if isinstance(part, (list, tuple)) else model.run(part)


def own_loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        raise UsageError(
            "the model returned no loss: give labels in the batch, or a criterion(outputs, inputs) to execute_pipeline."
        )
    return loss


def loss_from(criterion: Callable[[Any, Any], torch.Tensor] | None, output: Any, part: Any) -> torch.Tensor:
    """The loss of a micro-batch, a scalar.

    Args:
        criterion: the user's; None where the model computes its own.
        output: of the model.
        part: the micro-batch.

    Raises:
        UsageError: there is none, or it is no tensor of one entry.
    """
    loss = own_loss(output) if criterion is None else criterion(output, part)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    rows = [("rule", "the loss of a micro-batch is one number"), ("try", "the mean over its targets: loss.mean()")]
    raise UsageError(explain(f"{'the criterion' if criterion else 'the model'} gave {kind} for a loss.", rows))


def detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return (
            type(output)({key: detached(value) for key, value in output.items()})
            if type(output) is dict
            else {key: detached(value) for key, value in output.items() if value is not None}
        )
    if isinstance(output, (list, tuple)):
        return tuple(detached(item) for item in output)
    return output
