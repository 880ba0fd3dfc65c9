"""What goes wrong below ends in equal numbers or in a typed exception."""

from __future__ import annotations

import copy
import errno
import os
import signal
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
from tiering.aio import FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import SpaceError, TieringWarning, TransferError, TransferTimeoutError

HARMLESS = {
    "a short completion": FaultRule(FaultAction.SHORT, value=4096 + 100, first=3, every=4),
    "EAGAIN": FaultRule(FaultAction.ERRNO, value=errno.EAGAIN, first=3, every=3),
    "EINTR": FaultRule(FaultAction.ERRNO, value=errno.EINTR, first=5, every=5),
    "delayed reads": FaultRule(FaultAction.DELAY, value=3000, every=2, writes=False),
    "delayed writes": FaultRule(FaultAction.DELAY, value=3000, every=2, reads=False),
}


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    """What training gives when nothing goes wrong."""
    return train(base_model(), config_for(Path(), param="none", optimizer="none"), steps=4)


@pytest.mark.parametrize("backend", ["uring", "threads"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_can_be_mended_changes_no_bit(
    name: str, backend: str, tmp_path: Path, expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    """Short, refused and late operations are continued, repeated and waited for."""
    config = config_for(tmp_path, tiering={"aio_backend": backend})
    losses, weights = train(base_model(), config, steps=4, faults=Faults(rules=(HARMLESS[name],)))
    assert losses == expected[0]
    assert_equal(weights, expected[1])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(refuse_uring_errno=errno.EPERM), "io_uring"),
        (Faults(refuse_register_errno=errno.ENOMEM), "regist|lock"),
        (Faults(refuse_direct_errno=errno.EINVAL), "O_DIRECT|direct"),
    ],
)
def test_a_refused_way_is_replaced_with_one_warning(
    faults: Faults,
    message: str,
    tmp_path: Path,
    expected: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """No ring, no registration, no direct I/O: equal bits, and one warning that says why."""
    with pytest.warns(TieringWarning, match=message) as warned:
        losses, weights = train(base_model(), config_for(tmp_path), steps=4, faults=faults)
    assert len([w for w in warned if issubclass(w.category, TieringWarning)]) == 1
    assert losses == expected[0]
    assert_equal(weights, expected[1])


@pytest.mark.parametrize("first", range(1, 60, 6))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_operation_is_raised_and_ends_cleanly(
    number: int, first: int, tmp_path: Path
) -> None:
    """A typed exception with the errno, or success if it was only a read ahead that failed."""
    faults = Faults(rules=(FaultRule(FaultAction.ERRNO, value=number, first=first),))
    try:
        train(base_model(), config_for(tmp_path), steps=3, faults=faults)
    except TransferError as error:
        assert error.errno == number  # noqa: PT017 - success is allowed too
    assert list(tmp_path.iterdir()) == []


def test_a_drive_too_small_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    """The error gives needed and free bytes; weights are as they were."""
    with drive_of("1m", tmp_path) as small:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(SpaceError, match=r"need \d+ bytes.*\d+ free"):
            infinity.initialize(model=model, config=config_for(small))
        assert_equal(model.state_dict(), before)


def test_reserved_space_outlasts_a_drive_that_fills_up_later(tmp_path: Path) -> None:
    """Steps go on after the rest of the drive was filled by somebody else."""
    with drive_of("8m", tmp_path) as small:
        with pytest.warns(TieringWarning):
            engine, *_ = infinity.initialize(model=base_model(), config=config_for(small))
        with engine:
            for step, batch in enumerate(base_batches()):
                if step == 1:
                    _fill(small / "somebody")
                engine.backward(base_loss(engine, batch))
                engine.step()
            weights = engine.module.state_dict()
        config = config_for(tmp_path, param="none", optimizer="none")
        assert_equal(weights, train(base_model(), config, steps=4)[1])


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


_TRAIN_UNTIL_KILLED = """
    import os, sys
    from tests.infinity.conftest import *
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(Path(sys.argv[1])))
    while True:
        for batch in base_batches():
            engine.backward(base_loss(engine, batch))
            engine.step()
        print("alive", flush=True)
"""


def test_a_killed_run_leaves_nothing_behind_that_the_next_one_does_not_remove(
    tmp_path: Path,
) -> None:
    """kill -9 in the middle of training; the next run starts, and its end leaves the path empty."""
    child = python(_TRAIN_UNTIL_KILLED, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "alive"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(list(tmp_path.iterdir())) == 1
    train(base_model(), config_for(tmp_path), steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_live_runs_folder_is_never_touched(tmp_path: Path) -> None:
    """Two runs on one path: each trains as if alone."""
    child = python(_TRAIN_UNTIL_KILLED, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "alive"
    (folder,) = tmp_path.iterdir()
    _, weights = train(base_model(), config_for(tmp_path), steps=3)
    config = config_for(tmp_path, param="none", optimizer="none")
    assert_equal(weights, train(base_model(), config, steps=3)[1])
    assert folder.exists()
    assert child.stdout.readline().strip() == "alive"
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_two_models_on_one_path_equal_their_solo_runs(tmp_path: Path) -> None:
    """Alternating steps of two engines of equal shapes."""
    models = [base_model(seed=s) for s in (1, 2)]
    config = config_for(tmp_path)
    solo = [train(copy.deepcopy(model), config, steps=4)[1] for model in models]
    engines = [infinity.initialize(model=model, config=config).engine for model in models]
    for batch in base_batches():
        for engine in engines:
            engine.backward(base_loss(engine, batch))
            engine.step()
    for engine, weights in zip(engines, solo, strict=True):
        assert_equal(engine.module.state_dict(), weights)
        engine.close()
    assert list(tmp_path.iterdir()) == []


_AS_ORDINARY_USER = """
    import os, resource, sys, tempfile
    from tests.infinity.conftest import *
    with tempfile.TemporaryDirectory() as scratch:  # imports all that training imports
        train(base_model(), config_for(Path(scratch)), steps=1)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
    os.setuid(65534)
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    engine, *_ = infinity.initialize(model=model, config=config_for(Path(sys.argv[1])))
    x = torch.ones(2, 512)
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        print(float(loss.detach()).hex())
    engine.close()
"""


def test_an_ordinary_user_with_a_small_memory_lock_limit_trains_to_equal_bits(
    tmp_path: Path,
) -> None:
    """8 MiB of locked memory, as most systems allow: registration may be refused, no more."""
    if os.getuid() != 0:
        pytest.skip("needs root to become an ordinary user")
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.owner() == "root" and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    out, _ = python(_AS_ORDINARY_USER, tmp_path).communicate()
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()  # type: ignore[no-any-return]

    config: Config = config_for(tmp_path, param="none", optimizer="none")
    losses, _ = train(model, config, steps=3, loss_of=loss_of, batches=[torch.ones(2, 512)])
    assert out.split() == [loss.hex() for loss in losses]


def test_a_lost_completion_is_not_waited_for_in_vain_at_close(tmp_path: Path) -> None:
    """The engine ends with an exception of the package, not with a hang."""
    faults = Faults(rules=(FaultRule(FaultAction.SWALLOW, first=20),))
    config = config_for(tmp_path, tiering={"io_timeout_s": 3})
    engine, *_ = infinity.initialize(model=base_model(), config=config, faults=faults)
    with pytest.raises(TransferTimeoutError, match=r"(read|write) .*safetensors"), engine:
        _steps(engine)
    assert list(tmp_path.iterdir()) == []


def _steps(engine: infinity.InfinityEngine) -> None:
    for batch in base_batches():
        engine.backward(base_loss(engine, batch))
        engine.step()
