"""The update: every parameter by its own group, its own count of steps, in whatever sub-group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.lr_schedules import WarmupDecayLR
from tests.infinity.conftest import (
    Reference,
    assert_close,
    assert_equal,
    base_model,
    config_for,
    train,
    without_optimizer,
)
from tiering.errors import ConfigError

HOMES = ("none", "cpu", "nvme")
SIZES = [round(8 * 1.418**number) for number in range(30)]


class Targets(nn.Module):
    """Parameters of given sizes that are drawn to a number."""

    def __init__(self, sizes: Sequence[int], value: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(size) if value is None else torch.full((size,), value))
            for size in sizes
        )

    def forward(self, target: float) -> torch.Tensor:
        """How far they are from it."""
        return sum(((p - target).square().mean() for p in self.all), torch.zeros(()))

    def slope(self) -> torch.Tensor:
        """Their sum: every gradient is 1."""
        return sum((p.sum() for p in self.all), torch.zeros(()))


def test_many_sizes_in_many_sub_groups_train_like_plain_adamw_wherever_they_live(
    tmp_path: Path,
) -> None:
    """Thirty parameters, clipped, two micro-batches, twenty steps: compared after every one."""
    plain = Reference(Targets(SIZES), clip=1.0)
    before = {k: v.clone() for k, v in plain.model.state_dict().items()}
    with ExitStack() as stack:
        engines = []
        for home in HOMES:
            config = config_for(
                tmp_path,
                param=home,
                optimizer=home,
                gradient_clipping=1.0,
                gradient_accumulation_steps=2,
                zero_optimization={"sub_group_size": 10_000},
            )
            engine, *_ = infinity.initialize(model=Targets(SIZES), config=config)
            engines.append(stack.enter_context(engine))
        for step in range(20):
            targets = (0.1 * step, 1.0)
            plain.step([plain.model(target) for target in targets])
            for engine in engines:
                for target in targets:
                    engine.backward(engine(target))
                    engine.step()
            first, *others = (engine.module.state_dict() for engine in engines)
            for other in others:
                assert_equal(other, first)
            assert_close(first, dict(plain.model.state_dict()))
        assert all(not torch.equal(first[name], before[name]) for name in before)


def test_bias_correction_is_the_same_in_every_sub_group(tmp_path: Path) -> None:
    """Weights of 1 with gradients of 1 in five of them: equal to the bit after each step."""
    config = config_for(tmp_path, zero_optimization={"sub_group_size": 64})
    config["optimizer"]["params"] = {"lr": 0.01, "weight_decay": 0.0}
    engine, *_ = infinity.initialize(model=Targets([64] * 5, 1.0), config=config)
    with engine:
        for expected in (0.99, 0.98, 0.97):
            engine.backward(engine.module.slope())
            engine.step()
            weights = torch.cat([p.detach() for p in engine.parameters()])
            assert weights.unique().tolist() == pytest.approx([expected], abs=1e-7)


def test_a_bias_that_gets_a_gradient_on_some_steps_has_a_count_of_its_own(tmp_path: Path) -> None:
    """Beside a weight of the same unit that always gets one."""

    class Sometimes(nn.Linear):
        def forward(self, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
            x, use = batch
            bias = self.bias if use else None
            return nn.functional.linear(x, self.weight, bias).square().mean()

    def loss_of(module: nn.Module, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
        return module(batch)

    model, batches = Sometimes(5, 7), [(torch.randn(4, 5), step % 2 == 0) for step in range(6)]
    expected = Reference(model).train(6, loss_of=loss_of, batches=batches)[1]
    weights = train(model, config_for(tmp_path), steps=6, loss_of=loss_of, batches=batches)[1]
    assert_close(weights, expected)


GROUPS = ((1e-2, 0.0), (1e-4, 0.0), (1e-2, 0.5))


@pytest.mark.parametrize("given_by", ["user", "config"])
def test_each_group_has_its_rate_and_decay_whoever_makes_the_optimizer(
    given_by: str, tmp_path: Path
) -> None:
    """One step from 1 with gradients of 1; then a rate that was changed takes effect."""
    model = Targets([40] * 3, 1.0)
    groups = [
        {"params": [p], "lr": rate, "weight_decay": decay}
        for p, (rate, decay) in zip(model.all, GROUPS, strict=True)
    ]
    arguments = (
        {"optimizer": torch.optim.AdamW(groups)}
        if given_by == "user"
        else {"model_parameters": groups}
    )
    config = config_for(tmp_path, zero_optimization={"sub_group_size": 1e9})
    if given_by == "user":
        config = without_optimizer(config)
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, **arguments)
    with engine:
        engine.backward(model.slope())
        engine.step()
        found = [float(p.detach()[7]) for p in model.all]
        assert found == pytest.approx([0.99, 0.9999, 0.985], abs=1e-6)
        optimizer.param_groups[1]["lr"] = 1e-2
        engine.backward(model.slope())
        engine.step()
        assert float(model.all[1].detach()[7]) == pytest.approx(0.9899, abs=1e-6)


@pytest.mark.parametrize("given_by", ["user", "config"])
def test_empty_groups_keep_their_place_beside_filled_ones(given_by: str, tmp_path: Path) -> None:
    """A schedule with a greatest rate for each steers the one that trains by its own."""
    model = Targets([12, 5], 1.0)
    model.all[0].requires_grad_(False)
    groups = [
        {"params": [], "lr": 1e-3},
        {"params": [model.all[1]], "lr": 1e-4},
        {"params": [], "lr": 1e-5},
    ]
    plain = copy.deepcopy(model)
    plain_groups = [groups[0], {**groups[1], "params": [plain.all[1]]}, groups[2]]
    reference = torch.optim.AdamW(plain_groups, weight_decay=0.01)
    params = {"total_num_steps": 8, "warmup_max_lr": [1e-3, 1e-4, 1e-5], "warmup_num_steps": 3}
    beside = WarmupDecayLR(reference, **params)
    config = config_for(tmp_path, scheduler={"type": "WarmupDecayLR", "params": params})
    arguments = (
        {"optimizer": torch.optim.AdamW(groups, weight_decay=0.01)}
        if given_by == "user"
        else {"model_parameters": groups}
    )
    if given_by == "user":
        config = without_optimizer(config)
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, **arguments)
    rates = []
    with engine:
        assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]
        for _ in range(6):
            engine.backward(engine(0.0))
            engine.step()
            plain(0.0).backward()
            reference.step()
            reference.zero_grad()
            beside.step()
            assert engine.get_lr() == beside.get_last_lr()
            rates.append(engine.get_lr())
        assert_close(engine.module.state_dict(), dict(plain.state_dict()))
    assert [max(rate) for rate in zip(*rates, strict=True)] == pytest.approx([1e-3, 1e-4, 1e-5])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"maximize": True}, "maximize=True"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"lr": -1.0}, r"lr -1\.0"),
        ({"lr": "fast"}, "lr 'fast'"),
        ({"betas": (2, 3)}, r"betas \(2, 3\)"),
        ({"betas": (0.9,)}, r"betas \(0\.9,\)"),
        ({"eps": float("nan")}, "eps nan"),
        ({"weight_decay": -0.1}, r"weight_decay -0\.1"),
    ],
)
def test_what_a_group_cannot_have_is_refused(
    wrong: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """When the engine is made, and when a group is added; the model stays as it was."""
    model = base_model()
    groups = [{"params": list(model.parameters()), **wrong}]
    with pytest.raises(ConfigError, match=f"a group of parameters has {reason}"):
        infinity.initialize(model=model, config=config_for(tmp_path), model_parameters=groups)
    first, *rest = model.parameters()
    engine, optimizer, *_ = infinity.initialize(
        model=model, config=config_for(tmp_path), model_parameters=rest
    )
    with engine, pytest.raises(ConfigError, match=f"a group of parameters has {reason}"):
        optimizer.add_param_group({"params": [first], **wrong})


@pytest.mark.parametrize("switch", ["maximize", "amsgrad"])
def test_what_torchs_optimizer_has_and_ours_has_not_is_refused(switch: str, tmp_path: Path) -> None:
    """With the same words, wherever it was said."""
    model = base_model()
    optimizer = torch.optim.AdamW(model.parameters(), **{switch: True})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"a group of parameters has {switch}=True"):
        infinity.initialize(
            model=model, optimizer=optimizer, config=without_optimizer(config_for(tmp_path))
        )
