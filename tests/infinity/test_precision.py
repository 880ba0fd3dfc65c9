"""16-bit training: loss scales, steps that overflow, and weights that stay in fp32."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.loss_scale import DynamicLossScale, LossScaleError
from tests.infinity.conftest import (
    Config,
    Reference,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
)
from tiering.errors import TieringWarning

HOMES = ("none", "cpu", "nvme")


def fp16(path: Path, home: str = "nvme", **section: Any) -> Config:
    """fp16 with everything at this home."""
    return config_for(path, param=home, optimizer=home, fp16={"enabled": True, **section})


def run(
    engine: infinity.InfinityEngine, overflowing: Sequence[bool]
) -> tuple[list[float], list[bool]]:
    """A step for each, with an infinite loss where asked; returns scales before and outcomes."""
    scales, applied = [], []
    for number, is_bad in enumerate(overflowing):
        scales.append(engine.optimizer.loss_scale)
        loss = base_loss(engine, base_batches()[number % 4])
        engine.backward(loss * torch.inf if is_bad else loss)
        engine.step()
        applied.append(engine.was_step_applied())
    return scales, applied


@pytest.mark.parametrize("home", HOMES)
def test_steps_that_overflow_leave_everything_as_it_was(home: str, tmp_path: Path) -> None:
    """Weights, moments, step counts and schedule equal a run without those batches."""

    def train(bad: int, power: int) -> tuple[dict[str, torch.Tensor], list[float], int]:
        engine, *_ = infinity.initialize(
            model=base_model(),
            config=fp16(tmp_path, home, initial_scale_power=power, hysteresis=2),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        )
        with engine:
            scales, applied = run(engine, [True] * bad)
            assert not any(applied)
            assert engine.skipped_steps == bad
            for batch in base_batches():
                engine.backward(base_loss(engine, batch))
                engine.step()
                assert engine.was_step_applied()
                scales.append(engine.optimizer.loss_scale)
            assert engine.get_lr() == [1e-3 * 0.5**4]
            return engine.module.state_dict(), scales, engine.stats().arena_used_bytes

    skipped, scales, _ = train(3, 16)
    plain, _, _ = train(0, 14)
    assert scales[:4] == [65536, 65536, 32768, 16384]
    assert_equal(skipped, plain)


def test_where_fp16_states_live_changes_nothing(tmp_path: Path) -> None:
    """And the weights are those of plain torch with fp32 masters, within a rounding."""
    found = []
    for home in HOMES:
        engine, *_ = infinity.initialize(
            model=base_model(), config=fp16(tmp_path, home, initial_scale_power=8)
        )
        with engine:
            for batch in base_batches():
                engine.backward(base_loss(engine, batch))
                engine.step()
            found.append((engine.module.state_dict(), engine.get_global_grad_norm()))
    for weights, norm in found[1:]:
        assert_equal(weights, found[0][0])
        assert norm == found[0][1]
    _, expected = Reference(base_model(), storage=torch.float16).train(4)
    assert_close(found[0][0], expected, rtol=2e-3, atol=2e-4)


def test_the_norm_and_clipping_are_those_without_a_scale(tmp_path: Path) -> None:
    """The scale is taken out before anybody sees a gradient."""
    outcomes = []
    for scale in (1, 1024):
        engine, *_ = infinity.initialize(
            model=base_model(),
            config={**fp16(tmp_path, "none", loss_scale=scale), "gradient_clipping": 0.1},
        )
        with engine:
            run(engine, [False] * 3)
            outcomes.append((engine.get_global_grad_norm(), engine.module.state_dict()))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-3)
    assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-2, atol=1e-3)


def test_a_scale_at_its_minimum_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    """After halving as often as it may; the engine is whole, and its weights can be saved."""
    config = fp16(tmp_path, initial_scale_power=2, hysteresis=1, min_loss_scale=1)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    before = copy.deepcopy(dict(base_model().state_dict()))
    with engine:
        scales, _ = run(engine, [True, True])
        assert [*scales, engine.optimizer.loss_scale] == [4, 2, 1]
        with pytest.raises(LossScaleError, match=r"minimum of 1 .*first is that of '0\.weight'"):
            run(engine, [True])
        assert_close(engine.module.state_dict(), before, rtol=1e-3, atol=1e-3)
        assert run(engine, [False])[1] == [True]


def test_a_static_scale_stays_and_too_many_skipped_steps_are_an_error(tmp_path: Path) -> None:
    """Each skipped step is told of."""
    config = fp16(tmp_path, loss_scale=8)
    config["tiering"] = {"max_skipped_steps": 2}
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for _ in range(2):
            with pytest.warns(TieringWarning, match="a step was skipped"):
                run(engine, [True])
        assert engine.optimizer.loss_scale == 8
        with pytest.raises(LossScaleError, match="3 steps in a row"):
            run(engine, [True])


def test_a_backward_of_ones_own_needs_the_scale(tmp_path: Path) -> None:
    """Without it gradients would be thousands of times too small; with it, it is the engine's."""
    config = fp16(tmp_path, "none", loss_scale=1024)
    weights = []
    for own in (False, True):
        engine, *_ = infinity.initialize(model=base_model(), config=config)
        with engine:
            loss = base_loss(engine, base_batches()[0])
            if own:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
            weights.append(engine.module.state_dict())
            base_loss(engine, base_batches()[1]).backward()
            with pytest.raises(RuntimeError, match="without the loss scale"):
                engine.step()
    assert_equal(*weights)


def test_a_part_of_a_loss_without_the_scale_is_refused(tmp_path: Path) -> None:
    """Also where the rest of the micro-batch has it, before or behind."""
    config = fp16(tmp_path, "none", loss_scale=256)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        base_loss(engine, base_batches()[0]).backward()
        with pytest.raises(RuntimeError, match="without the loss scale"):
            engine.backward(base_loss(engine.module, base_batches()[1]))
        engine.zero_grad()
        engine.scale(base_loss(engine, base_batches()[0]))  # never used
        engine.zero_grad()
        base_loss(engine, base_batches()[0]).backward()
        with pytest.raises(RuntimeError, match="without the loss scale"):
            engine.step()


@pytest.mark.parametrize("policy", ["ignore", "skip", "raise"])
def test_gradients_that_are_not_finite_are_ignored_skipped_or_raised_as_chosen(
    policy: str, tmp_path: Path
) -> None:
    """In bf16, which has no loss scale."""
    config = config_for(tmp_path, bf16={"enabled": True}, tiering={"nonfinite_gradients": policy})
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", TieringWarning)
        run(engine, [False])
        if policy == "raise":
            with pytest.raises(LossScaleError, match=r"'0\.weight'"):
                run(engine, [True])
        else:
            run(engine, [True])
            assert engine.skipped_steps == (policy == "skip")
        finite = all(bool(v.isfinite().all()) for v in engine.module.state_dict().values())
        assert finite == (policy != "ignore")


class Routed(nn.Module):
    """A block with a router that must be exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)
        self.router = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weigh two ways by the router, in fp32."""
        assert self.router.weight.dtype is torch.float32
        share = self.router(x.float()).softmax(-1)
        inner = self.inner(x.to(self.inner.weight.dtype)).float()
        return share[..., :1] * inner + share[..., 1:] * x


@pytest.mark.parametrize("home", HOMES)
def test_parameters_that_are_to_stay_fp32_do(home: str, tmp_path: Path) -> None:
    """In the module, in the store, in the update: the values fp32 has, not those of bf16."""
    model = nn.Sequential(*(Routed() for _ in range(3)))
    plain = copy.deepcopy(model)
    config = config_for(
        tmp_path,
        param=home,
        optimizer=home,
        bf16={"enabled": True},
        tiering={"keep_fp32": ["*.router.*"], "compute_dtype": "bf16"},
    )
    for block in plain:
        block.inner.to(torch.bfloat16)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    torch_optimizer = torch.optim.AdamW(masters, lr=1e-3)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
            plain(x).square().mean().backward()
            for weight, master in zip(plain.parameters(), masters, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
            torch_optimizer.step()
            for weight, master in zip(plain.parameters(), masters, strict=True):
                weight.data.copy_(master.detach())
        weights = engine.module.state_dict()
    assert_equal(weights, dict(plain.state_dict()))
    router = weights["0.router.weight"]
    assert router.dtype is torch.float32
    assert not torch.equal(router, router.bfloat16().float())


def test_a_dynamic_scale_follows_its_rule() -> None:
    """Halved by the last of so many overflows, doubled after a window without one."""
    scale = DynamicLossScale(16.0, window=3, hysteresis=2, least=2.0)
    values = []
    for overflow in (True, True, False, False, False, True, True, True):
        scale.update(overflow=overflow)
        values.append(scale.value)
    assert values == [16, 8, 8, 8, 16, 16, 8, 4]
    scale.update(overflow=True)
    with pytest.raises(LossScaleError, match="minimum of 2"):
        scale.update(overflow=True)
