"""Colonnade: train any unmodified Hugging Face model in parallel, with the numbers of one process."""

from colonnade.cluster.launch import launch, launch_from_torch
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.ledger import ledger

__version__ = "0.1.0"

__all__ = ["ParallelMesh", "__version__", "launch", "launch_from_torch", "ledger"]
