"""Pools and the drive under the engine: sizes, names, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from tests.infinity.conftest import (
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    train,
)


class Tokens(nn.Module):
    """An embedding larger than any buffer_size that is asked for, and a small linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(583, 9)
        self.lin = nn.Linear(9, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.lin(self.embed(tokens)).square().mean()  # type: ignore[no-any-return]


def _call(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_parameter_larger_than_buffer_size_trains_as_on_cpu(count: int, tmp_path: Path) -> None:
    """The arena is cut to the records, whatever the size and number of buffers in the file."""
    torch.manual_seed(0)
    batches = list(torch.randint(0, 583, (3, 2, 7)))
    runs = []
    for device in ("cpu", "nvme"):
        torch.manual_seed(0)
        config = config_for(tmp_path, param=device, optimizer=device)
        config["zero_optimization"]["offload_param"].update(buffer_size=1000, buffer_count=count)
        engine, *_ = infinity.initialize(model=Tokens(), config=config)
        with engine:
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()
            with torch.no_grad():
                runs.append((float(engine.eval()(batches[0])), engine.module.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


def test_many_parameters_used_together_in_the_smallest_arena(tmp_path: Path) -> None:
    """A module with nine weights of its own, with no room for anything else."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList([nn.Parameter(torch.randn(70, 70)) for _ in range(9)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.all:
                x = torch.tanh(x @ weight)
            return x.square().mean()

    torch.manual_seed(0)
    model, batches = Fused(), list(torch.randn(3, 2, 70))
    smallest = _smallest_budget(model, tmp_path)
    torch.manual_seed(0)
    config = config_for(tmp_path, tiering={"host_memory": smallest})
    _, weights = train(Fused(), config, steps=3, loss_of=_call, batches=batches)
    plain = config_for(tmp_path, param="cpu", optimizer="cpu")
    torch.manual_seed(0)
    assert_equal(weights, train(Fused(), plain, steps=3, loss_of=_call, batches=batches)[1])


def _smallest_budget(model: nn.Module, path: Path) -> int:
    """What the error of a budget of one page says would do."""
    with pytest.raises(infinity.ConfigError, match="smallest budget") as error:
        infinity.initialize(model=model, config=config_for(path, tiering={"host_memory": 4096}))
    return int(str(error.value).splitlines()[-1].split()[0].replace(",", ""))


@pytest.mark.parametrize("extra", [0, 4096, 65536])
def test_gradients_that_find_no_room_go_to_the_drive_and_come_back(
    extra: int, tmp_path: Path
) -> None:
    """The smallest budgets train to the same bits as everything in memory."""
    model = base_model()
    config = config_for(
        tmp_path, tiering={"host_memory": _smallest_budget(base_model(), tmp_path) + extra}
    )
    losses, weights = train(model, config, steps=3)
    plain = config_for(tmp_path, param="none", optimizer="none")
    expected_losses, expected = train(base_model(), plain, steps=3)
    assert losses == expected_losses
    assert_equal(weights, expected)


def test_no_arena_room_is_held_back_step_after_step(tmp_path: Path) -> None:
    """Forty small parameters and four large ones: nothing is held back."""
    small = [nn.Linear(20, 25, bias=False) for _ in range(40)]
    large = [nn.Linear(25, 4000, bias=False) for _ in range(4)]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.ModuleList(small), nn.ModuleList(large)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.stack([m(x) for m in self.small]).mean(0)
            return torch.stack([m(y).square().mean() for m in self.large]).sum()

    engine, *_ = infinity.initialize(model=Mixed(), config=config_for(tmp_path))
    with engine:
        for _ in range(50):
            engine.backward(engine(torch.ones(2, 20)))
            engine.step()
            arena = engine._parts.arena.stats()
            assert arena.retained_bytes == 0
            assert arena.peak_bytes <= arena.capacity_bytes


def test_a_thousand_small_parameters_make_few_files_with_short_names(tmp_path: Path) -> None:
    """Names have a fixed length, however many parameters there are."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(1000)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(p * x).sum() for p in self.all]).mean()

    engine, *_ = infinity.initialize(
        model=Many(), config=config_for(tmp_path, zero_optimization={"sub_group_size": 1e9})
    )
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(())))
            engine.step()
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert len(files) < 20
        assert all(len(p.name) < 64 for p in files)


def test_any_tool_can_read_what_is_on_the_drive(tmp_path: Path) -> None:
    """Record files are safetensors files: the tiles' masters are the weights."""
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    with engine:
        engine.backward(base_loss(engine, base_batches()[0]))
        engine.step()
        weights = engine.module.state_dict()
        engine.flush()
        files = [load_file(p) for p in tmp_path.rglob("*.safetensors")]
        masters = [f["master"] for f in files if "master" in f]
    flat = torch.cat([weights[name].reshape(-1) for name in ("4.weight", "4.bias")])
    assert any(
        torch.equal(master[:3200], flat[:3200]) for master in masters if master.numel() >= 3200
    )


def test_bytes_read_and_written_are_what_the_table_says(tmp_path: Path) -> None:
    """All on NVMe with buffers only: 14 read and 14 written a parameter at most, and padding.

    The weights of the forward are those the update has just made, so they are not read. The first
    step has no update before its forward, and the second meets what no trace foretold.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    config = config_for(tmp_path, bf16={"enabled": True}, tiering={"compute_dtype": "fp32"})
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        before: Any = None
        for step in range(6):
            if step == 2:
                before = engine.stats()
            engine.backward(engine(torch.randn(2, 256)).square().mean())
            engine.step()
        after = engine.stats()  # the last update is still to come, as was one before
    numel = 4 * after.parameter_numel
    assert after.nvme_read_bytes - before.nvme_read_bytes <= 14.5 * numel
    assert 13.9 * numel <= after.nvme_written_bytes - before.nvme_written_bytes <= 14.5 * numel
    hits = after.prefetch_hits - before.prefetch_hits
    assert after.prefetch_misses - before.prefetch_misses <= 0.05 * hits
