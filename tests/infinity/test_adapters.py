"""Adapters in fp32 on a frozen base in bf16, in the same modules."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.comm import Communicator
from tests.infinity.conftest import Config, Weights, assert_close, config_for
from tests.infinity.ranks import RankPool

STEPS = 3


class Adapted(nn.Module):
    """A frozen linear in bf16 with two trained matrices in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12).to(torch.bfloat16).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(3, 12) / 4)
        self.lora_b = nn.Parameter(torch.zeros(12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In and out in fp32."""
        assert (self.base.weight.dtype, self.lora_a.dtype) == (torch.bfloat16, torch.float32)
        base = self.base(x.to(torch.bfloat16)).float()
        return torch.tanh(base + functional.linear(functional.linear(x, self.lora_a), self.lora_b))


def adapted() -> nn.Module:
    """Two of them."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted())


def inputs(step: int) -> torch.Tensor:
    """Four samples."""
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Far from 1."""
    return (model(x) - 1).square().mean()


def train_adapters(config: Config) -> tuple[Weights, int]:
    """This rank's samples of every step; returns the weights, and how many are trained."""
    comm = Communicator()
    engine, optimizer, *_ = infinity.initialize(model=adapted(), config=config)
    with engine:
        for step in range(STEPS):
            engine.backward(loss_of(engine, inputs(step)[comm.rank :: comm.size]))
            engine.step()
        trained = sum(len(group["params"]) for group in optimizer.param_groups)
        return engine.module.state_dict(), trained


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("size", [1, 2])
def test_adapters_stay_fp32_on_a_bf16_base_and_train_as_in_plain_torch(
    size: int, home: str, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Each parameter is gathered in its own type; the base does not change."""
    config = config_for(
        tmp_path,
        param=home,
        optimizer=home,
        bf16={"enabled": True},
        tiering={"keep_fp32": ["*lora*"], "compute_dtype": "bf16"},
    )
    plain = adapted()
    base = copy.deepcopy(plain[0].base.weight)
    adam = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), lr=1e-3)
    for step in range(STEPS):
        for rank in range(size):
            (loss_of(plain, inputs(step)[rank::size]) / size).backward()
        adam.step()
        adam.zero_grad()
    for weights, trained in on_ranks(size, train_adapters, config):
        assert trained == 4
        assert_close(weights, dict(plain.state_dict()), rtol=1e-5)
        assert torch.equal(weights["0.base.weight"], base)
        assert weights["1.lora_b"].any()
