"""The only file of this room that looks inside transformers: small files, names and conversions of the hub format.

transformers is imported when a transformers model is met, never earlier; a plain nn.Module needs none of it.

[Note: weights that the hub stores differently]
Some families keep weights in another form in memory than in their files: Mixtral's experts are one stacked tensor per
layer here, one matrix per expert there. transformers describes this by *conversions* of names and tensors, reverts them
in save_pretrained and applies them in from_pretrained; llama, qwen2, qwen3, mistral, gpt2 and opt have none. We use the
same conversions, one tensor at a time: that a tensor can be converted by itself is checked on the meta device beforehand.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade.errors import CheckpointError, explain


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model is a transformers PreTrainedModel."""
    transformers = sys.modules.get("transformers")  # not imported: then nobody can have made such a model
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def save_small_files(model: Any, folder: Path, config: Any, tokenizer: Any) -> None:
    """Write what save_pretrained writes beside the weights: config, generation config, custom code, tokenizer.

    Args:
        config: the config to write; by default the model's own. Neither is changed.
    """
    config = copy.deepcopy(config if config is not None else getattr(model, "config", None))
    if is_transformers_model(model):
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        if model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, str(folder), config=config)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


class SaveRules:
    """What the tensors of a model are called, and look like, in its files.

    Args:
        logical: every tensor of the model, in its whole shape on the meta device, with its state-dict names.

    Raises:
        CheckpointError: where a conversion takes several tensors (Note: weights that the hub stores differently).
    """

    def __init__(self, model: Any, logical: Sequence[tuple[tuple[str, ...], torch.Tensor]]) -> None:
        self.model = model
        self._tied_patterns = _tied_patterns(model) if is_transformers_model(model) else None
        kept = {name: torch.empty_like(meta) for names, meta in logical for name in self.kept_names(names)}
        self._keys = self._find_keys(kept) if is_transformers_model(model) else {name: name for name in kept}

    def kept_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names under which a tied tensor is stored: one, unless transformers could not tie the others again."""
        if self._tied_patterns is None:
            return names[:1]
        declared = [name for name in names if any(re.search(pattern, name) for pattern in self._tied_patterns)]
        return tuple(name for name in names if name not in declared) or (sorted(declared)[-1],)

    def stored(self, names: tuple[str, ...], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The keys that a tensor is stored as, with their values: views of it where possible."""
        out: dict[str, torch.Tensor] = {}
        for name in self.kept_names(names):
            value = tensor if not out else tensor.clone()  # a file may not hold the same memory twice
            out |= {self._keys[name]: value} if name in self._keys else self._revert({name: value})
        return out

    def _find_keys(self, kept: dict[str, torch.Tensor]) -> dict[str, str]:
        """By state-dict name, the key of every tensor that is stored as it is; the others are converted."""
        try:
            together = self._revert(dict(kept))
            key_of = {id(tensor): key for key, tensor in together.items()}
            keys = {name: key_of[id(tensor)] for name, tensor in kept.items() if id(tensor) in key_of}
            apart = {key: kept[name] for name, key in keys.items()}
            for name in kept.keys() - keys.keys():
                apart |= self._revert({name: kept[name]})
        except Exception as error:
            raise _cannot_convert(self.model, f"{type(error).__name__}: {error}") from error
        if {k: v.shape for k, v in apart.items()} != {k: v.shape for k, v in together.items()}:
            names = sorted(apart.keys() ^ together.keys())
            raise _cannot_convert(self.model, f"several tensors are stored together: {', '.join(names[:5])}")
        return keys

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, tensors)


def _cannot_convert(model: nn.Module, reason: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"{type(model).__name__} stores weights in its files in another form than in memory, and this conversion "
            "cannot be done one tensor at a time.",
            [("reason", reason), ("try", "one process and the model's own save_pretrained")],
        )
    )


def _tied_patterns(model: nn.Module) -> list[str]:
    patterns: list[str] = []
    for name, module in model.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or {}
        patterns.extend(f"{name}.{key}" if name else key for key in declared)
    return patterns


def ignored_on_save(model: nn.Module) -> frozenset[str]:
    """State-dict names that the model's class keeps out of its files."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


class LoadRules:
    """How keys in files become the model's state-dict names.

    Attributes:
        prefix: what the names of the base model begin with inside a model with a head ("model", "transformer"), or "".
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.prefix: str = getattr(model, "base_model_prefix", "") or ""
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        if is_transformers_model(model):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming

            mapping = get_model_conversion_mapping(model)
            self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
            self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def in_order(self, keys: Iterable[str]) -> list[str]:
        """Keys in the order in which conversions expect them: expert 2 before expert 10."""
        if not self._renamings and not self._converters:
            return list(keys)
        from transformers.core_model_loading import dot_natural_key

        return sorted(keys, key=dot_natural_key)

    def rename(self, key: str) -> tuple[str, str | None]:
        """The state-dict name for a key, and the pattern of the conversion it takes part in (None: stored as it is)."""
        if not self._renamings and not self._converters:
            return key, None
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(key, self._renamings, self._converters)

    def convert(self, name: str, parts: list[tuple[str, str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Apply one conversion.

        Args:
            name: the (first) state-dict name it makes.
            parts: key, pattern and value of each tensor it takes, in order.

        Returns:
            By state-dict name, the whole tensors it makes.

        Raises:
            CheckpointError: where the tensors do not go together.
        """
        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        converter = copy.deepcopy(by_pattern[parts[0][1]])
        for key, pattern, value in parts:
            converter.add_tensor(name, key, pattern, value)
        try:
            made = converter.convert(name, model=self.model, config=self.model.config)
        except Exception as error:
            keys = ", ".join(key for key, *_ in parts[:3])
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{name} cannot be made of the {len(parts)} keys {keys}, …: {reason}") from error
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def ignored(self, names: Iterable[str], kind: str) -> list[str]:
        """Those of the names that the model's class says not to worry about.

        Args:
            kind: "missing" or "unexpected".
        """
        patterns = set(getattr(self.model, f"_keys_to_ignore_on_load_{kind}", None) or ())
        if kind == "unexpected" and is_transformers_model(self.model):
            buffers = [name for name, _ in self.model.named_buffers()]
            # Buffers that older files hold and that today's models compute.
            patterns |= {r"rotary_emb\.inv_freq"} if any(n.endswith("rotary_emb.inv_freq") for n in buffers) else set()
            patterns |= {r"(^|\.)position_ids$"} if any(n.endswith("position_ids") for n in buffers) else set()
        joined = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or "$^")
        return [name for name in names if joined.search(name)]
