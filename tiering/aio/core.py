"""What an engine, its files and its transfers share: the C engine and the transfers on their way.

Who keeps what alive: `Core` holds each flight until it has ended, and the flight holds its
memory, its file and the flight it waits for. So a user may drop a transfer at any time. A flight
stands among the pending ones before C hears of it, and C writes its id into memory the flight owns:
an interrupt between two Python instructions cannot lose one that is under way.

C counts the requests that have ended. Whoever asks after any flight looks at that count and, when
it has grown, takes in the outcomes of all of them: to ask about a flight that is pending costs
nearly nothing, however many there are.

Every device, told by the number of its file system, has a path of its own in C, with its own worker
and queue: a slow drive does not hold up a fast one.

What would break: closing the C engine under a call. So every call outside the lock is counted, and
the last step of closing waits until none is left.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiering.aio.backend import FileInfo, Memory
from tiering.aio.config import BACKENDS, AioConfig, Faults
from tiering.aio.flight import Flight, Order, Outcome, failure, foreign_process
from tiering.aio.native import ffi, lib
from tiering.aio.reasons import why_no_uring, why_not_open
from tiering.errors import ConfigError, EngineClosedError, TransferError

if TYPE_CHECKING:  # these exist for the type checker only
    from tiering.aio._native import Aio, Options, Stats

_WAIT_SLICE_S: Final = 1.0  # then a look for signals such as Ctrl-C, which costs a cold wake-up
_TAKEN_IN_AT_ONCE: Final = 64
_FINALIZER_S: Final = 5.0  # how long a forgotten engine lets its transfers end


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
        self._adding = threading.Lock()
        self._pending: dict[int, NativeFlight] = {}  # by the tags they have in C
        self._last_tag = 0
        self._paths: dict[int, int] = {}  # by device
        self._callers = 0
        self._is_closing = False
        self._registered: Memory | None = None
        # Used over and over, with the lock held.
        self._request = ffi.new("struct aio_request *")
        self._results = ffi.new("struct aio_result[]", _TAKEN_IN_AT_ONCE)
        self._untaken = ffi.new("uint32_t *")
        self._seen_ended = 0
        self.uses_threads = False
        """Whether some transfer went through threads."""
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
            self._take_in(self._aio)
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
                self._take_in(self._aio)
            return flight.has_ended

    def wait(self, flight: NativeFlight, timeout_s: float | None) -> None:
        """Return when it has ended, well or not."""
        self._check_process()
        if not self._await(flight, _deadline(timeout_s)):
            raise flight.timeout(timeout_s, self._done_bytes(flight))

    def wait_some(
        self, flights: Sequence[NativeFlight], count: int, timeout_s: float | None
    ) -> bool:
        """Return when so many of them have ended; False: too many are still pending."""
        deadline = _deadline(timeout_s)
        while True:
            with self._use() as aio:
                with self._lock:
                    self._take_in(aio)
                    seen = self._seen_ended
                missing = count - sum(flight.has_ended for flight in flights)
                if missing <= 0:
                    return True
                left_s = _left(deadline)
                if left_s <= 0:
                    return False
                lib.aio_wait_ended(aio, seen + missing, int(min(left_s, _WAIT_SLICE_S) * 1e6))

    def open_file(self, path: str) -> OpenFile:
        """Open an existing file."""
        info = ffi.new("struct aio_file_info *")
        with self._use() as aio:
            number = lib.aio_file_open(aio, self._path_of(aio, path), os.fsencode(path), info)
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

    def stats(self) -> dict[int, Stats]:
        """The counters of C, by device; 0 stands for a device not known yet."""
        with self._use() as aio:
            return {
                device: _path_stats(aio, number)
                for device, number in (self._paths or {0: 0}).items()
            }

    def close(self, timeout_s: float | None) -> None:
        """Let transfers end, at most so long, and free everything."""
        if os.getpid() != self._owner:
            return
        deadline = _deadline(timeout_s)
        with self._lock:
            self._is_closing = True
            pending = list(self._pending.values())
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

    def _path_of(self, aio: Aio, path: str) -> int:
        """The path of the file's device; the first one's where the machine has no more."""
        try:
            device = Path(path).stat().st_dev
        except OSError:
            return 0  # C will say why
        with self._adding:
            if device not in self._paths:
                self._paths[device] = max(0, lib.aio_path_add(aio)) if self._paths else 0
            return self._paths[device]

    # With the lock held.

    def _submit(self, aio: Aio, flight: NativeFlight, file: OpenFile, order: Order) -> None:
        request = self._request
        request.op = lib.AIO_READ if order.verb == "read" else lib.AIO_WRITE
        request.file = file.number
        request.buffer = ffi.cast("void *", order.memory.address + order.at)
        request.bytes = order.nbytes
        request.offset = order.offset
        request.after = flight.after.ids[0] if flight.after else 0
        self._last_tag = tag = self._last_tag + 1
        request.tag = tag
        self._pending[tag] = flight
        error = -lib.aio_submit(aio, request, 1, flight.ids)
        if error:
            del self._pending[tag]
            raise TransferError(f"{flight.text} was not started", errno=error, path=flight.path)

    def _take_in(self, aio: Aio) -> None:
        """Note the outcomes of all that are done.

        An interrupt anywhere in here loses none: what C handed over stays untaken until it is
        noted, and is noted a second time without harm.
        """
        ended = lib.aio_ended_count(aio)
        if ended == self._seen_ended:
            return
        self._note_untaken()  # of a call that was interrupted
        while not lib.aio_reap(aio, self._results, _TAKEN_IN_AT_ONCE, self._untaken):
            if not self._untaken[0]:
                break
            self._note_untaken()
        self._seen_ended = ended

    def _note_untaken(self) -> None:
        while self._untaken[0]:
            result = self._results[self._untaken[0] - 1]
            flight = self._pending.get(result.tag)
            if flight is not None:
                self.uses_threads |= result.backend == BACKENDS["threads"]
                flight.end(
                    Outcome(
                        -result.error,
                        result.done_bytes,
                        result.error_offset,
                        result.queue_ns,
                        result.device_ns,
                    )
                )
                del self._pending[result.tag]
            self._untaken[0] -= 1

    # Without it.

    def _await(self, flight: NativeFlight, deadline: float | None) -> bool:
        """Wait in slices, so that signals are seen. Returns whether it has ended."""
        result = ffi.new("struct aio_result *")
        while not flight.has_ended:
            left_s = _left(deadline)
            slice_us = int(max(0.0, min(left_s, _WAIT_SLICE_S)) * 1e6)
            with self._use() as aio:
                lib.aio_wait(aio, flight.ids[0], slice_us, result)
                with self._lock:
                    self._take_in(aio)
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
                user = next(
                    (flight for flight in self._pending.values() if flight.file is file), None
                )
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
            for flight in self._pending.values():
                flight.end(None)
            self._pending.clear()
            self._registered = None


def _path_stats(aio: Aio, number: int) -> Stats:
    stats = ffi.new("struct aio_stats *")
    lib.aio_path_stats(aio, number, stats)
    return stats


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline: float | None) -> float:
    return math.inf if deadline is None else deadline - time.monotonic()


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
