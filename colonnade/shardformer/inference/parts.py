"""How the output of a linear layer is taken apart: into fused parts, and each part into heads. Read off autograd's graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Node = Any  # torch.autograd.graph.Node
Consumers = dict[Node, dict[int, list[Node]]]
ELEMENTWISE = 12  # how many operations that keep a shape are looked through


def consumers_of(roots: list[Node]) -> Consumers:
    """Node → output number → nodes that read it."""
    readers: dict[Node, dict[int, list[Node]]] = {}
    seen: set[Node] = set()
    queue = list(roots)
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, number in node.next_functions:
            if before is not None:
                readers.setdefault(before, {}).setdefault(number, []).append(node)
                queue.append(before)
    return readers


def _shape(node: Node, number: int = 0) -> tuple[int, ...]:
    metadata = node._input_metadata  # what a node's gradient looks like is what its output looked like
    return tuple(metadata[number].shape) if number < len(metadata) else ()


def parts_of(mark: Node, consumers: Consumers) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    """How a layer's output is split, how many heads each part is viewed as, and the extents of such a head.

    Args:
        mark: the node whose output it is.
    """
    for sizes, nodes in _splits(mark, consumers):
        views = [_view(node, number, consumers) for node, number in nodes]
        return sizes, tuple(heads for heads, _ in views), frozenset[int]().union(*(inner for _, inner in views))
    heads, inner = _view(mark, 0, consumers)
    fused = _fused_before_heads(mark, consumers)
    if fused:
        return fused
    counts = _split_heads(mark, heads, consumers) if heads else ()
    if counts:  # viewed as heads first: queries, keys and values are told apart by the numbers of their heads
        return tuple(n * (_shape(mark)[-1] // heads) for n in counts), counts, inner
    return (_shape(mark)[-1],), (heads,), inner


def _fused_before_heads(
    mark: Node, consumers: Consumers
) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]] | None:
    """Queries, keys and values in one view [.., 3, heads, extent], unlike [.., heads, 3, extent] where heads come first."""
    viewed = next((_shape(node) for node, _, _ in _views(mark, 0, consumers)), ())
    if len(viewed) < 4 or viewed[-3] != 3 or viewed[-2] == 3:
        return None
    _, _, heads, extent = viewed[-4:]
    return (heads * extent,) * 3, (heads,) * 3, frozenset({extent})


def _splits(mark: Node, consumers: Consumers) -> Iterator[tuple[tuple[int, ...], list[tuple[Node, int]]]]:
    """The ways in which the last dimension is split at once: sizes of the parts, and the nodes that hold them."""
    width, rows = _shape(mark)[-1], math.prod(_shape(mark)[:-1])
    slices: list[tuple[int, int, Node]] = []  # start, size
    for node in _through_elementwise(mark, 0, consumers):
        kind, shapes = type(node).__name__, [tuple(m.shape) for m in node._input_metadata]
        if any(not shape or math.prod(shape[:-1]) != rows for shape in shapes):
            continue
        sizes = tuple(shape[-1] for shape in shapes)
        if kind.startswith(("Split", "Unbind", "Chunk")) and sum(sizes) == width:
            yield sizes, [(node, i) for i in range(len(sizes))]
        if kind.startswith(("Slice", "Narrow")):
            slices.append((_start(node), sizes[0], node))
    slices.sort(key=lambda found: found[0])
    if slices and sum(size for _, size, _ in slices) == width:
        yield tuple(size for _, size, _ in slices), [(node, 0) for *_, node in slices]


def _start(node: Node) -> int:
    return getattr(node, "_saved_start", 0)


def _split_heads(mark: Node, heads: int, consumers: Consumers) -> tuple[int, ...]:
    """Numbers of heads into which a view of all heads is split; none where it is not, or only into equal parts."""
    viewed = next(node for node, _, _ in _views(mark, 0, consumers))
    shape = _shape(viewed)
    found: list[
        tuple[bool, int, int]
    ] = []  # heads that are picked out by their numbers (indexing) are taken as the last
    for node in _through_elementwise(viewed, 0, consumers):
        outputs = [tuple(m.shape) for m in node._input_metadata]
        if all(len(o) == len(shape) and o[:-2] == shape[:-2] and o[-1] == shape[-1] for o in outputs):
            kind = type(node).__name__
            found += [(kind.startswith("Index"), _start(node) % (1 << 62) + i, o[-2]) for i, o in enumerate(outputs)]
    counts = tuple(count for *_, count in sorted(found, key=lambda f: f[:2]))
    return counts if sum(counts) == heads and len(set(counts)) > 1 else ()


def _through_elementwise(node: Node, number: int, consumers: Consumers) -> Iterator[Node]:
    """Readers of an output that change its last dimension, looking through those that do not."""
    shape, queue, seen = _shape(node, number), [(node, number)], set()
    while queue:
        at, n = queue.pop(0)
        for reader in consumers.get(at, {}).get(n, []):
            if reader in seen:
                continue
            seen.add(reader)
            same = _shape(reader)[-1:] == shape[-1:] and len(_last_as(reader, shape)) == 1
            if same and len(reader._input_metadata) == 1 and len(seen) < ELEMENTWISE:
                queue.append((reader, 0))
            else:
                yield reader


def _views(node: Node, number: int, consumers: Consumers) -> Iterator[tuple[Node, int, frozenset[int]]]:
    """Readers that view the last dimension of an output as equal blocks: the node, their number, their extents."""
    for reader in _through_elementwise(node, number, consumers):
        heads, *inner = [*_last_as(reader, _shape(node, number)), 0]
        if len(inner) > 1:
            yield reader, heads, frozenset({*inner[:-1], math.prod(inner[:-1])})


def _last_as(reader: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As what a reader sees the last dimension of a tensor of this shape, behind its rows; nothing where it mixes them."""
    viewed, rows = _shape(reader), math.prod(shape[:-1])
    if math.prod(viewed) != math.prod(shape):
        return ()
    leading = 0
    while leading < len(viewed) and math.prod(viewed[:leading]) != rows:
        leading += 1
    return viewed[leading:]


def _view(node: Node, number: int, consumers: Consumers) -> tuple[int, frozenset[int]]:
    """Number of equal blocks as which an output is viewed next, 0 where it is not, and their extents."""
    return next(((heads, inner) for _, heads, inner in _views(node, number, consumers)), (0, frozenset()))
