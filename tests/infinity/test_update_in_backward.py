"""Half of the model is updated under backward: the same result, or a loud refusal."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.plan import ElementBytes, ModelSize, Tiers, UnitSize, make_plan, updated_early
from tests.infinity.conftest import (
    base_batches,
    base_loss,
    base_model,
    config_for,
    train,
)
from tiering.errors import ConfigError, EngineClosedError
from tiering.spec import Tier


def early(path: Path, **extra: Any) -> dict[str, Any]:
    """The base configuration with early updates."""
    tiering = {"update_in_backward": True, **extra.pop("tiering", {})}
    return config_for(path, tiering=tiering, **extra)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_bit_is_different(tier: str, bf16: bool, accumulation: int, tmp_path: Path) -> None:
    """Losses, weights and the reported norm."""
    extra = {"bf16": {"enabled": bf16}, "gradient_accumulation_steps": accumulation}
    found = []
    for make in (config_for, early):
        config = make(tmp_path, param=tier, optimizer=tier, **extra)
        found.append(train(base_model(), config, steps=8))
    (losses, weights), (early_losses, early_weights) = found
    assert early_losses == losses
    assert all(torch.equal(early_weights[name], weights[name]) for name in weights)


def test_the_norm_is_of_all_gradients(tmp_path: Path) -> None:
    """Of those used already too."""
    norms = []
    for make in (config_for, early):
        engine, *_ = infinity.initialize(model=base_model(), config=make(tmp_path))
        with engine:
            for batch in base_batches():
                engine.backward(base_loss(engine, batch))
                engine.step()
                norms.append(engine.get_global_grad_norm())
    assert norms[:4] == norms[4:]


def test_half_of_the_model_is_updated_when_backward_ends(tmp_path: Path) -> None:
    """And the other half waits for the next forward."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        spent = [gradients.is_spent for gradients in engine.optimizer._gradients]
        assert not spent[0]
        assert any(spent)
        assert not engine.optimizer.is_due
        engine.step()
        assert engine.optimizer.is_due


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"gradient_clipping": 1.0}, r"gradient_clipping is 1\.0"),
        ({"fp16": {"enabled": True}}, "fp16.enabled may refuse a step"),
        ({"fp16": {"enabled": "auto"}}, "the model's weights are fp16"),
        ({"tiering": {"nonfinite_gradients": "skip"}}, "nonfinite_gradients may refuse a step"),
        ({"tiering": {"nonfinite_gradients": "raise"}}, "nonfinite_gradients may refuse a step"),
    ],
)
def test_what_needs_all_gradients_first_is_refused_with_it(
    extra: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Half of the model would have been updated by then."""
    with pytest.raises(ConfigError, match=f"{reason}(?s:.*)update_in_backward"):
        infinity.initialize(model=base_model().half(), config=early(tmp_path, **extra))


def test_gradients_that_were_used_cannot_be_forgotten(tmp_path: Path) -> None:
    """Training goes on if the step is made."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        with pytest.raises(RuntimeError, match="can't be forgotten"):
            engine.zero_grad()
        engine.step()
        engine.zero_grad()
        engine.backward(base_loss(engine, base_batches()[1]))
        engine.step()


def test_settings_changed_after_backward_end_the_training(tmp_path: Path) -> None:
    """A part of the model was updated by the old ones."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        engine.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(RuntimeError, match="settings were changed after backward"):
            engine.step()
        with pytest.raises(EngineClosedError, match="of different steps"):
            base_loss(engine, base_batches()[0])


@pytest.mark.parametrize("change", ["in place", "data", "load"])
def test_weights_changed_after_backward_end_the_training(change: str, tmp_path: Path) -> None:
    """Half of the model was updated from the old ones."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        if change == "load":
            engine.module.load_state_dict(base_model().state_dict())
        for parameter in engine.parameters() if change != "load" else ():
            with torch.no_grad():
                (parameter if change == "in place" else parameter.data).mul_(0.5)
        with pytest.raises(RuntimeError, match="weights were changed after backward"):
            engine.step()


def test_a_weight_used_in_backward_after_its_update_is_refused(tmp_path: Path) -> None:
    """A recomputation would have another result than with the weight of the forward."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        loss = base_loss(engine, base_batches()[0])
        looked_at: list[float] = []

        def look(_gradient: torch.Tensor) -> None:
            looked_at.extend(float(p.detach().sum()) for p in engine.parameters())

        engine.module[0].weight.register_hook(look)
        with pytest.raises(RuntimeError, match="under which it was updated already"):
            engine.backward(loss)


def test_a_second_backward_before_the_step_is_refused(tmp_path: Path) -> None:
    """It would add to gradients that are gone."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        with pytest.raises(RuntimeError, match=r"updated.* already"):
            engine.backward(base_loss(engine, base_batches()[1]))
        with pytest.raises(EngineClosedError, match="backward was interrupted"):
            engine.step()


@pytest.mark.parametrize("look", ["step", "zero_grad", "flush", "forward"])
def test_a_backward_of_ones_own_that_fails_half_way_ends_the_training(
    look: str, tmp_path: Path
) -> None:
    """The engine learns of it by the next call, whichever that is."""
    engine, *_ = infinity.initialize(model=base_model(), config=early(tmp_path))
    with engine:
        loss = base_loss(engine, base_batches()[0])
        engine.module[0].weight.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        with suppress(RuntimeError, EngineClosedError):
            engine(base_batches()[0][0]) if look == "forward" else getattr(engine, look)()
        with pytest.raises(EngineClosedError, match="backward was interrupted when a part"):
            engine.step()


def test_a_backward_that_fails_half_way_ends_the_training(tmp_path: Path) -> None:
    """Some weights are new by then; the reason is named whatever is tried next."""
    model = base_model()
    engine, *_ = infinity.initialize(model=model, config=early(tmp_path))
    with engine:
        loss = base_loss(engine, base_batches()[0])
        model[0].weight.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        for call in (engine.step, engine.zero_grad, engine.flush):
            with pytest.raises(EngineClosedError, match="backward was interrupted by ZeroDivision"):
                call()


def _fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_that_have_to_wait_have_room_on_every_tier(
    accumulation: int, tmp_path: Path
) -> None:
    """Of units with a parameter that gets none, and of micro-batches before the last."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))
            self.unused = nn.ParameterList(torch.zeros(2) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    batches = [torch.full((2, 128), float(n)) for n in range(6)]
    found = [
        train(
            Half(),
            make(tmp_path, param=tier, optimizer=tier, gradient_accumulation_steps=accumulation),
            steps=6,
            batches=batches,
            loss_of=lambda module, batch: module(batch),
        )[0]
        for tier in ("cpu", "nvme")
        for make in (config_for, early)
    ]
    assert found[0] == found[1] == found[2] == found[3]


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(50, 24)
        self.mixed = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.head(self.mixed(self.tokens(ids)))
        return logits


def test_a_tied_weight_is_updated_after_all_its_uses(tmp_path: Path) -> None:
    """Its gradient is complete only then."""
    batches = [(ids % 50, targets % 50) for ids, targets in base_batches()]
    found = [
        train(Tied(), make(tmp_path), steps=4, batches=batches, loss_of=base_loss)
        for make in (config_for, early)
    ]
    assert found[0][0] == found[1][0]


def test_about_half_of_the_model_is_updated_early_wherever_backward_is() -> None:
    """By elements of what is trained; the first unit waits, whose weights are needed at once."""
    assert updated_early([10, 10, 10, 10]) == [False, True, False, True]
    assert updated_early([40, 10, 10]) == [False, True, True]
    assert updated_early([10, 10, 10, 40]) == [False, False, False, True]
    assert updated_early([10, 0, 10]) == [False, False, True]
    assert updated_early([0, 10, 10]) == [False, False, True]
    assert updated_early([10]) == [False]
    assert updated_early([0, 0]) == [False, False]
    assert updated_early([]) == []
    blocks = updated_early([20, *[10] * 24])
    assert sum(blocks) == 13
    assert not any(blocks[i : i + 2] == [False] * 2 for i in range(1, 24))


def test_early_gradients_need_little_room() -> None:
    """Two at once, not all."""
    gradient = [
        make_plan(
            ModelSize(
                [UnitSize(2**20, True, ElementBytes(2, 2), is_early) for _ in range(8)], 2**21, 2
            ),
            Tiers(Tier.NVME, Tier.NVME),
        )
        for is_early in (False, True)
    ]
    assert [dict(plan.terms)["gradients"] for plan in gradient] == [2**24, 2**22]


def test_a_gradient_that_was_used_under_backward_is_not_set_or_read(tmp_path: Path) -> None:
    """It would be a second update of the same step."""
    model = base_model()
    config = config_for(tmp_path, tiering={"update_in_backward": True})
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        last = model[4].weight
        with pytest.raises(RuntimeError, match=r"updated.* already"):
            engine.set_state(last, "gradient", torch.ones(last.shape))
        with pytest.raises(RuntimeError, match=r"updated.* already"):
            engine.get_state(last, "gradient")
