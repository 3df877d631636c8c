"""Policies for models that nobody has written one for: inferred from one forward, used only after a numeric check."""

from colonnade.shardformer.inference.infer import infer_policy

__all__ = ["infer_policy"]
