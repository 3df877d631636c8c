"""The widths and counts of a tiny twin: small, and in the proportions of the model's own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from colonnade.model import config_fields as names
from colonnade.model.config_fields import Fields, is_number

VOCAB = 67  # no two ranks can share it out evenly
POSITIONS = 64
WINDOW = 8  # narrower than the sequences that a twin is fed
TOKENS = 13  # of a sequence that a twin is fed
MAX_RATIO = 8  # of query heads to key/value heads; larger ones are reduced
HIDDEN_WITHOUT_HEADS = 64
SMALLEST_HIDDEN = 32
MAX_STATE = 16
MAX_PATCHES, FEW_PATCHES = 32, 16  # along a side of a picture: where there are more than these, and how many then
MAX_WIDER = 4  # how much wider than the narrowest heads of a model those of another part may be


@dataclass(frozen=True)
class Scale:
    """The attention of a model and of its twin; every other width follows from it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    new_hidden: int
    new_heads: int
    new_kv_heads: int
    new_head_dim: int
    multiple: int

    def width(self, size: int) -> int:
        """A width of the residual stream's kind."""
        return self.new_hidden if size == self.hidden else self._rounded(size * self.new_hidden / self.hidden)

    def inner(self, size: int) -> int:
        """A width inside the blocks: between 8 entries and 4 times the hidden size."""
        return self._rounded(min(size * self.new_hidden / self.hidden, 4 * self.new_hidden))

    def head_width(self, size: int) -> int:
        """A width inside a head: even, at least 2."""
        return max(2, 2 * round(size * self.new_head_dim / self.head_dim / 2))

    def count(self, size: int, whole: int, new_whole: int) -> int:
        """Heads of one layer, where the model has `whole` and its twin `new_whole`: in the same proportion if that
        divides as before."""
        wanted = size * new_whole // whole
        if wanted * whole == size * new_whole and _divides_alike(wanted, size, self.multiple):
            return wanted
        return small_count(size, self.multiple, 4)

    def _rounded(self, size: float) -> int:
        unit = math.lcm(8, 2 * self.multiple)
        return max(unit, unit * round(size / unit))


def scale_of(fields: Fields, multiple: int, narrowest: int | None = None) -> Scale | None:
    """The scale of a configuration; None where it says nothing of widths, or nothing of layers that have them.

    Args:
        narrowest: width of the narrowest heads of the parts that hand their widths to this one; None where there are none.
    """
    hidden, heads = fields.number(names.HIDDEN), fields.number(names.HEADS)
    if not hidden or not heads:
        if not hidden or not fields.number(names.LAYERS):
            return None
        new = min(hidden, math.lcm(HIDDEN_WITHOUT_HEADS, 2 * multiple))
        return Scale(hidden, 1, 1, hidden, new, 1, 1, new, multiple)
    kv_heads = fields.number(names.KV_HEADS) or heads
    head_dim = fields.number(names.HEAD_DIM) or hidden // heads
    new_kv, new_heads = head_counts(kv_heads, heads, multiple)
    new_dim = 16 if new_heads <= 8 else 8
    if narrowest and head_dim % narrowest == 0 and head_dim // narrowest <= MAX_WIDER:
        new_dim *= head_dim // narrowest
    new_hidden = new_heads * new_dim
    if heads * head_dim != hidden:  # the projections then are not square, and stay so
        step = math.lcm(8, new_heads)  # most configurations want heads to divide the hidden size
        smallest = step * math.ceil(min(hidden, SMALLEST_HIDDEN) / step)
        scaled = max(smallest, step * round(new_hidden * hidden / (heads * head_dim) / step))
        new_hidden = scaled if scaled != new_hidden else new_hidden + step
    return Scale(hidden, heads, kv_heads, head_dim, new_hidden, new_heads, new_kv, new_dim, multiple)


def head_counts(kv_heads: int, heads: int, multiple: int) -> tuple[int, int]:
    """Key/value heads and heads of the twin."""
    if heads % kv_heads:  # no grouping that could be kept
        return small_count(kv_heads, multiple, 2), small_count(heads, multiple, 4)
    if kv_heads == heads:
        count = small_count(heads, multiple, 4)
        return count, count
    new_kv = small_count(kv_heads, multiple, 2)
    ratio = heads // kv_heads
    if ratio > MAX_RATIO:
        ratio = small_count(ratio, multiple, MAX_RATIO // 2)
    return new_kv, new_kv * ratio


def small_count(count: int, multiple: int, about: int) -> int:
    """A count, about as small as said, that `multiple` ranks share out as they do the given one.

    It has the same common divisor with `multiple`, is smaller than it only where the given one is, and then divides it
    only where that does. One stays one.
    """
    for small in range(max(2, about), count):
        if _divides_alike(small, count, multiple):
            return small
    return count


def _divides_alike(small: int, count: int, multiple: int) -> bool:
    if small < 1 or math.gcd(small, multiple) != math.gcd(count, multiple):
        return False
    if (small < multiple) != (count < multiple):
        return False
    return count >= multiple or (multiple % small == 0) == (multiple % count == 0)


def shrink_widths(fields: Fields, scale: Scale) -> None:
    """All widths and counts of heads, and what follows from them."""

    def sizes(table: Iterable[str]) -> list[str]:  # a size of 0 says that there is no such thing
        return [n for n in fields.numbers(table) if fields[n] > 0]

    new: dict[str, int] = {}
    new |= dict.fromkeys(sizes(names.HIDDEN), scale.new_hidden)
    new |= {n: scale.count(fields[n], scale.heads, scale.new_heads) for n in sizes(names.HEADS)}
    new |= {n: scale.count(fields[n], scale.kv_heads, scale.new_kv_heads) for n in sizes(names.KV_HEADS)}
    new |= dict.fromkeys(sizes(names.HEAD_DIM), scale.new_head_dim)
    new |= {n: scale.width(fields[n]) for n in sizes(names.LIKE_HIDDEN)}
    new |= {n: scale.inner(fields[n]) for n in sizes(names.INNER)}
    new |= {n: scale.head_width(fields[n]) for n in sizes(names.LIKE_HEAD_DIM)}
    for n in sizes(names.LIKE_HEADS):
        new[n] = small_count(fields[n], scale.multiple, 4 if fields[n] >= scale.heads else 2)
    for shared, sharing in names.HEAD_PAIRS:
        if sizes((shared, sharing)) == [shared, sharing]:
            new[shared], new[sharing] = head_counts(fields[shared], fields[sharing], scale.multiple)
    if {"qk_rope_head_dim", "qk_nope_head_dim"} <= new.keys():  # multi-head latent attention
        if "qk_head_dim" in new:
            new["qk_head_dim"] = new["qk_rope_head_dim"] + new["qk_nope_head_dim"]
        if "head_dim" in new:  # what rotary positions turn
            whole = fields["qk_rope_head_dim"] == fields["head_dim"]
            new["head_dim"] = new["qk_rope_head_dim"] if whole else scale.new_head_dim
    _shrink_lists(fields, scale)
    _shrink_state_space(fields, scale, new)
    fields.update(new)
    _shrink_rotary(fields, new.get("head_dim", scale.new_head_dim))


def shrink_layer_widths(fields: Fields, scale: Scale) -> None:
    """The sizes of single layers that differ from the others'."""
    for layer, values in (fields.get("per_layer_config") or {}).items():
        own = fields.overriding(values)
        widths = {n: scale.head_width(own[n]) for n in own.numbers(names.HEAD_DIM)}
        shrink_widths(own, scale)
        shrink_counts(own, scale.multiple)
        own.update(widths)
        fields["per_layer_config"][layer] = dict(own)


def _shrink_lists(fields: Fields, scale: Scale) -> None:
    for n in fields.lists(("intermediate_size",)):
        fields[n] = [scale.inner(size) for size in fields[n]]
    for n in fields.lists(names.HEADS_PER_LAYER):
        fields[n] = [scale.count(size, scale.heads, scale.new_heads) for size in fields[n]]
    for n in fields.lists(names.PARTS_OF_HIDDEN):
        parts = [max(2, 2 * round(part * scale.new_hidden / scale.hidden / 2)) for part in fields[n][:-1]]
        fields[n] = [*parts, scale.new_hidden - sum(parts)]


def _shrink_state_space(fields: Fields, scale: Scale, new: dict[str, int]) -> None:
    """Heads of state-space blocks, which share out a multiple of the hidden size or a width of their own."""
    new |= {n: min(MAX_STATE, fields[n]) for n in fields.numbers(names.STATES)}
    heads_name, dim_name, groups_name = _mamba_names(fields)
    if heads_name is None:
        return
    heads = fields[heads_name]
    groups, new_heads = head_counts(fields[groups_name] if groups_name else 1, heads, scale.multiple)
    whole = new.get("mamba_d_ssm") or new_heads * scale.new_head_dim
    expand = next((fields[n] for n in names.MAMBA_EXPAND if isinstance(fields.get(n), (int, float))), 0)
    own_width = heads * fields[dim_name] if dim_name else 0
    if "mamba_d_ssm" not in new and own_width in (0, int(expand * scale.hidden)):
        whole = int(expand * scale.new_hidden)
    if whole % new_heads:
        groups, new_heads = 1, math.gcd(whole, new_heads)
    new[heads_name] = new_heads
    if dim_name:
        new[dim_name] = whole // new_heads
    if groups_name:
        new[groups_name] = groups


def _mamba_names(fields: Fields) -> tuple[str | None, str | None, str | None]:
    """Names of the count of heads, of their width and of the count of groups."""
    heads, dims = fields.numbers(names.MAMBA_HEADS), fields.numbers(names.MAMBA_HEAD_DIM)
    groups = fields.numbers(names.MAMBA_GROUPS)
    if not heads and groups and fields.numbers(names.STATES):  # a model of such blocks alone has no other heads
        heads, dims = fields.numbers(names.HEADS), fields.numbers(names.HEAD_DIM)
    first = [found[0] if found else None for found in (heads, dims, groups)]
    return first[0], first[1], first[2]


def _shrink_rotary(fields: Fields, head_dim: int) -> None:
    """Rotary tables that a configuration spells out: one factor for each pair of a head, or parts that add up to them."""
    rotary: Any = fields.get("rope_parameters")
    if not isinstance(rotary, dict):
        return
    for parameters in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        share = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        pairs = int(head_dim * share) // 2
        for name in ("short_factor", "long_factor"):
            factors = parameters.get(name)
            if isinstance(factors, list) and factors:
                parameters[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]
        sections = parameters.get("mrope_section")
        if isinstance(sections, list) and sum(sections):
            scaled = [max(1, section * pairs // sum(sections)) for section in sections]
            parameters["mrope_section"] = [*scaled[:-1], pairs - sum(scaled[:-1])]


def shrink_counts(fields: Fields, multiple: int) -> None:
    """Experts, windows, positions, pictures and vocabularies."""
    new: dict[str, Any] = {n: min(2, fields[n]) for n in fields.numbers(names.CHOSEN)}
    groups = [n for n in fields.numbers(names.GROUPS) if fields[n] > 1]
    for n in fields.numbers(names.EXPERTS):
        if fields[n] > 1:  # two in each group, so that a group can be scored by its best two
            new[n] = max(small_count(fields[n], multiple, 4), 4 if groups else 1)
    new |= dict.fromkeys(groups, 2)
    new |= {n: min(1 if groups else fields[n], fields[n]) for n in fields.numbers(names.CHOSEN_GROUPS)}
    chunks = names.CHUNKS if fields.numbers(names.STATES) else ()
    new |= {n: min(WINDOW, fields[n]) for n in fields.numbers((*names.WINDOWS, *chunks))}
    if not isinstance(fields.get("rope_parameters"), dict):  # rotary scaling counts in positions; a table costs memory
        new |= {n: min(POSITIONS, fields[n]) for n in fields.numbers(names.POSITION_TABLES)}
    patch = fields.number(("patch_size",))
    for n in fields.numbers(("image_size",)):
        if patch and fields[n] // patch > MAX_PATCHES and fields[n] % patch == 0:
            new[n] = FEW_PATCHES * patch
    for n in fields.lists(names.POSITION_GRIDS):
        new[n] = [*(1 for _ in fields[n][1:]), TOKENS]  # some train only on sequences that fill the grid
    new |= dict.fromkeys((n for n in fields.numbers(names.VOCABULARIES) if fields[n]), VOCAB)
    fields.update(new)
    _shrink_ids(fields)


def _shrink_ids(fields: Fields) -> None:
    """Token ids have to lie in the small vocabulary, and those that differed still differ."""
    found = [n for n in fields if n.endswith(("token_id", "token_index")) and isinstance(fields[n], (int, list))]
    ids = {value for n in found for value in (fields[n] if isinstance(fields[n], list) else [fields[n]])}
    free = iter(i for i in range(VOCAB - 1, -1, -1) if i not in ids)
    small = {value: value if 0 <= value < VOCAB else next(free) for value in sorted(ids, key=str) if is_number(value)}
    for n in found:
        value = fields[n]
        fields[n] = [small.get(v, v) for v in value] if isinstance(value, list) else small.get(value, value)
