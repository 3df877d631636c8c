"""The schedule that torch and transformers lack."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

from colonnade.errors import ConfigError
from colonnade.optim import MultiStepWarmupLR


def sgd():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return SGD([{"params": [first]}, {"params": [second], "lr": 0.1}], lr=1.0)


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_the_rate_rises_and_falls_by_steps():
    optimizer = sgd()
    found = rates(optimizer, MultiStepWarmupLR(optimizer, [6, 8], warmup_steps=4, gamma=0.5), 10)
    wanted = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert [first for first, _ in found] == pytest.approx(wanted)
    assert [second for _, second in found] == pytest.approx([0.1 * rate for rate in wanted])


def test_without_warm_up_it_is_that_of_torch():
    one, other = sgd(), sgd()
    found = rates(one, MultiStepWarmupLR(one, [3, 3, 5]), 8)
    wanted = rates(other, MultiStepLR(other, [3, 3, 5]), 8)
    assert all(a == pytest.approx(b) for a, b in zip(found, wanted))


def test_a_loaded_schedule_goes_on_exactly():
    optimizer = sgd()
    schedule = MultiStepWarmupLR(optimizer, [6, 8], warmup_steps=4)
    rates(optimizer, schedule, 3)
    other = sgd()
    again = MultiStepWarmupLR(other, [6, 8], warmup_steps=4)
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(schedule.state_dict())
    assert rates(optimizer, schedule, 7) == rates(other, again, 7)


@pytest.mark.parametrize("milestones, warmup", [([], 0), ([2, 9], 4), ([3], -1)])
def test_milestones_lie_after_the_warm_up(milestones, warmup):
    with pytest.raises(ConfigError, match="milestone"):
        MultiStepWarmupLR(sgd(), milestones, warmup)
