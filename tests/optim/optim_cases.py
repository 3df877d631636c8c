"""Parameters, their layouts, gradients, and optimizers by name: what the tests of this folder share."""

import torch
from torch import nn

from colonnade.model.layout import Box, Range, TensorLayout, set_layout, shard_ranges
from colonnade.optim import CAME, Adafactor, GaLoreAdamW, Lamb, Lars, Muon

STEPS = 20
SKIPPED = "bias"  # has no gradient at every third step


def aux(params, **options):
    """The parameters that are no matrices, for AdamW."""
    return {"params": [p for p in params if p.dim() != 2], "lr": 3e-3} | options


def matrices(params, **options):
    return {"params": [p for p in params if p.dim() == 2]} | options


def galore(params, proj_type="std"):
    low = matrices(params, rank=4, update_proj_gap=7, scale=0.5, proj_type=proj_type)
    return GaLoreAdamW([low, aux(params)], lr=1e-2, eps=1e-4, weight_decay=0.1)


# name: makes the optimizer of a list of parameters
OPTIMIZERS = {
    "lamb": lambda params: Lamb(params, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "lars": lambda params: Lars(params, lr=0.5, weight_decay=0.1, trust_coefficient=0.02),
    "adafactor": lambda params: Adafactor(params, lr=1e-2, weight_decay=0.1),
    "came": lambda params: CAME(params, lr=1e-2, weight_decay=0.1),
    "galore": galore,
    "galore reverse": lambda params: galore(params, "reverse_std"),
    "galore full": lambda params: galore(params, "full"),
    "muon": lambda params: Muon([matrices(params), aux(params, use_muon=False)], lr=1e-2, weight_decay=0.1),
}

SHAPES = {
    "column": (24, 16),
    "column, flat": (8, 24),
    "row": (16, 24),
    "fused": (24, 12),
    "uneven": (13, 6),
    "uneven columns": (6, 13),
    "held by several": (12, 10),
    "fused with heads": (16, 8),
    "some ranks have none": (9, 8),
    "a rank without boxes": (8, 8),
    "two dims": (10, 12),
    "no grid": (8, 6),
    "out of order": (16, 5),
    "experts": (4, 6, 8),
    "inside of experts": (3, 8, 6),
    "vector": (16,),
    "vector held by several": (8,),
    "replicated": (7, 9),
    "bias": (11,),
    "scalar": (),
}


def layouts(rank, ranks, axis="tp"):
    """Name → layout on this rank."""

    def split(name, dim, **options):
        shape = SHAPES[name]
        return TensorLayout.split(shape, dim, shard_ranges(shape[dim], rank, ranks, **options), axis)

    def boxes(name, found):
        return TensorLayout(SHAPES[name], tuple(found), (axis,))

    first = min(ranks, 3)  # the ranks that have anything
    third = Range(9 * rank // first, 9 * (rank + 1) // first) if rank < first else Range(9, 9)
    quarters = [Box((r, c), (0, 0), (5, 6)) for r in (0, 5) for c in (0, 6)]
    if ranks == 2:
        quarters = [Box((0, 0), (0, 0), (5, 6)), Box((0, 6), (0, 0), (5, 6))]
        lower = [Box((5, 0), (5, 0), (5, 6)), Box((5, 6), (5, 0), (5, 6))]
        two_dims = [quarters[rank], lower[1 - rank]]
    else:
        two_dims = [quarters[rank]]
    diagonal = [Box((0, 0), (0, 0), (4, 3)), Box((4, 3), (4, 0), (4, 3))]
    other = [Box((0, 3), (4, 0), (4, 3)), Box((4, 0), (0, 0), (4, 3))]
    rest = [Box((2 * ranks, 0), (2, 0), (16 - 2 * ranks, 5))] if rank == 0 else []
    return {
        "column": split("column", 0),
        "column, flat": split("column, flat", 0),
        "row": split("row", 1),
        "fused": split("fused", 0, pieces=3),
        "uneven": split("uneven", 0),
        "uneven columns": split("uneven columns", 1),
        "held by several": split("held by several", 0, units=2 if ranks == 4 else 1),
        "fused with heads": split("fused with heads", 0, pieces=[8, 4, 4], units=2, heads=[4, None, None]),
        "some ranks have none": TensorLayout.split(SHAPES["some ranks have none"], 0, [third], axis),
        "a rank without boxes": boxes("a rank without boxes", [Box((0, 0), (0, 0), (8, 8))] if rank == 0 else []),
        "two dims": boxes("two dims", two_dims),
        "no grid": boxes("no grid", [diagonal, other, [], []][rank]),
        "out of order": boxes("out of order", [Box((rank * 2 + i, 0), (1 - i, 0), (1, 5)) for i in (0, 1)] + rest),
        "experts": split("experts", 0),
        "inside of experts": split("inside of experts", 1),
        "vector": split("vector", 0),
        "vector held by several": split("vector held by several", 0, units=1),
    }


def values():
    """Name → logical parameter."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step):
    """Name → gradient of the logical parameter, None for one that has none at this step; different at each step."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=generator) * 0.3 + 0.1 for name, shape in SHAPES.items()}
    return found | ({SKIPPED: None} if step % 3 == 1 else {})


def parameters(rank_layouts=None):
    """Name → this rank's parameter, with its layout; without layouts the logical ones."""
    found = {}
    for name, value in values().items():
        layout = (rank_layouts or {}).get(name)
        found[name] = nn.Parameter(value if layout is None else layout.extract(value))
        if layout is not None:
            set_layout(found[name], layout)
    return found


def train(params, optimizer, rank_layouts=None, steps=range(STEPS)):
    """Steps with the gradients of these numbers."""
    for step in steps:
        for name, grad in gradients(step).items():
            layout = (rank_layouts or {}).get(name)
            params[name].grad = grad if layout is None or grad is None else layout.extract(grad)
        optimizer.step()


def relative(found, wanted):
    """max|a − b| / max|b|."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
