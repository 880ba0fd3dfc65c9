"""An update that was decided and not made yet cannot be seen, changed, lost or made twice."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import InfinityEngine
from tests.infinity.conftest import (
    Config,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
)

Weights = dict[str, torch.Tensor]


def _cycle(engine: InfinityEngine, number: int) -> None:
    engine.backward(base_loss(engine, base_batches()[number % 4]))
    engine.step()


def _nothing(_engine: InfinityEngine) -> None:
    """The next forward comes at once."""


def _forget_gradients(engine: InfinityEngine) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()
    engine.module.zero_grad()


def _change_settings(engine: InfinityEngine) -> None:
    for group in engine.optimizer.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.2), eps=1.0, weight_decay=0.9)
    kept = [dict(group) for group in engine.optimizer.param_groups]
    engine.optimizer.param_groups.clear()
    engine.module.state_dict()
    engine.optimizer.param_groups.extend(
        group | {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        for group in kept
    )


def _step_again(engine: InfinityEngine) -> None:
    with pytest.raises(RuntimeError, match=r"without engine\.backward"):
        engine.step()


def _evaluate(engine: InfinityEngine) -> None:
    with torch.no_grad():
        base_loss(engine, base_batches()[0])


def _evaluate_in_inference_mode(engine: InfinityEngine) -> None:
    with torch.inference_mode():
        base_loss(engine, base_batches()[0])


def _use_one_module_in_inference_mode(engine: InfinityEngine) -> None:
    with torch.inference_mode():
        engine.module[3](torch.ones(1, 32))


def _read_one_weight(engine: InfinityEngine) -> None:
    assert float(engine.module[2][0].weight.data.norm()) > 0


def _load_what_is_there(engine: InfinityEngine) -> None:
    engine.module.load_state_dict(engine.module.state_dict())


def _scale_a_weight(engine: InfinityEngine) -> None:
    with torch.no_grad():
        engine.module[2][0].weight.mul_(0.5)


def _scale_a_weights_data(engine: InfinityEngine) -> None:
    engine.module[2][0].weight.data.mul_(0.5)


def _replace_a_weight(engine: InfinityEngine) -> None:
    weight = engine.module[2][0].weight
    weight.data = weight.data * 0.5


def _raise(*_: object) -> None:
    raise ArithmeticError


def _fail_in_the_forward(engine: InfinityEngine) -> None:
    handle = engine.module[2].register_forward_pre_hook(_raise)
    with pytest.raises(ArithmeticError):
        base_loss(engine, base_batches()[1])
    handle.remove()


def _forget_a_backward(engine: InfinityEngine) -> None:
    base_loss(engine, base_batches()[1])
    engine.backward(base_loss(engine, base_batches()[2]))
    engine.zero_grad()


def _flush(engine: InfinityEngine) -> None:
    engine.flush()


def _autocast(engine: InfinityEngine) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        base_loss(engine, base_batches()[1])


BETWEEN = [
    _nothing,
    _forget_gradients,
    _change_settings,
    _step_again,
    _evaluate,
    _evaluate_in_inference_mode,
    _use_one_module_in_inference_mode,
    _read_one_weight,
    _load_what_is_there,
    _scale_a_weight,
    _scale_a_weights_data,
    _replace_a_weight,
    _fail_in_the_forward,
    _forget_a_backward,
    _flush,
    _autocast,
]


def smallest_budget(model: nn.Module, path: Path) -> int:
    """What the error of a budget of one page says would do."""
    with pytest.raises(infinity.ConfigError, match="smallest budget") as error:
        infinity.initialize(model=model, config=config_for(path, tiering={"host_memory": 4096}))
    return int(str(error.value).splitlines()[-1].split()[0].replace(",", ""))


def _train(config: Config, between: Callable[[InfinityEngine], None], *, at_once: bool) -> Weights:
    """Three cycles with something after each step; optionally with the update made in the step."""
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for number in range(3):
            _cycle(engine, number)
            if at_once:
                engine.optimizer.settle()
            between(engine)
        return engine.module.state_dict()


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_whatever_happens_after_a_step_finds_its_update_made(
    between: Callable[[InfinityEngine], None], tmp_path: Path
) -> None:
    """As if the update had been made in the step, to the bit, on every tier."""
    smallest = smallest_budget(base_model(), tmp_path)
    config = config_for(tmp_path, param="none", optimizer="none", gradient_clipping=0.1)
    expected = _train(config, between, at_once=True)
    configs = [config, config_for(tmp_path, param="cpu", optimizer="cpu", gradient_clipping=0.1)]
    configs += [
        config_for(tmp_path, gradient_clipping=0.1, tiering={"host_memory": budget})
        for budget in (smallest, "auto", 2**30)
    ]
    for each in configs:
        assert_equal(_train(each, between, at_once=False), expected)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_step_asked_of_the_optimizer_hides_and_loses_no_change(
    device: str, tmp_path: Path
) -> None:
    """A weight that was looked at just before has its new value, and a change of it counts."""
    model = base_model()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    engine, optimizer, *_ = infinity.initialize(
        model=model, config=config_for(tmp_path, param=device, optimizer=device)
    )
    with engine:
        for batch in base_batches():
            base_loss(plain, batch).backward()
            reference.step()
            reference.zero_grad()
            base_loss(engine, batch).backward()
            seen = float(model[4].weight.detach().norm())
            optimizer.step()
            optimizer.zero_grad()
            assert float(model[4].weight.detach().norm()) != seen
            with torch.no_grad():
                model[4].weight.mul_(0.5)
                plain[4].weight.mul_(0.5)
        assert_close(model.state_dict(), plain.state_dict())


class _TwoLosses(nn.Module):
    """Two weights of one unit, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))

    def forward(self, which: str) -> torch.Tensor:
        return getattr(self, which).square().sum()  # type: ignore[no-any-return]


def test_a_step_of_one_weight_leaves_the_other_weights_forward_valid(tmp_path: Path) -> None:
    """As in torch: two forwards, then backward and step of each, though they share a unit."""
    model = _TwoLosses()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        for _ in range(3):
            for loss in [plain(which) for which in "ab"]:
                loss.backward()
                reference.step()
                reference.zero_grad()
            for loss in [engine(which) for which in "ab"]:
                engine.backward(loss)
                engine.step()
        assert_close(model.state_dict(), plain.state_dict())


class _Interruption:
    """Raises KeyboardInterrupt before a line of the update, counted from 1."""

    _WHERE = ("infinity/optimizer.py", "infinity/unit.py", "infinity/gradients.py")
    _ELSEWHERE = ("release", "forsake", "gather", "_gather_flat", "_whole")

    def __init__(self, at: int) -> None:
        self.lines, self._at = 0, at

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        inside = code.co_filename.endswith(self._WHERE) and code.co_name not in self._ELSEWHERE
        return self._line if inside else None

    def _line(self, _frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._line


def _interrupted(at: int, device: str, path: Path) -> tuple[Weights | None, int]:
    """Two cycles, of which the second's step and its update are interrupted and gone on from.

    Returns:
        The weights, or None if the engine goes on no more; and how many lines could be hit.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    zero = {"sub_group_size": 48}
    config = config_for(path, param=device, optimizer=device, zero_optimization=zero)
    engine, *_ = infinity.initialize(model=model, config=config)
    interruption = _Interruption(at)
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    with engine:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            try:
                with interruption:
                    engine.step()
                    engine.optimizer.settle()
            except KeyboardInterrupt:
                try:
                    if engine.optimizer.has_gradients:
                        engine.step()
                    engine.optimizer.settle()
                    engine(x)
                except infinity.EngineClosedError:
                    return None, interruption.lines
        return engine.module.state_dict(), interruption.lines


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_an_interrupt_of_an_update_neither_loses_nor_repeats_it(
    device: str, tmp_path: Path
) -> None:
    """At any line: training goes on to equal weights, or the engine says that it cannot."""
    expected, lines = _interrupted(0, device, tmp_path)
    assert expected is not None
    outcomes = []
    for at in range(1, lines + 1, 11):
        weights, _ = _interrupted(at, device, tmp_path)
        outcomes.append(weights is None)
        if weights is not None:
            assert_equal(weights, expected)
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_forked_child_makes_no_update_of_its_parents(device: str, tmp_path: Path) -> None:
    """It is told so, where it would wait for threads it lacks; the parent goes on."""
    expected = _train(config_for(tmp_path, param="none", optimizer="none"), _nothing, at_once=True)

    def fork(engine: InfinityEngine) -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(infinity.EngineClosedError):
                    engine.module[1][0].weight.sum()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    config = config_for(tmp_path, param=device, optimizer=device)
    assert_equal(_train(config, fork, at_once=False), expected)
