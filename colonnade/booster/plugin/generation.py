"""Generating text with a boosted model, by transformers' own `generate`, whatever the layout.

[Note: generating over stages]
All ranks of a pipeline call `generate` with the same prompts. Each step is one forward through the stages; the last one
sends the logits of the last position to all, and every rank chooses the same token: by the same rule, or drawn from the
same random numbers. Keys and values are not kept, since transformers asks the cache of the first block how far it is, and
only one stage has that; so the cost grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.booster.plugin.pipeline import Pipeline
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import broadcast
from colonnade.errors import UsageError, explain
from colonnade.model.adapters import plain_model


def generate(model: BoostedModel, mesh: ParallelMesh, *args: Any, **kwargs: Any) -> Any:
    """What the user's model's `generate` returns; see `Booster.generate`."""
    own: Any = model.unwrap()
    if not hasattr(own, "generate"):
        raise UsageError(f"{type(own).__name__} has no generate method; it is no generative transformers model.")
    if model.pipeline is not None:
        _check(own, kwargs)
        kwargs["use_cache"] = False
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _through(model.pipeline, own, mesh) if model.pipeline is not None else nullcontext():
            return own.generate(*args, **kwargs)
    finally:
        model.train(training)


def _check(own: Any, kwargs: dict[str, Any]) -> None:
    refused = []
    if getattr(own.config, "is_encoder_decoder", False):
        refused.append(("found", "a model with an encoder, which generate calls by itself, before the decoder"))
    if kwargs.get("use_cache"):
        refused.append(("use_cache=True", "keys and values lie on many ranks; leave it out"))
    if kwargs.get("assistant_model") is not None or kwargs.get("prompt_lookup_num_tokens"):
        refused.append(("found", "assisted generation, which reads the logits of more than the last position"))
    if refused:
        rows = [*refused, ("or", "booster.save_model(model, path), and generate with plain transformers")]
        raise UsageError(explain("this cannot be generated over pipeline stages.", rows))


@contextmanager
def _through(pipeline: Pipeline, own: Any, mesh: ParallelMesh) -> Iterator[None]:
    """Inside the block the model's forward goes through all stages, and random draws are the same on all of them."""

    def forward(**inputs: Any) -> Any:
        return _Output(logits=pipeline.last_logits(native, inputs))

    inner: Any = plain_model(own)  # of a model with adapters, which call that one
    native = inner.forward
    drawn = torch.randint(2**62, (1,), device=current_device())
    seed = int(broadcast(broadcast(drawn, mesh.axis("tp")), mesh.axis("pp")))
    devices = [] if current_device().type == "cpu" else [current_device()]
    with torch.random.fork_rng(devices=devices, device_type=current_device().type if devices else "cuda"):
        torch.manual_seed(seed)
        inner.forward = forward
        try:
            yield
        finally:
            del inner.forward


class _Output(dict):
    """A model's output with logits only, as `generate` reads it."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)
