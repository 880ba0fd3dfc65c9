"""`AioEngine`: the `AioBackend` protocol over the C engine.

A call builds its arguments, calls, checks and raises; no byte passes through Python, and every call
into C releases the interpreter lock. What the three classes here share is `tiering.aio.core.Core`.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tiering.aio.backend import File, FileInfo, Memory, Transfer
from tiering.aio.config import BACKENDS, AioConfig, AioStats, Faults
from tiering.aio.core import Core, NativeFlight, OpenFile
from tiering.aio.flight import Order, too_few_ended
from tiering.aio.native import check_native
from tiering.aio.reasons import why_no_uring, why_unregistered
from tiering.errors import ConfigError, TieringWarning

if TYPE_CHECKING:  # it exists for the type checker only
    from tiering.aio._native import Stats


class AioFile:
    """An open file of an `AioEngine`; closed at the latest with the engine.

    Args:
        opened: what the engine knows of it.
    """

    def __init__(self, opened: OpenFile) -> None:
        self.opened = opened

    def __repr__(self) -> str:
        return f"AioFile({self.opened.path!r})"

    @property
    def path(self) -> str:
        """The name it was opened by."""
        return self.opened.path

    @property
    def info(self) -> FileInfo:
        """How it can be reached."""
        return self.opened.info

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for its transfers and close it. A second call does nothing.

        Raises:
            TransferTimeoutError: one is still pending after ``timeout_s``; the file stays open.
        """
        self.opened.core.close_file(self.opened, timeout_s)


class AioTransfer:
    """One request of an `AioEngine` on its way. It may be dropped; it ends all the same.

    Args:
        flight: what the engine knows of it.
    """

    def __init__(self, flight: NativeFlight) -> None:
        self.flight = flight

    def __repr__(self) -> str:
        return f"<AioTransfer: {self.flight.text}>"

    @property
    def queue_s(self) -> float:
        """From when it could start until its first block did; 0 while it is pending."""
        return self.flight.queue_s

    @property
    def device_s(self) -> float:
        """From when its first block started until it ended; 0 while it is pending."""
        return self.flight.device_s

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks, never raises for a failed transfer."""
        return self.flight.core.poll(self.flight)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer has succeeded; may be called again, from any thread.

        Raises:
            TransferError: it failed; `SpaceError` when the drive is full.
            TransferTimeoutError: it is still pending after ``timeout_s``.
            EngineClosedError: the engine was closed before it ended, or belongs to another process.
        """
        self.flight.core.wait(self.flight, timeout_s)
        self.flight.raise_failure()


class AioEngine:
    """Moves bytes between memory and files: by io_uring, or by threads where that is forbidden.

    It implements `tiering.aio.backend.AioBackend`. Each drive has one worker in C, for all files on
    it. An engine is
    closed by `close`, by ``with``, and at the latest when the last reference to it is gone, which
    lets pending transfers end for some seconds.

    Args:
        config: how to drive the drive; the defaults fit an NVMe drive.
        faults: deliberate faults, for tests.

    Raises:
        ConfigError: the named backend cannot be had, or there is no compiled part.
    """

    def __init__(self, config: AioConfig | None = None, *, faults: Faults | None = None) -> None:
        check_native()
        self._config = config or AioConfig()
        self._core = Core(self._config, faults or Faults())
        self._finalizer = weakref.finalize(self, self._core.close_unreferenced)
        self._told: set[str] = set()
        self._tell_fallback()

    def __enter__(self) -> AioEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def config(self) -> AioConfig:
        """What it was told."""
        return self._config

    def open(self, path: str) -> AioFile:
        """Open an existing file for reading and writing.

        Raises:
            TransferError: the file cannot be opened.
        """
        return AioFile(self._core.open_file(os.fspath(path)))

    def read(  # noqa: PLR0913 - the six facts a read consists of
        self,
        file: File,
        memory: Memory,
        *,
        at: int = 0,
        nbytes: int,
        offset: int,
        after: Transfer | None = None,
    ) -> AioTransfer:
        """Start reading ``nbytes`` at file ``offset`` into ``memory`` from its byte ``at``.

        With ``after``, it starts when that transfer has succeeded, and fails with ECANCELED when
        that fails.

        Raises:
            ConfigError: bytes outside the memory, or a file or transfer of another engine.
            EngineClosedError: the engine was closed or belongs to another process.
        """
        return self._start(Order("read", memory, at, nbytes, offset), file, after)

    def write(  # noqa: PLR0913 - the six facts a write consists of
        self,
        file: File,
        memory: Memory,
        *,
        at: int = 0,
        nbytes: int,
        offset: int,
        after: Transfer | None = None,
    ) -> AioTransfer:
        """Start writing; the mirror image of `read`."""
        return self._start(Order("write", memory, at, nbytes, offset), file, after)

    def wait_some(
        self, transfers: Sequence[Transfer], count: int = 1, timeout_s: float | None = None
    ) -> None:
        """Return when at least ``count`` of the transfers, or all, have ended, well or not.

        To wait for one transfer hurries it; this hurries none.

        Raises:
            ConfigError: a transfer of another engine.
            TransferTimeoutError: too many are still pending after ``timeout_s``.
            EngineClosedError: the engine was closed, or belongs to another process.
        """
        flights = [self._own_flight(transfer) for transfer in transfers]
        if not self._core.wait_some(flights, min(count, len(flights)), timeout_s):
            raise too_few_ended(flights, count, timeout_s)

    def register(self, memory: Memory) -> None:
        """Pin the memory for cheaper transfers, in place of what was pinned before.

        Where that is refused everything works without; the statistics say why.
        """
        self._core.register(memory)
        for raw in self._core.stats().values():
            if raw.register_errno and raw.backend == BACKENDS["uring"]:
                reason = why_unregistered(raw.register_errno, raw.backend, memory.nbytes)
                self._tell("register", f"{reason}. All works without, for some processor time")

    def sync(self, file: File) -> None:
        """Return when everything written to the file is on the drive (fdatasync).

        Raises:
            TransferError: it is not known whether all of it is.
        """
        self._core.sync_file(self._own(file))

    def stats(self) -> AioStats:
        """Counters now, of all devices together."""
        self._tell_fallback()
        return self._merged(list(self._core.stats().values()))

    def device_stats(self) -> dict[str, AioStats]:
        """Counters now of each device that files were opened on, by ``major:minor``."""
        return {
            f"{os.major(device)}:{os.minor(device)}": self._merged([raw])
            for device, raw in self._core.stats().items()
        }

    def _merged(self, raws: Sequence[Stats]) -> AioStats:
        def total(name: str) -> int:
            return sum(getattr(raw, name) for raw in raws)

        worst = max(raws, key=lambda raw: raw.backend)  # threads, where any path has fallen back
        unregistered = max(raws, key=lambda raw: raw.register_errno)
        return AioStats(
            backend="uring" if worst.backend == BACKENDS["uring"] else "threads",
            backend_reason=why_no_uring(worst.backend_errno),
            fixed_files=all(raw.fixed_files for raw in raws),
            registered_bytes=min(raw.registered_bytes for raw in raws),
            register_reason=why_unregistered(
                unregistered.register_errno,
                unregistered.backend,
                self._core.registered_bytes_wanted,
            ),
            read_bytes=total("read_bytes"),
            written_bytes=total("written_bytes"),
            read_blocks=total("read_blocks"),
            written_blocks=total("written_blocks"),
            buffered_blocks=total("buffered_blocks"),
            retries=total("retries"),
            short_transfers=total("short_transfers"),
            pending_requests=total("pending_requests"),
            ended_requests=total("ended_requests"),
            busy_s=total("busy_ns") / 1e9,
            queue_s=total("queue_ns") / 1e9,
            device_s=total("device_ns") / 1e9,
            waits=total("waits"),
            waited_s=total("waited_ns") / 1e9,
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Let transfers end, at most ``timeout_s``, and free everything. Twice is once.

        Transfers that have not ended by then never will; waiting for them raises
        `EngineClosedError`. In a forked child this does nothing.
        """
        self._core.close(timeout_s)
        self._finalizer.detach()

    def _start(self, order: Order, file: File, after: Transfer | None) -> AioTransfer:
        if self._core.uses_threads:
            self._tell_fallback()
        before = None if after is None else self._own_flight(after)
        return AioTransfer(self._core.start(self._own(file), order, before))

    def _own(self, file: File) -> OpenFile:
        if not isinstance(file, AioFile) or file.opened.core is not self._core:
            raise ConfigError(f"{file!r} was not opened by this engine")
        return file.opened

    def _own_flight(self, transfer: Transfer) -> NativeFlight:
        if not isinstance(transfer, AioTransfer) or transfer.flight.core is not self._core:
            raise ConfigError(f"{transfer!r} does not belong to this engine; wait for it instead")
        return transfer.flight

    def _tell_fallback(self) -> None:
        """The ring may be given up in the middle of work, so this is asked more than once."""
        if self._config.backend != "auto" or "backend" in self._told:
            return
        errors = [raw.backend_errno for raw in self._core.stats().values() if raw.backend_errno]
        if errors:
            self._tell(
                "backend",
                f"file I/O goes through threads: {why_no_uring(errors[0])}. The backend 'threads' "
                "asks for that and silences this",
            )

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, TieringWarning, stacklevel=4)
