"""ZeRO: what travels and what a rank holds, counted exactly against the budgets of stages 1 and 2.

Ψ parameters of a rank, N data-parallel ranks, k accumulation steps. Elements: 2Ψ a step, stage 2 kΨ + Ψ. Bytes: fp32
8Ψ + 8Ψ/N and 4Ψ + 12Ψ/N, 16 bits 4Ψ + 12Ψ/N and 2Ψ + 14Ψ/N. To this comes the padding that the plan says.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from parity_runs import build, rows
from torch import nn
from torch.optim import SGD, AdamW

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from colonnade.comm.buffers import KEPT
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import run_on_ranks

LINE = 16  # float32 elements of the 64 bytes at whose multiples parameters and parts begin


def plugin_for(stage, tp_size, **options):
    options = {"precision": "fp32"} | options
    if tp_size == 1:
        return LowLevelZeroPlugin(stage, **options)
    return HybridParallelPlugin(tp_size=tp_size, zero_stage=stage, **options)


class Run:
    """A boosted model, and the numbers of its plan."""

    def __init__(self, name, stage, tp_size=1, **options):
        self.plugin = plugin_for(stage, tp_size, **options)
        self.booster = Booster(plugin=self.plugin)
        plain = build(name)
        self.model, self.optimizer, *_ = self.booster.boost(plain, AdamW(plain.parameters(), lr=1e-3))
        self.axis = self.plugin.mesh.axis("dp")
        whole = rows(2 * self.axis.size)[0]
        self.batch = rows_of(whole, self.axis.rank, self.axis.size)
        self.plans = [storage.plan for storage in self.optimizer.stepped.storages]
        self.size = sum(p.numel() for p in self.model.unwrap().parameters())
        self.padded = sum(plan.numel for plan in self.plans)

    def backward(self, count=1, no_sync=False):
        for index in range(count):
            paused = no_sync and index + 1 < count
            with self.booster.no_sync(self.model, self.optimizer) if paused else nullcontext():
                self.booster.backward(self.model(**self.batch).loss / count, self.optimizer)

    def step(self):
        self.optimizer.step()

    def padding(self):
        """At most a line behind each parameter, and one behind each rank's part of a bucket."""
        lines = sum(len(plan.places) + self.axis.size * len(plan.buckets) for plan in self.plans)
        assert 0 <= self.padded - self.size < LINE * lines * 4 // self.plans_itemsize()
        return self.padded - self.size

    def plans_itemsize(self):
        return self.optimizer.stepped.storages[0].flat.element_size()

    def owned(self):
        """Elements of this rank's parts, from the first parameter in each to the end of the last."""
        total = 0
        for plan in self.plans:
            for bucket in plan.buckets:
                start, stop = bucket.part(self.axis.rank)
                inside = [p for p in plan.places if max(p.start, start) < min(p.stop, stop)]
                if inside:
                    total += min(inside[-1].stop, stop) - max(inside[0].start, start)
        return total


def moved(name, stage, tp_size, count, no_sync, options):
    """Elements moved over dp in the second step, less those of single numbers."""
    run = Run(name, stage, tp_size, **options)
    run.backward()
    run.step()
    run.optimizer.zero_grad()
    with colonnade.ledger() as ledger:
        run.backward(count, no_sync)
        run.step()
    ranks = run.axis.size
    reductions = 1 if no_sync else count
    # loss and number of targets; whether a gradient was missing or late; squares of the norm: of what is split over
    # nothing, over dp, and over dp and tp
    numbers = ranks * (2 * count + 2 * reductions + (2 if tp_size == 1 else 3))
    over_dp = {operation: elements for (operation, axis), elements in ledger.elements.items() if axis == "dp"}
    over_dp["all_gather"] -= numbers
    run.padding()
    return over_dp, run.size, run.padded


def assert_moved(ranks, name, stage, tp_size=1, options=None):
    whole = sum(p.numel() for p in build(name).parameters())
    cases = [(1, False, 1), (3, False, 3)] + ([(3, True, 1)] if stage == 1 else [])
    for count, no_sync, reductions in cases:
        found = run_on_ranks(ranks, moved, name, stage, tp_size, count, no_sync, options or {})
        for over_dp, size, padded in found:
            assert over_dp == {"reduce_scatter": reductions * padded, "all_gather": padded}
            assert size == whole if tp_size == 1 else size < 0.6 * whole


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_step_moves_each_element_twice(ranks, stage):
    assert_moved(ranks, "LL", stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_whatever_the_buckets_the_format_and_the_order(stage):
    for options in ({"bucket_bytes": 1}, {"precision": "bf16"}, {"overlap_communication": False, "bucket_bytes": 5000}):
        assert_moved(2, "LT", stage, options=options)


@pytest.mark.parametrize("stage", [1, 2])
def test_under_tensor_parallelism_only_what_this_rank_holds(stage):
    assert_moved(4, "LT", stage, tp_size=2)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_of_a_global_batch(stage):
    """Stage 1 reduces once; stage 2, whose gradients are never whole on a rank, for each of them."""
    for elements, padded in run_on_ranks(2, through_the_pipeline, stage):
        assert elements == {1: padded, 2: 2 * padded}[stage]


def through_the_pipeline(stage):
    run = Run("LL", stage, microbatch_size=1)
    with colonnade.ledger() as ledger:
        run.booster.execute_pipeline(iter([run.batch]), run.model, None, run.optimizer)
    return ledger.elements["reduce_scatter", "dp"], run.padded


def nbytes(tensors):
    """Bytes of the memory behind tensors, each piece once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(name, stage, tp_size, precision):
    run = Run(name, stage, tp_size, precision=precision)
    run.backward(2)
    run.step()
    shards = run.optimizer.stepped
    units = [unit.tensor for units in shards.units for unit in units]
    states = [run.optimizer.state[unit] for unit in units]
    item, owned = (4 if precision == "fp32" else 2), run.owned()
    part = sum(bucket.sizes[run.axis.rank] for plan in run.plans for bucket in plan.buckets)
    gradients = nbytes(bucket.gradient for bucket in run.optimizer.reducer.buckets)
    assert all(p.dtype.itemsize == item and p.grad is None for p in run.model.unwrap().parameters())
    found = {
        "parameters": nbytes(run.model.unwrap().parameters()),
        "gradients": gradients,
        "states": nbytes(state[key] for state in states for key in ("exp_avg", "exp_avg_sq")),
        "masters": nbytes(units) if item == 2 else 0,
    }
    assert found == {
        "parameters": item * run.padded,
        "gradients": item * (run.padded if stage == 1 else part),
        "states": 8 * owned,
        "masters": 4 * owned if item == 2 else 0,
    }
    assert item == 2 or all(unit.untyped_storage().data_ptr() in _storages(shards) for unit in units)
    run.padding()
    return sum(found.values()), run.size, run.padded, owned


def _storages(shards):
    return {storage.flat.untyped_storage().data_ptr() for storage in shards.storages}


WHOLE_AND_SPLIT = {("fp32", 1): (8, 8), ("fp32", 2): (4, 12), ("bf16", 1): (4, 12), ("bf16", 2): (2, 14)}


@pytest.mark.parametrize("case", WHOLE_AND_SPLIT, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_holds_the_bytes_of_the_budget(ranks, case):
    precision, stage = case
    whole, split = WHOLE_AND_SPLIT[case]
    found = run_on_ranks(ranks, held, "LT", stage, 1, precision)
    size = found[0][1]
    for total, _, padded, _ in found:
        assert total <= whole * padded + split * padded / ranks
    assert sum(owned for *_, owned in found) >= size
    together = sum(total for total, *_ in found)
    budget = ranks * (whole * size + split * size / ranks)
    padding = found[0][2] - size
    assert budget <= together <= budget + ranks * (whole + split) * padding


@pytest.mark.parametrize("case", WHOLE_AND_SPLIT, ids=str)
def test_under_tensor_parallelism_the_bytes_of_what_this_rank_holds(case):
    precision, stage = case
    whole, split = WHOLE_AND_SPLIT[case]
    for total, _, padded, _ in run_on_ranks(4, held, "LT", stage, 2, precision):
        assert total <= whole * padded + split * padded / 2


def tensors_alive():
    gc.collect()
    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"]


def nothing_else_is_left(stage, precision):
    before = tensors_alive()  # what earlier tests have left may be of kinds that have no memory
    run = Run("LL", stage, precision=precision, bucket_bytes=20_000)
    for _ in range(2):
        run.backward(2)
        run.step()
        run.optimizer.zero_grad()
    whole, split = WHOLE_AND_SPLIT[precision, stage]
    lent = run.optimizer.reducer.buckets[0].pool.nbytes
    numbers = 64 * 1024  # rotary tables, step counts, the batch
    earlier = {id(tensor) for tensor in before}
    made = nbytes(t.detach() for t in tensors_alive() if id(t) not in earlier)
    assert made <= whole * run.padded + split * run.padded / run.axis.size + lent + numbers


@pytest.mark.parametrize("case", WHOLE_AND_SPLIT, ids=str)
def test_nothing_else_is_left_after_a_step(case):
    precision, stage = case
    run_on_ranks(2, nothing_else_is_left, stage, precision)


class Tower(nn.Module):
    """Layers of one size each, the first of which may be many times larger."""

    def __init__(self, depth, table=64):
        super().__init__()
        self.table = nn.Embedding(table, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def watched(depth, table, options):
    """Most buckets under way, most bytes lent, and bytes kept, over two steps."""
    booster, plain = Booster(plugin=LowLevelZeroPlugin(precision="fp32", **options)), Tower(depth, table)
    model, optimizer, *_ = booster.boost(plain, SGD(plain.parameters(), lr=0.1))
    buckets = optimizer.reducer.buckets
    pool = buckets[0].pool
    seen = {"under way": 0, "lent": 0, "now": 0}
    take, give = pool.take, pool.give

    def taking(numel, dtype, device):
        tensor = take(numel, dtype, device)
        seen["now"] += (tensor if tensor._base is None else tensor._base).nbytes
        seen["lent"] = max(seen["lent"], seen["now"])
        seen["under way"] = max(seen["under way"], sum(bucket._sum is not None for bucket in buckets))
        return tensor

    def giving(tensor):
        seen["now"] -= (tensor if tensor._base is None else tensor._base).nbytes
        give(tensor)

    pool.take, pool.give = taking, giving
    for _ in range(2):
        booster.backward(model(torch.arange(8)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert seen["now"] == 0, "everything lent came back"
    largest = max(bucket.plan.numel for bucket in buckets) * 4
    return seen["under way"], seen["lent"], pool.nbytes, largest, len(buckets)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_buckets_are_under_way_and_buffers_do_not_grow_with_the_model(stage):
    options = {"stage": stage, "bucket_bytes": 17_000}  # a layer each
    small, large = (run_on_ranks(2, watched, depth, 64, options)[0] for depth in (6, 30))
    assert large[4] > 4 * small[4]
    assert small[:3] == large[:3]
    under_way, lent, kept, largest, _ = large
    # one that is being filled and two on the way, each with what it receives
    assert under_way <= 2
    assert lent <= {1: 2, 2: 6}[stage] * largest
    assert kept <= lent


@pytest.mark.parametrize("stage", [1, 2])
def test_buffers_do_not_grow_with_a_huge_parameter(stage):
    """Its gradient is ready for all its buckets at once."""
    options = {"stage": stage, "bucket_bytes": 1 << 20}
    small, large = (run_on_ranks(2, watched, 2, table, options)[0] for table in (1 << 14, 1 << 16))
    assert (small[4], large[4]) == (4 + 1, 16 + 1)
    assert large[1] <= 6 * large[3]
    assert small[1:3] == large[1:3]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_kept_is_bounded_where_nothing_overlaps(stage):
    options = {"stage": stage, "bucket_bytes": 17_000, "overlap_communication": False}
    *_, kept, largest, number = run_on_ranks(2, watched, 30, 64, options)[0]
    assert number > 2 * KEPT
    assert kept <= KEPT * largest


def without_ranks():
    assert dist.get_world_size() == 1
    for stage in (1, 2):
        run = Run("LL", stage)
        with colonnade.ledger() as ledger:
            run.backward()
            run.step()
        assert not ledger.calls


def test_one_rank_sends_nothing():
    run_on_ranks(1, without_ranks)
