"""A worker process of `colonnade verify`: `python -m colonnade.tools.verify FOLDER`, one for each rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from colonnade import launch_from_torch
from colonnade.tools.verify.check import run_job

if __name__ == "__main__":
    launch_from_torch(seed=1024)
    # the twin's unequal shares are of no interest; the model's own are in the certificate
    logging.getLogger("colonnade.shardformer.shard.sharder").setLevel(logging.ERROR)
    run_job(Path(sys.argv[1]))
