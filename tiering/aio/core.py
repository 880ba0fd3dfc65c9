"""What an engine, its files and its transfers share: the C engine and the transfers on their way.

Who keeps what alive: `Core` holds each flight until it has ended, and the flight holds its
memory, its file and the flight it waits for. So a user may drop a transfer at any time. A flight
stands among the pending ones before C hears of it, and C writes its id into memory the flight owns:
an interrupt between two Python instructions cannot lose one that is under way.

An ended flight is forgotten in C when somebody asks for it; each new one also looks after two old
ones, so that the table stays small when nobody ever asks.

What would break: closing the C engine under a call. So every call outside the lock is counted, and
the last step of closing waits until none is left.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiering.aio.backend import FileInfo, Memory
from tiering.aio.config import BACKENDS, AioConfig, Faults
from tiering.aio.flight import Flight, Order, Outcome, failure, foreign_process
from tiering.aio.native import ffi, lib
from tiering.aio.reasons import why_no_uring, why_not_open
from tiering.errors import ConfigError, EngineClosedError, TransferError

if TYPE_CHECKING:  # these exist for the type checker only
    from tiering.aio._native import Aio, Options, Result, Stats

_WAIT_SLICE_S = 0.1  # between two looks for signals such as Ctrl-C
_SWEPT_AT_ONCE = 2
_FINALIZER_S = 5.0  # how long a forgotten engine lets its transfers end


class OpenFile:
    """A file that is open in C.

    Args:
        core: whose.
        path: the name it was opened by.
        number: its number in C.
        info: how it can be reached.
    """

    def __init__(self, core: Core, path: str, number: int, info: FileInfo) -> None:
        self.core = core
        self.path = path
        self.number = number
        self.info = info
        self.is_open = True


class NativeFlight(Flight):
    """One transfer on its way through C.

    Args:
        file: of which file.
        order: what is to be done.
    """

    def __init__(self, file: OpenFile, order: Order) -> None:
        super().__init__(file.path, order)
        self.core = file.core
        self.ids = ffi.new("uint64_t[1]")
        # Kept alive until the end.
        self.file: OpenFile | None = file
        self.after: NativeFlight | None = None

    def end(self, outcome: Outcome | None) -> None:
        """Note the outcome, or None when the engine closed first, and let go of what was kept."""
        super().end(outcome)
        self.file = self.after = None


class Core:
    """The C engine and what is on its way through it. Its lock guards all of it.

    Args:
        config: how to drive the drive.
        faults: deliberate faults, for tests.

    Raises:
        ConfigError: the named backend cannot be had.
    """

    def __init__(self, config: AioConfig, faults: Faults) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pending: dict[NativeFlight, None] = {}
        self._callers = 0
        self._is_closing = False
        self._registered: Memory | None = None
        self._aio: Aio | None = _open(config, faults)

    @property
    def registered_bytes_wanted(self) -> int:
        """What `register` was last given."""
        return self._registered.nbytes if self._registered else 0

    def start(self, file: OpenFile, order: Order, after: NativeFlight | None) -> NativeFlight:
        """Put a transfer on its way."""
        order.check(file.path)
        self._check_process()
        flight = NativeFlight(file, order)
        with self._lock:
            if self._aio is None or self._is_closing:
                raise EngineClosedError(f"the engine is closed; no {flight.text}")
            if not file.is_open:
                raise ConfigError(f"the file is closed; no {flight.text}")
            self._sweep(self._aio)
            if after and after.has_failed:
                flight.end(Outcome(errno.ECANCELED, 0, order.offset))
            else:
                flight.after = after if after and not after.has_ended else None
                self._submit(self._aio, flight, file, order)
        return flight

    def poll(self, flight: NativeFlight) -> bool:
        """Whether it has ended."""
        self._check_process()
        with self._lock:
            if not flight.has_ended and self._aio is not None:
                self._look_after(self._aio, flight)
            return flight.has_ended

    def wait(self, flight: NativeFlight, timeout_s: float | None) -> None:
        """Return when it has ended, well or not."""
        self._check_process()
        if not self._await(flight, _deadline(timeout_s)):
            raise flight.timeout(timeout_s, self._done_bytes(flight))

    def open_file(self, path: str) -> OpenFile:
        """Open an existing file."""
        info = ffi.new("struct aio_file_info *")
        with self._use() as aio:
            number = lib.aio_file_open(aio, 0, os.fsencode(path), info)
        if number < 0:
            raise TransferError(why_not_open(path, -number), errno=-number, path=path)
        return OpenFile(
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

    def close_file(self, file: OpenFile, timeout_s: float | None) -> None:
        """Wait for its transfers and close it."""
        self._check_process()
        deadline = _deadline(timeout_s)
        for flight in self._close_or_list_users(file):
            if not self._await(flight, deadline):
                raise flight.in_the_way(timeout_s)

    def sync_file(self, file: OpenFile) -> None:
        """Return when everything written to it is on the drive."""
        with self._use() as aio:
            error = -lib.aio_file_sync(aio, file.number) if file.is_open else errno.EBADF
        if error:
            raise failure(f"sync of {file.path} failed", error, file.path)

    def register(self, memory: Memory) -> None:
        """Register memory with the ring, where it lets us."""
        with self._use() as aio:
            lib.aio_register(aio, ffi.cast("void *", memory.address), memory.nbytes)
            with self._lock:
                self._registered = memory

    def stats(self) -> Stats:
        """The counters of C."""
        stats = ffi.new("struct aio_stats *")
        with self._use() as aio:
            lib.aio_path_stats(aio, 0, stats)
        return stats

    def close(self, timeout_s: float | None) -> None:
        """Let transfers end, at most so long, and free everything."""
        if os.getpid() != self._owner:
            return
        deadline = _deadline(timeout_s)
        with self._lock:
            self._is_closing = True
            pending = list(self._pending)
        with contextlib.suppress(EngineClosedError):  # another thread was faster
            for flight in pending:
                self._await(flight, deadline)
        self._tear_down()

    def close_unreferenced(self) -> None:
        """Close from a finalizer, which the garbage collector may run anywhere, even in here.

        Where this very thread may hold the lock or be counted as a caller, another thread closes;
        until then that thread keeps the memory of pending transfers alive.
        """
        if os.getpid() != self._owner:
            return
        is_idle = self._lock.acquire(blocking=False)
        if is_idle:
            is_idle = not self._callers
            self._lock.release()
        if is_idle:
            self.close(_FINALIZER_S)
        else:
            threading.Thread(target=self.close, args=(_FINALIZER_S,), name="aio-close").start()

    def _check_process(self) -> None:
        """A forked child must not even take the lock: a thread it lacks may hold it."""
        if os.getpid() != self._owner:
            raise foreign_process(self._owner, os.getpid())

    @contextlib.contextmanager
    def _use(self) -> Iterator[Aio]:
        """The C engine, kept from being closed as long as the block lasts."""
        self._check_process()
        with self._lock:
            if self._aio is None:
                raise EngineClosedError("the engine is closed")
            aio = self._aio
            self._callers += 1
        try:
            yield aio
        finally:
            with self._lock:
                self._callers -= 1
                if not self._callers:
                    self._idle.notify_all()

    # With the lock held.

    def _submit(self, aio: Aio, flight: NativeFlight, file: OpenFile, order: Order) -> None:
        request = ffi.new("struct aio_request *")
        request.op = lib.AIO_READ if order.verb == "read" else lib.AIO_WRITE
        request.file = file.number
        request.buffer = ffi.cast("void *", order.memory.address + order.at)
        request.bytes = order.nbytes
        request.offset = order.offset
        request.after = flight.after.ids[0] if flight.after else 0
        self._pending[flight] = None
        error = -lib.aio_submit(aio, request, 1, flight.ids)
        if error:
            del self._pending[flight]
            raise TransferError(f"{flight.text} was not started", errno=error, path=flight.path)

    def _sweep(self, aio: Aio) -> None:
        """Look after the oldest flights; those still pending go to the end."""
        for flight in list(itertools.islice(self._pending, _SWEPT_AT_ONCE)):
            self._look_after(aio, flight)
            if not flight.has_ended:
                del self._pending[flight]
                self._pending[flight] = None

    def _look_after(self, aio: Aio, flight: NativeFlight) -> None:
        result = ffi.new("struct aio_result *")
        if not lib.aio_wait(aio, flight.ids[0], 0, result):
            self._note_end(aio, flight, result)

    def _note_end(self, aio: Aio, flight: NativeFlight, result: Result) -> None:
        if flight.has_ended:
            return
        flight.end(Outcome(-result.error, result.done_bytes, result.error_offset))
        del self._pending[flight]
        lib.aio_forget(aio, flight.ids[0])

    # Without it.

    def _await(self, flight: NativeFlight, deadline: float | None) -> bool:
        """Wait in slices, so that signals are seen. Returns whether it has ended."""
        result = ffi.new("struct aio_result *")
        while not flight.has_ended:
            left_s = _WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            slice_us = int(max(0.0, min(left_s, _WAIT_SLICE_S)) * 1e6)
            with self._use() as aio:
                if not lib.aio_wait(aio, flight.ids[0], slice_us, result):
                    with self._lock:
                        self._note_end(aio, flight, result)
            if left_s <= 0:
                break
        return flight.has_ended

    def _done_bytes(self, flight: NativeFlight) -> int:
        result = ffi.new("struct aio_result *")
        with self._use() as aio:
            lib.aio_wait(aio, flight.ids[0], 0, result)
        return result.done_bytes

    def _close_or_list_users(self, file: OpenFile) -> Iterator[NativeFlight]:
        """Yield what is pending on the file until there is nothing, then close it."""
        while True:
            with self._lock:
                if not file.is_open or self._aio is None:
                    return
                user = next((flight for flight in self._pending if flight.file is file), None)
                if user is None:
                    file.is_open = False
                    lib.aio_file_close(self._aio, file.number)
                    return
            yield user

    def _tear_down(self) -> None:
        with self._lock:
            aio, self._aio = self._aio, None
            if aio is None:
                return
            while self._callers:
                self._idle.wait()
        lib.aio_close(aio, 0)
        with self._lock:
            for flight in self._pending:
                flight.end(None)
            self._pending.clear()
            self._registered = None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _open(config: AioConfig, faults: Faults) -> Aio:
    out = ffi.new("struct aio **")
    error = -lib.aio_open(_options(config, faults), out)
    if error:
        raise ConfigError(f"cannot make an engine of {config}: {os.strerror(error)}")
    error = -lib.aio_path_add(out[0])
    if error <= 0:
        return out[0]
    lib.aio_close(out[0], 0)
    if config.backend == "uring":
        raise ConfigError(
            f"backend 'uring' cannot be had: {why_no_uring(error)}; "
            "or choose the backend 'auto' or 'threads'"
        )
    raise ConfigError(f"cannot start an engine of {config}: {os.strerror(error)}")


def _options(config: AioConfig, faults: Faults) -> Options:
    options = ffi.new("struct aio_options *")
    options.block_bytes = config.block_bytes
    options.queue_depth = config.queue_depth
    options.threads = config.threads
    options.backend = BACKENDS[config.backend]
    options.max_files = config.max_files
    options.direct = lib.AIO_DIRECT_OFF if config.direct == "off" else lib.AIO_DIRECT_AUTO
    options.faults.refuse_uring_errno = faults.refuse_uring_errno
    options.faults.refuse_register_errno = faults.refuse_register_errno
    options.faults.refuse_direct_errno = faults.refuse_direct_errno
    options.faults.force_alignment_bytes = faults.force_alignment_bytes
    options.faults.force_memory_alignment_bytes = faults.force_memory_alignment_bytes
    options.faults.max_transfer_bytes = faults.max_transfer_bytes
    for index, wanted in enumerate(faults.rules):
        rule = options.faults.rules[index]
        rule.action = wanted.action
        rule.op = (wanted.reads << lib.AIO_READ) | (wanted.writes << lib.AIO_WRITE)
        rule.first = wanted.first
        rule.every = wanted.every
        rule.value = wanted.value
    return options
