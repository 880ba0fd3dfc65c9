"""Training on several drives: equal bits, each drive's share, and what happens without room."""

from __future__ import annotations

import copy
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import (
    Config,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    drive_of,
    python,
    train,
)
from tiering.errors import SpaceError, TieringWarning


def on(*paths: Path, param: str = "nvme", optimizer: str = "nvme", **tiering: object) -> Config:
    """The base configuration with everything spread over these paths, the first twice as fast."""
    speeds = [{"path": str(path), "gb_per_s": 1 + (path == paths[0])} for path in paths]
    config = config_for(paths[0], param=param, optimizer=optimizer)
    config["tiering"] = {"nvme_paths": speeds, **tiering}
    return config


def mean_square(model: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """A loss for models of layers alone."""
    return model(batch).square().mean()


@pytest.mark.parametrize("homes", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "none")])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_paths_never_change_a_bit(count: int, homes: tuple[str, str], tmp_path: Path) -> None:
    """However many, and whatever is on them."""
    param, optimizer = homes
    paths = [tmp_path / str(number) for number in range(count)]
    losses, weights = train(base_model(), on(*paths, param=param, optimizer=optimizer), steps=4)
    plain = config_for(tmp_path, param="none", optimizer="none")
    expected_losses, expected = train(base_model(), plain, steps=4)
    assert losses == expected_losses
    assert_equal(weights, expected)
    assert all(list(path.iterdir()) == [] for path in paths)


def test_paths_of_unknown_speed_are_measured_and_both_get_work(tmp_path: Path) -> None:
    """The statistics tell what each drive has read and written since the start."""
    config = config_for(tmp_path / "a")
    config["tiering"] = {"nvme_paths": [f"{tmp_path}/a", f"{tmp_path}/b"]}
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        before = engine.stats()
        assert all(volume.held_bytes > 0 for volume in before.nvme_paths)
        assert all(volume.written_bytes == 0 for volume in before.nvme_paths)
        for batch in base_batches():
            engine.backward(base_loss(engine, batch))
            engine.step()
        engine.flush()
        stats = engine.stats()
    assert [volume.path for volume in stats.nvme_paths] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert sum(volume.share for volume in stats.nvme_paths) == pytest.approx(1)
    assert sum(volume.read_bytes for volume in stats.nvme_paths) == stats.nvme_read_bytes
    assert sum(volume.written_bytes for volume in stats.nvme_paths) == stats.nvme_written_bytes
    assert all(volume.written_bytes > 0 for volume in stats.nvme_paths)


def test_each_step_moves_its_share_over_each_drive(tmp_path: Path) -> None:
    """Two thirds of all bytes read and written, on a drive twice as fast as the other."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)))
    config = on(tmp_path / "fast", tmp_path / "slow", host_memory="3MiB")
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for _ in range(4):
            engine.backward(mean_square(engine, torch.randn(2, 256)))
            engine.step()
        engine.flush()
        fast, slow = engine.stats().nvme_paths
    assert fast.read_bytes == pytest.approx(2 * slow.read_bytes, rel=0.1)
    assert fast.written_bytes == pytest.approx(2 * slow.written_bytes, rel=0.1)


def test_the_room_of_all_drives_counts_before_the_model_is_touched(tmp_path: Path) -> None:
    """What fits on no drive alone fits on two; what does not fit names both."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    before = copy.deepcopy(model.state_dict())
    with ExitStack() as closing:
        a, b = (closing.enter_context(drive_of("3m", tmp_path / name)) for name in "ab")
        with pytest.raises(SpaceError, match=r"under .*/a/small has \d+ free") as error:
            infinity.initialize(model=model, config=on(a))
        assert_equal(model.state_dict(), before)
        with pytest.warns(TieringWarning):  # of direct I/O, and of the fast one being full
            train(model, on(a, b), steps=1, loss_of=mean_square, batches=[torch.randn(2, 256)])
        large = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        with pytest.raises(SpaceError, match=r"need \d+ bytes") as error:
            infinity.initialize(model=large, config=on(a, b))
        for drive in (a, b):
            assert f"the drive under {drive} has" in str(error.value)
            assert not list(drive.glob("tiering-*"))


_TRAIN_UNTIL_KILLED = """
    import sys
    from tests.infinity.conftest import *
    config = config_for(sys.argv[1] + "/a")
    config["tiering"] = {"nvme_paths": [sys.argv[1] + "/a", sys.argv[1] + "/b"]}
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    while True:
        for batch in base_batches():
            engine.backward(base_loss(engine, batch))
            engine.step()
        print("alive", flush=True)
"""


def test_a_killed_run_leaves_nothing_on_any_path_that_the_next_does_not_remove(
    tmp_path: Path,
) -> None:
    """kill -9 in the middle of training; the next run's start and end leave both paths empty."""
    child: subprocess.Popen[str] = python(_TRAIN_UNTIL_KILLED, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "alive"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    roots = [tmp_path / "a", tmp_path / "b"]
    assert [len(list(root.iterdir())) for root in roots] == [1, 1]
    train(base_model(), on(*roots), steps=1)
    assert [list(root.iterdir()) for root in roots] == [[], []]
