"""An engine with a file and memory, on every backend."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiering.aio import AioConfig, AioEngine, AnyEngine, Faults, PinnedMemory, PureEngine
from tiering.aio.backend import File, FileInfo, Transfer
from tiering.errors import ConfigError

MEMORY_BYTES = 8 * 2**20
HALF = MEMORY_BYTES // 2
PATTERN = bytes(range(251)) * (HALF // 251 + 1)


@dataclasses.dataclass
class Bench:
    """One file, and memory of which the first half is written and the second read into."""

    engine: AnyEngine
    file: File
    memory: PinnedMemory

    @property
    def info(self) -> FileInfo:
        """How the file can be reached."""
        return self.file.info

    def write(self, at: int, nbytes: int, offset: int, after: Transfer | None = None) -> Transfer:
        """Start writing from the first half."""
        return self.engine.write(
            self.file, self.memory, at=at, nbytes=nbytes, offset=offset, after=after
        )

    def read(self, at: int, nbytes: int, offset: int, after: Transfer | None = None) -> Transfer:
        """Start reading into the second half."""
        return self.engine.read(
            self.file, self.memory, at=HALF + at, nbytes=nbytes, offset=offset, after=after
        )

    def is_same(self, at: int, nbytes: int) -> bool:
        """Whether what was read is what was written."""
        written = self.memory.buffer(at, nbytes)
        return bytes(written) == bytes(self.memory.buffer(HALF + at, nbytes))

    def round_trip(self, at: int, nbytes: int, offset: int) -> bool:
        """Write and read back; whether the bytes are the same."""
        self.memory.buffer(HALF + at, nbytes)[:] = bytes(nbytes)
        self.read(at, nbytes, offset, after=self.write(at, nbytes, offset)).wait()
        return self.is_same(at, nbytes)


MakeBench = Callable[..., Bench]


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on a file system of its own, in memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def has_uring() -> bool:
    """Whether this machine lets us have a ring."""
    try:
        AioEngine(AioConfig(backend="uring")).close()
    except ConfigError:
        return False
    return True


@pytest.fixture(params=["uring", "threads", "python"], scope="module")
def backend(request: pytest.FixtureRequest, has_uring: bool) -> str:
    """Each backend in turn, that of Python alone included."""
    return _present(request.param, has_uring)


@pytest.fixture(params=["uring", "threads"], scope="module")
def native_backend(request: pytest.FixtureRequest, has_uring: bool) -> str:
    """Each backend of the C engine in turn, for what only that has: faults, and its insides."""
    return _present(request.param, has_uring)


def _present(name: str, has_uring: bool) -> str:
    if name == "uring" and not has_uring:
        pytest.skip("io_uring is refused on this machine")
    return name


def start_engine(backend: str, *, faults: Faults | None = None, **options: int | str) -> AnyEngine:
    """An engine of the backend with that name."""
    if backend == "python":
        return PureEngine(AioConfig(**options))
    return AioEngine(AioConfig(backend=backend, **options), faults=faults)


StartEngine = Callable[..., AnyEngine]


@pytest.fixture(scope="session", name="start_engine")
def _start_engine() -> StartEngine:
    """The function of that name."""
    return start_engine


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeBench]:
    """Makes benches; what is still open at the end of the module is closed at once."""
    made: list[Bench] = []

    def make(
        backend: str,
        *,
        faults: Faults | None = None,
        folder: Path | None = None,
        **options: int | str,
    ) -> Bench:
        path = (folder or tmp_path_factory.mktemp("aio")) / "data.bin"
        path.touch()
        memory = PinnedMemory(MEMORY_BYTES)
        memory.buffer(0, HALF)[:] = PATTERN[:HALF]
        engine = start_engine(backend, faults=faults, **{"block_bytes": 65536, **options})
        made.append(Bench(engine, engine.open(str(path)), memory))
        return made[-1]

    yield make
    for bench in made:
        bench.engine.close(0)
