"""Measuring paths: what is measured, when nothing is, and that nothing stays behind."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiering.aio import AioConfig, AioEngine, FaultRule, Faults, PureEngine
from tiering.aio.config import FaultAction
from tiering.bandwidth import make_volumes, measure_gb_per_s
from tiering.errors import ConfigError, SpaceError, TransferError, TransferTimeoutError
from tiering.folder import SwapFolder

MakeEngine = Callable[..., AioEngine]
MIB = 1 << 20


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[SwapFolder]]:
    """Two, as on two drives."""
    with ExitStack() as closing:
        yield [closing.enter_context(SwapFolder(tmp_path / name)) for name in ("a", "b")]


def left(folder: SwapFolder) -> list[str]:
    """What lies in a folder."""
    return [path.name for path in folder.path.iterdir()]


def test_each_path_is_written_and_read_back_and_nothing_stays(
    folders: list[SwapFolder], make_engine: MakeEngine
) -> None:
    """64 MiB each, through the backend itself."""
    engine = make_engine()
    volumes = make_volumes(folders, engine)
    assert [volume.folder for volume in volumes] == folders
    assert all(volume.gb_per_s > 0 for volume in volumes)
    stats = engine.stats()
    assert (stats.read_bytes, stats.written_bytes) == (128 * MIB, 128 * MIB)
    assert [left(folder) for folder in folders] == [["lock"], ["lock"]]


def test_threads_of_python_measure_as_well(folders: list[SwapFolder]) -> None:
    """Nothing but the protocol of backends is used."""
    engine = PureEngine(AioConfig())
    assert all(volume.gb_per_s > 0 for volume in make_volumes(folders, engine))
    assert engine.stats().read_bytes == 128 * MIB
    engine.close()


def test_nothing_is_measured_for_one_path_or_for_known_speeds(
    folders: list[SwapFolder], make_engine: MakeEngine
) -> None:
    """What the user says is taken as it is."""
    engine = make_engine()
    assert len(make_volumes(folders[:1], engine)) == 1
    volumes = make_volumes(folders, engine, gb_per_s=[6.0, 2.5])
    assert [volume.gb_per_s for volume in volumes] == [6.0, 2.5]
    assert engine.stats().written_bytes == 0
    with pytest.raises(ConfigError, match="1 speeds were given for 2 paths"):
        make_volumes(folders, engine, gb_per_s=[1.0])


def test_a_small_drive_is_measured_with_what_fits(
    small_drive: Path, make_engine: MakeEngine
) -> None:
    """At most half of what is free; where that is next to nothing, the remedy is named."""
    with SwapFolder(small_drive) as folder:
        engine = make_engine()
        assert measure_gb_per_s(folder, engine) > 0
        assert 0 < engine.stats().written_bytes <= folder.free_bytes() // 2
        folder.make_file("fill", folder.free_bytes() - MIB)
        with pytest.raises(SpaceError, match=f"{small_drive} cannot be measured.*gb_per_s"):
            measure_gb_per_s(folder, engine)
        assert set(left(folder)) == {"lock", "fill"}


@pytest.mark.parametrize("reads", [True, False])
def test_a_drive_that_fails_meanwhile_is_named_and_nothing_stays(
    reads: bool, folders: list[SwapFolder], make_engine: MakeEngine
) -> None:
    """On either way."""
    rule = FaultRule(FaultAction.ERRNO, errno.EIO, every=1, reads=reads, writes=not reads)
    with pytest.raises(TransferError, match=str(folders[0].path)):
        make_volumes(folders, make_engine(faults=Faults(rules=(rule,))))
    assert left(folders[0]) == ["lock"]


def test_a_drive_that_does_not_answer_is_not_waited_for_in_vain(
    folders: list[SwapFolder], make_engine: MakeEngine
) -> None:
    """A lost completion is an error after the time given."""
    rule = FaultRule(FaultAction.SWALLOW)
    engine = make_engine(faults=Faults(rules=(rule,)))
    with pytest.raises(TransferTimeoutError, match=str(folders[0].path)):
        measure_gb_per_s(folders[0], engine, timeout_s=0.1)
    assert left(folders[0]) == ["lock"]
    engine.close(0.1)
