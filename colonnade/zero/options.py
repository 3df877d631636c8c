"""What can be said about ZeRO beside its stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colonnade.errors import ConfigError, explain


@dataclass(frozen=True)
class ZeroOptions:
    """How gradients travel and where states live.

    Args:
        bucket_bytes: gradients are reduced in buckets of about this size.
        communication_dtype: format in which gradients travel; by default that of the parameters.
        overlap_communication: reduce a bucket while the backward pass goes on; else all after it.
        cpu_offload: master weights and optimizer states live in host memory, and the step is made there.

    Raises:
        ConfigError: a bucket size below 1, a format that is no floating-point one, or a switch that is neither on nor off.
    """

    bucket_bytes: int = 4 << 20
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            wrong.append((f"bucket_bytes={self.bucket_bytes!r}", "must be a whole number of at least 1"))
        kind = self.communication_dtype
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
            wrong.append((f"communication_dtype={kind!r}", "must be torch.float32, torch.bfloat16 or torch.float16"))
        for name in ("overlap_communication", "cpu_offload"):
            if not isinstance(getattr(self, name), bool):
                wrong.append((f"{name}={getattr(self, name)!r}", "must be True or False"))
        if wrong:
            raise ConfigError(explain("ZeRO cannot work with these options.", wrong))


def check_stage(stage: int, allowed: tuple[int, ...]) -> int:
    """Refuse a stage that is not among the allowed ones.

    Raises:
        ConfigError: with what there is instead.
    """
    if isinstance(stage, bool) or stage not in allowed:
        raise ConfigError(
            explain(
                f"ZeRO stage {stage!r} is not available here; there are {', '.join(map(str, allowed))}.",
                [
                    ("stage 0", "nothing dealt out: TorchDDPPlugin, or HybridParallelPlugin(zero_stage=0)"),
                    ("stage 1, 2", "optimizer states, and with 2 gradients: LowLevelZeroPlugin(stage=…)"),
                    ("stage 3", "parameters too: TorchFSDPPlugin"),
                ],
            )
        )
    return stage
