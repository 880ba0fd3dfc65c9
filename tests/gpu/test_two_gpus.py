"""Two ranks with a GPU each train as one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity
from infinity.comm import Communicator
from tests.infinity.conftest import (
    Config,
    assert_close,
    assert_equal,
    base_loss,
    base_model,
    config_for,
    samples,
)
from tests.infinity.ranks import Ranks, first_failure, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Ranks]:
    """Two processes in an NCCL group."""
    ranks = Ranks(2, "cpu:gloo,cuda:nccl")
    yield ranks
    ranks.close()


def train_share(config: Config) -> tuple[list[float], Weights]:
    """This rank's half of every batch; the norms, and the weights on the CPU."""
    comm = Communicator()
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    norms = []
    with engine:
        for step in range(6):
            inputs, targets = (t.cuda() for t in samples(step))
            part = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)
            engine.backward(base_loss(engine, (inputs[part], targets[part])))
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        return norms, {k: v.cpu() for k, v in engine.module.state_dict().items()}


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_two_gpus_equal_one_wherever_states_live(
    home: str, two_gpus: Ranks, tmp_path: Path
) -> None:
    """Up to the order of a sum; between the homes to the last bit."""
    config = config_for(tmp_path, param=home, optimizer=home, gradient_clipping=0.5)
    config["train_micro_batch_size_per_gpu"] = "auto"
    first, second = two_gpus.run(train_share, config)
    norms, weights = train_share(config)
    assert_equal(first[1], second[1])
    assert first[0] == second[0]
    assert first[0] == pytest.approx(norms, rel=1e-4)
    assert_close(first[1], weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages_train_the_same_on_two_gpus(
    stage: int, two_gpus: Ranks, tmp_path: Path
) -> None:
    """With what stays whole whole."""
    three = config_for(tmp_path, param="none", optimizer="none")
    lower = config_for(tmp_path, param="none", optimizer="none", zero_optimization={"stage": stage})
    for config in (three, lower):
        config["train_micro_batch_size_per_gpu"] = "auto"
    (_, expected), _ = two_gpus.run(train_share, three)
    (_, weights), _ = two_gpus.run(train_share, lower)
    assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("kill", -9, "rank 1 has gone"),
        ("exit", 7, "rank 1 has gone"),
        ("throw within with", 1, "rank 1 failed: ValueError: a mistake of one rank"),
        ("backward", 1, "rank 1 failed: ValueError: a mistake of one rank"),
    ],
)
def test_a_rank_that_ends_ends_the_other(kind: str, code: int, reason: str, tmp_path: Path) -> None:
    """By itself, with the reason, though what it waits for is on a GPU."""
    status, text = torchrun(kind, tmp_path)
    assert status == 1
    assert re.search(f"RankError: .*{reason}", text), text
    failed, rank = first_failure(text)
    assert failed == (code if rank == 1 else 1)


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    status, text = torchrun("hang", tmp_path)
    assert status == 1
    assert re.search(r"RankError: .*rank 1 did not come to it within 2 s", text), text
