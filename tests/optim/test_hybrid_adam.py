"""HybridAdam is torch's Adam or AdamW, wherever the state is."""

import copy

import pytest
import torch
from torch import nn

from colonnade.errors import ConfigError
from colonnade.optim import HybridAdam
from tests.optim.optim_cases import relative

SHAPES = [(8, 6), (5,), (3, 4)]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}


def groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0}]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(params, optimizer, steps=range(20)):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if i == 1 and step % 3 == 1 else grad
        optimizer.step()


@pytest.mark.parametrize("state_device", [None, "cpu"])
@pytest.mark.parametrize("adamw", [True, False])
def test_it_is_that_of_torch(adamw, state_device):
    params, others = parameters(), parameters()
    optimizer = HybridAdam(groups(params), adamw_mode=adamw, state_device=state_device, **OPTIONS)
    train(params, optimizer)
    train(others, (torch.optim.AdamW if adamw else torch.optim.Adam)(groups(others), **OPTIONS))
    assert max(relative(a, b) for a, b in zip(params, others)) < 1e-6
    assert [int(optimizer.state[p]["step"]) for p in params] == [20, 13, 20]


def test_16_bit_parameters_are_updated_in_float32_on_the_host():
    """Each step is float32 AdamW on the values as they are, rounded once."""
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = HybridAdam(groups(params), state_device="cpu", **OPTIONS)
    train(params, optimizer)
    wide = [nn.Parameter(p.detach().float()) for p in others]
    oracle = torch.optim.AdamW(groups(wide), **OPTIONS)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        for i, (param, copy_) in enumerate(zip(others, wide)):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            copy_.data.copy_(param)
            copy_.grad = None if i == 1 and step % 3 == 1 else grad.float()
        oracle.step()
        for param, copy_ in zip(others, wide):
            param.data.copy_(copy_)
    assert all(torch.equal(a, b) for a, b in zip(params, others))
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
    assert set(optimizer.state) == set(params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_to_the_bit(dtype):
    params = parameters(dtype)
    optimizer = HybridAdam(groups(params), state_device="cpu", **OPTIONS)
    train(params, optimizer, range(7))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = HybridAdam(groups(others), state_device="cpu", **OPTIONS)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["params"] for group in again.param_groups] == [others[:2], others[2:]]
    for pair in ((params, optimizer), (others, again)):
        train(*pair, range(7, 20))
    assert all(torch.equal(a, b) for a, b in zip(params, others))


def test_hooks_are_called_once_a_step():
    weight = nn.Parameter(torch.zeros(2))
    torch.optim.Adam([weight])  # torch now calls hooks around Adam.step too
    optimizer, calls = HybridAdam([weight]), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert calls == [1]


def test_a_group_added_later_keeps_its_state_on_the_host_too():
    first, second = parameters(torch.bfloat16)[:2]
    optimizer = HybridAdam([first], state_device="cpu")
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert optimizer.state[second]["exp_avg"].dtype == torch.float32
    assert first not in optimizer.state


def test_an_unknown_state_device_is_refused():
    with pytest.raises(ConfigError, match="cannot keep its state on 'nvme'"):
        HybridAdam([nn.Parameter(torch.zeros(2))], state_device="nvme")
