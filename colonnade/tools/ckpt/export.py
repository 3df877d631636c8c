"""A folder in the format of the hub from a training checkpoint, without processes and without the program that trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.hub_folder import WEIGHT_FILES, is_model_folder, write_index, write_weights
from colonnade.checkpoint.hub_plan import Gather, SavePlan, parse_size, plan_files
from colonnade.checkpoint.manifest import Key
from colonnade.checkpoint.model_tensors import named_tensors
from colonnade.checkpoint.staged_folder import StagedFolder
from colonnade.checkpoint.training_load import Checkpoint, open_checkpoint
from colonnade.checkpoint.training_save import CONFIG
from colonnade.checkpoint.transformers_internals import SaveRules, ignored_on_save
from colonnade.cluster.mesh import Axis
from colonnade.errors import CheckpointError, ConfigError, explain
from colonnade.tools.ckpt.source import read_whole

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "added_tokens.json", "*.model", "chat_template*")  # fmt: skip


def export(
    path: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    size_per_shard: int | str = "5GB",
    tokenizer: Path | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> SavePlan:
    """Write a folder that transformers' `from_pretrained` loads; one output file is in memory at a time.

    Args:
        path: a folder of training checkpoints, of which the latest is taken, or the folder of one.
        out: a new folder, or one with an earlier model, which stays whole until the new one is complete.
        dtype: "fp32", "bf16" or "fp16"; by default the format in which the model was trained.
        size_per_shard: largest size of a file.
        tokenizer: folder from which to copy the tokenizer's files.
        told: called with the name of each file before it is written.

    Raises:
        CheckpointError: the checkpoint is damaged, or not that of a plain transformers model.
        ConfigError: an option means nothing.
    """
    if dtype is not None and dtype not in FORMATS:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(FORMATS)}.")
    limit = parse_size(size_per_shard)
    checkpoint = open_checkpoint(path, Axis.alone("world"))
    model, config = _model_of(checkpoint)
    chosen = FORMATS[dtype] if dtype else getattr(torch, str(config.get("dtype") or "float32"))
    gathers = _gathers(model, checkpoint, chosen)
    meta = {g.names: torch.empty(g.shape, dtype=g.dtype, device="meta") for g in gathers}
    rules = SaveRules(model, list(meta.items()))
    plan = plan_files(gathers, lambda g: {k: v.nbytes for k, v in rules.stored(g.names, meta[g.names]).items()}, limit)
    folder = StagedFolder(out, is_model_folder, WEIGHT_FILES)
    try:
        _copy_small(checkpoint, folder.open(), config | {"dtype": str(chosen).removeprefix("torch.")}, tokenizer)
        waiting: dict[str, torch.Tensor] = {}
        for file in plan.files:
            told(file.name)
            for gather in file.gathers:
                whole = torch.empty(gather.shape, dtype=gather.dtype)
                read_whole(checkpoint, _key(checkpoint, gather.names), whole)
                waiting |= rules.stored(gather.names, whole)
            write_weights({key: waiting.pop(key).contiguous() for key in file.keys}, folder.staging / file.name)
        write_index(plan, folder.staging)
        folder.commit()
    finally:
        folder.discard()
    return plan


def _model_of(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """The model's class on the meta device, and its config."""
    file = checkpoint.folder / CONFIG / "config.json"
    if any(".lora_" in key.name for key in checkpoint.manifest.tensors):
        raise CheckpointError(
            explain(
                f"{checkpoint.folder} is of a model with adapters.",
                [("try", "booster.load(…) in a program, and booster.save_lora_as_pretrained(model, path)")],
            )
        )
    if "model" not in checkpoint.manifest.parts or not file.is_file():
        raise CheckpointError(
            explain(
                f"{checkpoint.folder} is not of a transformers model with a config.",
                [
                    ("holds", ", ".join(checkpoint.manifest.parts)),
                    ("try", "booster.load(…) in the program that made it"),
                ],
            )
        )
    import transformers

    config = json.loads(file.read_text(encoding="utf-8"))
    name = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise CheckpointError(
            explain(
                f"transformers {transformers.__version__} has no class {name!r}.",
                [
                    (
                        "try",
                        "booster.load(…) in the program that made the checkpoint, and booster.save_model(model, path)",
                    )
                ],
            )
        )
    with torch.device("meta"):
        return kind(kind.config_class.from_pretrained(file.parent)), config


def _gathers(model: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> list[Gather]:
    parameters, ignored = {id(p) for p in model.parameters()}, ignored_on_save(model)
    found, missing = [], []
    for names, tensor in named_tensors(model):
        kept = tuple(name for name in names if name not in ignored)
        if not kept:
            continue
        stored = checkpoint.manifest.tensors.get(_key(checkpoint, kept))
        if stored is None or stored.shape != tuple(tensor.shape):
            missing.append(kept[0])
            continue
        kind = dtype if stored.dtype.is_floating_point and id(tensor) in parameters else stored.dtype
        found.append(Gather(kept, stored.shape, kind, id(tensor) in parameters, ()))
    if missing:
        raise CheckpointError(
            explain(
                f"{checkpoint.folder} has not all weights of {type(model).__name__}.",
                [("lacks", ", ".join(missing[:5]))],
            )
        )
    return found


def _key(checkpoint: Checkpoint, names: tuple[str, ...]) -> Key:
    return Key("model", checkpoint.name_of(names) or names[0])


def _copy_small(checkpoint: Checkpoint, folder: Path, config: dict[str, Any], tokenizer: Path | None) -> None:
    for file in (checkpoint.folder / CONFIG).iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is None:
        return
    found = {file for pattern in TOKENIZER_FILES for file in tokenizer.glob(pattern) if file.is_file()}
    if not found:
        raise ConfigError(f"{tokenizer} has no files of a tokenizer.")
    for file in found:
        shutil.copyfile(file, folder / file.name)
