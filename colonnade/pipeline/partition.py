"""How many blocks each stage gets, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from colonnade.errors import ConfigError, explain


def partition(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, bound: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Deal consecutive blocks out to stages: the number of blocks of each, none of them empty.

    The largest cost of a stage is made as small as possible, and among those that do so the sum of squares, so that what
    is left is spread evenly.

    Args:
        costs: of each block, in any unit.
        stages: number of stages.
        first, last: what the first and the last stage have to do besides (embedding, head).
        bound: pairs of blocks (first, last), numbers from 0, that have to lie on one stage with all between them.

    Raises:
        ConfigError: there are fewer blocks, or places to cut, than are needed.
    """
    blocks = len(costs)
    allowed = [all(not a < cut <= b for a, b in bound) for cut in range(blocks + 1)]
    if sum(allowed[1:blocks]) + 1 < stages:
        raise ConfigError(_too_few(blocks, sum(allowed[1:blocks]) + 1, stages))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squares, numbers of blocks) of this stage and those behind it."""
        if stage == stages - 1:
            mine = cost_of(stage, start, blocks)
            return mine, mine**2, (blocks - start,)
        found = []
        for stop in range(start + 1, blocks - (stages - stage - 1) + 1):
            if allowed[stop] and (rest := best(stage + 1, stop))[2]:
                mine = cost_of(stage, start, stop)
                found.append((max(mine, rest[0]), mine**2 + rest[1], (stop - start, *rest[2])))
        return min(found, default=(float("inf"), 0.0, ()))

    return list(best(0, 0)[2])


def check_counts(counts: Sequence[int], blocks: int, stages: int, bound: Sequence[tuple[int, int]] = ()) -> list[int]:
    """The numbers of blocks that a user has chosen, if they fit.

    Raises:
        ConfigError: they are not one for each stage, do not add up to the model's blocks, or cut where it must not be cut.
    """
    numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in counts)
    wrong = not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if wrong or len(counts) != stages or sum(counts) != blocks:
        sums = f", which add up to {sum(counts)}" if numbers else ""
        raise ConfigError(
            explain(
                f"num_layers_per_stage={list(counts)} does not fit.",
                [
                    ("needs", f"{stages} whole numbers of at least 1, one for each stage, that add up to {blocks}"),
                    ("found", f"{len(counts)} {'numbers' if numbers else 'entries'}{sums}"),
                    ("try", f"{partition([1.0] * blocks, stages, bound=bound)}, or leave it out"),
                ],
            )
        )
    cuts = [sum(counts[:n]) for n in range(1, stages)]
    bad = [(cut, a, b) for cut in cuts for a, b in bound if a < cut <= b]
    if bad:
        cut, a, b = bad[0]
        raise ConfigError(
            explain(
                f"num_layers_per_stage={list(counts)} cuts before block {cut}.",
                [("rule", f"blocks {a} to {b} share what only they know, and have to be on one stage")],
            )
        )
    return list(counts)


def _too_few(blocks: int, places: int, stages: int) -> str:
    some_bound = places < blocks
    bound = f", of which some have to stay together: {places} group{'s' * (places > 1)}" if some_bound else ""
    rows = [("found", f"{blocks} blocks{bound}"), ("rule", "each stage holds at least one block")]
    if some_bound:
        shared = "keys and values that layers share, router logits that the loss collects, or the like"
        rows.append(
            ("reason", f"blocks make something that others, or the loss, use and that they do not return: {shared}")
        )
    rows.append(("try", f"at most {places} stages: pp_size × num_model_chunks ≤ {places}"))
    if some_bound:
        rows.append(("or", "output_router_logits=False in the config, where it is on"))
    return explain(f"the model cannot be cut into {stages} pipeline stages.", rows)
