"""The public names: those that are promised exist, nothing is exported by accident, and each says what it is for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types

import pytest

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

# A name that leaves one of these lists breaks somebody's script.
PROMISED = {
    "colonnade": ["ParallelMesh", "__version__", "launch", "launch_from_torch", "ledger"],
    "colonnade.booster": ["Booster"],
    "colonnade.booster.plugin": ["HybridParallelPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"],
    "colonnade.shardformer": [
        "ModelSharder",
        "ModulePolicyDescription",
        "Policy",
        "ShardConfig",
        "ShardFormer",
        "SubModuleReplacementDescription",
    ],
    "colonnade.shardformer.layer": [
        "FusedLayerNorm",
        "FusedRMSNorm",
        "Linear1D_Col",
        "Linear1D_Row",
        "VocabParallelEmbedding1D",
        "VocabParallelLMHead1D",
        "cross_entropy_1d",
    ],
}


def packages() -> list[types.ModuleType]:
    """Every package of the library that exports something."""
    names = [info.name for info in pkgutil.walk_packages(colonnade.__path__, "colonnade.") if info.ispkg]
    modules = [colonnade, *map(importlib.import_module, names)]
    return [module for module in modules if hasattr(module, "__all__")]


def exported() -> list[tuple[str, str, object]]:
    found = [(module.__name__, name, getattr(module, name)) for module in packages() for name in module.__all__]
    return [item for item in found if callable(item[2])]


@pytest.mark.parametrize("package", PROMISED)
def test_promised_names_are_exported(package):
    assert set(PROMISED[package]) <= set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", packages(), ids=lambda module: module.__name__)
def test_exports_are_sorted_complete_and_there(package):
    names = package.__all__
    assert names == sorted(set(names))
    assert all(hasattr(package, name) for name in names)
    imported = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert imported <= set(names)


@pytest.mark.parametrize("where, name, value", exported(), ids=[f"{where}.{name}" for where, name, _ in exported()])
def test_a_public_name_has_a_docstring(where, name, value):
    assert (inspect.getdoc(value) or "").strip(), f"{where}.{name}"


@pytest.mark.parametrize("kind", [Booster, HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin, Plugin])
def test_a_public_method_is_described_where_it_is_first_defined(kind):
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert (inspect.getdoc(method) or "").strip(), f"{kind.__name__}.{name}"


def test_keywords_of_the_well_known_names_stay():
    hybrid = set(inspect.signature(HybridParallelPlugin).parameters)
    assert hybrid >= {
        "tp_size",
        "pp_size",
        "sp_size",
        "zero_stage",
        "precision",
        "max_norm",
        "sequence_parallelism_mode",
        "enable_fused_normalization",
        "enable_flash_attention",
        "num_microbatches",
        "microbatch_size",
        "custom_policy",
    }
    assert {"precision", "max_norm"} <= set(inspect.signature(TorchDDPPlugin).parameters)
    fsdp = set(inspect.signature(TorchFSDPPlugin).parameters)
    assert fsdp >= {
        "precision",
        "max_norm",
        "reshard_after_forward",
        "cpu_offload",
        "num_microbatches",
        "microbatch_size",
    }
    boost = list(inspect.signature(Booster.boost).parameters)
    assert boost == ["self", "model", "optimizer", "criterion", "dataloader", "lr_scheduler"]
    assert "seed" in inspect.signature(colonnade.launch_from_torch).parameters
