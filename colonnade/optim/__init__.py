"""Optimizers that compute the same on split parameters as one process does on whole ones, and what torch lacks else."""

from colonnade.optim.adafactor import Adafactor
from colonnade.optim.came import CAME
from colonnade.optim.galore import GaLoreAdamW
from colonnade.optim.hybrid_adam import HybridAdam
from colonnade.optim.lamb import Lamb
from colonnade.optim.lars import Lars
from colonnade.optim.lr_scheduler import MultiStepWarmupLR
from colonnade.optim.muon import Muon

__all__ = [
    "Adafactor",
    "CAME",
    "GaLoreAdamW",
    "HybridAdam",
    "Lamb",
    "Lars",
    "MultiStepWarmupLR",
    "Muon",
]
