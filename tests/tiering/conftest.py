"""Engines, drives and folders that the tests of the tensor store share."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tiering.aio import AioConfig, AioEngine, Faults
from tiering.errors import ConfigError

DRIVE_BYTES = 64 << 20

MakeEngine = Callable[..., AioEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes engines, as ``make_engine(config, faults=...)``, and closes them after the test."""
    with ExitStack() as opened:

        def make(config: AioConfig | None = None, *, faults: Faults | None = None) -> AioEngine:
            engine = AioEngine(config, faults=faults)
            opened.callback(engine.close, 10.0)
            return engine

        yield make


@pytest.fixture(params=["uring", "threads"])
def each_backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend this machine has, one after another."""
    name: str = request.param
    try:
        AioEngine(AioConfig(backend=name)).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return name


@contextmanager
def mounted_drive(folder: Path, nbytes: int) -> Iterator[Path]:
    """An ext4 file system of this size, in an image in ``folder``."""
    image, mounted = folder / "image", folder / "drive"
    mounted.mkdir(parents=True)
    image.touch()
    with image.open("r+b") as file:
        file.truncate(nbytes)
    for command in (
        ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
        ["mount", "-o", "loop", str(image), str(mounted)],
    ):
        if shutil.which(command[0]) is None:
            pytest.skip(f"no {command[0]} to make a small drive with")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small drive cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 64 MiB, for tests that fill it."""
    with mounted_drive(tmp_path, DRIVE_BYTES) as mounted:
        yield mounted


@pytest.fixture
def small_drives(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two ext4 file systems, of 64 MiB and of half of that."""
    with (
        mounted_drive(tmp_path / "large", DRIVE_BYTES) as large,
        mounted_drive(tmp_path / "small", DRIVE_BYTES // 2) as small,
    ):
        yield large, small


@pytest.fixture
def open_files() -> Callable[[], list[str]]:
    """Tells what the descriptors of this process lead to."""

    def names() -> list[str]:
        links = Path("/proc/self/fd").iterdir()
        return [str(link.readlink()) for link in links if link.is_symlink()]

    return names


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder on a file system in memory, which has no direct I/O."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory is mounted here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that every user may write to, under directories that every user may enter."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o777)
        yield Path(path)
