"""Several engines in one program: each pages its own model, and one graph may go through all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import InfinityEngine
from tests.infinity.conftest import Reference, assert_close, config_for

HOMES = ("none", "cpu", "nvme")


def small(seed: int, inputs: int = 6) -> nn.Module:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, 6))


def paged(stack: ExitStack, path: Path, home: str, seed: int) -> InfinityEngine:
    """An engine of a small model."""
    config = config_for(path, param=home, optimizer=home)
    return stack.enter_context(infinity.initialize(model=small(seed), config=config).engine)


@pytest.mark.parametrize("home", HOMES)
def test_a_generator_and_a_critic_train_against_each_other(home: str, tmp_path: Path) -> None:
    """What the critic gets from the generator's loss is forgotten; five rounds as in torch."""
    plain_g, plain_d = Reference(small(0)), Reference(small(1))
    with ExitStack() as stack:
        g, d = (paged(stack, tmp_path, home, seed) for seed in (0, 1))
        for z in torch.randn(5, 4, 6):
            real = torch.ones(4, 6)
            d.backward((d(g(z).detach()) - d(real)).square().mean())
            d.step()
            fake = plain_g.model(z).detach()
            plain_d.step([(plain_d.model(fake) - plain_d.model(real)).square().mean()])
            g.backward(d(g(z)).square().mean())
            g.step()
            d.zero_grad()
            plain_g.step([plain_d.model(plain_g.model(z)).square().mean()])
            plain_d.model.zero_grad()
        assert_close(g.module.state_dict(), dict(plain_g.model.state_dict()))
        assert_close(d.module.state_dict(), dict(plain_d.model.state_dict()))


@pytest.mark.parametrize("backward_by", ["the loss", "the first", "the second"])
def test_one_loss_goes_through_two_engines_that_both_step(backward_by: str, tmp_path: Path) -> None:
    """One with everything on the drive, the other with nothing there."""

    def loss_of(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return a(x).sum() + b(a(x)).mean()

    plain_a, plain_b = Reference(small(0)), Reference(small(1))
    with ExitStack() as stack:
        a, b = paged(stack, tmp_path, "nvme", 0), paged(stack, tmp_path, "none", 1)
        for x in torch.randn(3, 4, 6):
            loss = loss_of(a, b, x)
            if backward_by == "the loss":
                loss.backward()
            else:
                (a if backward_by == "the first" else b).backward(loss)
            a.step()
            b.step()
            loss_of(plain_a.model, plain_b.model, x).backward()
            for plain in (plain_a, plain_b):
                plain.step([])
        assert_close(a.module.state_dict(), dict(plain_a.model.state_dict()))
        assert_close(b.module.state_dict(), dict(plain_b.model.state_dict()))
