"""The layers of a tiny twin: few, but one of each kind that the model has."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

from colonnade.model.config_fields import (
    LAST,
    LAYER_NUMBERS,
    LAYER_NUMBERS_FROM_ONE,
    LAYERS,
    LEADING,
    PER_LAYER,
    PERIODS,
    SHARED_KINDS,
    SHARED_WEIGHTS,
    STRETCH_LENGTHS,
    STRETCHES,
    TRAILING,
    Fields,
    is_number,
)

MAX_LAYERS = 8
MIN_LAYERS = 2


def shrink_layers(fields: Fields, least: int = MIN_LAYERS) -> None:
    """Few layers, at least one of each kind, in their order; all that counts or lists layers is fitted to them.

    Args:
        least: so many layers at least, where there are as many.
    """
    spelled = fields.get("attention_types")
    if isinstance(spelled, list):  # GPT-Neo: kinds and how often they repeat
        once = sum(len(kinds) for kinds, _ in spelled)
        times = math.ceil(least / once)
        fields["attention_types"] = [[kinds, min(times, repeated)] for kinds, repeated in spelled]
        fields.pop("attention_layers", None)
        layers = sum(len(kinds) * repeated for kinds, repeated in fields["attention_types"])
        fields.update(dict.fromkeys(fields.numbers(LAYERS), layers))
        return
    count = fields.number(LAYERS) or 0
    if count > 1:
        chosen = _choose(fields, count)
        others = [layer for layer in range(count) if layer not in chosen]
        _keep_layers(fields, sorted(chosen + others[: max(0, least - len(chosen))]), count)


def _choose(fields: Fields, count: int) -> list[int]:
    lists = _lists(fields, count)
    own = {int(layer): values for layer, values in (fields.get("per_layer_config") or {}).items()}
    # where the kinds are spelled out, the interval they were made from says nothing more
    periods = [] if lists else [fields[name] for name in PERIODS if is_number(fields.get(name))]
    periods += [fields[name] for name in ("decoder_sparse_step", "expert_layer_period") if lists and fields.get(name)]

    def kind(layer: int) -> tuple[Hashable, ...]:
        spelled_out = [repr(fields[name][layer]) for name in lists if name != "layer_rope_theta"]
        numbered = [layer in fields[name] for name in fields.lists(LAYER_NUMBERS)]
        numbered += [layer + 1 in fields[name] for name in fields.lists(LAYER_NUMBERS_FROM_ONE)]
        counted = [layer < fields[name] for name in fields.numbers(LEADING)]
        counted += [layer <= fields[name] for name in fields.numbers(LAST)]
        counted += [layer >= count - fields[name] for name in fields.numbers(TRAILING)]
        stretch = [layer >= start for names in _stretches(fields) for start in _starts(fields, names)]
        return (*spelled_out, *numbered, *counted, *stretch)

    def kind_and_sizes(layer: int) -> tuple[Hashable, ...]:
        return (*kind(layer), repr(own.get(layer)))

    def copies(layer: int) -> int:
        shared = any(fields[name][layer] in SHARED_KINDS for name in lists)
        return 1 + (fields.number([SHARED_WEIGHTS]) or 1) if shared else 1

    chosen = _some_of_each(kind_and_sizes, copies, count)
    if len(chosen) > MAX_LAYERS:  # every layer has sizes of its own
        chosen = _some_of_each(kind, copies, count)
    if (period := max(periods, default=1)) > 1:
        chosen = list(range(min(count, MAX_LAYERS, max(period, 1 + max(chosen)))))
    return chosen


def _lists(fields: Fields, count: int) -> list[str]:
    return [name for name in fields.lists((*PER_LAYER, "intermediate_size")) if len(fields[name]) == count]


def _stretches(fields: Fields) -> list[tuple[str, ...]]:
    return [names for names in STRETCHES if len(fields.numbers(names)) == len(names)]


def _starts(fields: Fields, names: tuple[str, ...]) -> list[int]:
    return [sum(fields[name] for name in names[:i]) for i in range(len(names))]


def _some_of_each(kind: Callable[[int], Hashable], copies: Callable[[int], int], count: int) -> list[int]:
    """The first layers of each kind, as many as it needs; a second layer where all are alike."""
    taken: dict[Hashable, list[int]] = {}
    for layer in range(count):
        layers = taken.setdefault(kind(layer), [])
        if len(layers) < copies(layer):
            layers.append(layer)
    chosen = sorted(layer for layers in taken.values() for layer in layers)
    return chosen if len(chosen) > 1 else sorted({*chosen, *[i for i in range(count) if i not in chosen][:1]})


def _keep_layers(fields: Fields, chosen: list[int], count: int) -> None:
    new: dict[str, Any] = {name: [fields[name][layer] for layer in chosen] for name in _lists(fields, count)}
    for first, names in ((0, LAYER_NUMBERS), (1, LAYER_NUMBERS_FROM_ONE)):
        for name in fields.lists(names):
            new[name] = [at + first for at, layer in enumerate(chosen) if layer + first in fields[name]]
    new |= {name: sum(layer < fields[name] for layer in chosen) for name in fields.numbers(LEADING)}
    new |= {name: sum(layer <= fields[name] for layer in chosen) - 1 for name in fields.numbers(LAST)}
    new |= {name: sum(layer >= count - fields[name] for layer in chosen) for name in fields.numbers(TRAILING)}
    for name in fields.numbers(STRETCH_LENGTHS):  # borders between leading layers and others lie between stretches
        new[name] = min(fields[name], math.gcd(*(new[n] for n in fields.numbers(LEADING))) or 2)
    for stretches in _stretches(fields):
        for name, start in zip(stretches, _starts(fields, stretches)):
            new[name] = sum(start <= layer < start + fields[name] for layer in chosen)
    own = {int(layer): values for layer, values in (fields.get("per_layer_config") or {}).items()}
    if own:
        new["per_layer_config"] = {at: dict(own[layer]) for at, layer in enumerate(chosen) if layer in own}
    if len(fields.get("stage_names") or ()) == count + 1:  # of a backbone: the stem and then each layer
        new["out_indices"] = sorted({sum(layer < index for layer in chosen) for index in fields["out_indices"]})
        for name in ("stage_names", "out_features"):  # follow from the others
            fields.pop(name, None)
    new |= {name: min(len(chosen), fields[name]) for name in fields.numbers((*LAYERS, "max_window_layers"))}
    fields.update(new)
