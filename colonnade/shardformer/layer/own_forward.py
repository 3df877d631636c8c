"""What a native module's forward of its own does: works around the one it derives from, or computes the same by itself.

A subclass of nn.Linear that writes `x @ self.weight.T + self.bias` is a linear layer. One that routes, quantises or
normalises is another thing, and a parallel linear layer in its place would be silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class _Sample:
    """A small module to try a forward on: its sizes, the shape of its weight, its input, and what it should give."""

    sizes: dict[str, int]
    weight: tuple[int, int]
    x: Callable[[torch.Generator], torch.Tensor]
    wanted: Callable[[Any, torch.Tensor], torch.Tensor]


_SAMPLES: dict[type[nn.Module], _Sample] = {
    nn.Linear: _Sample(
        {"in_features": 5, "out_features": 3},
        (3, 5),
        lambda g: torch.randn(2, 7, 5, generator=g, dtype=torch.float64),
        lambda m, x: F.linear(x, m.weight, m.bias),
    ),
    nn.Embedding: _Sample(
        {"num_embeddings": 11, "embedding_dim": 3},
        (11, 3),
        lambda g: torch.randint(11, (2, 7), generator=g),
        lambda m, x: F.embedding(x, m.weight, m.padding_idx),
    ),
}


def has_own_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a module of a subclass of `base` has another forward, which does not call its parent's."""
    forward = type(module).forward
    if forward is base.forward:
        return False
    # one that mentions no `super` cannot reach the class it derives from
    return "super" not in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ("super",))


def computes_as(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the forward of a module's class gives the numbers of `base`, output and gradients, training or not.

    Found by trying it in float64 on a small module with the attributes of this one, which is not changed.
    """
    sample = _SAMPLES.get(base)
    if sample is None:
        return False
    generator = torch.Generator().manual_seed(0)
    twin = _small(module, sample, generator)
    x = sample.x(generator)
    with torch.random.fork_rng(devices=[]):
        try:
            return all(_same(twin.train(mode), x, sample, generator) for mode in (True, False))
        except Exception:  # whatever a forward of another kind raises on such an input: it is of another kind
            return False


def _small(module: nn.Module, sample: _Sample, generator: torch.Generator) -> Any:
    """An object of the module's class with its attributes, but sizes and parameters of the sample."""
    twin: Any = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    parts = vars(nn.Module())
    twin.__dict__.update({key: value for key, value in vars(module).items() if key not in parts} | sample.sizes)
    twin.weight = nn.Parameter(torch.randn(sample.weight, generator=generator, dtype=torch.float64))
    if "bias" in vars(module)["_parameters"]:
        has_bias = vars(module)["_parameters"]["bias"] is not None
        bias = torch.randn(sample.weight[0], generator=generator, dtype=torch.float64)
        twin.bias = nn.Parameter(bias) if has_bias else None
    if getattr(module, "padding_idx", None) is not None:
        twin.padding_idx = 1
    return twin


def _same(twin: Any, x: torch.Tensor, sample: _Sample, generator: torch.Generator) -> bool:
    inputs = list(twin.parameters())
    if x.is_floating_point():
        x = x.clone().requires_grad_()
        inputs.append(x)
    found, wanted = twin(x), sample.wanted(twin, x)
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    upstream = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    gradients = zip(torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream))
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in [(found, wanted), *gradients])
