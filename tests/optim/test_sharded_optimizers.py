"""Split over ranks, every optimizer steps as one process does on whole parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import colonnade
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError
from colonnade.model.layout import Box, TensorLayout, layout_of, set_layout, shard_ranges
from colonnade.optim import Adafactor, GaLoreAdamW, Lamb, Muon
from colonnade.testing.logical import assemble
from colonnade.testing.ranks import on_ranks, run_on_ranks
from tests.optim.optim_cases import (
    OPTIMIZERS,
    SKIPPED,
    STEPS,
    galore,
    gradients,
    layouts,
    parameters,
    relative,
    train,
    values,
)

TOLERANCE = 1e-5


def one_process(name):
    params = parameters()
    optimizer = OPTIMIZERS[name](list(params.values()))
    train(params, optimizer)
    return params, optimizer


def differences(params, wanted, axis):
    """Name → relative difference of the weights that the ranks hold together; replicas must have the same bits."""
    pieces = {name: (p.detach(), layout_of(p)) for name, p in params.items()}
    found = {}
    for name in pieces:
        of_ranks = [rank[name] for rank in all_gather_object(pieces, axis)]
        whole = assemble(of_ranks)
        assert whole.missing == 0, name
        assert whole.spread == 0, f"replicas of {name} differ by {whole.spread}"
        found[name] = relative(whole.value, wanted[name])
    return found


def split_equals_whole(optimizer_name, batch_elements):
    mesh = ParallelMesh(tp=torch.distributed.get_world_size())
    axis = mesh.axis("tp")
    of_rank = layouts(axis.rank, axis.size)
    params = parameters(of_rank)
    optimizer = OPTIMIZERS[optimizer_name](list(params.values()))
    optimizer.set_mesh(mesh)
    optimizer.batch_elements = batch_elements
    train(params, optimizer, of_rank)
    wanted, single = one_process(optimizer_name)
    for name, param in params.items():
        steps = STEPS - sum(gradients(step)[name] is None for step in range(STEPS))
        assert optimizer.state[param]["step"] == single.state[wanted[name]]["step"] == steps, name
    return differences(params, wanted, axis)


@pytest.mark.sample("2-*", "4-67108864-adafactor", "4-300-came")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("ranks, batch_elements", [(2, 1 << 26), (4, 1 << 26), (4, 300)])
def test_every_layout_gives_the_weights_of_one_process(optimizer_name, ranks, batch_elements):
    for found in run_on_ranks(ranks, split_equals_whole, optimizer_name, batch_elements):
        wrong = {name: f"{x:.1e}" for name, x in found.items() if not x <= TOLERANCE}
        assert not wrong, f"{optimizer_name}: {wrong}"


def test_the_gradients_are_hard_enough_to_tell_a_wrong_optimizer():
    """Steps on the boxes of a rank as if they were the parameter give other weights by far."""
    for name in OPTIMIZERS:
        wanted, _ = one_process(name)
        half = nn.Parameter(values()["column"][:12])
        optimizer = OPTIMIZERS[name]([half])
        for step in range(STEPS):
            half.grad = gradients(step)["column"][:12]
            optimizer.step()
        assert relative(half, wanted["column"][:12]) > 100 * TOLERANCE, name
        assert relative(wanted["column"], values()["column"]) > 0.01, name


def two_axes(optimizer_name):
    """Rows over dp and columns over tp, fused rows of uneven size; one process is asked too."""
    mesh = ParallelMesh(tp=2)
    shapes = {"grid": (10, 8), "fused": (9, 6), "rows only": (12, 5)}
    generator = torch.Generator().manual_seed(3)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    grads = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(STEPS)]

    def layout(name):
        rows, columns = shapes[name]
        of_rows = shard_ranges(rows, mesh.rank("dp"), 2, pieces=3 if name == "fused" else 1)
        of_columns = shard_ranges(columns, mesh.rank("tp"), 2)[0]
        if name == "rows only":
            return TensorLayout.split((rows, columns), 0, of_rows, "dp")
        boxes, offset = [], 0
        for start, stop, _ in of_rows:
            boxes.append(Box((start, of_columns.start), (offset, 0), (stop - start, of_columns.size)))
            offset += stop - start
        return TensorLayout((rows, columns), tuple(boxes), ("dp", "tp"))

    of_rank = {name: layout(name) for name in shapes}
    params = {name: nn.Parameter(of_rank[name].extract(whole[name])) for name in shapes}
    for name, param in params.items():
        set_layout(param, of_rank[name])
    alone = {name: nn.Parameter(whole[name].clone()) for name in shapes}
    optimizer, single = (OPTIMIZERS[optimizer_name](list(ps.values())) for ps in (params, alone))
    optimizer.set_mesh(mesh)
    for grad in grads:
        for name in shapes:
            params[name].grad, alone[name].grad = of_rank[name].extract(grad[name]), grad[name]
        optimizer.step()
        single.step()
    return differences(params, alone, mesh.world)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_two_axes_may_split_a_parameter(optimizer_name):
    for found in run_on_ranks(4, two_axes, optimizer_name):
        assert max(found.values()) <= TOLERANCE, found


def dtensors(optimizer_name):
    mesh = ParallelMesh()
    axis = mesh.axis("dp")
    of_rank = {n: x for n, x in layouts(axis.rank, axis.size, "dp").items() if n in ("column", "uneven", "vector")}
    device_mesh, wanted = mesh.device_mesh["dp"], one_process(optimizer_name)[0]

    def distributed(local, whole):
        return DTensor.from_local(local, device_mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())

    params = {n: nn.Parameter(distributed(x.extract(values()[n]), values()[n])) for n, x in of_rank.items()}
    for name, param in params.items():
        set_layout(param, of_rank[name])
    optimizer = OPTIMIZERS[optimizer_name](list(params.values()))
    optimizer.set_mesh(mesh)
    for step in range(STEPS):
        for name, param in params.items():
            grad = gradients(step)[name]
            param.grad = distributed(of_rank[name].extract(grad), grad)
        optimizer.step()
    found = {name: relative(param.full_tensor(), wanted[name]) for name, param in params.items()}
    assert all(not isinstance(v, DTensor) for state in optimizer.state.values() for v in state.values())
    return found


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_distributed_tensors_step_like_whole_ones(optimizer_name):
    for found in run_on_ranks(2, dtensors, optimizer_name):
        assert max(found.values()) <= TOLERANCE, found


def resumed(optimizer_name):
    mesh = ParallelMesh(tp=2)
    of_rank = layouts(mesh.rank("tp"), 2)
    params = parameters(of_rank)
    optimizer = OPTIMIZERS[optimizer_name](list(params.values()))
    optimizer.set_mesh(mesh)
    train(params, optimizer, of_rank, range(10))
    others = parameters(of_rank)
    with torch.no_grad():
        for name, param in others.items():
            param.copy_(params[name])
    again = OPTIMIZERS[optimizer_name](list(others.values()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.set_mesh(mesh)
    for pair in ((params, optimizer), (others, again)):
        train(*pair, of_rank, range(10, STEPS))
    return [name for name in params if not torch.equal(params[name], others[name])]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_a_loaded_state_goes_on_to_the_bit(optimizer_name):
    assert run_on_ranks(2, resumed, optimizer_name) == [[], []]


def split_after_some_steps(optimizer_name):
    """Ten steps on whole parameters, then they are split; what boost does with state of the parameter's shape is done."""
    mesh = ParallelMesh(tp=2)
    of_rank = layouts(mesh.rank("tp"), 2)
    params = parameters()
    optimizer = OPTIMIZERS[optimizer_name](list(params.values()))
    train(params, optimizer, steps=range(10))
    for name, layout in of_rank.items():
        param = params[name]
        for key, value in optimizer.state[param].items():
            if value.shape == layout.shape and key != "step":
                optimizer.state[param][key] = layout.extract(value)
        param.grad = None
        param.data = layout.extract(param.data)
        set_layout(param, layout)
    optimizer.set_mesh(mesh)
    train(params, optimizer, of_rank, range(10, STEPS))
    return differences(params, one_process(optimizer_name)[0], mesh.axis("tp"))


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_parameters_may_be_split_after_some_steps(optimizer_name):
    for found in run_on_ranks(2, split_after_some_steps, optimizer_name):
        assert max(found.values()) <= TOLERANCE, found


@on_ranks(2)
def test_statistics_are_kept_for_the_rows_and_columns_that_a_rank_holds():
    mesh = ParallelMesh(tp=2)
    of_rank = layouts(mesh.rank("tp"), 2)
    params = parameters(of_rank)
    optimizer = OPTIMIZERS["adafactor"](list(params.values()))
    optimizer.set_mesh(mesh)
    train(params, optimizer, of_rank, range(1))
    shapes = {
        n: [tuple(optimizer.state[params[n]][k].shape) for k in ("row_var", "col_var")] for n in ("column", "row")
    }
    assert shapes == {"column": [(12, 1), (1, 16)], "row": [(16, 1), (1, 12)]}
    assert optimizer.state[params["fused"]]["row_var"].shape == (12, 1)
    assert optimizer.state[params["vector"]]["variance"].shape == (8,)
    low = galore(list(params.values()))
    low.set_mesh(mesh)
    train(params, low, of_rank, range(1))
    column, row = low.state[params["column"]], low.state[params["row"]]
    assert column["projection_right"].shape == (4, 16) and column["exp_avg"].shape == (12, 4)
    assert row["projection_left"].shape == (16, 4) and row["exp_avg"].shape == (4, 12)


@on_ranks(2)
def test_parameters_that_are_split_need_the_mesh():
    params = parameters(layouts(torch.distributed.get_rank(), 2))
    optimizer = Lamb(list(params.values()))
    with pytest.raises(UsageError, match="split over tp, and does not know the mesh"):
        train(params, optimizer, layouts(torch.distributed.get_rank(), 2), range(1))


def counted(make, names, steps=2):
    """What the ledger says of the last of some steps on some of the parameters."""
    mesh = ParallelMesh(tp=2)
    of_rank = layouts(mesh.rank("tp"), 2)
    params = parameters(of_rank)
    optimizer = make([params[name] for name in names])
    optimizer.set_mesh(mesh)
    for step in range(steps):
        for name in names:
            grad = gradients(step)[name]
            params[name].grad = of_rank[name].extract(grad) if name in of_rank else grad
        with colonnade.ledger() as ledger:
            optimizer.step()
    return dict(ledger.calls), dict(ledger.elements)


@on_ranks(2)
def test_norms_travel_in_one_all_reduce_of_two_numbers_for_each_split_parameter():
    for name in ("lamb", "lars"):
        calls, elements = counted(OPTIMIZERS[name], ["column", "row", "fused", "vector", "replicated"])
        assert calls == {("all_reduce", "tp"): 1}
        assert elements == {("all_reduce", "tp"): 2 * 4}


@on_ranks(2)
def test_factored_optimizers_send_the_statistics_along_the_split_dim():
    names = ["column", "row", "vector", "replicated"]  # (24, 16) by rows, (16, 24) by columns
    calls, elements = counted(Adafactor, names)
    assert calls == {("all_reduce", "tp"): 2}
    assert elements == {("all_reduce", "tp"): 16 + 16 + 3 + 3}
    calls, elements = counted(OPTIMIZERS["came"], names)
    assert calls == {("all_reduce", "tp"): 3}
    assert elements == {("all_reduce", "tp"): 2 * (16 + 16) + 3}


@on_ranks(2)
def test_muon_sends_each_split_matrix_twice():
    calls, elements = counted(Muon, ["column", "row", "replicated"])
    assert calls == {("all_gather", "tp"): 2, ("broadcast", "tp"): 2}
    assert elements == {("all_gather", "tp"): 2 * 24 * 16, ("broadcast", "tp"): 2 * 24 * 16}


@on_ranks(2)
def test_galore_sends_matrices_only_when_it_projects_anew():
    def make(params):
        return GaLoreAdamW([{"params": params, "rank": 4, "update_proj_gap": 2}])

    names = ["column", "column, flat", "replicated"]  # projected from the right (along columns), and from the left
    calls, elements = counted(make, names, steps=2)
    assert calls == {("all_reduce", "tp"): 1}
    assert elements == {("all_reduce", "tp"): 4 * 24}  # of (8, 24), 4 numbers for each column
    calls, elements = counted(make, names, steps=3)
    assert calls == {("all_reduce", "tp"): 1, ("all_gather", "tp"): 2, ("broadcast", "tp"): 2}
    assert elements["all_gather", "tp"] == 24 * 16 + 8 * 24
    assert elements["broadcast", "tp"] == 4 * (16 + 8)


@on_ranks(2)
def test_what_every_rank_holds_whole_costs_no_communication():
    for make in OPTIMIZERS.values():
        calls, _ = counted(make, ["replicated", SKIPPED], steps=1)
        assert calls == {}
