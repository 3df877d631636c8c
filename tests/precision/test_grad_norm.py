"""The gradient norm over ranks is that of the logical gradient in one process, whatever each rank holds of it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError
from colonnade.model.layout import Range, TensorLayout, deal, layout_of, local_of, set_layout
from colonnade.precision.grad_norm import gradient_norm, gradient_parts
from colonnade.testing.ranks import on_ranks, run_on_ranks

CPU = torch.device("cpu")
CLOSE = 1e-6  # relative, against float64; what is summed is float32
SHAPES = {
    "matrix": (7, 5),
    "bias": (9,),
    "scale": (),
    "big": (70, 90),
    "held": (8, 4),
    "fused": (12, 3),
    "empty": (0, 4),
}
MESHES = {"tp 2": (2, 2), "dp 2": (2, 1), "tp 2 × dp 2": (4, 2), "tp 4": (4, 4)}  # (ranks, tp)


def logical_gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * (i + 1) for i, (name, shape) in enumerate(SHAPES.items())}


def exact_norm(gradients):
    return torch.cat([g.double().flatten() for g in gradients.values()]).norm().item()


def layouts(mesh):
    """What a rank holds: unequal cuts, several boxes, and pieces that several ranks hold beside pieces of its own."""
    tp, rank = mesh.size("tp"), mesh.rank("tp")
    found = {name: TensorLayout.whole(shape) for name, shape in SHAPES.items()}
    if tp > 1:
        cut = [Range(start, stop) for start, stop in (deal(n, tp)[rank] for n in (7, 90))]
        found["matrix"] = TensorLayout.split(SHAPES["matrix"], 0, [cut[0]], "tp")
        found["big"] = TensorLayout.split(SHAPES["big"], 1, [cut[1]], "tp")
        own, pair = Range(rank, rank + 1), rank // 2
        shared = Range(4 + pair, 5 + pair, (2 * pair, 2 * pair + 1))  # each of them on two ranks
        found["held"] = TensorLayout.split((4 + tp // 2, 4), 0, [own, shared], "tp")
        found["fused"] = TensorLayout.split(
            (12, 3), 0, [Range(*deal(4, tp)[rank]), Range(*deal_from(4, 8, tp, rank))], "tp"
        )
    return found


def deal_from(start, size, ranks, rank):
    first, last = deal(size, ranks)[rank]
    return start + first, start + last


def logical_for(mesh):
    gradients = logical_gradients()
    if mesh.size("tp") > 1:
        own = mesh.size("tp")  # of the "held" rows 0..3 only as many as there are ranks are dealt out
        gradients["held"] = gradients["held"][: 4 + own // 2].clone()
        gradients["held"][own:4] = 0
    return gradients


def parameters(mesh, dtype=torch.float32):
    params = {}
    for (name, layout), logical in zip(layouts(mesh).items(), logical_for(mesh).values()):
        param = nn.Parameter(torch.zeros(layout.local_shape, dtype=dtype))
        set_layout(param, layout)
        param.grad = layout.extract(logical).to(dtype)
        params[name] = param
    params["unused"] = nn.Parameter(torch.zeros(3))
    return params


def dealt_out(parts_of, mesh):
    """As ZeRO has them: of every gradient a range of its entries on each data-parallel rank."""
    parts = {}
    for param in parts_of.values():
        axes = ("dp", *layout_of(param).sharded_axes)
        held = parts.setdefault(axes, [])
        if param.grad is None:
            continue
        for grad in next(iter(gradient_parts([param], mesh).values())):
            start, stop = deal(grad.numel(), mesh.size("dp"))[mesh.rank("dp")]
            held.append(grad.reshape(-1)[start:stop])
    return parts


def norms(tp):
    mesh = ParallelMesh(tp=tp)
    params = parameters(mesh)
    kinds = {"plain": gradient_parts(params.values(), mesh), "zero": dealt_out(params, mesh)}
    names = list(params)
    kinds["mixed"] = dealt_out({n: params[n] for n in names[::2]}, mesh)
    for axes, grads in gradient_parts([params[n] for n in names[1::2]], mesh).items():
        kinds["mixed"].setdefault(axes, []).extend(grads)
    return {kind: gradient_norm(parts, mesh, CPU).item() for kind, parts in kinds.items()}, exact_norm(
        logical_for(mesh)
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_it_is_the_norm_of_the_logical_gradient(mesh):
    ranks, tp = MESHES[mesh]
    results = run_on_ranks(ranks, norms, tp)
    assert all(found == results[0][0] for found, _ in results), "the same bits on every rank"
    found, wanted = results[0]
    for kind, norm in found.items():
        assert norm == pytest.approx(wanted, rel=CLOSE), kind


def test_one_process_without_a_group():
    mesh = ParallelMesh()
    params = parameters(mesh)
    assert params["unused"].grad is None
    norm = gradient_norm(gradient_parts(params.values(), mesh), mesh, CPU)
    assert norm.dtype == torch.float64 and norm.dim() == 0
    assert norm.item() == pytest.approx(exact_norm(logical_gradients()), rel=CLOSE)


def test_no_gradient_at_all_is_zero():
    mesh = ParallelMesh()
    for params in ([], [nn.Parameter(torch.ones(3))]):
        assert gradient_norm(gradient_parts(params, mesh), mesh, CPU).item() == 0


BIG = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "all alike": lambda n, g: torch.full((n,), 0.1),
    "positive": lambda n, g: torch.rand(n, generator=g),
    "few large": lambda n, g: torch.where(torch.rand(n, generator=g) < 1e-5, 1e3, 1e-3 * torch.randn(n, generator=g)),
    "tiny": lambda n, g: 1e-12 * torch.randn(n, generator=g),
}


def big_gradient(kind, numel=4 << 20):
    return BIG[kind](numel + 5, torch.Generator().manual_seed(3)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BIG)
def test_big_gradients_keep_their_digits(kind, dtype):
    mesh, grad = ParallelMesh(), big_gradient(kind).to(dtype)
    norm = gradient_norm({(): [grad]}, mesh, CPU).item()
    assert norm == pytest.approx(grad.double().norm().item(), rel=CLOSE)


@pytest.mark.parametrize("rows", [511, 512, 513, 1023, 1024, 1025])
def test_every_entry_counts_once_around_the_size_of_a_row(rows):
    grads = [torch.full((n,), 0.5) for n in (rows, 1, 3)] + [torch.full((rows, 2), 0.5).t()]
    wanted = math.sqrt(0.25 * (3 * rows + 4))
    assert gradient_norm({(): grads}, ParallelMesh(), CPU).item() == pytest.approx(wanted, rel=CLOSE)


@on_ranks(2)
def test_big_gradients_split_over_ranks():
    mesh = ParallelMesh(tp=2)
    for kind in ("normal", "few large"):
        grad = big_gradient(kind)
        start, stop = deal(grad.numel(), 2)[mesh.rank("tp")]
        norm = gradient_norm({("tp",): [grad[start:stop]]}, mesh, CPU).item()
        assert norm == pytest.approx(grad.double().norm().item(), rel=CLOSE), kind


def same_everywhere(value):
    of_ranks = all_gather_object(value, Axis.of(None, "world"))
    assert all(repr(other) == repr(value) for other in of_ranks), of_ranks


def not_finite(tp):
    """One entry on the last rank alone: of a piece of its own, or of what all should hold alike."""
    mesh = ParallelMesh(tp=tp)
    last = dist.get_rank() == dist.get_world_size() - 1
    for value in (math.inf, -math.inf, math.nan):
        for name in ("big", "held", "bias"):
            for zero in (False, True):
                params = parameters(mesh)
                if last:
                    local_of(params[name].grad).reshape(-1)[-1 if name == "bias" else 0] = value
                parts = dealt_out(params, mesh) if zero else gradient_parts(params.values(), mesh)
                split = any(axes for axes, grads in parts.items() if any(not g.isfinite().all() for g in grads))
                norm = gradient_norm(parts, mesh, CPU)
                if tp > 1 or zero:  # over plain data parallelism nothing is exchanged: the reduction has made it alike
                    same_everywhere(norm.item())
                if last and split:
                    assert not norm.isfinite()


@pytest.mark.parametrize("mesh", ["tp 2", "dp 2"])
def test_an_infinite_entry_on_one_rank_makes_the_norm_infinite_on_all(mesh):
    ranks, tp = MESHES[mesh]
    run_on_ranks(ranks, not_finite, tp)


@on_ranks(2)
def test_an_overflow_of_one_replica_alone_is_seen_by_both():
    """Kernels that use atomics may round differently on each rank, and one of them beyond the largest number."""
    mesh = ParallelMesh(tp=2)
    for value in (math.inf, math.nan):
        for rank in (0, 1):
            grad = torch.ones(4)
            if mesh.rank("tp") == rank:
                grad[2] = value
            for check in (True, False):
                norm = gradient_norm({(): [grad], ("tp",): [torch.ones(4)]}, mesh, CPU, check)
                assert not norm.isfinite(), "a step must be left out on both ranks or on none"


@on_ranks(2)
def test_replicas_that_differ_in_rounding_have_one_norm():
    mesh = ParallelMesh(tp=2)
    grad = torch.ones(64) * (1 + 1e-5 * mesh.rank("tp"))
    norm = gradient_norm({(): [grad], ("tp",): [torch.ones(4)]}, mesh, CPU).item()
    same_everywhere(norm)
    assert norm == pytest.approx(math.sqrt(64 + 8), rel=2e-5)


def disagreement(tp, axis_name, zero):
    mesh = ParallelMesh(tp=tp)
    params = parameters(mesh)
    if mesh.rank(axis_name):
        params["bias"].grad *= 3
    parts = dealt_out(params, mesh) if zero else gradient_parts(params.values(), mesh)
    if axis_name == "dp":  # something is split over dp: then there is an exchange, and it shows
        parts[("dp",)] = [torch.ones(3)]
    with pytest.raises(UsageError, match=f"the ranks of {axis_name} .*hold different gradients") as caught:
        gradient_norm(parts, mesh, CPU)
    assert "max_norm" in str(caught.value)
    dist.barrier()  # raised on every rank
    same_everywhere(gradient_norm(parts, mesh, CPU, check_replicas=False).item())


@pytest.mark.parametrize(
    "ranks, tp, axis, zero",
    [(2, 2, "tp", False), (4, 2, "tp", False), (4, 2, "tp", True), (2, 1, "dp", False), (4, 2, "dp", False)],
)
def test_replicas_that_disagree_are_an_error_on_every_rank(ranks, tp, axis, zero):
    run_on_ranks(ranks, disagreement, tp, axis, zero)


def test_a_sparse_gradient_counts_each_entry_once():
    """A row that a batch looks up twice lies twice in the gradient of an embedding, which is their sum."""
    table = nn.Embedding(9, 4, sparse=True)
    table(torch.tensor([1, 1, 5])).square().sum().backward()
    assert table.weight.grad.is_sparse and not table.weight.grad.is_coalesced()
    mesh = ParallelMesh()
    found = gradient_norm(gradient_parts([table.weight], mesh), mesh, CPU)
    assert float(found) == pytest.approx(float(table.weight.grad.to_dense().norm()), rel=CLOSE)
