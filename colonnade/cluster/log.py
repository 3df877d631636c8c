"""Loggers that speak on chosen ranks, so that a job of many processes prints a line once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist


class _RankFilter(logging.Filter):
    """Lets a record pass on the chosen ranks and writes the rank into it."""

    def __init__(self, ranks: frozenset[int] | None) -> None:
        super().__init__()
        self.ranks = ranks

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = rank = dist.get_rank() if dist.is_initialized() else 0
        return self.ranks is None or rank in self.ranks


def get_logger(name: str, ranks: Iterable[int] | None = (0,)) -> logging.Logger:
    """The logger `name`, writing to stderr from level INFO, on the chosen ranks only.

    The rank is asked for when a line is written, so a logger may be made before the job is launched; until then each
    process counts as rank 0.

    Args:
        name: usually `__name__`.
        ranks: global ranks that speak; None for all.

    Example:
        log = get_logger(__name__)
        log.info("step %d: loss %.4f", step, loss)     # [12:30:01 rank 0] step 10: loss 4.4940
    """
    logger = logging.getLogger(name)
    for old in [f for f in logger.filters if isinstance(f, _RankFilter)]:
        logger.removeFilter(old)
    logger.addFilter(_RankFilter(None if ranks is None else frozenset(ranks)))
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s rank %(rank)d] %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a handler on the root logger would print the line a second time
    return logger
