"""Ctrl-C anywhere: training goes on exactly, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import infinity
from infinity import InfinityEngine
from tests.infinity.conftest import (
    Weights,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
)
from tests.interrupts import Interrupted
from tiering.errors import EngineClosedError

_PLACES = 8  # of an act, evenly spread


def evaluate(engine: InfinityEngine) -> None:
    """One forward."""
    with torch.no_grad():
        base_loss(engine, base_batches()[1])


def train(engine: InfinityEngine, numbers: Sequence[int] = (1,)) -> None:
    """One step a batch."""
    for number in numbers:
        engine.backward(base_loss(engine, base_batches()[number]))
        engine.step()


def weights_after(path: Path, home: str, numbers: Sequence[int]) -> Weights:
    """Of a training without interrupts."""
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(path, param=home, optimizer=home)
    )
    with engine:
        train(engine, numbers)
        return engine.module.state_dict()


def interrupted(
    path: Path, home: str, act: Callable[[InfinityEngine], None], nth: int
) -> tuple[int, Weights | None]:
    """Interrupt an act at its nth call and train on; None: the engine has said that it cannot."""
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(path, param=home, optimizer=home)
    )
    with engine:
        train(engine, [0])
        engine.flush()
        with Interrupted(nth) as interrupt, suppress(KeyboardInterrupt):
            act(engine)
        torch.set_grad_enabled(True)  # torch's own guard may be what was interrupted
        try:
            engine.zero_grad()
            train(engine, [2, 3])
            return interrupt.calls, engine.module.state_dict()
        except EngineClosedError:
            return interrupt.calls, None


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("act", [evaluate, train])
def test_an_interrupt_anywhere_is_gone_on_from(
    act: Callable[[InfinityEngine], None], home: str, tmp_path: Path
) -> None:
    """The step that was interrupted has been made as a whole, or not at all."""
    expected = [weights_after(tmp_path, home, numbers) for numbers in ((0, 2, 3), (0, 1, 2, 3))]
    calls, _ = interrupted(tmp_path, home, act, 0)
    outcomes = [
        interrupted(tmp_path, home, act, nth)[1]
        for nth in range(calls // _PLACES, calls, calls // _PLACES)
    ]
    went_on = [weights for weights in outcomes if weights is not None]
    assert went_on
    for weights in went_on:
        assert any(
            all(torch.equal(weights[name], other[name]) for name in weights) for other in expected
        )
    assert act is train or len(went_on) == len(outcomes)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_gradient_that_nobody_took_is_not_added_to_the_next(
    error: type[BaseException], is_early: bool, tmp_path: Path
) -> None:
    """What comes between autograd and the engine leaves it on the parameter."""
    config = config_for(tmp_path, tiering={"update_in_backward": is_early})
    model, pending = base_model(), [error]

    def fail(_parameter: torch.Tensor) -> None:
        if pending:
            raise pending.pop()

    model[4].weight.register_post_accumulate_grad_hook(fail)  # before any update under backward
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        with pytest.raises(error):
            train(engine)
        engine.zero_grad()
        train(engine, [0])
        weights = engine.module.state_dict()
    assert_equal(weights, weights_after(tmp_path, "nvme", [0]))


def test_a_gradient_that_somebody_put_there_has_no_effect(tmp_path: Path) -> None:
    """Gradients are the engine's: neither this step nor the next has it."""
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        for parameter in engine.parameters():
            parameter.grad = torch.full(parameter.shape, 1000.0)
        engine.step()
        train(engine, [1])
        weights = engine.module.state_dict()
    assert_equal(weights, weights_after(tmp_path, "nvme", [0, 1]))
