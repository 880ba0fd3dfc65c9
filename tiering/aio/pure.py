"""`PureEngine`: the `AioBackend` protocol in Python alone, for where the C engine cannot be loaded.

A safety net: the same bytes and the same errors at less speed. A few threads take one transfer each
and move it with preadv and pwritev, cut at multiples of the block size; `descriptors` decides how.

A transfer that waits for another is run by the thread that ended the other. So no thread waits for
a transfer, however long the chain, and a chain is run to its end when the process ends.

What would break: closing a descriptor, or freeing memory, under a thread that hangs in the kernel
with it. `PureEngine.close` gives up transfers that do not end in time, but the thread still holds
both, and the last one to leave a file closes it.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

from tiering.aio.backend import File, FileInfo, Memory, Transfer
from tiering.aio.config import AioConfig, AioStats
from tiering.aio.descriptors import Descriptors
from tiering.aio.flight import (
    Flight,
    Order,
    Outcome,
    failure,
    foreign_process,
    too_few_ended,
)
from tiering.aio.native import why_not_native
from tiering.aio.reasons import why_not_open
from tiering.errors import ConfigError, EngineClosedError

_THREADS_MOST: Final = 16
_STALLS: Final = 2  # operations in a row that move nothing


class PureFile:
    """An open file of a `PureEngine`; closed at the latest with the engine."""

    def __init__(self, engine: PureEngine, path: str) -> None:
        self.engine = engine
        self.path = path
        self.is_open = True
        self.users = 0  # threads that are in the kernel with it now
        self.descriptors = Descriptors(path, direct=engine.config.direct)
        self.release = weakref.finalize(self, self.descriptors.close)

    def __repr__(self) -> str:
        return f"PureFile({self.path!r})"

    @property
    def info(self) -> FileInfo:
        """How it can be reached."""
        return self.descriptors.info

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for its transfers and close it. A second call does nothing.

        Raises:
            TransferTimeoutError: one is still pending after ``timeout_s``; the file stays open.
        """
        self.engine.close_file(self, timeout_s)


class PureTransfer(Flight):
    """One request of a `PureEngine` on its way. It may be dropped; it ends all the same."""

    def __init__(self, engine: PureEngine, file: PureFile, order: Order) -> None:
        super().__init__(file.path, order)
        self.engine = engine
        self.address = order.memory.address + order.at
        self.file: PureFile | None = file
        self.after: PureTransfer | None = None
        self.followers: list[PureTransfer] = []
        self.done_bytes = 0
        self.ready_ns = self.started_ns = time.monotonic_ns()
        self.ended = threading.Event()

    def __repr__(self) -> str:
        return f"<PureTransfer: {self.text}>"

    def end(self, outcome: Outcome | None) -> None:
        """Note the outcome, let go of what was kept, and wake who waits."""
        super().end(outcome)
        self.file = self.after = None
        self.ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks, never raises for a failed transfer."""
        self.engine.check_process()
        return self.has_ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer has succeeded; may be called again, from any thread.

        Raises:
            TransferError: it failed; `SpaceError` when the drive is full.
            TransferTimeoutError: it is still pending after ``timeout_s``.
            EngineClosedError: the engine was closed before it ended, or belongs to another process.
        """
        self.engine.check_process()
        if not self.engine.await_end(self, timeout_s):
            raise self.timeout(timeout_s, self.done_bytes)
        self.raise_failure()


class PureEngine:
    """Moves bytes between memory and files by threads of Python.

    It implements `tiering.aio.backend.AioBackend`. Whoever drops it without closing it lets its
    transfers end.

    Args:
        config: how to drive the drive; the backend it names is not looked at.
    """

    def __init__(self, config: AioConfig | None = None) -> None:
        self._config = config or AioConfig()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._some_ended = threading.Condition(self._lock)
        self._pending: dict[PureTransfer, None] = {}
        self._files: weakref.WeakSet[PureFile] = weakref.WeakSet()
        self._counts: collections.Counter[str] = collections.Counter()
        self._busy_s = self._busy_since_s = 0.0
        self._register_reason = ""
        self._is_closing = False
        self._here = threading.local()
        self._threads = ThreadPoolExecutor(
            self._config.threads or min(self._config.queue_depth, _THREADS_MOST),
            thread_name_prefix="aio-python",
            initializer=setattr,
            initargs=(self._here, "is_worker", True),
        )

    def __enter__(self) -> PureEngine:
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

    def open(self, path: str) -> PureFile:
        """Open an existing file for reading and writing.

        Raises:
            TransferError: the file cannot be opened.
        """
        with self._in_use():
            if len(self._files) >= self._config.max_files:
                raise failure(why_not_open(path, errno.EMFILE), errno.EMFILE, path)
            try:
                file = PureFile(self, path)
            except OSError as error:
                number = error.errno or errno.EIO
                raise failure(why_not_open(path, number), number, path) from error
            self._files.add(file)
        return file

    def read(  # noqa: PLR0913 - the six facts a read consists of
        self,
        file: File,
        memory: Memory,
        *,
        at: int = 0,
        nbytes: int,
        offset: int,
        after: Transfer | None = None,
    ) -> PureTransfer:
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
    ) -> PureTransfer:
        """Start writing; the mirror image of `read`."""
        return self._start(Order("write", memory, at, nbytes, offset), file, after)

    def wait_some(
        self, transfers: Sequence[Transfer], count: int = 1, timeout_s: float | None = None
    ) -> None:
        """Return when at least ``count`` of the transfers, or all, have ended, well or not.

        Raises:
            ConfigError: a transfer of another engine.
            TransferTimeoutError: too many are still pending after ``timeout_s``.
            EngineClosedError: the engine was closed, or belongs to another process.
        """
        own = [self._own_transfer(transfer) for transfer in transfers]
        with self._in_use():
            wanted = min(count, len(own))
            has_ended = self._some_ended.wait_for(
                lambda: sum(transfer.has_ended for transfer in own) >= wanted, timeout_s
            )
        if not has_ended:
            raise too_few_ended(own, count, timeout_s)

    def register(self, memory: Memory) -> None:  # noqa: ARG002 - the protocol's
        """Do nothing: there is no ring to register memory with."""
        with self._in_use():
            self._register_reason = "fixed buffers: off (threads of Python have none)"

    def sync(self, file: File) -> None:
        """Return when everything written to the file is on the drive (fdatasync).

        Raises:
            TransferError: it is not known whether all of it is.
        """
        opened = self._own(file)
        with self._in_use():
            if not opened.is_open:
                raise failure(f"sync of {opened.path} failed", errno.EBADF, opened.path)
            opened.users += 1
        try:
            opened.descriptors.sync()
        except OSError as error:
            number = error.errno or errno.EIO
            raise failure(f"sync of {opened.path} failed", number, opened.path) from error
        finally:
            self._leave(opened)

    def stats(self) -> AioStats:
        """Counters now."""
        with self._in_use():
            counts, is_busy = self._counts, bool(self._pending)
            return AioStats(
                backend="python",
                backend_reason=why_not_native(),
                fixed_files=False,
                registered_bytes=0,
                register_reason=self._register_reason,
                read_bytes=counts["read bytes"],
                written_bytes=counts["write bytes"],
                read_blocks=counts["read blocks"],
                written_blocks=counts["write blocks"],
                buffered_blocks=counts["buffered blocks"],
                retries=counts["retries"],
                short_transfers=counts["short transfers"],
                pending_requests=len(self._pending),
                ended_requests=counts["ended requests"],
                busy_s=self._busy_s + is_busy * (time.monotonic() - self._busy_since_s),
                queue_s=counts["queue ns"] / 1e9,
                device_s=counts["device ns"] / 1e9,
                waits=counts["waits"],
                waited_s=counts["waited ns"] / 1e9,
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Let transfers end, at most ``timeout_s``, and free everything. Twice is once.

        Transfers that have not ended by then never will; waiting for them raises
        `EngineClosedError`. In a forked child this does nothing.
        """
        if os.getpid() != self._owner:
            return
        if getattr(self._here, "is_worker", False):
            # The garbage collector ran somebody's finalizer here; this thread cannot wait for
            # itself.
            threading.Thread(target=self.close, args=(timeout_s,), name="aio-close").start()
            return
        deadline_s = _deadline(timeout_s)
        with self._lock:
            self._is_closing = True
            pending = list(self._pending)
        for transfer in pending:
            transfer.ended.wait(_left(deadline_s))
        with self._lock:
            given_up = list(self._pending)
            self._pending.clear()
            for transfer in given_up:
                transfer.end(None)
            self._some_ended.notify_all()
            for file in list(self._files):
                self._shut(file)
        self._threads.shutdown(wait=not given_up, cancel_futures=True)

    def close_file(self, file: PureFile, timeout_s: float | None) -> None:
        """Wait for a file's transfers and close it."""
        self.check_process()
        deadline_s = _deadline(timeout_s)
        while True:
            with self._lock:
                user = next((one for one in self._pending if one.file is file), None)
                if user is None:
                    self._shut(file)
                    return
            if not user.ended.wait(_left(deadline_s)):
                raise user.in_the_way(timeout_s)

    def await_end(self, transfer: PureTransfer, timeout_s: float | None) -> bool:
        """Wait for a transfer. Returns whether it has ended."""
        if transfer.ended.is_set():
            return True
        began_ns = time.monotonic_ns()
        has_ended = transfer.ended.wait(timeout_s)
        with self._lock:
            self._counts["waits"] += 1
            self._counts["waited ns"] += time.monotonic_ns() - began_ns
        return has_ended

    def check_process(self) -> None:
        """Refuse a forked child, which must not even take a lock: a thread it lacks may hold it."""
        if os.getpid() != self._owner:
            raise foreign_process(self._owner, os.getpid())

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Hold the lock, after a check that the engine can be used here at all."""
        self.check_process()
        with self._lock:
            if self._is_closing:
                raise EngineClosedError("the engine is closed")
            yield

    def _own(self, file: File) -> PureFile:
        if not isinstance(file, PureFile) or file.engine is not self:
            raise ConfigError(f"{file!r} was not opened by this engine")
        return file

    def _own_transfer(self, transfer: Transfer) -> PureTransfer:
        if not isinstance(transfer, PureTransfer) or transfer.engine is not self:
            raise ConfigError(f"{transfer!r} does not belong to this engine; wait for it instead")
        return transfer

    def _start(self, order: Order, file: File, after: Transfer | None) -> PureTransfer:
        opened, before = self._own(file), None if after is None else self._own_transfer(after)
        order.check(opened.path)
        transfer = PureTransfer(self, opened, order)
        with self._in_use():
            if not opened.is_open:
                raise ConfigError(f"the file is closed; no {transfer.text}")
            if before and before.has_failed:
                transfer.end(Outcome(errno.ECANCELED, 0, order.offset))
                return transfer
            if not self._pending:
                self._busy_since_s = time.monotonic()
            self._pending[transfer] = None
            if before and not before.has_ended:
                transfer.after = before
                before.followers.append(transfer)
            else:
                self._submit(transfer)
        return transfer

    # With the lock held.

    def _submit(self, transfer: PureTransfer) -> None:
        try:
            self._threads.submit(self._run, transfer)
        except RuntimeError as error:  # there are no new threads when the process ends
            del self._pending[transfer]
            transfer.end(None)
            raise EngineClosedError(f"no {transfer.text}: {error}") from error

    def _shut(self, file: PureFile) -> None:
        file.is_open = False
        self._files.discard(file)
        if not file.users:
            file.release()

    # On a thread of the pool.

    def _run(self, transfer: PureTransfer) -> None:
        """Move a transfer's bytes, and then those of all that waited for it."""
        todo = collections.deque([transfer])
        while todo:
            transfer = todo.popleft()
            todo.extend(self._end(transfer, self._move(transfer)))

    def _end(self, transfer: PureTransfer, outcome: Outcome | None) -> list[PureTransfer]:
        """Note the outcome, unless the transfer was given up. Returns those that waited for it."""
        with self._lock:
            if not transfer.has_ended:
                del self._pending[transfer]
                if not self._pending:
                    self._busy_s += time.monotonic() - self._busy_since_s
                transfer.end(outcome and self._timed(transfer, outcome))
                self._some_ended.notify_all()
            followers, transfer.followers = transfer.followers, []
            for follower in followers:
                follower.ready_ns = follower.started_ns = time.monotonic_ns()
        return followers

    def _timed(self, transfer: PureTransfer, outcome: Outcome) -> Outcome:
        """The outcome with its times, which are counted as well."""
        queue_ns = transfer.started_ns - transfer.ready_ns
        device_ns = time.monotonic_ns() - transfer.started_ns
        self._counts["ended requests"] += 1
        self._counts["queue ns"] += queue_ns
        self._counts["device ns"] += device_ns
        return outcome._replace(queue_ns=queue_ns, device_ns=device_ns)

    def _move(self, transfer: PureTransfer) -> Outcome | None:
        """Move all bytes of a transfer. Returns how that ended, or None when it was given up."""
        with self._lock:
            file, memory = transfer.file, transfer.memory  # held until the kernel is through
            if file is None or memory is None:
                return None
            if transfer.after and transfer.after.has_failed:
                return Outcome(errno.ECANCELED, 0, transfer.offset)
            file.users += 1
        transfer.started_ns = time.monotonic_ns()
        error_number = 0
        try:
            self._move_pieces(transfer, file)
        except OSError as error:
            error_number = error.errno or errno.EIO
        except OverflowError:  # an offset no file has
            error_number = errno.EINVAL
        finally:
            self._leave(file)
        done_bytes = transfer.done_bytes
        return Outcome(error_number, done_bytes, transfer.offset + done_bytes)

    def _leave(self, file: PureFile) -> None:
        with self._lock:
            file.users -= 1
            if not file.is_open and not file.users:
                file.release()

    def _move_pieces(self, transfer: PureTransfer, file: PureFile) -> None:
        verb, stalls = transfer.verb, 0
        while transfer.done_bytes < transfer.nbytes and not transfer.has_ended:
            offset = transfer.offset + transfer.done_bytes
            block_bytes = self._config.block_bytes - offset % self._config.block_bytes
            left_bytes = transfer.nbytes - transfer.done_bytes
            moved = file.descriptors.move(
                verb, transfer.address + transfer.done_bytes, offset, min(block_bytes, left_bytes)
            )
            stalls = 0 if moved.nbytes else stalls + 1
            if stalls == _STALLS:
                raise OSError(errno.ENODATA if verb == "read" else errno.EIO, "no progress")
            transfer.done_bytes += moved.nbytes
            with self._lock:
                self._counts[f"{verb} bytes"] += moved.nbytes
                self._counts[f"{verb} blocks"] += 1
                self._counts["buffered blocks"] += not moved.is_direct
                self._counts["short transfers"] += moved.nbytes < moved.asked_bytes
                self._counts["retries"] += moved.retries


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
