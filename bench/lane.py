"""One path under measurement: a file of our own on it, and an engine that reaches the file.

The file lives in a private folder that goes away with the process, however that ends: when its
block is left, at exit, or, after a kill, when the next measurement comes to the same path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.buffers import Buffer
from bench.job import Job
from tiering.aio import AioStats, AioTransfer, AnyEngine, PureTransfer, open_engine
from tiering.aio.backend import File, Transfer
from tiering.errors import ConfigError, SpaceError
from tiering.folder import SwapFolder
from tiering.sizes import format_bytes

_KEPT_FREE_BYTES: Final = 64 * 2**20  # nobody is helped by a full file system
_CLOSE_S: Final = 5.0
_CANNOT_RESERVE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class Order(NamedTuple):
    """One request.

    Args:
        verb: "read" or "write".
        offset: first byte of the file.
        nbytes: how many.
    """

    verb: str
    offset: int
    nbytes: int


class Mark(NamedTuple):
    """A moment of a measurement; the differences of two are its figures.

    Args:
        at_s: on a clock of its own.
        cpu_s: processor time of the process, user and system.
        read_bytes: so far.
        written_bytes: so far.
        blocks: so far, both ways.
    """

    at_s: float
    cpu_s: float
    read_bytes: int
    written_bytes: int
    blocks: int


@dataclass(frozen=True)
class Place:
    """A file to measure on.

    Args:
        root: the user's path.
        folder: our folder under it.
        file: in that folder.
        size_bytes: of the file.
    """

    root: Path
    folder: SwapFolder
    file: Path
    size_bytes: int

    def drop_cache(self) -> None:
        """Ask the kernel to forget what it has of the file; only what is on the drive can go."""
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def open_places(roots: Sequence[Path], size_bytes: int) -> Iterator[list[Place]]:
    """Make a file on each path, with all its room taken, and remove them at the end.

    Raises:
        ConfigError: a path that is none, or without enough room.
    """
    with contextlib.ExitStack() as closing:
        folders = []
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"{root} is not a directory; name one on the drive to measure")
            folders.append(closing.enter_context(SwapFolder(root)))
        _check_room(folders, size_bytes)
        yield [_make_file(folder, size_bytes) for folder in folders]


def _check_room(folders: Sequence[SwapFolder], size_bytes: int) -> None:
    on_device: dict[int, list[SwapFolder]] = {}
    for folder in folders:
        on_device.setdefault(folder.path.stat().st_dev, []).append(folder)
    for group in on_device.values():
        needed_bytes = size_bytes * len(group) + _KEPT_FREE_BYTES
        free_bytes = group[0].free_bytes()
        if needed_bytes > free_bytes:
            raise ConfigError(
                f"{', '.join(str(folder.root) for folder in group)}: not enough room: "
                f"{format_bytes(size_bytes * len(group))} for files and "
                f"{format_bytes(_KEPT_FREE_BYTES)} to keep free are {needed_bytes} bytes, "
                f"and {free_bytes} bytes ({format_bytes(free_bytes)}) are free; "
                "make --size smaller or name another --path"
            )


def _make_file(folder: SwapFolder, size_bytes: int) -> Place:
    file = folder.path / "data"
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise SpaceError(
                f"cannot take {format_bytes(size_bytes)} under {folder.root}",
                errno=error.errno or 0,
                path=str(file),
            ) from error
        os.ftruncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return Place(folder.root, folder, file, size_bytes)


class Lane:
    """An engine with one file open and its memory registered, as a job wants it.

    Args:
        place: the file.
        buffer: the memory; its areas are at least as large as the job's.
        job: how to drive the engine.

    Raises:
        ConfigError: the job's backend cannot be had.
    """

    def __init__(self, place: Place, buffer: Buffer, job: Job) -> None:
        self.place = place
        self.buffer = buffer
        self.job = job
        self._engine: AnyEngine = open_engine(job.config())
        self._file = self._engine.open(os.fspath(place.file))
        if job.registration == "registered":
            self._engine.register(buffer)

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close(_CLOSE_S)

    @property
    def file(self) -> File:
        """The open file."""
        return self._file

    def start(self, order: Order) -> AioTransfer | PureTransfer:
        """Put a request on its way."""
        start, at = (
            (self._engine.read, self.buffer.target_at(order.offset))
            if order.verb == "read"
            else (self._engine.write, self.buffer.source_at(order.offset))
        )
        return start(self._file, self.buffer, at=at, nbytes=order.nbytes, offset=order.offset)

    def wait_some(self, transfers: Sequence[Transfer], count: int) -> None:
        """Return when so many of them have ended."""
        self._engine.wait_some(transfers, count)

    def sync(self) -> None:
        """Have all that was written on the drive."""
        self._engine.sync(self._file)

    def stats(self) -> AioStats:
        """The engine's counters."""
        return self._engine.stats()

    def mark(self) -> Mark:
        """This moment."""
        stats = self._engine.stats()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Mark(
            at_s=time.perf_counter(),
            cpu_s=usage.ru_utime + usage.ru_stime,
            read_bytes=stats.read_bytes,
            written_bytes=stats.written_bytes,
            blocks=stats.read_blocks + stats.written_blocks,
        )
