"""The learning rate schedule that neither torch nor transformers has.

Everything else is there already, and works with every optimizer and plugin:

| schedule | where it is |
|---|---|
| cosine, step, multi-step, exponential, one cycle | torch.optim.lr_scheduler: CosineAnnealingLR, StepLR, MultiStepLR, ExponentialLR, OneCycleLR |
| cosine after warm-up, down to 0 or to a least rate | transformers: get_cosine_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup |
| flat, then cosine, with or without warm-up | transformers: get_wsd_schedule(…, decay_type="cosine") |
| linear after warm-up | transformers: get_linear_schedule_with_warmup |
| polynomial, with or without warm-up and end rate | torch: PolynomialLR (to 0); transformers: get_polynomial_decay_schedule_with_warmup(…, lr_end=…) |

(What transformers calls warm-up mostly begins with a rate of 0, so that the first step changes nothing. The schedule here
begins with 1/warmup_steps of the rate.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from colonnade.errors import ConfigError


class MultiStepWarmupLR(LambdaLR):
    """The rate rises linearly over the first steps, and is multiplied by `gamma` at each milestone.

    The rate of step t is a function of t alone, so that a schedule goes on exactly after its state has been loaded.

    Args:
        milestones: numbers of steps after which the rate falls, counted from the start of training.
        warmup_steps: step t < warmup_steps has (t + 1) / warmup_steps of the rate.
        gamma: factor at each milestone.
        last_epoch: number of the last step, −1 at the start of training.

    Raises:
        ConfigError: a milestone lies within the warm-up, or there is none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Iterable[int],
        warmup_steps: int = 0,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        ordered = sorted(milestones)
        if not ordered or ordered[0] < warmup_steps or warmup_steps < 0:
            raise ConfigError(
                f"milestones={ordered} with warmup_steps={warmup_steps}: at least one milestone is needed, and none "
                "before the end of the warm-up."
            )

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return gamma ** bisect_right(ordered, step)

        super().__init__(optimizer, factor, last_epoch)
