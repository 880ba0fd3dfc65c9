"""Memory that nobody should look at is no number: training in debug mode shows that nobody does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import assert_equal, base_model, config_for, train

HOMES = [(p, o) for p in ("none", "cpu", "nvme") for o in ("none", "cpu", "nvme")]


@pytest.mark.parametrize(("param", "optimizer"), HOMES)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_twenty_steps_in_debug_mode_change_nothing(
    kind: str, param: str, optimizer: str, tmp_path: Path
) -> None:
    """Losses and weights are those of a run without it, accumulation and clipping included."""
    runs = [
        train(
            base_model(),
            config_for(
                tmp_path,
                param=param,
                optimizer=optimizer,
                gradient_clipping=1.0,
                gradient_accumulation_steps=2,
                tiering={"poison": poison},
                **({kind: {"enabled": True}} if kind != "fp32" else {}),
            ),
            steps=20,
        )
        for poison in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("early", [False, True])
def test_an_arena_without_room_to_spare_is_never_read_late(early: bool, tmp_path: Path) -> None:
    """Slots change hands all the time there."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8)]
    model = nn.Sequential(*blocks)
    batches = [torch.randn(4, 64) for _ in range(4)]
    runs = [
        train(
            copy.deepcopy(model),
            config_for(
                tmp_path,
                tiering={"host_memory": "1600KB", "poison": poison, "update_in_backward": early},
            ),
            steps=10,
            batches=batches,
            loss_of=lambda run, batch: run(batch).square().mean(),
        )
        for poison in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def test_what_the_user_still_holds_is_left_alone(tmp_path: Path) -> None:
    """A tensor taken from a weight outlives its use, in debug mode too."""
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(tmp_path, tiering={"poison": True})
    )
    with engine:
        held = engine.module[0].weight.detach()
        values = held.clone()
        for inputs in torch.randint(0, 100, (3, 2, 9)):
            engine.backward(engine(inputs).square().mean())
            engine.step()
        assert torch.equal(held, values)
