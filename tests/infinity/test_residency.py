"""What stays in memory is not read again, and what is read is on its way before its use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import assert_equal, config_for
from tiering.aio import FaultRule, Faults
from tiering.aio.config import FaultAction

LAYERS, WIDTH = 20, 64
WEIGHTS_BYTES = LAYERS * 4 * WIDTH * WIDTH


def layers() -> nn.Module:
    """Equal ones, each a unit."""
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def read_bytes_of_a_pass(path: Path, **zero: Any) -> int:
    """By a forward without gradients, when passes repeat."""
    engine, *_ = infinity.initialize(
        model=layers(), config=config_for(path, optimizer="none", zero_optimization=zero)
    )
    with engine, torch.no_grad():
        for _ in range(3):
            before = engine.stats().nvme_read_bytes
            engine(torch.ones(2, WIDTH))
        return engine.stats().nvme_read_bytes - before


def test_weights_within_max_in_cpu_are_not_read_again(tmp_path: Path) -> None:
    """None, half, and all of them."""
    found = [
        read_bytes_of_a_pass(
            tmp_path,
            offload_param={"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": numel},
        )
        for numel in (0, LAYERS * WIDTH * WIDTH / 2, 1e9)
    ]
    assert found[0] <= WEIGHTS_BYTES
    assert found[1] <= WEIGHTS_BYTES / 2
    assert found[0] > found[1] > found[2] == 0


@pytest.mark.parametrize("bucket", [0, 1, 10**9])
def test_weights_are_fetched_no_farther_ahead_than_the_bucket(bucket: int, tmp_path: Path) -> None:
    """None at 0, one unit at 1; and the drive is waited for where none are."""
    engine, *_ = infinity.initialize(
        model=layers(),
        config=config_for(
            tmp_path, optimizer="none", zero_optimization={"stage3_prefetch_bucket_size": bucket}
        ),
    )
    with engine, torch.no_grad():
        for _ in range(3):
            before = engine.stats()
            engine(torch.ones(2, WIDTH))
        after = engine.stats()
    misses = after.prefetch_misses - before.prefetch_misses
    assert (misses > LAYERS / 2) == (bucket == 0)
    assert (misses == 0) == (bucket > 0)


def test_reads_of_a_slow_drive_are_begun_before_their_use(tmp_path: Path) -> None:
    """From the third step on, when the order is known, 95 in 100 are there or on their way."""
    slow = Faults(rules=(FaultRule(FaultAction.DELAY, value=2000, every=1, writes=False),))
    engine, *_ = infinity.initialize(model=layers(), config=config_for(tmp_path), faults=slow)
    with engine:
        for step in range(5):
            if step == 2:
                before = engine.stats()
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        after = engine.stats()
    hits = after.prefetch_hits - before.prefetch_hits
    misses = after.prefetch_misses - before.prefetch_misses
    assert hits >= 0.95 * (hits + misses)
    assert after.prefetch_wasted == before.prefetch_wasted


def test_what_device_memory_holds_is_not_moved_and_changes_no_number(tmp_path: Path) -> None:
    """Gradients, then weights, then states; a budget for all of them leaves the drive idle."""
    numel = LAYERS * WIDTH * WIDTH
    found = []
    for bytes_a_parameter in (0, 4, 6, 8, 14, 21):
        config = config_for(tmp_path, gradient_clipping=1.0)
        if bytes_a_parameter:
            config["tiering"] = {"device_memory": bytes_a_parameter * numel}
        engine, *_ = infinity.initialize(model=layers(), config=config)
        with engine:
            for step in range(5):
                if step == 3:
                    before = engine.stats()
                engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
                engine.step()
            weights = engine.module.state_dict()
            after = engine.stats()
        moved = after.nvme_read_bytes + after.nvme_written_bytes
        moved -= before.nvme_read_bytes + before.nvme_written_bytes
        found.append((moved, after.arena_budget_bytes, weights))
    moved_bytes = [moved for moved, _, _ in found]
    # Gradients free room in the host, which is no budget here: about the same is moved.
    assert moved_bytes[1] == pytest.approx(moved_bytes[0], rel=0.1)
    assert moved_bytes[1:] == sorted(moved_bytes[1:], reverse=True)
    assert moved_bytes[-1] == 0
    arenas = [arena for _, arena, _ in found]
    assert arenas[1] < arenas[0] - 3 * numel  # gradients of fp32
    assert arenas[-1] < 2**17
    for _, _, weights in found:
        assert_equal(weights, found[0][2])
