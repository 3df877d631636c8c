"""Pipeline parallelism: a model cut into stages, schedules as data, and one runtime that plays them."""

from __future__ import annotations

from colonnade.pipeline.action import Action
from colonnade.pipeline.schedule import Schedule, make_schedule

__all__ = ["Action", "Schedule", "make_schedule"]
