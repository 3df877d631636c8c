"""Training checkpoints of a booster: what belongs to one, and how it is taken back."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.booster.plugin.boosted_model import BoostedModel
from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.background import BACKGROUND
from colonnade.checkpoint.manifest import Key
from colonnade.checkpoint.remote import is_remote
from colonnade.checkpoint.root import folder_of
from colonnade.checkpoint.spread import stages_of
from colonnade.checkpoint.training_items import IMPLEMENTATION, Items, items_of, targets_of
from colonnade.checkpoint.training_load import (
    MIXED,
    UNCHANGED,
    Checkpoint,
    Match,
    check_match,
    match_model,
    open_checkpoint,
    read_into,
)
from colonnade.checkpoint.training_save import UNCHANGED as NOT_SAVED
from colonnade.checkpoint.training_save import Snapshot, save_training, take_snapshot
from colonnade.checkpoint.transformers_internals import save_small_files
from colonnade.cluster.mesh import ParallelMesh
from colonnade.cluster.random_state import branch_off, random_state, set_random_state
from colonnade.errors import CheckpointError, ConfigError, UsageError, explain
from colonnade.model.adapters import plain_model
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.precision.state import SavedState, Shape, Shard

LIKE_RANK = ("dp", "pp")  # axes along which random generators differ


@dataclass(frozen=True)
class Training:
    """What is saved and loaded together; None for what is not.

    Args:
        model: boosted.
        optimizer: boosted.
        lr_scheduler, dataloader, extra: anything with `state_dict` and `load_state_dict`; `extra` may be a dict.
    """

    model: BoostedModel | None = None
    optimizer: ParallelOptimizer | None = None
    lr_scheduler: Any = None
    dataloader: Any = None
    extra: Any = None

    def snapshot(
        self, path: str | Path, mesh: ParallelMesh, step: int, *, with_random: bool = True, copied: bool = False
    ) -> Snapshot:
        """What this rank writes. All ranks call it.

        Args:
            copied: into memory of its own, so that training can go on.
        """
        if self.model is not None:
            self.model.check_loaded()
        attempt = Attempt(mesh, f"the training state was not saved to {path}.", (NOT_SAVED,))
        items, objects, snapshot = Items(), {}, None
        with attempt:
            items = items_of(None if self.model is None else self.model.unwrap(), self.optimizer, mesh)
            objects = self._objects()
        stages: Mapping[Key, Sequence[int]] = {}
        if mesh.size("pp") > 1:
            held = attempt.agree(list(items.shards))
            stages = stages_of([held[rank] for rank in mesh.axis("pp").ranks])
        own: dict[str, Any] = {}
        if with_random and mesh.rank("tp") == mesh.rank("sp") == 0:
            own = {"place": {axis: mesh.rank(axis) for axis in LIKE_RANK}, "random": random_state()}
        parts = ["model"] * (self.model is not None) + ["optimizer"] * (self.optimizer is not None)
        parts += [*self._stateful(), *["random"] * with_random]
        with attempt:
            snapshot = take_snapshot(items, mesh, stages, step, objects, own, tuple(parts))
            snapshot.about.update(self._about())
            if self.model is not None:
                snapshot.write_config = partial(_write_config, self.model.unwrap(), self.model.original_config)
            if copied:
                snapshot.copy()
        attempt.agree()
        assert snapshot is not None  # else the exchange has raised
        return snapshot

    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = {name: state_of(name, value) for name, value in self._stateful().items()}
        if self.optimizer is not None:
            scaler = self.optimizer.loss_scaler
            objects["optimizer"] = type(self.optimizer.inner).__name__
            objects["loss_scale"] = None if scaler is None else scaler.state_dict()
        return objects

    def _about(self) -> dict[str, str]:
        about = {}
        if self.model is not None:
            about["model"] = type(plain_model(self.model.unwrap())).__name__
            about["precision"] = str(self.model.dtype).removeprefix("torch.")
        if self.optimizer is not None:
            about["optimizer"] = type(self.optimizer.inner).__name__
        return about

    def _stateful(self) -> dict[str, Any]:
        found = {"lr_scheduler": self.lr_scheduler, "dataloader": self.dataloader, "extra": self.extra}
        return {name: value for name, value in found.items() if value is not None}

    def load(
        self, path: str | Path, mesh: ParallelMesh, *, strict: bool, thorough: bool, with_random: bool = True
    ) -> int:
        """Take a checkpoint back. All ranks call it.

        Returns:
            The step that it was saved at.
        """
        world = mesh.world
        checkpoint = open_checkpoint(path, world, thorough=thorough)
        attempt = Attempt(world, f"nothing was loaded from {path}.", (UNCHANGED,))
        match, targets, groups = Match(), list[tuple[Key, Shard]](), list[set[str]]()
        with attempt:
            self._check_parts(checkpoint)
            if self.model is not None:
                match, targets = match_model(checkpoint, *targets_of(self.model.unwrap()))
            if self.optimizer is not None:
                groups = groups_of(checkpoint, self.optimizer, strict)
        told = attempt.agree((match, groups))
        if self.model is not None:
            check_match(checkpoint, [each for each, _ in told], "model", strict)
        if self.optimizer is not None:
            check_groups(checkpoint, [each for _, each in told])
        attempt = Attempt(world, f"reading {checkpoint.folder} failed in the middle of a load.", (MIXED,))
        with attempt:
            if self.optimizer is not None:
                targets += restore_optimizer(checkpoint, self.optimizer)
            read_into(checkpoint, targets)
            self._refresh()
            self._set_objects(checkpoint)
            if with_random and "random" in checkpoint.manifest.parts:
                restore_random([own for own in checkpoint.objects["own"] if own], mesh)
        attempt.agree()
        return checkpoint.manifest.step

    def _refresh(self) -> None:
        """Let optimizers of the model that are not loaded follow its weights."""
        for optimizer in self.model.optimizers if self.model is not None else []:
            if optimizer is not self.optimizer:
                optimizer.stepped.refresh()

    def _check_parts(self, checkpoint: Checkpoint) -> None:
        asked = {"model": self.model, "optimizer": self.optimizer, **self._stateful()}
        lacking = [name for name, value in asked.items() if value is not None and name not in checkpoint.manifest.parts]
        if lacking:
            raise CheckpointError(
                explain(
                    f"{checkpoint.folder} has no {', '.join(lacking)}.",
                    [("holds", ", ".join(checkpoint.manifest.parts)), ("try", "load only what it holds")],
                )
            )

    def _set_objects(self, checkpoint: Checkpoint) -> None:
        objects = checkpoint.objects
        for name, value in self._stateful().items():
            set_state(value, objects[name])
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            if self.optimizer.loss_scaler is not None and objects["loss_scale"] is not None:
                self.optimizer.loss_scaler.load_state_dict(objects["loss_scale"])


def _write_config(model: nn.Module, config: Any, folder: Path) -> None:
    save_small_files(plain_model(model), folder, config, None)


def save_training_state(
    training: Training,
    path: str | Path,
    mesh: ParallelMesh,
    *,
    step: int = 0,
    keep_last: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """Write a checkpoint into a folder of checkpoints; see `Booster.save`."""
    _check_numbers(step, keep_last)
    finish_saving(mesh)
    snapshot = training.snapshot(path, mesh, step, copied=asynchronous)
    if asynchronous:
        world = BACKGROUND.world()
        BACKGROUND.start(partial(save_training, snapshot, path, world, keep_last=keep_last))
        return Path(path) if is_remote(path) else folder_of(Path(os.path.realpath(path)), step)
    return save_training(snapshot, path, mesh.world, keep_last=keep_last)


def finish_saving(mesh: ParallelMesh) -> None:
    """Wait for a save in the background, and raise its error; see `Booster.finish_saving`."""
    BACKGROUND.finish()


def load_training_state(
    training: Training, path: str | Path, mesh: ParallelMesh, *, strict: bool = True, verify: bool = False
) -> int:
    """Go on from a checkpoint; see `Booster.load`."""
    finish_saving(mesh)
    return training.load(path, mesh, strict=strict, thorough=verify)


def save_part(training: Training, path: str | Path, mesh: ParallelMesh) -> None:
    """Write a part of what belongs to a training into a folder of its own."""
    save_training(training.snapshot(path, mesh, 0, with_random=False), path, mesh.world, keep_last=None, in_root=False)


def load_part(training: Training, path: str | Path, mesh: ParallelMesh) -> None:
    """Take back a part, from a folder that has it, alone or with others."""
    finish_saving(mesh)
    training.load(path, mesh, strict=True, thorough=False, with_random=False)


def _check_numbers(step: Any, keep_last: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if value is None and name == "keep_last":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")


def state_of(name: str, value: Any) -> Any:
    """The state of a scheduler, a data loader or what the user adds.

    Raises:
        UsageError: it has none.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise UsageError(
            explain(
                f"{name} was given as a {type(value).__name__}, which has no state that could be saved.",
                [
                    ("needs", "state_dict() and load_state_dict()" + (", or a dict" if name == "extra" else "")),
                    *([("try", "plugin.prepare_dataloader(…), whose loader has them")] if name == "dataloader" else []),
                ],
            )
        )
    return value.state_dict()


def set_state(value: Any, state: Any) -> None:
    """Put a state back; into a dict its entries."""
    if isinstance(value, MutableMapping):
        value.clear()
        value.update(state)
    else:
        value.load_state_dict(state)


def groups_of(checkpoint: Checkpoint, optimizer: ParallelOptimizer, strict: bool) -> list[set[str]]:
    """Names of the parameters of each group, as the checkpoint knows them.

    Raises:
        CheckpointError: the state is of an optimizer of another class, or with other groups.
    """
    saved, kind = checkpoint.objects["groups"], checkpoint.objects["optimizer"]
    if strict and kind != type(optimizer.inner).__name__:
        raise CheckpointError(
            explain(
                f"{checkpoint.folder} has the state of another optimizer.",
                [("expected", type(optimizer.inner).__name__), ("found", str(kind))],
            )
        )
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            explain(
                f"{checkpoint.folder} has the state of an optimizer with other parameter groups.",
                [("expected", f"{len(optimizer.param_groups)} groups"), ("found", f"{len(saved)}")],
            )
        )
    return [
        {checkpoint.name_of(optimizer.names[p]) or optimizer.names[p][0] for p in group["params"]}
        for group in optimizer.param_groups
    ]


def check_groups(checkpoint: Checkpoint, told: Sequence[Sequence[set[str]]]) -> None:
    """Compare the groups of all ranks together with those that were saved.

    Raises:
        CheckpointError: the same on every rank; a group holds other parameters.
    """
    for number, (_, names) in enumerate(checkpoint.objects["groups"]):
        here, saved = set().union(*(each[number] for each in told)), set(names)
        rows = [("only here", here - saved), ("only saved", saved - here)]
        if here != saved:
            said = [(which, ", ".join(sorted(some)[:5])) for which, some in rows if some]
            raise CheckpointError(
                explain(f"parameter group {number} of {checkpoint.folder} holds other parameters.", [*said, UNCHANGED])
            )


def restore_optimizer(checkpoint: Checkpoint, optimizer: ParallelOptimizer) -> Sequence[tuple[Key, Shard]]:
    """Make memory for what an optimizer kept, and set its options; what is to be read and where to."""
    by_name: dict[str, dict[str, Shape]] = {}
    for key, stored in checkpoint.manifest.of_part("optimizer").items():
        by_name.setdefault(key.name, {})[key.state] = Shape(stored.shape, stored.dtype)

    def saved(param: nn.Parameter) -> SavedState | None:
        name = checkpoint.name_of(optimizer.names[param])
        tensors, numbers = by_name.get(name or "", {}), {} if name is None else checkpoint.numbers_of(name)
        return SavedState(tensors, numbers) if tensors or numbers else None

    for group, (options, _) in zip(optimizer.param_groups, checkpoint.objects["groups"]):
        group.update({key: value for key, value in options.items() if key not in IMPLEMENTATION})
    targets = []
    for state in optimizer.restore(saved):
        name = checkpoint.name_of(optimizer.names[state.param]) or optimizer.names[state.param][0]
        targets += [(Key("optimizer", name, key), shard) for key, shard in state.tensors.items()]
        if state.master is not None:
            targets.append((Key("model", name), state.master))
    optimizer.stepped.refresh()  # where the weights were not saved, the copies are those of the model as it is
    return [(key, shard) for key, shard in targets if key in checkpoint.manifest.tensors]


def restore_random(saved: Sequence[Mapping[str, Any]], mesh: ParallelMesh) -> None:
    """Set this rank's random generators to what they were in its place.

    Where there were other places, the first rank goes on as it would have, and the others branch off from it.
    """
    places = {tuple(own["place"][axis] for axis in LIKE_RANK): own["random"] for own in saved}
    mine = tuple(mesh.rank(axis) for axis in LIKE_RANK)
    sizes = tuple(mesh.size(axis) for axis in LIKE_RANK)
    same = tuple(1 + max(place[i] for place in places) for i in range(len(LIKE_RANK))) == sizes
    set_random_state(places[mine] if same else places[0, 0])
    if not same and any(mine):
        branch_off("resumed", *mine)
