"""Saving and loading, for every layout: models in the Hugging Face hub format.

[Note: one rank fails, every rank raises]
Saving and loading are collective: each rank calls them, and a rank that raised alone would leave the others waiting in
a collective until its time-out. So a rank keeps its error, goes on taking part, and tells it at the next exchange of
status (`agreement.py`); there all ranks raise, with the reason of the one that failed.

[Note: nothing is written over a checkpoint]
A save fills a new folder beside the target and ends with renames (`staged_folder.py`). Whenever the process dies, a
whole checkpoint is on disk: the earlier one or the new one, never a mixture.
"""

from colonnade.checkpoint.adapter_save import adapter_folder, save_adapters
from colonnade.checkpoint.agreement import Attempt, agree
from colonnade.checkpoint.hub_load import LoadReport, load_model
from colonnade.checkpoint.hub_save import save_model
from colonnade.checkpoint.model_tensors import named_tensors

__all__ = [
    "Attempt",
    "LoadReport",
    "adapter_folder",
    "agree",
    "load_model",
    "named_tensors",
    "save_adapters",
    "save_model",
]
