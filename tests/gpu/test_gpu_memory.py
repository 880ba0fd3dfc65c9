"""What is taken of a GPU and of the host beside it: what was planned, once, and no more."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import config_for
from tiering.arena import Arena
from tiering.tiers.device import DeviceTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

WIDTH = 4096


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def deep_model(blocks: int = 32) -> nn.Sequential:
    """Each block 64 MiB of fp32 weights."""
    with torch.device("cpu"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)))


def test_memory_stays_as_planned_however_far_ahead_python_is(tmp_path: Path) -> None:
    """2 GiB of weights go through a device that is slower than the link."""
    model = deep_model()
    total = sum(p.nbytes for p in model.parameters())
    config = config_for(tmp_path, param="cpu", optimizer="cpu")
    batch = torch.randn(2**15, WIDTH, device="cuda")  # milliseconds of compute a block
    before = torch.cuda.memory_allocated()
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine, torch.no_grad():
        plan = engine.stats().device_plan_bytes
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            engine(batch)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    activations = 3 * batch.nbytes
    assert plan < total
    assert peak <= plan + activations


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_every_step_uses_the_buffers_of_those_before_it(home: str, tmp_path: Path) -> None:
    """Nothing goes back to the driver, memory has no trend, and is what was planned."""
    engine, *_ = infinity.initialize(
        model=deep_model(8).bfloat16(),
        config=config_for(
            tmp_path, param=home, optimizer=home, bf16={"enabled": True}, gradient_clipping=1.0
        ),
    )
    batch = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    freed, peaks = [], []
    plan_bytes = engine.stats().device_plan_bytes
    before = torch.cuda.memory_allocated()
    with engine:
        for _ in range(12):
            torch.cuda.reset_peak_memory_stats()
            engine.backward(engine(batch).square().mean())
            engine.step()
            torch.cuda.synchronize()
            freed.append(torch.cuda.memory_stats()["num_device_free"])
            peaks.append(torch.cuda.max_memory_allocated())
    assert freed[-1] == freed[5]
    activations = 2 * 8 * batch.nbytes
    assert max(peaks) - before <= plan_bytes + activations


def test_taking_all_weights_needs_no_room_on_the_device(tmp_path: Path) -> None:
    """They come to the host, unit by unit: the model may be larger than the device."""
    model = deep_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine, *_ = infinity.initialize(
        model=model, config=config_for(tmp_path, param="cpu", optimizer="cpu")
    )
    with engine:
        weights = engine.module.state_dict()
        plan = engine.stats().device_plan_bytes
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights.items())
    assert torch.cuda.max_memory_allocated() - before <= plan < total


def test_registered_memory_is_what_was_asked_for() -> None:
    """Not rounded to a power of two, and not held a second time by the driver."""
    asked = 10 * 135_790_592
    torch.zeros(1, device="cuda").item()
    before = resident_bytes()
    arena = Arena(asked)
    tier = DeviceTier(torch.device("cuda", 0))
    tier.register(arena.memory.address, arena.capacity_bytes)
    try:
        arena.memory.buffer(0, asked)[:] = bytes(asked)
        assert resident_bytes() - before <= asked * 1.02
    finally:
        tier.unregister()
        arena.close()


def test_activations_that_wait_on_the_host_leave_the_device(tmp_path: Path) -> None:
    """What is saved for backward takes the device's memory only while it is used."""

    def peak_bytes(*, on_host: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
        config = config_for(tmp_path, activation_checkpointing={"cpu_checkpointing": on_host})
        engine, *_ = infinity.initialize(model=model, config=config)
        batch = torch.randn(2**18, 64, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with engine:
            engine.backward(engine(batch).square().mean())
            engine.step()
        return torch.cuda.max_memory_allocated() - before

    saved = 2 * 16 * 2**18 * 64 * 4  # the input of each linear layer, and each tanh's output
    assert peak_bytes(on_host=False) - peak_bytes(on_host=True) > saved / 4
