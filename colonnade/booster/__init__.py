"""Booster and its plugins."""

from colonnade.booster.booster import Booster

__all__ = ["Booster"]
