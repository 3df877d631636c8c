"""The states of a process's random generators: torch's default ones, Python's and numpy's; taken and put back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from colonnade.cluster.device import current_device, get_rng_state, set_rng_state
from colonnade.cluster.streams import derive_seed

CPU = torch.device("cpu")


def random_state() -> dict[str, Any]:
    """The states, made of numbers and tensors; numpy's only where the program uses it."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": get_rng_state(CPU), "python": (version, torch.tensor(numbers), gauss)}
    if current_device().type != "cpu":
        state["device"] = get_rng_state(current_device()).cpu()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (
            kind,
            torch.from_numpy(keys.astype("int64")),
            *(x.item() if hasattr(x, "item") else x for x in rest),
        )
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` has taken. A generator that this process does not have is passed over."""
    set_rng_state(CPU, state["cpu"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if current_device().type != "cpu" and "device" in state:
        set_rng_state(current_device(), state["device"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def branch_off(*parts: int | str) -> None:
    """Seed all generators from torch's present state and the given parts: new streams that are the same in each run."""
    seed = derive_seed(get_rng_state(CPU).numpy().tobytes(), *parts)
    torch.manual_seed(seed)  # of all devices
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
