"""What a rank keeps whole, and where, changes no number: stages, buckets, budgets, sub-groups."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch

import infinity
from tests.infinity.conftest import (
    Config,
    Reference,
    Weights,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    samples,
    train_part,
)
from tests.infinity.ranks import RankPool

PLACES: Final = [
    *((1, "none", home) for home in ("none", "cpu", "nvme")),
    *((2, "none", home) for home in ("none", "cpu", "nvme")),
    *((3, home, home) for home in ("none", "cpu", "nvme")),
]
ACCUMULATION, CLIP, STEPS = 2, 0.5, 4
FROZEN = ("0.weight", "2.2.weight", "3.3.bias")


def place(path: Path, stage: int, param: str, optimizer: str, **extra: Any) -> Config:
    """A stage, and where it keeps things."""
    zero = {"stage": stage, **extra.pop("zero_optimization", {})}
    return config_for(path, param=param, optimizer=optimizer, zero_optimization=zero, **extra)


class Story(NamedTuple):
    """What a training of several steps has to tell."""

    losses: list[float]
    norms: list[float | None]
    weights: Weights


def partly_frozen() -> torch.nn.Module:
    """The base model; some whole units, and parts of others, are not trained."""
    model = base_model()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def story(config: Config) -> Story:
    """Accumulation, clipping, frozen parameters, and a weight changed in place between steps."""
    config = {**config, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP}
    model = partly_frozen()
    engine, *_ = infinity.initialize(model=model, config=config)
    losses, norms = [], []
    with engine:
        for step in range(STEPS):
            for batch in _micro_batches(step):
                loss = base_loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            norms.append(engine.get_global_grad_norm())
            with torch.no_grad():
                model[1][0].weight.mul_(0.5)
        return Story(losses, norms, engine.module.state_dict())


def _micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    start = ACCUMULATION * (step % 2)
    return base_batches()[start : start + ACCUMULATION]


@functools.cache
def whole() -> Story:
    """Stage 0: everything on every rank, nothing anywhere else."""
    return story(place(Path(), 0, "none", "none"))


def test_with_everything_whole_it_is_plain_torch() -> None:
    """Stage 0."""
    plain = Reference(partly_frozen(), clip=CLIP)
    for step in range(STEPS):
        plain.step([base_loss(plain.model, batch) for batch in _micro_batches(step)])
        with torch.no_grad():
            plain.model[1][0].weight.mul_(0.5)  # in fp32 it is the master
    weights = whole().weights
    assert_close(weights, dict(plain.model.state_dict()))
    assert_equal({n: weights[n] for n in FROZEN}, {n: base_model().state_dict()[n] for n in FROZEN})


@pytest.mark.parametrize(("stage", "param", "optimizer"), PLACES)
def test_stages_never_change_a_bit(stage: int, param: str, optimizer: str, tmp_path: Path) -> None:
    """On one rank; losses, norms and weights."""
    found = story(place(tmp_path, stage, param, optimizer))
    assert found[:2] == whole()[:2]
    assert_equal(found.weights, whole().weights)


@pytest.mark.parametrize(
    "extra",
    [
        {"zero_optimization": {"reduce_bucket_size": 7}},
        {"zero_optimization": {"reduce_bucket_size": 5e8, "sub_group_size": 1e9}},
        {"zero_optimization": {"allgather_bucket_size": 33, "sub_group_size": 160}},
        {"tiering": {"host_memory": "1MiB"}},
        {"tiering": {"host_memory": "64MiB"}, "zero_optimization": {"sub_group_size": 4096}},
    ],
)
@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_buckets_sub_groups_and_budgets_never_change_a_bit(
    home: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    found = story(place(tmp_path, 3, home, home, **extra))
    assert found[:2] == whole()[:2]
    assert_equal(found.weights, whole().weights)


@pytest.mark.parametrize(("stage", "param", "optimizer"), [(0, "none", "none"), *PLACES])
def test_two_ranks_in_any_stage_equal_plain_torch(
    stage: int, param: str, optimizer: str, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Three micro-batches a step on each, clipped; the reference has the whole batch."""
    plain = Reference(base_model(), clip=CLIP)
    for step in range(2):
        plain.step([base_loss(plain.model, samples(step, 12))])
    config = place(tmp_path, stage, param, optimizer, gradient_clipping=CLIP)
    for norms, weights in on_ranks(2, train_part, config, 2, 3, 12):
        assert len(norms) == 2
        assert_close(weights, dict(plain.model.state_dict()), rtol=1e-5, atol=1e-6)
