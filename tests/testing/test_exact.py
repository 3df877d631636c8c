"""The comparison in fp64: what it is for, that it agrees where a layout is right, and that it hides no fault."""

import functools
import sys
from pathlib import Path

import pytest
import torch

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.model.default_configs import default_config
from colonnade.model.twin import shrink, twin_model
from colonnade.testing.exact import compare_in_fp64, compare_pipeline_in_fp64, sensitivity, why_fp32_is_unsure
from colonnade.testing.parity_report import Difference, ParityReport
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model
from colonnade.tools.verify.batches import make_batches

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import wrong_policies  # noqa: E402 - the planted faults that `verify` has to find

BATCH = {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def twin(family):
    return twin_model(shrink(default_config(family)))


def compared(build, policy=None):
    batch = BATCH if isinstance(build, functools.partial) else make_batches(build())[0]
    return compare_in_fp64(build, batch, Axis.of(None), lambda _: policy() if policy else None)


def t5():
    return twin("t5")


def test_a_layout_that_is_right_agrees_to_the_rounding_of_fp64():
    for build in (functools.partial(tiny_model, "qwen3"), t5):
        first, second = run_on_ranks(2, compared, build)
        assert first == second and max(first.values()) < 1e-10


@pytest.mark.parametrize("policy", ["HeadNormsForgotten", "BiasTooOften"])
def test_a_planted_fault_is_as_large_as_ever(policy):
    name = "qwen3" if policy == "HeadNormsForgotten" else "OP"
    found = run_on_ranks(2, compared, functools.partial(tiny_model, name), getattr(wrong_policies, policy))[0]
    assert max(found.values()) > 1e-3


def piped(build, tp=1, policy=None):
    batch = BATCH if isinstance(build, functools.partial) else make_batches(build(), share=3)[0]
    options = {"tp_size": tp, "pp_size": 2, "precision": "fp32", "microbatch_size": 1, "check_cut": False}
    plugin = HybridParallelPlugin(custom_policy=policy() if policy else None, **options)
    return compare_pipeline_in_fp64(build, batch, plugin)


def test_a_pipeline_that_is_right_agrees_to_the_rounding_of_fp64():
    for build in (functools.partial(tiny_model, "G2"), t5):
        first, second = run_on_ranks(2, piped, build)
        assert first == second and max(first.values()) < 1e-10


def test_a_fault_planted_in_a_pipeline_is_as_large_as_ever():
    found = run_on_ranks(4, piped, functools.partial(tiny_model, "OP"), 2, wrong_policies.BiasTooOften)[0]
    assert max(found.values()) > 1e-3


def report(worst, rounding):
    failures = ((worst, "a.weight"),) if worst > 1e-5 else ()
    return ParityReport("tp 2", 1, (Difference("gradients", worst, "a.weight", 1e-5, failures),), rounding, {}, 1)


def test_fp32_is_asked_first_and_has_to_fail_for_a_reason_of_its_own():
    build = functools.partial(tiny_model, "LL")
    assert sensitivity(build, BATCH) < 5e-6
    assert why_fp32_is_unsure(report(1e-6, {"gradients": 1.0}), build, BATCH) == "", "it has not failed"
    assert why_fp32_is_unsure(report(1e-3, {"gradients": 4e-6}), build, BATCH) == "", "something is wrong"
    assert "one process in fp32 is off" in why_fp32_is_unsure(report(1e-3, {"gradients": 6e-6}), build, BATCH)


def test_a_model_that_the_last_bit_of_its_weights_moves_is_told():
    """DiffLlama subtracts attentions that nearly cancel; its own run in fp32 is near the exact one by luck."""
    build = functools.partial(twin, "diffllama")
    batch = make_batches(build())[0]
    assert sensitivity(build, batch) == sensitivity(build, batch) > 5e-6
    said = why_fp32_is_unsure(report(1e-3, {"gradients": 4e-6}), build, batch)
    assert said.startswith("the last bit of the weights moves the gradients by")
    assert torch.get_default_dtype() == torch.float32
