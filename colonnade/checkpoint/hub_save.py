"""save_model: a model whose parameters lie in pieces on many ranks becomes one ordinary Hugging Face folder.

[Note: one file in memory]
The writer, global rank 0, gathers one tensor at a time and writes a file as soon as its tensors are there. So its host
memory grows by one output file and one tensor, and that of the other ranks not at all. Each tensor is sent by the ranks
whose boxes are needed, at position 0 of every axis along which they hold the same; all others only take part in the
exchanges of status, one per file.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.hub_folder import WEIGHT_FILES, is_model_folder, write_index, write_weights
from colonnade.checkpoint.hub_plan import (
    Gather,
    Held,
    OutputFile,
    SavePlan,
    Source,
    parse_size,
    plan_files,
    plan_gathers,
)
from colonnade.checkpoint.model_tensors import check_layout, extra_state, named_tensors
from colonnade.checkpoint.staged_folder import StagedFolder
from colonnade.checkpoint.transformers_internals import SaveRules, ignored_on_save, save_small_files
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import AXES, ParallelMesh
from colonnade.comm.collectives import receive, send
from colonnade.errors import CheckpointError
from colonnade.model.layout import local_of

WRITER = 0  # global rank; position 0 of every axis


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    mesh: ParallelMesh,
    *,
    config: Any = None,
    shard: bool = True,
    size_per_shard: int | str = "5GB",
    tokenizer: Any = None,
) -> None:
    """Save a model in the Hugging Face hub format; transformers' from_pretrained(path) loads it.

    Called by every rank. The folder is replaced as a whole at the end; until then an earlier checkpoint in it stays
    untouched, and files of it that a save does not write (a README, tokenizer files) are kept.

    Traffic: two object exchanges, one exchange of status per file, and each sharded tensor once to the writer.

    Args:
        model: a transformers model or any nn.Module; its parameters may be shards that carry a layout.
        path: the folder; global rank 0 writes it.
        config: transformers config to write; by default the model's own.
        shard: cut the weights into several files, with an index, where they exceed size_per_shard.
        size_per_shard: bytes, or text such as "5GB" (powers of 1000).
        tokenizer: saved into the same folder where given.

    Raises:
        CheckpointError: on every rank, where any of them fails; an earlier checkpoint is still whole, and the same
            objects can be saved again.
        ConfigError: where size_per_shard is not a size.
    """
    limit = parse_size(size_per_shard) if shard else None
    folder = StagedFolder(path, is_model_folder, WEIGHT_FILES)
    after = (("left", "no trace of this save; what was in the folder before is unchanged"),)
    save = ModelSave(model, mesh, folder, Attempt(mesh, f"the model was not saved to {os.fspath(path)}.", after))
    try:
        plan = save.prepare(limit, config, tokenizer)
        for file in plan.files:
            save.write_file(file)
        save.commit(plan)
    finally:
        folder.discard()


class ModelSave:
    """One save, as seen by this rank. Its public methods end with an exchange of status."""

    def __init__(self, model: nn.Module, mesh: ParallelMesh, folder: StagedFolder, attempt: Attempt) -> None:
        self.model, self.mesh, self.folder, self.attempt = model, mesh, folder, attempt
        self.is_writer = mesh.world.rank == WRITER
        self.tensors: dict[str, torch.Tensor] = {}
        self.rules: SaveRules | None = None
        self.gathered: dict[str, torch.Tensor] = {}  # by key in the files: gathered and not written yet; writer only

    def prepare(self, limit: int | None, config: Any, tokenizer: Any) -> SavePlan:
        """Check everything that can be checked, write the small files, and agree on the plan."""
        held: list[Held] = []
        with self.attempt:
            held = self._announce()
            if self.is_writer:
                save_small_files(self.model, self.folder.open(), config, tokenizer)
        announced = self._agree(held)
        plan = None
        with self.attempt:
            if self.is_writer:
                plan = self._plan(announced, limit)
        return self._agree(plan)[WRITER]

    def _agree(self, value: Any = None) -> list[Any]:
        if self.attempt.error is not None:
            self.folder.discard()  # first: whoever hears of the failure finds no trace of it
        return self.attempt.agree(value)

    def _announce(self) -> list[Held]:
        """What this rank can send, and remember where it is."""
        if lost := extra_state(self.model):
            raise CheckpointError(f"safetensors files cannot hold the extra state {', '.join(lost)}: it is no tensor.")
        parameters = {id(parameter) for parameter in self.model.parameters()}
        ignored = ignored_on_save(self.model)
        held = []
        for names, tensor in named_tensors(self.model):
            names = tuple(name for name in names if name not in ignored)
            if names:
                layout = check_layout(names[0], tensor)
                if _is_first_holder(self.mesh, layout.sharded_axes):
                    held.append(Held(names, tensor.dtype, layout, id(tensor) in parameters))
                    self.tensors[names[0]] = tensor
        return held

    def _plan(self, announced: list[list[Held]], limit: int | None) -> SavePlan:
        gathers = plan_gathers(announced)
        meta = {gather.names: torch.empty(gather.shape, dtype=gather.dtype, device="meta") for gather in gathers}
        self.rules = rules = SaveRules(self.model, list(meta.items()))

        def stored_bytes(gather: Gather) -> dict[str, int]:
            return {key: value.nbytes for key, value in rules.stored(gather.names, meta[gather.names]).items()}

        return plan_files(gathers, stored_bytes, limit)

    def write_file(self, file: OutputFile) -> None:
        """Gather the tensors of one file on the writer, which writes it."""
        for gather in file.gathers:
            whole = self._gather(gather)
            with self.attempt:
                if self.is_writer and self.attempt.error is None:
                    assert self.rules is not None and whole is not None
                    self.gathered |= self.rules.stored(gather.names, whole)
            del whole  # only what is still to be written keeps its memory
        with self.attempt:
            if self.is_writer and self.attempt.error is None:
                tensors = {key: self.gathered.pop(key).contiguous() for key in file.keys}
                write_weights(tensors, self.folder.staging / file.name)
                del tensors
        self._agree()

    def _gather(self, gather: Gather) -> torch.Tensor | None:
        """The whole tensor, in host memory, on the writer; None on the other ranks, and on a writer that has failed."""
        whole = None
        with self.attempt:
            if self.is_writer and self.attempt.error is None:
                whole = torch.empty(gather.shape, dtype=gather.dtype)
        for source in gather.sources:
            # After an error too: who is to send or to receive does so until the exchange of status.
            if self.is_writer:
                part = self._take(source, gather.dtype)
                with self.attempt:
                    if whole is not None and part is not None:
                        source.layout.insert(part.cpu(), whole)
            elif source.rank == self.mesh.world.rank:
                self._send(source, gather.dtype)
        return whole

    def _take(self, source: Source, dtype: torch.dtype) -> torch.Tensor | None:
        if source.rank == WRITER:
            return local_of(self.tensors[source.name].detach())
        buffer = torch.empty(source.layout.local_shape, dtype=dtype, device=current_device())
        return receive(buffer, self.mesh.world, source.rank)

    def _send(self, source: Source, dtype: torch.dtype) -> None:
        part = None
        with self.attempt:
            local = local_of(self.tensors[source.name].detach())
            # A local tensor may be larger than its boxes: the padding of a vocabulary stays here.
            part = local[tuple(slice(n) for n in source.layout.local_shape)].to(current_device()).contiguous()
        if part is None:
            part = torch.zeros(source.layout.local_shape, dtype=dtype, device=current_device())
        send(part, self.mesh.world, WRITER)

    def commit(self, plan: SavePlan) -> None:
        """Write the index and put the folder in place."""
        with self.attempt:
            if self.is_writer:
                write_index(plan, self.folder.staging)
                self.folder.commit()
        self._agree()


def _is_first_holder(mesh: ParallelMesh, sharded_axes: tuple[str, ...]) -> bool:
    """Whether this rank is the first of those that hold the same boxes. Stages of a pipeline hold other tensors."""
    return all(mesh.rank(axis) == 0 for axis in AXES if axis != "pp" and axis not in sharded_axes)
