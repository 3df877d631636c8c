"""A worker process of `colonnade train`: `python -m colonnade.tools.train WORK_FOLDER`, one for each rank."""

from __future__ import annotations

import sys
from pathlib import Path

from colonnade import launch_from_torch
from colonnade.tools.train.prepare import Plan
from colonnade.tools.train.recipe import train_on_this_rank

if __name__ == "__main__":
    work = Path(sys.argv[1])
    launch_from_torch(seed=Plan.read(work).options.seed)
    train_on_this_rank(work)
