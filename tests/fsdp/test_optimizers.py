"""Which optimizers FSDP takes: those that compare all parameters are refused, those of which nothing is known announced."""

import logging

import pytest
import torch
from torch import nn

from colonnade.booster import Booster
from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.errors import ConfigError
from colonnade.fsdp.shard import log
from colonnade.optim import Lamb
from colonnade.testing.ranks import on_ranks


class ProdigyLike(torch.optim.SGD):
    """Known by its name to derive one rate from all parameters."""


class Unknown(torch.optim.SGD):
    """Says nothing, and is none of torch's own."""


class Elementwise(torch.optim.SGD):
    elementwise = True


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def announced(optimizer_class):
    """What the log says when a model is boosted with such an optimizer."""
    handler, model = Lines(), nn.Linear(4, 4)
    log.addHandler(handler)
    try:
        Booster(plugin=TorchFSDPPlugin(precision="fp32")).boost(model, optimizer_class(model.parameters(), lr=0.1))
    finally:
        log.removeHandler(handler)
    return handler.lines


@on_ranks(2)
def test_an_optimizer_that_compares_all_parameters_is_refused():
    with pytest.raises(ConfigError, match="its step depends on all parameters at once"):
        announced(ProdigyLike)
    with pytest.raises(ConfigError, match="LBFGS is not possible here"):
        announced(torch.optim.LBFGS)


@on_ranks(2)
def test_an_optimizer_of_which_nothing_is_known_is_announced():
    lines = announced(Unknown)
    if torch.distributed.get_rank() == 0:
        assert len(lines) == 1 and "Unknown is given parts of parameters" in lines[0]
        assert "Unknown.elementwise = True" in lines[0]
    for kind in (torch.optim.SGD, torch.optim.AdamW, Elementwise, Lamb):
        assert announced(kind) == []


@on_ranks(1)
def test_one_process_has_whole_parameters():
    for kind in (Unknown, ProdigyLike):
        assert announced(kind) == []
