"""The same training with the model on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("bf16", [False, True])
def test_host_and_drive_never_change_a_bit(bf16: bool, tmp_path: Path) -> None:
    """cpu and nvme update on the same processor, so weights are equal to the last bit."""
    model = base_model().cuda()
    runs = [
        train(
            copy.deepcopy(model),
            config_for(
                tmp_path,
                param=param,
                optimizer=optimizer,
                bf16={"enabled": bf16},
                gradient_clipping=1.0,
            ),
            steps=6,
            batches=_on_gpu(),
        )
        for param in ("none", "cpu", "nvme")
        for optimizer in ("cpu", "nvme")
    ]
    for losses, weights in runs:
        assert losses == runs[0][0]
        assert_equal(weights, runs[0][1])


def test_a_model_built_on_the_cpu_computes_on_the_gpu(tmp_path: Path) -> None:
    """Where there is a GPU it is used; buffers move with their types."""
    model = base_model()
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    losses, weights = train(model, config_for(tmp_path), steps=2, batches=_on_gpu())
    assert weights["0.weight"].is_cuda
    assert weights["count"].dtype is torch.int64
    assert losses[0] > 0
