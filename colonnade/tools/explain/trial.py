"""A policy of the reader's own, tried on a tiny twin of the model in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade.model.twin import shrink, twin_model
from colonnade.shardformer import Policy
from colonnade.shardformer.inference.check import Twin, said

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAME = "its tiny twin computes what one process computes"


def try_on_twin(policy: Policy, config: PretrainedConfig, ranks: int) -> tuple[str, str]:
    """What a twin does otherwise than one process when it is split by a policy, empty for nothing; and the verdict in words.

    The ranks are threads. Layers that communicate by torch.distributed alone fail here, and not in processes.
    """
    try:
        model: Any = twin_model(shrink(config, ranks))
        if getattr(model.config, "_experts_implementation", None):
            model.set_experts_implementation("eager")  # the grouped product does not exist in double precision
        twin = Twin(model, ranks)
    except Exception as error:  # a model's own code, and no fault of the policy
        return "", f"not checked, as its tiny twin does not train in one process: {said(error)}"
    fault = twin.difference(policy)
    return fault, f"its tiny twin does NOT compute what one process computes: {fault}" if fault else SAME
