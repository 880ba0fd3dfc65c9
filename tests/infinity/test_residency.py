"""What stays in memory is not read again, and what is read is on its way before its use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import config_for
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
