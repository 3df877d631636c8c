"""ShardConfig: what the sharder has to know beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colonnade.cluster.mesh import Axis


@dataclass(frozen=True)
class ShardConfig:
    """Options of ShardFormer.

    Args:
        tensor_parallel_process_group: group or `Axis` over which modules are split; None for all ranks of the job.
        enable_tensor_parallelism: split at all; without it the policy only changes norms and attention.
        enable_fused_normalization: replace norms by one fused operator each.
        enable_flash_attention: choose the fastest attention implementation that is installed.
        check_inferred_policy: let a policy that was inferred pass the numeric check of a tiny twin of the model (a second
            or two); without it a model may be trained wrong.
        extra_kwargs: anything a policy of your own wants to read.
    """

    tensor_parallel_process_group: Any = None
    enable_tensor_parallelism: bool = True
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    check_inferred_policy: bool = True
    extra_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def axis(self) -> Axis:
        """The tensor-parallel axis; one rank where tensor parallelism is off."""
        return Axis.of(self.tensor_parallel_process_group) if self.enable_tensor_parallelism else Axis.alone("tp")

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which modules are split."""
        return self.axis.size
