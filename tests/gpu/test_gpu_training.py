"""The same training with the model on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.infinity.conftest import (
    Reference,
    assert_close,
    assert_equal,
    base_batches,
    base_model,
    config_for,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def _on_gpu() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(inputs.cuda(), targets.cuda()) for inputs, targets in base_batches()]


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_fp32_equals_plain_torch_on_the_gpu(device: str, tmp_path: Path) -> None:
    """Wherever the states live, ten steps give torch's weights."""
    model = base_model().cuda()
    _, expected = Reference(model).train(10, batches=_on_gpu())
    config = config_for(tmp_path, param=device, optimizer=device)
    _, weights = train(model, config, steps=10, batches=_on_gpu())
    assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_where_states_live_never_changes_a_bit(
    kind: str, accumulation: int, tmp_path: Path
) -> None:
    """Updates are made on the GPU, whatever the homes, so weights are equal to the last bit."""
    model = base_model().cuda()
    runs = [
        train(
            copy.deepcopy(model),
            config_for(
                tmp_path,
                param=param,
                optimizer=optimizer,
                gradient_clipping=1.0,
                gradient_accumulation_steps=accumulation,
                tiering={"host_memory": "auto"},
                **({kind: {"enabled": True}} if kind != "fp32" else {}),
            ),
            steps=12,
            batches=_on_gpu(),
        )
        for param in ("none", "cpu", "nvme")
        for optimizer in ("none", "cpu", "nvme")
    ]
    for losses, weights in runs:
        assert losses == runs[0][0]
        assert_equal(weights, runs[0][1])


def test_activations_that_wait_on_the_host_change_nothing(tmp_path: Path) -> None:
    """They leave the device between forward and backward."""
    model = base_model().cuda()
    runs = [
        train(
            copy.deepcopy(model),
            config_for(tmp_path, activation_checkpointing={"cpu_checkpointing": on_host}),
            steps=3,
            batches=_on_gpu(),
        )
        for on_host in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def test_a_small_arena_with_many_copies_under_way_loses_nothing(tmp_path: Path) -> None:
    """Slots are given to the drive again and again while copies from and to them run."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(8)
    ]
    model = nn.Sequential(*blocks).cuda()
    batches = [torch.randn(16, 512, device="cuda") for _ in range(4)]

    def loss_of(run: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return run(batch).square().mean()

    common = {"steps": 8, "batches": batches, "loss_of": loss_of}
    smallest = config_for(tmp_path, tiering={"host_memory": "40MB"}, gradient_clipping=1.0)
    here = config_for(tmp_path, param="none", optimizer="none", gradient_clipping=1.0)
    losses, weights = train(copy.deepcopy(model), smallest, **common)
    expected_losses, expected = train(copy.deepcopy(model), here, **common)
    assert losses == expected_losses
    assert_equal(weights, expected)


def test_a_model_built_on_the_cpu_computes_on_the_gpu(tmp_path: Path) -> None:
    """Where there is a GPU it is used; buffers move with their types."""
    model = base_model()
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    losses, weights = train(model, config_for(tmp_path), steps=2, batches=_on_gpu())
    assert weights["0.weight"].is_cuda
    assert weights["count"].dtype is torch.int64
    assert losses[0] > 0


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_updates_under_backward_give_the_same_weights(
    accumulation: int, optimizer: str, tmp_path: Path
) -> None:
    """Whether gradients stay on the device until then, or come back to it."""
    model = base_model().cuda()
    runs = [
        train(
            copy.deepcopy(model),
            config_for(
                tmp_path,
                param="cpu",
                optimizer=optimizer,
                gradient_accumulation_steps=accumulation,
                bf16={"enabled": True},
                tiering={"update_in_backward": early, "poison": early},
            ),
            steps=8,
            batches=_on_gpu(),
        )
        for early in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])
