"""The dynamic loss scale of fp16 training.

(Mixed precision training, Micikevicius et al. 2018, section 3.2.) fp16 has no numbers below 6e-8, where many gradients lie.
The loss is multiplied by a scale before the backward pass and the gradients divided by it before the step. Where that makes
a gradient infinite the step is left out and the scale made smaller; after a time without it is made larger.

Whether a step is left out is read off the one gradient norm, which is the same number on every rank of every axis. So all
ranks decide alike, and their scales cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from colonnade.errors import ConfigError, UsageError, explain


@dataclass(frozen=True)
class LossScale:
    """How the loss scale starts and moves.

    Args:
        initial: scale of the first step; a power of two changes no digit.
        growth_factor: what it is multiplied by after `growth_interval` good steps in a row.
        backoff_factor: what it is multiplied by when gradients have overflowed.
        growth_interval: good steps before it grows; 0 for never.
        hysteresis: overflows before it shrinks; counted anew whenever it has grown.
        min_scale: it never shrinks below this; an overflow there ends the training with an error.
        max_scale: it never grows beyond this.

    Raises:
        ConfigError: numbers with which it could not work, all of them named.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        low, high = (bound if _is_number(bound) else None for bound in (self.min_scale, self.max_scale))
        rules = [
            ("initial", _within(self.initial, low, high), "min_scale ≤ initial ≤ max_scale"),
            ("growth_factor", _within(self.growth_factor, 1), "a number of at least 1"),
            ("backoff_factor", _within(self.backoff_factor, 0, 1, open_ends=True), "a number between 0 and 1"),
            ("growth_interval", _within(self.growth_interval, 0, whole=True), "a whole number of steps, 0 for never"),
            ("hysteresis", _within(self.hysteresis, 1, whole=True), "a whole number of at least 1"),
            ("min_scale", _within(self.min_scale, 0, open_ends=True), "a number above 0"),
            ("max_scale", _within(self.max_scale, low), "a number, not below min_scale"),
        ]
        wrong = [(f"{name}={getattr(self, name)!r}", rule) for name, right, rule in rules if not right]
        if wrong:
            raise ConfigError(explain("LossScale cannot work with these numbers.", wrong))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _within(
    value: Any, low: float | None, high: float | None = None, *, whole: bool = False, open_ends: bool = False
) -> bool:
    """Whether a value is a finite number within bounds, those that are given."""
    if not _is_number(value) or (whole and not isinstance(value, int)):
        return False
    above = low is None or (value > low if open_ends else value >= low)
    return above and (high is None or (value < high if open_ends else value <= high))


class DynamicLossScale:
    """The scale of a running training.

    Attributes:
        scale: what the next loss is multiplied by.
        skipped: number of steps left out so far.
    """

    def __init__(self, options: LossScale) -> None:
        self.options = options
        self.scale = float(options.initial)
        self.skipped = 0
        self._good = 0
        self._patience = options.hysteresis

    def update(self, norm: float) -> bool:
        """Move the scale by what the step's gradient norm says; whether the step is to be made.

        Raises:
            UsageError: gradients are not finite although the scale is the smallest allowed.
        """
        if math.isfinite(norm):
            self._good += 1
            if self.options.growth_interval and self._good >= self.options.growth_interval:
                self.scale = min(self.scale * self.options.growth_factor, self.options.max_scale)
                self._good, self._patience = 0, self.options.hysteresis
            return True
        if self.scale <= self.options.min_scale:
            raise UsageError(
                explain(
                    f"gradients are not finite at a loss scale of {self.scale:g}, the smallest allowed.",
                    [
                        ("rule", "an overflow makes the scale smaller"),
                        ("try", 'precision="bf16", or a lower learning rate'),
                    ],
                )
            )
        self.skipped += 1
        self._good = 0
        self._patience -= 1
        if self._patience <= 0:
            self.scale = max(self.scale * self.options.backoff_factor, self.options.min_scale)
        return False

    def state_dict(self) -> dict[str, float]:
        """What a resumed training needs."""
        return {"scale": self.scale, "good": self._good, "patience": self._patience, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._good, self._patience = int(state["good"]), int(state["patience"])
