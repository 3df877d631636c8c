"""Inputs with which a model can be run to look at it, and the loss by which two runs can be compared.

[Note: inputs that reach every part]
A part that no input reaches is neither seen nor checked. So whatever a forward takes it is given: pictures beside text,
with as many placeholder tokens as the model makes of a picture; sound; states to attend to, where layers attend to an
encoder that is not there; and labels, of the kind that its logits call for.

[Note: values that are not there]
On the meta device a tensor has no values, and a forward that asks for one fails: whether a mask hides anything, whether
there are as many placeholders as features. The inputs made here are such that the answer is yes, so `assume_yes` gives it.

Sequences have 13 tokens: more than a twin's attention window holds, and a number that no count of heads is. Nor is the
number of rows of a forward that is only looked at; a step that is checked has two, as it takes time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from colonnade.cluster.log import get_logger
from colonnade.shardformer.inference.dispatch import OperationMode

log = get_logger(__name__)
ROWS, TOKENS = 2, 13
TRACED_ROWS = 11
SOURCE_TOKENS = 7  # of what is attended to, where there is no encoder: another number than TOKENS
IGNORED = -100
TARGETS = ("labels", "targets")
# of pictures in another form than [rows, channels, height, width]; with one of these a model is run on text alone
OTHER_PICTURES = {"image_grid_thw", "image_position_ids", "image_patches", "aspect_ratio_ids"}


def probe_inputs(
    model: Any,
    device: torch.device,
    dense_mask: bool = False,
    pictures: bool = True,
    *,
    rows: int = ROWS,
    seed: int = 5,
    targets: bool = True,
) -> dict[str, Any]:
    """Inputs of one forward, by name; with targets where the model takes some, except on the meta device.

    Args:
        model: a transformers model, or any module whose forward takes token ids [rows, tokens] as its first argument.
            On the CPU it is run once without targets, to see the shape of its logits.
        dense_mask: give the mask as zeros [rows, 1, tokens, tokens], which models add as it is; the meta device has no
            values from which a mask could be made.
        pictures: give a model that reads text and pictures both, where it can make something of pictures of the size
            that its config says.
        rows: number of sequences, or pictures.
        seed: of the generator.
        targets: give targets where the model takes some.

    Raises:
        ValueError: a module without a config takes something that is not known.
        whatever the model raises for these inputs.
    """
    maker = _Maker(model, device, rows, seed)
    inputs = maker.inputs(dense_mask, pictures) if is_configured(model) else maker.plain_inputs()
    if targets and device.type != "meta":
        target = next((name for name in TARGETS if name in maker.names), None)
        if target is not None and (found := maker.targets(inputs)) is not None:
            inputs[target] = found
    return inputs


def probes(model: Any) -> Iterator[dict[str, Any]]:
    """Options of `probe_inputs` to try one after the other where the first may not run: those that reach most come first."""
    both = is_configured(model) and {"input_ids", "pixel_values"} <= _names(model).keys()
    for pictures in (True, False) if both else (False,):
        for dense_mask in (False, True):
            yield {"dense_mask": dense_mask, "pictures": pictures, "targets": False}


class assume_yes(OperationMode):  # noqa: N801 - used as `with assume_yes():`
    """Within it, every question for a truth value on the meta device is answered with yes; see
    [Note: values that are not there]. A question for a number fails as ever.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = function is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta"
        if asked and args[0].dtype == torch.bool:
            return True
        return function(*args, **(kwargs or {}))


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output; where there is none, a loss that weighs every entry of every tensor in it."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors = [t for t in _tensors(output) if t.is_floating_point()]
    tensors = [t for t in tensors if t.requires_grad] or tensors  # none does where no gradients are wanted
    scalars = [t for t in tensors if t.dim() == 0]
    if scalars:
        return scalars[0]
    total = torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor in tensors:
        weights = torch.linspace(0.1, 1.0, math.prod(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        total = total + (tensor * weights.view(tensor.shape)).square().mean()
    return total


def is_configured(model: Any) -> bool:
    """Whether a model has a config as transformers knows them; what others keep under that name says nothing here."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def predicts_next(model: Any) -> bool:
    """Whether a model's own loss shifts the labels: position t predicts label t + 1."""
    causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    return causal and not model.config.is_encoder_decoder


def usable_ids(config: Any, vocabulary: int) -> torch.Tensor:
    """Token ids without those that have a meaning of their own: padding, whose embedding does not train, and places for
    pictures.
    """
    special: set[Any] = set()
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if name.endswith(("token_id", "token_index")):
                special |= set(value) if isinstance(value, list) else {value}
    return torch.tensor([i for i in range(vocabulary) if i not in special])


def _names(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What a model's forward takes, by name."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(model.forward).parameters.items() if p.kind not in kinds}


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors at the top of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [value for value in values if isinstance(value, torch.Tensor)]


class _Maker:
    """Makes the inputs of one model from one generator."""

    def __init__(self, model: Any, device: torch.device, rows: int, seed: int) -> None:
        self.model, self.device, self.rows = model, device, rows
        self.names = _names(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.usable = torch.arange(1)
        axes = getattr(getattr(model, "config", None), "axial_pos_shape", None)
        self.tokens = math.prod(axes) if axes else TOKENS  # axial positions are for one number of tokens alone
        self.codebooks: int = getattr(getattr(model, "config", None), "num_codebooks", None) or 1

    def inputs(self, dense_mask: bool, pictures: bool) -> dict[str, Any]:
        """Of a transformers model."""
        config, names = self.model.config, self.names
        text = config.get_text_config()
        inputs: dict[str, Any] = {}
        places = 0
        if "input_ids" not in names or (pictures and not OTHER_PICTURES & names.keys()):
            inputs |= self._pictures()
            found = self._places(inputs)
            inputs, places = ({}, 0) if found is None else (inputs, found)
        if "input_ids" in names:
            self.usable = usable_ids(config, text.vocab_size)
            ids = self._ids(places)
            if "labels" not in names and isinstance(text.eos_token_id, int):
                ids[:, -1] = text.eos_token_id  # where encoders of text read off what they return
            inputs["input_ids"] = ids
            if "attention_mask" in names:
                shape = (len(ids), 1, ids.shape[1], ids.shape[1])
                dense = torch.zeros(shape, dtype=self.dtype, device=self.device)
                inputs["attention_mask"] = dense if dense_mask else torch.ones_like(ids)
        if "decoder_input_ids" in names and (config.is_encoder_decoder or text.is_encoder_decoder):
            self.usable = usable_ids(config, text.vocab_size)
            inputs["decoder_input_ids"] = self._ids(0)
        inputs |= self._sound() | self._context()
        if "return_loss" in names:
            inputs["return_loss"] = True
        if "use_cache" in names:
            inputs["use_cache"] = False
        return inputs

    def plain_inputs(self) -> dict[str, Any]:
        """Of a module without a config: token ids, under the name of its forward's first argument."""
        if not any(isinstance(m, nn.Embedding) for m in self.model.modules()):
            raise ValueError(f"{type(self.model).__name__} has no config and no nn.Embedding: it reads no token ids")
        first, *others = self.names
        needed = [n for n in others if self.names[n].default is inspect.Parameter.empty and n not in TARGETS]
        if needed:
            raise ValueError(f"the forward of {type(self.model).__name__} also needs {', '.join(needed)}")
        if self.device.type != "meta":  # where ids have no values
            ids = torch.zeros(self.rows, TOKENS, dtype=torch.long, device=self.device)
            self.usable = torch.arange(self._vocabulary(first, ids))
        return {first: self._ids(0)}

    def targets(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Targets that fit the logits: a token for each position, or a class for each row; None where neither fits."""
        logits = self._logits(inputs)
        if logits is None or logits.dim() not in (2, 3):
            return None
        ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if self.codebooks > 1:  # ids have a row of each codebook for every row of targets
            return self._choose(self.usable, (self.rows, self.tokens, self.codebooks))
        if logits.dim() == 3 and ids is not None and predicts_next(self.model):
            return ids.masked_fill(ids == self._placeholder(), IGNORED)
        classes = self.usable[self.usable < logits.shape[-1]]
        if logits.dim() == 2 or logits.shape[-1] <= int(self.usable.max()):
            classes = torch.arange(logits.shape[-1])
        return self._choose(classes, logits.shape[:-1])

    def _logits(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        with torch.no_grad():
            output = self.model(**inputs)
        if is_configured(self.model):
            return getattr(output, "logits", None)
        return next((t for t in _tensors(output) if t.dim()), None)

    def _vocabulary(self, name: str, ids: torch.Tensor) -> int:
        """Size of the table that a module's first argument is looked up in."""
        found: list[int] = []

        def note(module: nn.Embedding, args: Any) -> None:
            if args[0] is ids or args[0]._base is ids:
                found.append(module.num_embeddings)

        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        handles = [table.register_forward_pre_hook(note) for table in tables]
        try:
            with torch.no_grad():
                self.model(**{name: ids})
        except Exception as error:  # a model's own code
            raise ValueError(f"{type(self.model).__name__} does not run on token ids alone: {error}") from error
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise ValueError(
                f"{name}, the first argument of {type(self.model).__name__}, is looked up in no nn.Embedding"
            )
        return min(found)

    def _ids(self, places: int) -> torch.Tensor:
        """Token ids behind so many places for a picture."""
        ids = self._choose(self.usable, (self.rows * self.codebooks, self.tokens))
        return torch.cat([ids.new_full((len(ids), places), self._placeholder()), ids], 1) if places else ids

    def _choose(self, values: torch.Tensor, shape: Any) -> torch.Tensor:
        return values[torch.randint(len(values), tuple(shape), generator=self.generator)].to(self.device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def _placeholder(self) -> int:
        """The token that stands for a part of a picture; -1 where there is none."""
        config = getattr(self.model, "config", None)
        found = getattr(config, "image_token_id", None)
        return found if isinstance(found, int) else getattr(config, "image_token_index", None) or -1

    def _places(self, inputs: dict[str, Any]) -> int | None:
        """Number of placeholders in a row for the picture in it; None where the model cannot read the picture."""
        if "pixel_values" not in inputs or self._placeholder() < 0 or not hasattr(self.model, "get_image_features"):
            return 0
        try:
            with torch.no_grad(), assume_yes():
                features = self.model.get_image_features(pixel_values=inputs["pixel_values"])
        except Exception as error:  # a model's own code: sizes of the picture's side that do not fit together, say
            if self.names["pixel_values"].default is inspect.Parameter.empty:
                raise
            log.info("%s is run on text alone: pictures fail with %s", type(self.model).__name__, error)
            return None
        found = getattr(features, "pooler_output", features)
        entries = sum(t.numel() for t in ([found] if isinstance(found, torch.Tensor) else found))
        return entries // self.model.config.get_text_config().hidden_size // self.rows

    def _pictures(self) -> dict[str, Any]:
        if "pixel_values" not in self.names:
            return {}
        config = self.model.config
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs = {"pixel_values": self._random(self.rows, getattr(config, "num_channels", 3), height, width)}
        if "input_points" in self.names:  # prompts: a point and a box in each picture
            corner = torch.tensor([0.25 * width, 0.25 * height])
            inputs["input_points"] = corner.expand(self.rows, 1, 1, 2).to(self.device, self.dtype)
            inputs["input_labels"] = torch.ones(self.rows, 1, 1, dtype=torch.long, device=self.device)
            box = torch.cat([corner, 3 * corner])
            inputs["input_boxes"] = box.expand(self.rows, 1, 4).to(self.device, self.dtype)
        return inputs

    def _sound(self) -> dict[str, Any]:
        config = self.model.config
        if "input_features" not in self.names or not hasattr(config, "num_mel_bins"):
            return {}
        frames = 2 * config.max_source_positions  # two for each position
        return {"input_features": self._random(self.rows, config.num_mel_bins, frames)}

    def _context(self) -> dict[str, Any]:
        """States of an encoder that is not part of the model, and queries for a model that reads nothing else."""
        config, found = self.model.config, {}
        text = config.get_text_config()
        if "query_embeds" in self.names:
            found["query_embeds"] = self._random(self.rows, TOKENS, config.hidden_size)
        if "encoder_hidden_states" in self.names and self._attends_outside():
            width = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "encoder_hidden_size", None)
            found["encoder_hidden_states"] = self._random(self.rows, SOURCE_TOKENS, width or text.hidden_size)
        if "cross_attention_states" in self.names and hasattr(config, "cross_attention_layers"):
            found["cross_attention_states"] = self._random(self.rows, SOURCE_TOKENS, text.hidden_size)
        return found

    def _attends_outside(self) -> bool:
        flag = getattr(self.model.config, "add_cross_attention", False)
        names = ("encoder_attn", "crossattention")
        return flag or any(path.endswith(names) for path, _ in self.model.named_modules())
