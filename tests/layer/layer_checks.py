"""One layer alone, split over the ranks, against the native layer that it stands in for.

Everything is compared in float64, where a wrong sum cannot hide behind rounding.
"""

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.testing.logical import gather_parameters

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def noise(*shape, seed=3, dtype=torch.float64):
    """Standard normal numbers, the same at every call and on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_noise(module, seed=1, dtype=torch.float64):
    """The module in float64, every parameter random, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def positions(length, axis, pieces=1, units=None, heads=None):
    """Which entries of a dimension this rank should hold, worked out without the library."""
    return torch.cat([mine for mine, _ in _held_parts(length, axis, pieces, units, heads)])


def shares(length, axis, pieces=1, units=None, heads=None):
    """For each entry that this rank holds a share of 1: what its holders have together. Unequal shares for them."""
    found = []
    for mine, holders in _held_parts(length, axis, pieces, units, heads):
        weights = [1.0 + holders.index(rank) for rank in holders]
        found.append(torch.full((len(mine),), weights[holders.index(axis.rank)] / sum(weights), dtype=torch.float64))
    return torch.cat(found)


def _held_parts(length, axis, pieces, units, heads):
    """For each part the entries that this rank holds, and the ranks that hold the same."""
    parts = torch.arange(length).split(length // pieces if isinstance(pieces, int) else list(pieces))
    counts = heads if isinstance(heads, (list, tuple)) else [heads] * len(parts)
    for part, count in zip(parts, counts):
        blocks = part.view(units or len(part), -1)
        if len(blocks) >= axis.size:
            yield blocks.tensor_split(axis.size)[axis.rank].reshape(-1), [axis.rank]
            continue
        groups = torch.arange(axis.size).tensor_split(len(blocks))  # the ranks that share each block
        block = next(i for i, ranks in enumerate(groups) if axis.rank in ranks.tolist())
        ranks = groups[block].tolist()
        if count is None:
            yield blocks[block], ranks
        else:
            of_heads = blocks[block].view(count // len(blocks), -1).tensor_split(len(ranks))
            yield of_heads[ranks.index(axis.rank)].reshape(-1), [axis.rank]


def take(tensor, held):
    """This rank's entries of the last dimension; all of them where `held` is None."""
    return tensor.detach().clone() if held is None else tensor.detach()[..., held].clone()


def assert_same_as_native(layer, native, x, into=None, out=None, close=None, share=None):
    """Forward and backward of both with the same whole input and the same whole output gradient.

    Args:
        into, out: entries of the input's and the output's last dimension that are on this rank; None for all.
        share: this rank's share of the output gradient of each entry of `out`, where several ranks hold it.
        close: tolerances of `torch.testing.assert_close`.
    """
    close = EXACT if close is None else close
    whole, mine = x.detach().clone(), take(x, into)
    if x.is_floating_point():
        whole.requires_grad_()
        mine.requires_grad_()
    native.zero_grad()
    layer.zero_grad()
    wanted, found = native(whole), layer(mine)
    upstream = noise(*wanted.shape, seed=5, dtype=wanted.dtype)
    wanted.backward(upstream)
    found.backward(take(upstream, out) if share is None else take(upstream, out) * share)
    torch.testing.assert_close(found, take(wanted, out), **close)
    if x.is_floating_point():
        torch.testing.assert_close(mine.grad, take(whole.grad, into), **close)
    assert_same_tensors(layer, {n: p.grad for n, p in native.named_parameters()}, lambda p: p.grad, close)


def assert_same_tensors(layer, wanted, read, close):
    """What the ranks hold of each parameter, put together by the layouts, is what the native layer holds."""
    found = gather_parameters(layer, read, {}, Axis.of(None))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.missing == 0, f"no rank holds {tensor.missing} entries of {name}"
        assert tensor.spread == 0.0, f"ranks hold different values of the same entry of {name}"
        torch.testing.assert_close(tensor.value, wanted[name], **close)


def assert_holds_weights_of(layer, native):
    """The ranks together hold the native layer's weights, bit for bit, in storage of just that size."""
    weights = {name: parameter.detach() for name, parameter in native.named_parameters()}
    assert_same_tensors(layer, weights, lambda p: p, {"rtol": 0, "atol": 0})
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, nn.Parameter), name
        assert parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name
