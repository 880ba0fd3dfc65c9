"""`AioEngine`: the `AioBackend` protocol over the C engine.

A call builds its arguments, calls, checks and raises; no byte passes through Python, and every call
into C releases the interpreter lock.

Who keeps what alive: `_Core` holds each transfer until it has ended, and the transfer holds its
memory, its file and the transfer it waits for. So a transfer may be dropped at any time. A transfer
stands among the pending ones before C hears of it, and C writes its id into memory the transfer
owns: an interrupt between two Python instructions cannot lose one that is under way.

A finished transfer is forgotten in C when somebody asks for it; each new one also looks after two
old ones, so that the table stays small when nobody ever asks.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import threading
import time
import warnings
import weakref
from types import TracebackType
from typing import NamedTuple

from cffi import FFI

from tiering.aio.backend import File, FileInfo, Memory, Transfer
from tiering.aio.config import BACKENDS, AioConfig, AioStats, Faults
from tiering.aio.native import check_native, ffi, lib
from tiering.errors import (
    ConfigError,
    EngineClosedError,
    SpaceError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)

_WAIT_SLICE_S = 0.1  # between two looks for signals such as Ctrl-C
_SWEPT_AT_ONCE = 2
_FINALIZER_S = 5.0  # how long a forgotten engine lets its transfers end
_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_VERBS = ("read", "write")


class _Request(NamedTuple):
    """What a transfer is asked to do, in words a message can use."""

    op: int
    path: str
    nbytes: int
    offset: int

    def __str__(self) -> str:
        return f"{_VERBS[self.op]} of {self.nbytes} bytes at offset {self.offset} of {self.path}"


class _Result(NamedTuple):
    """How a transfer ended.

    Args:
        errno: 0 or the kernel's reason.
        done_bytes: how far it got.
        error_offset: file offset where it failed.
    """

    errno: int
    done_bytes: int
    error_offset: int


class AioFile:
    """An open file of an `AioEngine`; closed at the latest with the engine."""

    def __init__(self, core: _Core, path: str, number: int, info: FileInfo) -> None:
        self._core = core
        self._path = path
        self._number = number
        self._info = info
        self._is_open = True

    def __repr__(self) -> str:
        return f"AioFile({self._path!r})"

    @property
    def path(self) -> str:
        """The name it was opened by."""
        return self._path

    @property
    def info(self) -> FileInfo:
        """How it can be reached."""
        return self._info

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for its transfers and close it. A second call does nothing.

        Raises:
            TransferTimeoutError: one is still pending after ``timeout_s``; the file stays open.
        """
        self._core.close_file(self, timeout_s)


class AioTransfer:
    """One request of an `AioEngine` on its way."""

    def __init__(self, core: _Core, request: _Request, file: AioFile, memory: Memory) -> None:
        self._core = core
        self._request = request
        self._file: AioFile | None = file
        self._memory: Memory | None = memory
        self._after: AioTransfer | None = None
        self._ids: FFI.CData = ffi.new("uint64_t[1]")
        self._result: _Result | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<AioTransfer: {self._request}>"

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks, never raises for a failed transfer."""
        return self._has_ended() or self._core.poll(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer has succeeded; may be called again, from any thread.

        Raises:
            TransferError: it failed; SpaceError when the drive is full.
            TransferTimeoutError: it is still pending after ``timeout_s``.
            EngineClosedError: the engine was closed before it ended, or belongs to another process.
        """
        if not self._has_ended():
            self._core.wait(self, timeout_s)
        self._raise_failure()

    def _has_ended(self) -> bool:
        return self._result is not None or self._is_closed

    def _end(self, result: _Result | None) -> None:
        """Note the result, or that the engine closed first, and let go of what was kept."""
        self._result = result
        self._is_closed = result is None
        self._memory = self._after = self._file = None

    def _raise_failure(self) -> None:
        result = self._result
        if result is None:
            raise EngineClosedError(f"the engine was closed before the {self._request} had ended")
        if not result.errno:
            return
        message = (
            f"{self._request} failed at offset {result.error_offset} "
            f"with {result.done_bytes} of {self._request.nbytes} bytes done"
        )
        if result.errno == errno.ECANCELED:
            message = f"{self._request} was not started, since the transfer it waited for failed"
        elif result.errno == errno.ENODATA:
            message += f": the file ends at {result.error_offset}"
        kind = SpaceError if result.errno in _OUT_OF_SPACE else TransferError
        raise kind(message, errno=result.errno, path=self._request.path)


class _Use:
    """The C engine, kept from being closed as long as the block lasts."""

    def __init__(self, core: _Core) -> None:
        self._core = core

    def __enter__(self) -> FFI.CData:
        return self._core.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._core.leave()


class _Core:
    """What an engine, its files and its transfers share. ``_lock`` guards all of it."""

    def __init__(self, config: AioConfig, faults: Faults) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pending: dict[AioTransfer, None] = {}
        self._callers = 0
        self._is_closing = False
        self._registered: Memory | None = None
        self._aio: FFI.CData | None = _open(config, faults)

    def check_process(self) -> None:
        """A forked child must not even take the lock: a thread it lacks may hold it."""
        if os.getpid() != self._owner:
            raise EngineClosedError(
                f"this engine belongs to process {self._owner}; process {os.getpid()} was forked "
                "from it and must open its own"
            )

    def enter(self) -> FFI.CData:
        self.check_process()
        with self._lock:
            if self._aio is None:
                raise EngineClosedError("the engine is closed")
            self._callers += 1
            return self._aio

    def leave(self) -> None:
        with self._lock:
            self._callers -= 1
            if not self._callers:
                self._idle.notify_all()

    def start(self, request: _Request, file: File, memory: Memory, at: int, after: Transfer | None) -> AioTransfer:
        self.check_process()
        opened = self._own_file(file)
        transfer = AioTransfer(self, request, opened, memory)
        with self._lock:
            if self._aio is None or self._is_closing:
                raise EngineClosedError(f"the engine is closed; no {request}")
            if not opened._is_open:
                raise ConfigError(f"{opened!r} is closed; no {request}")
            self._sweep()
            failed = self._follow(transfer, after)
            if failed:
                transfer._end(_Result(errno.ECANCELED, 0, request.offset))
            else:
                self._submit(transfer, opened._number, memory.address + at)
        return transfer

    def _own_file(self, file: File) -> AioFile:
        if not isinstance(file, AioFile) or file._core is not self:
            raise ConfigError(f"{file!r} was not opened by this engine")
        return file

    def _follow(self, transfer: AioTransfer, after: Transfer | None) -> bool:
        """Let a transfer wait for another one. Returns whether that has failed already."""
        if after is None:
            return False
        if not isinstance(after, AioTransfer) or after._core is not self:
            raise ConfigError(f"{after!r} does not belong to this engine; wait for it first")
        if after._result is not None:
            return after._result.errno != 0
        transfer._after = after
        return False

    def _submit(self, transfer: AioTransfer, number: int, address: int) -> None:
        request = ffi.new("struct aio_request *")
        request.op = transfer._request.op
        request.file = number
        request.buffer = ffi.cast("void *", address)
        request.bytes = transfer._request.nbytes
        request.offset = transfer._request.offset
        request.after = transfer._after._ids[0] if transfer._after else 0
        self._pending[transfer] = None
        error = -int(lib.aio_submit(self._aio, request, 1, transfer._ids))
        if error:
            del self._pending[transfer]
            raise TransferError(
                f"{transfer._request} was not started", errno=error, path=transfer._request.path
            )

    def _sweep(self) -> None:
        """Look after the oldest transfers; those still pending go to the end."""
        for transfer in [t for t, _ in zip(self._pending, range(_SWEPT_AT_ONCE), strict=False)]:
            if not self._poll(transfer, 0):
                del self._pending[transfer]
                self._pending[transfer] = None

    def poll(self, transfer: AioTransfer) -> bool:
        self.check_process()
        with self._lock:
            return transfer._has_ended() or self._poll(transfer, 0)

    def _poll(self, transfer: AioTransfer, timeout_us: int) -> bool:
        """Ask C, note an end. Returns whether it has ended. With the lock held."""
        result = ffi.new("struct aio_result *")
        if lib.aio_wait(self._aio, transfer._ids[0], timeout_us, result):
            return False
        self._note_end(transfer, result)
        return True

    def _note_end(self, transfer: AioTransfer, result: FFI.CData) -> None:
        """With the lock held."""
        if transfer._has_ended():
            return
        transfer._end(_Result(-result.error, result.done_bytes, result.error_offset))
        del self._pending[transfer]
        lib.aio_forget(self._aio, transfer._ids[0])

    def wait(self, transfer: AioTransfer, timeout_s: float | None) -> None:
        """Return when it has ended, well or not."""
        if not self._await(transfer, _deadline(timeout_s)):
            raise TransferTimeoutError(
                f"{transfer._request} is still pending after {timeout_s} s, "
                f"with {self._done_bytes(transfer)} bytes done",
                errno=errno.ETIME,
                path=transfer._request.path,
            )

    def _await(self, transfer: AioTransfer, deadline: float | None) -> bool:
        """Wait in slices, so that signals are seen. Returns whether it has ended."""
        result = ffi.new("struct aio_result *")
        while not transfer._has_ended():
            left_s = _WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            slice_us = int(max(0.0, min(left_s, _WAIT_SLICE_S)) * 1e6)
            with _Use(self) as aio:
                if not lib.aio_wait(aio, transfer._ids[0], slice_us, result):
                    with self._lock:
                        self._note_end(transfer, result)
            if left_s <= 0:
                break
        return transfer._has_ended()

    def _done_bytes(self, transfer: AioTransfer) -> int:
        result = ffi.new("struct aio_result *")
        with _Use(self) as aio:
            lib.aio_wait(aio, transfer._ids[0], 0, result)
        return int(result.done_bytes)

    def open_file(self, path: str) -> AioFile:
        info = ffi.new("struct aio_file_info *")
        with _Use(self) as aio:
            number = int(lib.aio_file_open(aio, 0, os.fsencode(path), info))
        if number < 0:
            raise TransferError(_open_message(path, -number), errno=-number, path=path)
        return AioFile(
            self,
            path,
            number,
            FileInfo(
                direct=bool(info.direct),
                direct_errno=info.direct_errno,
                memory_align_bytes=info.memory_align_bytes,
                offset_align_bytes=info.offset_align_bytes,
            ),
        )

    def close_file(self, file: AioFile, timeout_s: float | None) -> None:
        self.check_process()
        deadline = _deadline(timeout_s)
        while True:
            with self._lock:
                if not file._is_open or self._aio is None:
                    return
                users = [t for t in self._pending if t._file is file]
                if not users:
                    file._is_open = False
                    lib.aio_file_close(self._aio, file._number)
                    return
            for transfer in users:
                if not self._await(transfer, deadline):
                    raise TransferTimeoutError(
                        f"{file!r} cannot be closed: {transfer._request} is still pending "
                        f"after {timeout_s} s",
                        errno=errno.ETIME,
                        path=file.path,
                    )

    def sync_file(self, file: File) -> None:
        opened = self._own_file(file)
        with _Use(self) as aio:
            error = -int(lib.aio_file_sync(aio, opened._number)) if opened._is_open else errno.EBADF
        if error:
            kind = SpaceError if error in _OUT_OF_SPACE else TransferError
            raise kind(f"sync of {opened.path} failed", errno=error, path=opened.path)

    def register(self, memory: Memory) -> None:
        with _Use(self) as aio:
            lib.aio_register(aio, ffi.cast("void *", memory.address), memory.nbytes)
            with self._lock:
                self._registered = memory

    def registered_bytes_wanted(self) -> int:
        with self._lock:
            return self._registered.nbytes if self._registered else 0

    def raw_stats(self) -> FFI.CData:
        stats = ffi.new("struct aio_stats *")
        with _Use(self) as aio:
            lib.aio_path_stats(aio, 0, stats)
        return stats

    def close(self, timeout_s: float | None) -> None:
        if os.getpid() != self._owner:
            return
        deadline = _deadline(timeout_s)
        with self._lock:
            if self._aio is None:
                return
            self._is_closing = True
            pending = list(self._pending)
        for transfer in pending:
            self._await(transfer, deadline)
        self._tear_down()

    def _tear_down(self) -> None:
        with self._lock:
            aio, self._aio = self._aio, None
            if aio is None:
                return
            while self._callers:
                self._idle.wait()
        lib.aio_close(aio, 0)
        with self._lock:
            for transfer in self._pending:
                transfer._end(None)
            self._pending.clear()
            self._registered = None


class AioEngine:
    """Moves bytes between memory and files through io_uring, or through threads where that is forbidden.

    It implements `tiering.aio.backend.AioBackend`. One worker, in C, serves all its files. Closed by
    ``close``, by ``with``, and at the latest when the last reference to it is gone, which lets
    pending transfers end for some seconds.

    Args:
        config: how to drive the drive; defaults fit an NVMe drive.
        faults: deliberate faults, for tests.

    Raises:
        ConfigError: the named backend cannot be had, or there is no compiled part.
    """

    def __init__(self, config: AioConfig | None = None, *, faults: Faults | None = None) -> None:
        check_native()
        self._config = config or AioConfig()
        self._core = _Core(self._config, faults or Faults())
        self._finalizer = weakref.finalize(self, self._core.close, _FINALIZER_S)
        self._fallback_was_told = False
        self._refusal_was_told = False
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
        return self._core.open_file(os.fspath(path))

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
        """
        request = _Request(int(lib.AIO_READ), _path_of(file), nbytes, offset)
        _check_range(request, memory, at)
        return self._core.start(request, file, memory, at, after)

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
        request = _Request(int(lib.AIO_WRITE), _path_of(file), nbytes, offset)
        _check_range(request, memory, at)
        return self._core.start(request, file, memory, at, after)

    def register(self, memory: Memory) -> None:
        """Pin the memory for cheaper transfers, in place of what was pinned before.

        Where that is refused everything works without; the statistics say why.
        """
        self._core.register(memory)
        self._tell_refusal()

    def sync(self, file: File) -> None:
        """Return when everything written to the file is on the drive (fdatasync)."""
        self._core.sync_file(file)

    def stats(self) -> AioStats:
        """Counters now."""
        self._tell_fallback()
        raw = self._core.raw_stats()
        return AioStats(
            backend=_backend_name(raw.backend),
            backend_reason=_backend_reason(raw.backend_errno),
            fixed_files=bool(raw.fixed_files),
            registered_bytes=raw.registered_bytes,
            register_reason=_register_reason(
                raw.register_errno, self._core.registered_bytes_wanted()
            ),
            read_bytes=raw.read_bytes,
            written_bytes=raw.written_bytes,
            read_blocks=raw.read_blocks,
            written_blocks=raw.written_blocks,
            buffered_blocks=raw.buffered_blocks,
            retries=raw.retries,
            short_transfers=raw.short_transfers,
            pending_requests=raw.pending_requests,
            busy_s=raw.busy_ns / 1e9,
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Let transfers end, at most ``timeout_s``, and free everything. A second call does nothing.

        Transfers that have not ended by then never will; waiting for them raises
        `EngineClosedError`. In a forked child this does nothing.
        """
        self._core.close(timeout_s)
        self._finalizer.detach()

    def _tell_fallback(self) -> None:
        if self._fallback_was_told or self._config.backend != "auto":
            return
        error = self._core.raw_stats().backend_errno
        if error:
            self._fallback_was_told = True
            warnings.warn(
                f"file I/O goes through threads: {_backend_reason(error)}. "
                'The option backend="threads" asks for that and silences this',
                TieringWarning,
                stacklevel=3,
            )

    def _tell_refusal(self) -> None:
        raw = self._core.raw_stats()
        if self._refusal_was_told or not raw.register_errno or raw.backend != BACKENDS["uring"]:
            return
        self._refusal_was_told = True
        reason = _register_reason(raw.register_errno, self._core.registered_bytes_wanted())
        warnings.warn(
            f"{reason}. Transfers work without, at the price of some processor time",
            TieringWarning,
            stacklevel=3,
        )


def _open(config: AioConfig, faults: Faults) -> FFI.CData:
    options = _options(config, faults)
    out = ffi.new("struct aio **")
    error = -int(lib.aio_open(options, out))
    if error:
        raise ConfigError(f"cannot make an engine of {config}: {os.strerror(error)}")
    number = int(lib.aio_path_add(out[0]))
    if number < 0:
        lib.aio_close(out[0], 0)
        if config.backend == "uring":
            raise ConfigError(
                f"backend 'uring' cannot be had: {_backend_reason(-number)}; "
                "or choose backend 'auto' or 'threads'"
            )
        raise ConfigError(f"cannot start {config}: {os.strerror(-number)}")
    return out[0]


def _options(config: AioConfig, faults: Faults) -> FFI.CData:
    options = ffi.new("struct aio_options *")
    options.block_bytes = config.block_bytes
    options.queue_depth = config.queue_depth
    options.threads = config.threads
    options.backend = BACKENDS[config.backend]
    options.max_files = config.max_files
    options.faults.refuse_uring_errno = faults.refuse_uring_errno
    options.faults.refuse_register_errno = faults.refuse_register_errno
    options.faults.refuse_direct_errno = faults.refuse_direct_errno
    options.faults.force_alignment_bytes = faults.force_alignment_bytes
    options.faults.max_transfer_bytes = faults.max_transfer_bytes
    for rule, wanted in zip(options.faults.rules, faults.rules, strict=False):
        rule.action = wanted.action
        rule.op = (wanted.reads << lib.AIO_READ) | (wanted.writes << lib.AIO_WRITE)
        rule.first = wanted.first
        rule.every = wanted.every
        rule.value = wanted.value
    return options


def _path_of(file: File) -> str:
    return file.path if isinstance(file, AioFile) else repr(file)


def _check_range(request: _Request, memory: Memory, at: int) -> None:
    if request.nbytes < 0 or request.offset < 0 or at < 0:
        raise ConfigError(f"{request} from byte {at} of its memory: none may be negative")
    if at + request.nbytes > memory.nbytes:
        raise ConfigError(
            f"{request} needs bytes {at} to {at + request.nbytes} of a memory of {memory.nbytes}"
        )


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _open_message(path: str, error: int) -> str:
    if error == errno.EMFILE:
        return (
            f"cannot open {path}: no descriptor or place is left; close files, or raise max_files "
            "or the limit on open files (ulimit -n)"
        )
    return f"cannot open {path}"


@functools.cache
def _backend_name(backend: int) -> str:
    return next(name for name, number in BACKENDS.items() if number == backend)


def _backend_reason(error: int) -> str:
    """Why io_uring is not in use, and what to do about it."""
    if not error:
        return ""
    name = errno.errorcode.get(error, str(error))
    if error == errno.ENOSYS and not lib.aio_has_uring():
        return "this build has no io_uring; install liburing-dev and build again"
    remedies = {
        errno.EPERM: "allow it in the container's seccomp profile, or set kernel.io_uring_disabled=0",
        errno.EACCES: "allow it in the container's seccomp profile, or set kernel.io_uring_disabled=0",
        errno.ENOSYS: "use Linux 5.6 or later, or a container runtime that passes it on",
        errno.ENOMEM: "raise the limit on locked memory (ulimit -l) or close other engines",
        errno.EMFILE: "raise the limit on open files (ulimit -n)",
    }
    remedy = remedies.get(error, "use a kernel and a file system that support it")
    return f"io_uring is refused with {name} ({os.strerror(error)}); {remedy}"


def _register_reason(error: int, wanted_bytes: int) -> str:
    """Why memory is not registered."""
    if not error:
        return ""
    if error == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "none" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        return (
            f"fixed buffers: off (lock limit {limit}, want {wanted_bytes / 2**20:.0f} MiB; "
            "raise it with ulimit -l or LimitMEMLOCK=)"
        )
    name = errno.errorcode.get(error, str(error))
    return f"fixed buffers: off ({name}: {os.strerror(error)}; Linux 5.19 or later has them)"
