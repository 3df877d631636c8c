"""Seeds of a job: every random generator of the process, the same on all ranks."""

from __future__ import annotations

import random

import torch


def seed_all(seed: int) -> None:
    """Seed the default generators of Python, NumPy (where it is installed) and torch, on every device.

    Called with the same number on all ranks, so that they build the same weights and draw the same data order.
    """
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass  # optional: without NumPy there is no generator to seed
    else:
        numpy.random.seed(seed % 2**32)  # the range NumPy takes
    torch.manual_seed(seed)
