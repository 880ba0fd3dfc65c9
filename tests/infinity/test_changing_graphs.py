"""Passes that differ from one another: right results always, and hits again when they settle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import config_for
from tiering.errors import ConfigError, TieringError

WIDTH = 96
BATCHES = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(24)]


class Branches(nn.Module):
    """Layers that a pass uses in the order, and as far, as it is told."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        """Through the layers of that order."""
        for index in order:
            x = x + torch.tanh(self.layers[index](x))
        return x


def tight(path: Path, **zero: object) -> dict[str, object]:
    """A configuration whose arena holds a part of the states only."""
    return config_for(path, zero_optimization={"sub_group_size": 4096, **zero})


def trained(
    engine: infinity.InfinityEngine, orders: list[list[int]], batches: list[torch.Tensor]
) -> list[float]:
    """The losses of a step for each order."""
    losses = []
    for order, batch in zip(orders, batches, strict=True):
        loss = engine(batch, order).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def reference(orders: list[list[int]], batches: list[torch.Tensor], count: int) -> list[float]:
    """The same by plain torch."""
    model = Branches(count)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for order, batch in zip(orders, batches, strict=True):
        loss = model(batch, order).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bucket", [0, 1, 10**9])
def test_a_layer_that_is_skipped_on_some_steps(bucket: int, tmp_path: Path) -> None:
    """However far ahead weights are fetched; and what is fetched in vain is counted."""
    orders = [[0, 1, 2] if flag else [0, 2] for flag in (1, 0, 1, 1, 0)]
    config = tight(tmp_path, stage3_prefetch_bucket_size=bucket)
    engine, *_ = infinity.initialize(model=Branches(3), config=config)
    with engine:
        losses = trained(engine, orders, BATCHES[:5])
    assert losses == pytest.approx(reference(orders, BATCHES[:5], 3), abs=1e-6)


def permuted(seed: int) -> Iterator[list[int]]:
    """All six, in another order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(6, generator=generator).tolist()


def dropped(seed: int) -> Iterator[list[int]]:
    """Each of six with one chance in two; never none."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = [i for i in range(6) if torch.rand(1, generator=generator) < 0.5]
        yield chosen or [0]


def stopped(seed: int) -> Iterator[list[int]]:
    """The first few."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield list(range(int(torch.randint(1, 7, (1,), generator=generator))))


@pytest.mark.parametrize("kind", [permuted, dropped, stopped])
def test_an_order_that_is_new_on_every_step(
    kind: Callable[[int], Iterator[list[int]]], tmp_path: Path
) -> None:
    """Permuted branches, stochastic depth, early exit; then hits again when the order is steady."""
    changing = [order for order, _ in zip(kind(3), range(8), strict=False)]
    orders = changing + [list(range(6))] * 6
    batches = BATCHES[: len(orders)]
    engine, *_ = infinity.initialize(model=Branches(6), config=tight(tmp_path))
    with engine:
        losses = trained(engine, orders[:-2], batches[:-2])
        settled = engine.stats()
        losses += trained(engine, orders[-2:], batches[-2:])
        misses = engine.stats().prefetch_misses - settled.prefetch_misses
    assert losses == pytest.approx(reference(orders, batches, 6), abs=1e-6)
    assert misses == 0


def test_evaluation_and_its_interruption_leave_training_as_it_was(tmp_path: Path) -> None:
    """A shorter path without gradients, ended half-way once; training keeps its own trace."""
    orders = [[0, 1, 2, 3]] * 12
    engine, *_ = infinity.initialize(model=Branches(4), config=tight(tmp_path))
    with engine:
        losses = trained(engine, orders[:6], BATCHES[:6])
        with torch.no_grad():
            for batch in BATCHES[:3]:
                engine(batch, [0, 1])
            with pytest.raises(IndexError):
                engine(BATCHES[0], [0, 9])
            engine(BATCHES[0], [0, 1])
        losses += trained(engine, orders[6:8], BATCHES[6:8])
        settled = engine.stats()
        losses += trained(engine, orders[8:], BATCHES[8:12])
        assert engine.stats().prefetch_misses == settled.prefetch_misses
    assert losses == pytest.approx(reference(orders, BATCHES[:12], 4), abs=1e-6)


def test_generating_between_steps_needs_no_more_memory_each_time(tmp_path: Path) -> None:
    """Rounds of many forwards without gradients, then of training: equal outputs, flat arena."""
    model = Branches(4)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = infinity.initialize(model=Branches(4), config=tight(tmp_path))
    used = []
    with engine:
        for _ in range(3):
            tokens = wanted = BATCHES[0]
            with torch.no_grad():
                for _ in range(8):
                    tokens, wanted = engine(tokens, [0, 1, 2, 3]), model(wanted, [0, 1, 2, 3])
            torch.testing.assert_close(tokens, wanted)
            for batch in BATCHES[:2]:
                trained(engine, [[0, 1, 2, 3]], [batch])
                adam.zero_grad()
                model(batch, [0, 1, 2, 3]).square().mean().backward()
                adam.step()
            engine.flush()
            used.append(engine.stats().arena_used_bytes)
    assert used[1] == used[2]


def test_a_trace_that_was_written_down_spares_the_next_run_its_first_misses(
    tmp_path: Path,
) -> None:
    """Of training and of evaluation; the results are the same to the last bit."""
    orders = [[0, 1, 2, 3]] * 3
    found = []
    for run in range(2):
        engine, *_ = infinity.initialize(model=Branches(4), config=tight(tmp_path))
        with engine:
            if run:
                engine.load_trace(tmp_path / "trace.json")
            losses = trained(engine, orders, BATCHES[:3])
            with torch.no_grad():
                engine(BATCHES[3], [0, 1])
            found.append((losses, engine.stats().prefetch_misses))
            engine.save_trace(tmp_path / "trace.json")
    (first, learning), (second, knowing) = found
    assert first == second
    assert knowing < learning / 2
    kinds = {"train", "train, up to date", "eval"}
    assert set(json.loads((tmp_path / "trace.json").read_text())["traces"]) == kinds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read.*No such file"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"version": 9, "records": {}, "traces": {}}', "version 9"),
        ('{"version": 1, "records": {"unit0.shard": 5}, "traces": {}}', "another model"),
        ('{"version": 1, "records": [7], "traces": {}}', "cannot be read"),
    ],
)
def test_a_trace_file_that_does_not_fit_is_refused(
    text: str | None, said: str, tmp_path: Path
) -> None:
    """With the reason; training goes on without it."""
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    engine, *_ = infinity.initialize(model=Branches(2), config=tight(tmp_path))
    with engine:
        with pytest.raises(ConfigError, match=said) as refused:
            engine.load_trace(file)
        assert isinstance(refused.value, TieringError)
        trained(engine, [[0, 1]], BATCHES[:1])


@pytest.mark.parametrize(
    "uses", ['[[99, "read"]]', '[["x", "read"]]', '[[0, "sing"]]', "7", '[[0, "read", 1]]']
)
def test_a_trace_file_with_uses_that_make_no_sense_is_refused(uses: str, tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=Branches(2), config=tight(tmp_path))
    with engine:
        trained(engine, [[0, 1]], BATCHES[:1])
        engine.save_trace(tmp_path / "trace.json")
        document = json.loads((tmp_path / "trace.json").read_text())
        document["traces"]["eval"] = json.loads(uses)
        (tmp_path / "trace.json").write_text(json.dumps(document))
        with pytest.raises(ConfigError, match="cannot be read"):
            engine.load_trace(tmp_path / "trace.json")
