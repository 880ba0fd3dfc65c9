"""Parameters of odd shapes: scalars, nothing at all, and sizes that divide by nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.comm import Communicator
from tests.infinity.conftest import Config, Reference, Weights, assert_close, config_for
from tests.infinity.ranks import RankPool

SHAPES = ((), (1,), (3,), (7, 1), (1003,), (2, 3, 5), (0, 8))
STEPS = 3


class Odd(nn.Module):
    """All shapes, and a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in SHAPES])
        self.empty = nn.Linear(8, 0, bias=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss that all of them are in."""
        nothing = self.empty(x).sum()
        return sum(((p * x.sum()).square().sum() for p in self.all), nothing + self.last(x).mean())


def inputs(step: int) -> torch.Tensor:
    """Four samples."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) / 8


def train_odd(config: Config) -> tuple[Weights, list[tuple[int, ...]]]:
    """This rank's samples of every step; returns the weights, and the shapes while released."""
    comm, model = Communicator(), Odd()
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for step in range(STEPS):
            engine.backward(engine(inputs(step)[comm.rank :: comm.size]))
            engine.step()
        shapes = [tuple(p.shape) for p in model.parameters()]
        return engine.module.state_dict(), shapes


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_odd_shapes_train_as_in_plain_torch_and_stay_what_they_are(
    size: int, home: str, on_ranks: RankPool, tmp_path: Path
) -> None:
    """On any number of ranks."""
    config = config_for(tmp_path, param=home, optimizer=home)
    plain = Reference(Odd())
    for step in range(STEPS):
        plain.step([plain.model(inputs(step)[rank::size]) for rank in range(size)])
    expected = dict(plain.model.state_dict())
    for weights, shapes in on_ranks(size, train_odd, config):
        assert shapes == [*SHAPES, (0, 8), (3, 8), (3,)]
        assert_close(weights, expected, rtol=1e-5, atol=1e-6)
