"""save_adapters: the adapters of a model whose parameters lie in pieces on many ranks become one folder of peft's format.

Which tensors belong to an adapter, and what they are called in its file, is asked of peft itself, on the meta device. They
are gathered as a model's are (`hub_save.py`), and the folder takes its place as a whole.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.hub_folder import write_weights
from colonnade.checkpoint.hub_plan import Gather, Held, plan_gathers
from colonnade.checkpoint.hub_save import WRITER, ModelSave
from colonnade.checkpoint.model_tensors import named_tensors
from colonnade.checkpoint.staged_folder import StagedFolder, locate, sync
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError
from colonnade.model.layout import layout_of

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_REPLACED = re.compile("|".join(map(re.escape, (CONFIG, WEIGHTS, PICKLED))))


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft, or one in a folder of its own below it."""
    return (folder / CONFIG).is_file() or any(folder.glob(f"*/{CONFIG}"))


def adapter_folder(path: str | os.PathLike[str]) -> Path:
    """The folder from which one adapter is read: `path`, or what an interrupted save left beside it.

    Raises:
        CheckpointError: there is none.
    """
    return locate(path, lambda folder: (folder / CONFIG).is_file())


def save_adapters(
    model: Any, path: str | os.PathLike[str], mesh: ParallelMesh, *, use_safetensors: bool = True
) -> None:
    """Save all adapters of a model as peft's save_pretrained does: "default" in the folder, others in folders below it.

    Called by every rank. The folder is replaced as a whole at the end; other files in it are kept.

    Traffic: four object exchanges, and each sharded tensor once to the writer, global rank 0.

    Args:
        model: a peft model; its parameters may be shards that carry a layout.
        use_safetensors: adapter_model.safetensors; or else adapter_model.bin, which is a pickle.

    Raises:
        CheckpointError: on every rank, where any of them fails; what was in the folder before is then unchanged.
    """
    folder = StagedFolder(path, is_adapter_folder, _REPLACED)
    after = (("left", "no trace of this save; what was in the folder before is unchanged"),)
    attempt = Attempt(mesh, f"the adapters were not saved to {os.fspath(path)}.", after)
    save = _AdapterSave(model, mesh, folder, attempt)
    try:
        gathers = save.plan()
        save.gather(gathers)
        save.write(use_safetensors)
    finally:
        folder.discard()


class _AdapterSave(ModelSave):
    """One save of adapters, as seen by this rank. Its public methods end with an exchange of status."""

    def plan(self) -> list[Gather]:
        """Check what can be checked, and agree on which tensors are gathered."""
        self.adapters: dict[str, dict[str, str]] = {}  # by adapter: key in its file → state-dict name
        held: list[Held] = []
        with self.attempt:
            configs: Any = self.model.peft_config
            self.adapters = {name: _keys(self.model, name) for name in configs}
            wanted = {name for keys in self.adapters.values() for name in keys.values()}
            held = [one for one in self._announce() if wanted.intersection(one.names)]
            if self.is_writer:
                self.folder.open()
        announced = self._agree(held)
        gathers = None
        with self.attempt:
            if self.is_writer:
                gathers = plan_gathers(announced)
        return self._agree(gathers)[WRITER]

    def gather(self, gathers: list[Gather]) -> None:
        """Put the tensors together on the writer. Adapters are small: all of them at once."""
        for one in gathers:
            whole = self._gather(one)
            if whole is not None:
                self.gathered |= dict.fromkeys(one.names, whole)
        self._agree()

    def write(self, use_safetensors: bool) -> None:
        """Write every adapter's files, and put the folder in place."""
        with self.attempt:
            if self.is_writer:
                for name, keys in self.adapters.items():
                    folder = self.folder.staging if name == "default" else self.folder.staging / name
                    folder.mkdir(exist_ok=True)
                    tensors = {key: self.gathered[source].clone() for key, source in keys.items()}  # none shared
                    if use_safetensors:
                        write_weights(tensors, folder / WEIGHTS)
                    else:
                        torch.save(tensors, folder / PICKLED)
                        sync(folder / PICKLED)
                    _write_config(self.model, name, folder)
                self.folder.commit()
        self._agree()


def _keys(model: Any, adapter: str) -> dict[str, str]:
    """Key in an adapter's file → state-dict name of the tensor that it holds."""
    from peft import get_peft_model_state_dict

    whole: dict[str, torch.Tensor] = {}
    for names, tensor in named_tensors(model):
        for name in names:
            whole[name] = torch.empty(layout_of(tensor).shape, dtype=tensor.dtype, device="meta")
    name_of = {id(tensor): name for name, tensor in whole.items()}
    found = get_peft_model_state_dict(model, whole, adapter, save_embedding_layers=False)
    made = [key for key, tensor in found.items() if id(tensor) not in name_of]
    if made:
        raise CheckpointError(
            f"adapter {adapter}: peft computes {made[0]} from several tensors, which are in pieces here."
        )
    if not found:
        raise CheckpointError(f"adapter {adapter} has no tensors in this model.")
    return {key: name_of[id(tensor)] for key, tensor in found.items()}


def _write_config(model: Any, adapter: str, folder: Path) -> None:
    """What peft's save_pretrained writes beside the weights; the model's own config of the adapter is not changed."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping if config.task_type is None else None)
