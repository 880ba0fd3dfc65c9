"""Gradients of several micro-batches and ranks: who divides, measures and clips them, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import InfinityEngine
from infinity.comm import Communicator
from tests.infinity.conftest import (
    Config,
    Reference,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    train_part,
    without_optimizer,
)
from tests.infinity.ranks import RankPool

HOMES = ("none", "cpu", "nvme")


class Slopes(nn.Module):
    """Its gradients are its inputs.

    Args:
        sizes: elements of its parameters.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, *slopes: torch.Tensor) -> torch.Tensor:
        """The sum of all products."""
        return sum(((p * s).sum() for p, s in zip(self.all, slopes, strict=True)), torch.zeros(()))


# -- accumulation


def _step_each_time(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    for loss in losses:
        engine.backward(loss)
        engine.step()


def _step_at_the_end(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    for loss in losses:
        engine.backward(loss)
    engine.step()


def _no_sync(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    """As with DistributedDataParallel."""
    for number in range(4):
        with engine.no_sync() if number < 3 else nullcontext():
            engine.backward(next(losses))
    engine.step()


def _boundary_by_hand(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    """As Accelerate does it."""
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number == 3)
        engine.backward(loss)
        engine.step()


def _divided_by_hand(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    for loss in losses:
        engine.backward(loss / 4, scale_wrt_gas=False)
        engine.step()


def _backward_of_ones_own(engine: InfinityEngine, losses: Iterator[torch.Tensor]) -> None:
    for loss in losses:
        engine.scale(loss).backward()
        engine.step()


@pytest.mark.parametrize(
    "way",
    [
        _step_each_time,
        _step_at_the_end,
        _no_sync,
        _boundary_by_hand,
        _divided_by_hand,
        _backward_of_ones_own,
    ],
)
def test_every_way_to_accumulate_gives_the_mean_of_the_micro_batches(
    way: Callable[[InfinityEngine, Iterator[torch.Tensor]], None], tmp_path: Path
) -> None:
    reference = Reference(base_model())
    config = config_for(tmp_path, gradient_accumulation_steps=4)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for _ in range(2):
            reference.step([base_loss(reference.model, batch) for batch in base_batches()])
            way(engine, (base_loss(engine, batch) for batch in base_batches()))
            assert engine.was_step_applied()
        assert (engine.global_steps, engine.micro_steps) == (2, 8)
        assert_close(engine.module.state_dict(), dict(reference.model.state_dict()))


def test_the_boundary_is_the_last_micro_batch_from_before_its_forward_to_its_step(
    tmp_path: Path,
) -> None:
    """What a loop sees before the forward, before the step, and behind it; and what it sets."""
    config = config_for(tmp_path, gradient_accumulation_steps=3)
    engine, *_ = infinity.initialize(model=base_model(), config=config)

    def seen() -> tuple[bool, bool, bool]:
        before = engine.is_gradient_accumulation_boundary()
        loss = base_loss(engine, base_batches()[0])
        assert engine.is_gradient_accumulation_boundary() == before
        engine.backward(loss)
        between = engine.is_gradient_accumulation_boundary()
        engine.step()
        return before, between, engine.was_step_applied()

    with engine:
        for _ in range(2):
            assert [seen() for _ in range(3)] == [(False,) * 3, (False,) * 3, (True,) * 3]
        engine.set_gradient_accumulation_boundary(True)
        assert seen() == (True, True, True)
        engine.set_gradient_accumulation_boundary(False)
        assert [seen() for _ in range(4)] == [(False,) * 3] * 4


def test_any_split_of_a_batch_gives_the_same_on_every_tier(tmp_path: Path) -> None:
    """Weights and gradient norms: bit for bit over the tiers, up to rounding over the splits."""
    expected: tuple[list[float], dict[str, torch.Tensor]] | None = None
    for accumulation in (1, 2, 4, 8):
        found = [
            train_part(config_for(tmp_path, param=home, optimizer=home), 3, accumulation)
            for home in HOMES
        ]
        for norms, weights in found[1:]:
            assert norms == found[0][0]
            assert_equal(weights, found[0][1])
        expected = expected or found[0]
        assert found[0][0] == pytest.approx(expected[0], rel=1e-6)
        assert_close(found[0][1], expected[1], atol=2e-7)


def _twice(engine: InfinityEngine, x: torch.Tensor) -> torch.Tensor:
    """A loss that mixes the engine and the module itself."""
    return (engine(x) + engine.module(x)) / 2


@pytest.mark.parametrize(
    ("loss_of", "arguments", "expected"),
    [
        (lambda engine, x: engine(x), {}, 1.0),
        (lambda engine, x: engine(x), {"scale_wrt_gas": False}, 8.0),
        (_twice, {}, 1.0),
    ],
)
def test_a_loss_is_divided_once_by_the_micro_batches_unless_told_not_to(
    loss_of: Callable[[InfinityEngine, torch.Tensor], torch.Tensor],
    arguments: dict[str, Any],
    expected: float,
    tmp_path: Path,
) -> None:
    """Eight micro-batches whose gradient is 1; the loss comes back as it was given."""
    config = config_for(tmp_path, gradient_accumulation_steps=8)
    engine, *_ = infinity.initialize(model=Slopes(5), config=config)
    with engine:
        for _ in range(8):
            loss = loss_of(engine, torch.ones(5))
            assert engine.backward(loss, **arguments) is loss
        gradient = engine.get_state(engine.module.all[0], "gradient")
        engine.step()
        assert gradient.tolist() == [expected] * 5
        assert engine.get_global_grad_norm() == pytest.approx(expected * 5**0.5)


# -- reduction


def gradients_of(config: Config, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Of every parameter after one backward, with inputs that differ from rank to rank."""
    engine, *_ = infinity.initialize(model=Slopes(*sizes), config=config)
    with engine:
        engine.backward(engine(*slopes(sizes, Communicator().rank)))
        found = [engine.get_state(p, "gradient") for p in engine.module.all]
        engine.step()
        return found


def slopes(sizes: Sequence[int], rank: int) -> list[torch.Tensor]:
    """This rank's inputs."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize(
    ("bucket", "sizes"), [(4096, (4095, 4096, 4097, 20000)), ("auto", (64 * 64,))]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_as_large_as_the_bucket_have_whole_gradients(
    size: int,
    stage: int,
    bucket: object,
    sizes: Sequence[int],
    on_ranks: RankPool,
    tmp_path: Path,
) -> None:
    """And those that are larger or smaller; every element is the mean over the ranks."""
    config = config_for(
        tmp_path,
        param="nvme" if stage == 3 else "none",
        zero_optimization={"stage": stage, "reduce_bucket_size": bucket},
    )
    expected = [
        sum(given) / size for given in zip(*(slopes(sizes, r) for r in range(size)), strict=True)
    ]
    for found in on_ranks(size, gradients_of, config, sizes):
        for gradient, mean in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, mean, rtol=1e-6, atol=1e-7)


# -- clipping


def descend(config: Config) -> tuple[float, torch.Tensor, torch.Tensor]:
    """One step down a slope of [3, 4] with rate 1; returns norm, weights and first moments.

    Adam with a rate and an epsilon that are alike and very large is plain gradient descent.
    """
    model, comm = Slopes(2), Communicator()
    adam = torch.optim.Adam(model.parameters(), lr=1e6, eps=1e6, betas=(0.5, 0.5))
    engine, *_ = infinity.initialize(model=model, config=without_optimizer(config), optimizer=adam)
    mine = torch.tensor([3.0, 4.0]) if comm.size == 1 else torch.zeros(2)
    if comm.size > 1:  # so that the mean is the same
        mine[comm.rank] = (3.0 + comm.rank) * comm.size
    with engine:
        engine.backward(engine(mine))
        engine.step()
        weights = engine.module.state_dict()["all.0"]
        return (
            engine.get_global_grad_norm(),
            weights,
            engine.get_state(model.all[0], "exp_avg") / 0.5,
        )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scale", [None, 1024])
@pytest.mark.parametrize("home", HOMES)
def test_the_norm_is_that_before_clipping_and_what_is_applied_is_clipped(
    home: str, scale: int | None, size: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """A gradient of [3, 4] with a norm of 5, clipped to 1; with and without fp16's scale."""
    config = config_for(tmp_path, param=home, optimizer=home, gradient_clipping=1.0)
    if scale is not None:
        config["fp16"] = {"enabled": True, "loss_scale": scale}
    for norm, weights, applied in on_ranks(size, descend, config):
        assert norm == pytest.approx(5.0, rel=1e-6)
        assert applied.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
        rounding = 2**-11 if scale else 2e-6
        assert weights.tolist() == pytest.approx([-0.6, -0.8], rel=rounding)
