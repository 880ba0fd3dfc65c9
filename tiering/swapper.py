"""The store's smallest entrance: put a tensor on the drive, get it back later.

On the way out a tensor's bytes are copied into arena slots, a piece at a time, and each slot is
written to the tensor's record file; when `swap_out` returns, all bytes have been copied and the
caller may do anything with the tensor. On the way in each piece is read into a slot and copied
from there to its place in an ordinary tensor. Pieces make one small arena serve tensors of any
size, and several of them in flight keep the drive busy while others are copied.

There is no thread here. Finished pieces are *landed* (copied on, their slot freed) and waiting
reads are started whenever the swapper is called, and inside waits. Writes are all started by
`swap_out` itself, so they need nobody.

What would break: reading what was only partly written. A record whose last write failed is marked
with the error and cannot be read until it has been written whole; a read that is asked for while
the write is on its way is chained to it, piece by piece. And an error that nobody asked for is
raised by `TensorSwapper.close` at the latest.

Ctrl-C may come between any two instructions. So each step can be made again: it notes first what it
is about to change and forgets last what it has done. A call that leaves by an exception is mended
by the next one, whichever that is: a job whose caller never got its transfer fails. A slot or a
transfer that was lost between two instructions is known to nobody; such a file is never written
again but replaced, and such an arena too, when nothing is under way, since closing files waits for
the lost transfers.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import difflib
import functools
import math
import os
import reprlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch.autograd.graph import increment_version
from typing_extensions import Self

from tiering.aio import AioConfig, open_engine
from tiering.aio.backend import AioBackend, Transfer
from tiering.arena import Arena, ArenaStats, Slot
from tiering.bandwidth import make_volumes
from tiering.errors import (
    ArenaFullError,
    ConfigError,
    EngineClosedError,
    RecordError,
    TieringError,
    TransferError,
    TransferTimeoutError,
)
from tiering.records import ALIGNMENT_BYTES, has_file_dtype
from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.nvme import NvmeTier, Part
from tiering.volumes import VolumeStats, open_folders

_HOST_MEMORY_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 16 << 20  # large enough for full speed, small enough to be copied meanwhile
_PIECES_IN_FLIGHT: Final = 8  # at least so many fit into the arena
_ABANDON_S: Final = 10.0  # how long an exception waits for transfers nobody will ask for

Root: TypeAlias = str | os.PathLike[str]
ResultT = TypeVar("ResultT")


class SwapperStats(NamedTuple):
    """What a swapper holds and has moved.

    Args:
        tensors: keys on the drive.
        stored_bytes: their bytes, without padding.
        pending_transfers: started, and not known to have ended.
        read_bytes: of all reads so far, padding included.
        written_bytes: the same for writes.
        arena: where the bytes of the host memory are.
        volumes: what each path holds and has moved.
    """

    tensors: int
    stored_bytes: int
    pending_transfers: int
    read_bytes: int
    written_bytes: int
    arena: ArenaStats
    volumes: tuple[VolumeStats, ...]


class SwapTransfer(Generic[ResultT]):
    """One tensor on its way out or in; `TensorSwapper` makes them."""

    def __init__(
        self, key: str, *, wait: Callable[[float | None], ResultT], done: Callable[[], bool]
    ) -> None:
        self.key = key
        self._wait = wait
        self._done = done

    def done(self) -> bool:
        """Whether it has ended, well or not. Neither blocks for the drive nor raises a failure."""
        return self._done()

    def wait(self, timeout_s: float | None = None) -> ResultT:
        """Return the tensor of a `TensorSwapper.swap_in`, or None when a swap-out is on the drive.

        May be called again, and after the swapper was closed.

        Raises:
            TransferError: a read or write failed.
            TransferTimeoutError: still pending after ``timeout_s``; names what is pending. It goes
                on.
            RecordError: what was to be read had not been written whole.
        """
        return self._wait(timeout_s)


@dataclass(eq=False)
class _Job:
    """One tensor's transfer: the parts that are still to be started, and the pieces in flight."""

    stored: _Stored
    todo: collections.deque[Part]
    began_in_round: int
    flying: dict[_Piece, None] = field(default_factory=dict)
    error: TieringError | None = None
    is_begun: bool = False
    """Its caller gets a transfer for it."""
    has_ended: bool = False
    is_heard: bool = False
    """Somebody was told how it ended."""

    def fail(self, error: TieringError) -> None:
        """Keep the first error, start nothing more; what has ended stays as it is."""
        if not self.has_ended:
            self.error = self.error or error
            self.todo.clear()

    def land(self, piece: _Piece) -> None:
        """Take what a finished piece brought."""

    def end(self) -> None:
        """Note how it ended."""


@dataclass(eq=False)
class _Writing(_Job):
    """A tensor on its way out."""

    written: dict[int, Transfer] = field(default_factory=dict)
    """The writes by where they start, for reads that come while they are under way."""

    def end(self) -> None:
        self.stored.fault = self.error
        self.written.clear()


@dataclass(eq=False)
class _Reading(_Job):
    """A tensor on its way in."""

    out: torch.Tensor | None = None
    behind: _Writing | None = None
    """The write it follows, if that had not ended when it began."""

    def land(self, piece: _Piece) -> None:
        start, nbytes = piece.part
        _check_fits(self.stored, self.result())  # it may have been freed meanwhile
        target = self.result().detach().view(-1).view(torch.uint8)
        _copy_out(piece.slot, target[start : start + nbytes])

    def result(self) -> torch.Tensor:
        """The destination, made when the first byte arrives."""
        if self.out is None:
            with torch.inference_mode(mode=False):
                stored = self.stored
                self.out = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        return self.out

    def end(self) -> None:
        if self.behind and self.behind.error:
            self.error = _not_whole(self.stored, self.behind.error)


@dataclass(eq=False)
class _Piece:
    """A part of a tensor in flight."""

    job: _Job
    part: Part
    slot: Slot
    transfer: Transfer
    has_landed: bool = False
    """Nothing is to be taken from it any more."""


@dataclass(eq=False)
class _Stored:
    """All that is known of one key."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_file: bool = False
    fault: TieringError | None = None
    """Why its contents cannot be had."""
    jobs: dict[_Job, None] = field(default_factory=dict)
    """Those that have not ended, in the order they began."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def writers(self) -> Iterator[_Writing]:
        """The transfer that writes it now; there is at most one."""
        return (job for job in self.jobs if isinstance(job, _Writing))

    @property
    def spec(self) -> RecordSpec:
        """Its record. A dtype that files do not know is kept as bytes there."""
        if has_file_dtype(self.dtype):
            tensor = TensorSpec("tensor", self.dtype, self.shape)
        else:
            tensor = TensorSpec("tensor", torch.uint8, (self.nbytes,))
        return RecordSpec(self.key, (tensor,))

    def parts(self, piece_bytes: int) -> collections.deque[Part]:
        """The payload cut into pieces."""
        starts = range(0, self.nbytes, piece_bytes)
        return collections.deque(Part(at, min(piece_bytes, self.nbytes - at)) for at in starts)


class TensorSwapper:
    """Keeps tensors on a drive, by key.

    Safe to use from several threads. A forked child cannot use its parent's swapper and gets an
    exception.

    Args:
        path: a directory on the drive; made if missing. Tensors live in a private folder in it,
            which is removed by `close` or at exit. Several, on a drive each: tensors are spread
            over them, each whole on one, in proportion to the drives' speeds. Those are measured,
            with 64 MiB a path, or given as the values of a mapping, in GB/s.
        host_memory_bytes: the arena through which everything moves; it bounds the memory in use,
            not the size of a tensor.
        aio: how the drive is driven; defaults fit an NVMe drive.
        backend: what moves the bytes, instead of the engine that ``aio`` asks for; closed with the
            swapper.

    Raises:
        ConfigError: a path, a speed or a size that cannot work.
        TransferError: a drive failed while its speed was measured.
    """

    def __init__(
        self,
        path: Root | Sequence[Root] | Mapping[Root, float],
        *,
        host_memory_bytes: int = _HOST_MEMORY_BYTES,
        aio: AioConfig | None = None,
        backend: AioBackend | None = None,
    ) -> None:
        if aio is not None and backend is not None:
            raise ConfigError("give a configuration or a backend, not both")
        _check_is("host_memory_bytes", host_memory_bytes, int)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self._stored: dict[str, _Stored] = {}
        self._jobs: dict[_Job, None] = {}  # not ended, in the order they began
        self._flying: dict[_Piece, None] = {}  # the same for pieces
        self._reads: collections.deque[_Reading] = collections.deque()  # with parts to be started
        self._failures: dict[_Job, TieringError] = {}  # of which nobody has heard yet
        self._round = 0  # of `wait`
        self._unwaited = 0  # transfers begun in this round and not waited for one by one
        self._is_at_work = False  # a call is in the middle of something, or was broken off there
        self._was_refused = False  # the call at work raised an error of ours: it came to its end
        self._is_arena_torn = False  # slots and transfers may be lost, its lock never given back
        self._unsure: dict[str, None] = {}  # keys whose file may be there or not
        self._is_free = False  # all was given back
        self._folders = open_folders(_roots(path))
        self._arena = Arena(host_memory_bytes)
        self._piece_bytes = _piece_bytes(self._arena.capacity_bytes)
        self._backend = backend or open_engine(aio)
        gb_per_s = list(path.values()) if isinstance(path, Mapping) else None
        volumes = make_volumes(self._folders, self._backend, gb_per_s=gb_per_s)
        self._backend.register(self._arena.memory)
        self._tier = NvmeTier(volumes, self._backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(TieringError):  # what is on its way already matters more
            self.close(_ABANDON_S)

    def swap_out(self, key: str, tensor: torch.Tensor) -> SwapTransfer[None]:
        """Start writing a tensor to the drive, in place of what the key held before.

        Waits for earlier transfers of the same key, and for room when the arena is full. When it
        returns, the tensor has been copied and may be changed or freed.

        Args:
            key: any string.
            tensor: dense, of any dtype, shape, strides and device.

        Raises:
            ConfigError: a key that is no string; no tensor, or one whose elements are not in memory
                of its own: sparse, nested, quantized, meta, a wrapper around others, freed. What
                the key held stays.
            SpaceError: no drive has room. What the key held before may be lost, and reading it
                raises then.
            EngineClosedError: the swapper was closed or belongs to another process.
        """
        _check_is("a key", key, str)
        source = _dense(key, tensor)
        with self._own_lock(), self._at_work():
            stored = self._make_room(key, source)
            job = _Writing(stored, stored.parts(self._piece_bytes), self._round)
            self._note(job)
            stored.fault = None  # the job has it from here
            try:
                self._write(job, source)
            except BaseException as error:
                job.fail(_torn(stored, error))
                raise
            self._begin(job)
            self._end_if_through(job)
        return SwapTransfer(
            key, wait=functools.partial(self._wait_for, job), done=lambda: self._is_done(job)
        )

    def swap_in(self, key: str, out: torch.Tensor | None = None) -> SwapTransfer[torch.Tensor]:
        """Start reading a tensor back; ``wait()`` of the transfer returns it.

        Args:
            key: of an earlier `swap_out`, which need not have ended.
            out: where to put it, of the same shape and dtype, contiguous, on any device; undefined
                if the transfer fails. None: a new tensor in host memory.

        Raises:
            ConfigError: a key that is no string, or an ``out`` that is no tensor or has no memory
                of its own.
            RecordError: no such key, it was not written whole, or ``out`` does not fit; names both
                sizes.
            EngineClosedError: the swapper was closed or belongs to another process.
        """
        with self._own_lock(), self._at_work():
            self._advance()
            stored = self._readable(key)
            if out is not None:
                _check_fits(stored, out)
            job = _Reading(
                stored,
                stored.parts(self._piece_bytes),
                self._round,
                out=out,
                behind=next(stored.writers(), None),
            )
            self._note(job)
            self._reads.append(job)
            self._start_reads()
            self._begin(job)

        def result(timeout_s: float | None) -> torch.Tensor:
            self._wait_for(job, timeout_s)
            return job.result()

        return SwapTransfer(key, wait=result, done=lambda: self._is_done(job))

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for all transfers.

        Returns:
            How many were begun since the last call and not waited for one by one; 0 at once if none
            was.

        Raises:
            TransferError: one of them failed; a further call tells of the next.
            TransferTimeoutError: something is pending after ``timeout_s``; names it.
        """
        deadline = _deadline(timeout_s)
        with self._own_lock(), self._at_work():
            jobs = list(self._jobs)
        for job in jobs:
            self._rest(job, deadline)
        with self._own_lock(), self._at_work():
            self._replace_arena_if_torn()
            count, self._unwaited = self._unwaited, 0
            self._round += 1
            if self._failures:
                raise self._failures.pop(next(iter(self._failures)))
        return count

    def delete(self, key: str) -> None:
        """Wait for the key's transfers and remove it from the drive.

        Raises:
            ConfigError: a key that is no string.
            RecordError: no such key.
            EngineClosedError: the swapper was closed or belongs to another process.
        """
        with self._own_lock(), self._at_work():
            stored = self._known(key)
            self._settle(stored)
            self._remove_file(stored, "it was about to be deleted")
            del self._stored[key]

    def keys(self) -> list[str]:
        """All keys, in the order they first came.

        Raises:
            EngineClosedError: the swapper was closed or belongs to another process.
        """
        with self._own_lock(), self._at_work():
            return list(self._stored)

    def stats(self) -> SwapperStats:
        """What is held and what was moved."""
        with self._own_lock(), self._at_work():
            self._advance()
            return SwapperStats(
                tensors=len(self._stored),
                stored_bytes=sum(stored.nbytes for stored in self._stored.values()),
                pending_transfers=len(self._jobs),
                read_bytes=self._tier.read_bytes,
                written_bytes=self._tier.written_bytes,
                arena=self._arena.stats(),
                volumes=self._tier.volumes(),
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is pending, at most ``timeout_s``; then give the drive and the memory back.

        A second call does nothing, and so does a call in a forked child.

        Raises:
            TransferError: a transfer failed and nobody has heard of it yet.
            TransferTimeoutError: something was still pending; names it. Everything is freed all the
                same.
        """
        if self._is_free or os.getpid() != self._pid:
            return
        deadline = _deadline(timeout_s)
        try:
            for job in [] if self._is_closed else list(self._jobs):
                self._rest(job, deadline)
        finally:
            self._is_closed = True
            self._tear_down(deadline)
        if self._failures:
            raise next(iter(self._failures.values()))

    def _tear_down(self, deadline: float | None) -> None:
        """Free everything, whatever fails on the way; an interrupted call is to be made again."""
        try:
            with contextlib.ExitStack() as last_to_first:
                last_to_first.callback(self._arena.close)
                for folder in self._folders:
                    last_to_first.callback(folder.close)
                last_to_first.callback(self._tier.close)
                last_to_first.callback(lambda: self._backend.close(_left_s(deadline)))
        except Exception:
            self._is_free = True
            raise
        self._is_free = True

    def _own_lock(self) -> threading.Lock:
        """The lock, for ``with`` itself: no interrupt can come between taking and keeping it."""
        self._check_process()
        return self._lock

    @contextlib.contextmanager
    def _at_work(self, *, after_close: bool = False) -> Iterator[None]:
        """Mend what an earlier call broke off, and note that this one has come to its end."""
        if self._is_closed and not after_close:
            roots = " and ".join(str(folder.root) for folder in self._folders)
            raise EngineClosedError(f"the swapper on {roots} was closed")
        if self._is_at_work:
            self._mend()
        self._was_refused = False
        self._is_at_work = True
        try:
            yield
        except TieringError:
            self._was_refused = True
            raise
        self._is_at_work = False

    def _mend(self) -> None:
        """Fail what was broken off, and bring the notes on all else into agreement."""
        self._is_arena_torn = self._is_arena_torn or not self._was_refused
        for piece in self._flying:
            # Half taken off, it has landed; half on its way, its part is still to be started.
            piece.has_landed = piece.has_landed or piece not in piece.job.flying
        for job in tuple(self._jobs):
            if not job.is_begun:
                job.fail(_torn(job.stored, KeyboardInterrupt()))
                self._hear(job)
                if isinstance(job, _Writing):  # a write nobody knows of may still come there
                    self._doubt(job.stored, "its writing was broken off")
            self._end_if_through(job)
        for key in tuple(self._unsure):
            if key not in self._stored:
                self._remove_doubtful(key)

    def _check_process(self) -> None:
        """Before the lock is asked for: in a forked child nobody may be left to give it back."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this swapper belongs to process {self._pid}; process {os.getpid()} was forked "
                f"from it and must open its own"
            )

    def _known(self, key: str) -> _Stored:
        _check_is("a key", key, str)
        try:
            return self._stored[key]
        except KeyError:
            nearest = difflib.get_close_matches(key, self._stored, n=1, cutoff=0.4)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise RecordError(f"no tensor {key!r} among {len(self._stored)}{hint}") from None

    def _readable(self, key: str) -> _Stored:
        stored = self._known(key)
        fault = stored.fault or next((job.error for job in stored.writers() if job.error), None)
        if fault is not None:
            raise _not_whole(stored, fault)
        return stored

    def _make_room(self, key: str, source: torch.Tensor) -> _Stored:
        """The key's place on the drive, ready to be written, of the size the tensor needs."""
        old = self._stored.get(key)
        if old is not None:
            self._settle(old)
        new = _Stored(key, source.dtype, tuple(source.shape))
        if old is not None and old.has_file:
            if (old.dtype, old.shape) == (new.dtype, new.shape):
                return old
            self._remove_file(old, "it was removed to make room for another size")
        elif key in self._unsure:
            self._remove_doubtful(key)
        new.fault = RecordError("nothing has been written yet")
        self._unsure[key] = None
        try:
            self._tier.create(new.spec)
        except TieringError:  # nothing was left behind
            del self._unsure[key]
            raise
        new.has_file = True
        self._stored[key] = new
        del self._unsure[key]
        return new

    def _doubt(self, stored: _Stored, why: str) -> None:
        """What is in its file, or whether there is one, cannot be known any more."""
        self._unsure[stored.key] = None
        stored.has_file = False
        stored.fault = stored.fault or RecordError(why)

    def _remove_file(self, stored: _Stored, why: str) -> None:
        is_there = stored.has_file
        self._doubt(stored, why)
        if is_there:
            self._tier.delete(stored.key)
            del self._unsure[stored.key]
        elif stored.key in self._unsure:
            self._remove_doubtful(stored.key)

    def _remove_doubtful(self, key: str) -> None:
        """Remove the file if there is one, when its transfers, lost ones too, have ended."""
        if key in self._tier.keys():  # noqa: SIM118 - it is no mapping
            self._tier.delete(key)
        del self._unsure[key]

    def _replace_arena_if_torn(self) -> None:
        """Give back slots that nobody knows of, when nothing is under way."""
        if not self._is_arena_torn or self._flying or self._is_closed:
            return
        self._tier.close()  # files are opened again; until then lost transfers have ended
        self._arena.close()
        fresh = Arena(self._arena.capacity_bytes)
        self._backend.register(fresh.memory)
        self._arena = fresh
        self._is_arena_torn = False

    def _note(self, job: _Job) -> None:
        self._jobs[job] = None
        job.stored.jobs[job] = None

    def _begin(self, job: _Job) -> None:
        """From here on it is its caller's; what is broken off before is nobody's."""
        self._unwaited += 1
        job.is_begun = True

    def _write(self, job: _Writing, source: torch.Tensor) -> None:
        """Copy a tensor into slots and start writing them, up to the first write that failed."""
        key, stream = job.stored.key, _ByteStream(source, self._piece_bytes)
        while job.todo:
            part = job.todo[0]
            slot = self._allocate(part.nbytes, key)
            if job.error is not None:  # of a piece that landed to make room
                slot.free()
                return
            try:
                stream.read_into(slot, part.nbytes)
            except BaseException:
                slot.free()
                raise
            try:
                transfer = self._tier.write(key, slot, part=part)
            except TieringError:
                slot.free()  # but not after an interrupt: the transfer may be under way then
                raise
            job.written[part.start_bytes] = transfer
            self._fly(_Piece(job, part, slot, transfer))

    def _start_reads(self) -> None:
        """Start reading, in the order asked for, as far as there is room."""
        while self._reads:
            job = self._reads[0]
            while job.todo:
                part = job.todo[0]
                slot = self._try_allocate(part.nbytes, job.stored.key)
                if slot is None:
                    return
                try:
                    after = job.behind.written.get(part.start_bytes) if job.behind else None
                    transfer = self._tier.read(job.stored.key, slot, part=part, after=after)
                except TieringError as error:
                    slot.free()
                    job.fail(_about(job, error))
                else:
                    self._fly(_Piece(job, part, slot, transfer))
            self._reads.popleft()
            self._end_if_through(job)

    def _fly(self, piece: _Piece) -> None:
        """Note that the next part of its job is in flight; `_mend` knows this order."""
        self._flying[piece] = None
        piece.job.flying[piece] = None
        piece.job.todo.popleft()

    def _allocate(self, nbytes: int, owner: str) -> Slot:
        """A slot; when the arena is full, wait for the pieces that are longest under way."""
        while (slot := self._try_allocate(nbytes, owner)) is None and self._flying:
            self._land(next(iter(self._flying)))
        if slot is None:
            arena = self._arena.stats()
            raise ArenaFullError(
                f"{owner!r} needs {nbytes} bytes of host memory, and of {arena.capacity_bytes} "
                f"bytes {arena.used_bytes} are in use, though nothing is under way; raise "
                f"host_memory_bytes"
            )
        return slot

    def _try_allocate(self, nbytes: int, owner: str) -> Slot | None:
        self._replace_arena_if_torn()
        if self._is_arena_torn and self._flying:
            return None  # what is under way has to land first
        return self._arena.try_allocate(nbytes, owner=owner)

    def _advance(self) -> None:
        """Land what has ended, oldest first, and start what there is room for then."""
        while self._flying and (piece := next(iter(self._flying))).transfer.done():
            self._land(piece)
        self._start_reads()

    def _land(self, piece: _Piece) -> None:
        """Wait for a piece, take what it brought, and free its slot; `_mend` knows this order."""
        job = piece.job
        try:
            piece.transfer.wait()
            if job.error is None and not piece.has_landed:
                job.land(piece)
        except TieringError as error:
            job.fail(_about(job, error))
        except RuntimeError as error:  # torch could not allocate or copy
            job.fail(_torn(job.stored, error))
        piece.has_landed = True
        piece.slot.free()
        job.flying.pop(piece, None)
        self._flying.pop(piece, None)
        self._end_if_through(job)

    def _land_what_is_done(self, job: _Job) -> None:
        for piece in tuple(job.flying):
            if piece.transfer.done():
                self._land(piece)

    def _end_if_through(self, job: _Job) -> None:
        """End a job with nothing left to do; it is among those that have not ended until last."""
        if job.todo or job.flying:
            return
        if not job.has_ended:
            if isinstance(job, _Reading) and job.behind is not None:
                # That is all of it: each part was read after it had been written.
                self._land_what_is_done(job.behind)
            job.end()
            if job.error is not None and not job.is_heard:
                self._failures[job] = job.error
            job.has_ended = True
        job.stored.jobs.pop(job, None)
        self._jobs.pop(job, None)

    def _settle(self, stored: _Stored) -> None:
        """Wait for all transfers of one key, however they end."""
        for job in tuple(stored.jobs):
            while not job.has_ended:
                self._start_reads()
                if not job.has_ended:
                    self._land(next(iter(job.flying or self._flying)))

    def _rest(self, job: _Job, deadline: float | None) -> None:
        """Wait until a job has ended, without the lock while there is nothing to do."""
        while True:
            with self._own_lock(), self._at_work(after_close=True):
                self._land_what_is_done(job)
                self._advance()  # the last to be done: it leaves something in flight
                if job.has_ended:
                    return
                piece = next(iter(job.flying or self._flying))
            try:
                piece.transfer.wait(_left_s(deadline))
            except TransferTimeoutError as error:
                raise _about(piece.job, error) from None
            except TieringError:
                pass  # it is told when the piece lands

    def _wait_for(self, job: _Job, timeout_s: float | None) -> None:
        self._rest(job, _deadline(timeout_s))
        with self._own_lock(), self._at_work(after_close=True):
            self._hear(job)
        if job.error is not None:
            raise job.error

    def _hear(self, job: _Job) -> None:
        """Note that somebody was told how a job ended."""
        is_counted = job.is_begun and not job.is_heard and job.began_in_round == self._round
        job.is_heard = True
        self._unwaited -= is_counted
        self._failures.pop(job, None)

    def _is_done(self, job: _Job) -> bool:
        with self._own_lock(), self._at_work(after_close=True):
            self._land_what_is_done(job)
            self._advance()
            return job.has_ended


class _ByteStream:
    """A tensor's bytes in row-major order. What is not contiguous is copied a run at a time."""

    def __init__(self, tensor: torch.Tensor, run_bytes: int) -> None:
        self._runs = _runs(tensor, run_bytes)
        self._run = torch.empty(0, dtype=torch.uint8)

    def read_into(self, slot: Slot, nbytes: int) -> None:
        """Fill the first bytes of a slot with the bytes that come next."""
        at = 0
        while at < nbytes:
            if not self._run.numel():
                self._run = next(self._runs)
            length = min(nbytes - at, self._run.numel())
            _copy_in(slot, at, self._run[:length])
            self._run = self._run[length:]
            at += length


def _runs(tensor: torch.Tensor, run_bytes: int) -> Iterator[torch.Tensor]:
    """Its bytes as flat tensors, in row-major order; copies have at most ``run_bytes``."""
    if tensor.is_contiguous():
        yield tensor.view(-1).view(torch.uint8)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > run_bytes:
        for row in tensor:
            yield from _runs(row, run_bytes)
    else:
        for rows in torch.split(tensor, run_bytes // row_bytes):
            yield rows.contiguous().view(-1).view(torch.uint8)


# In host memory bytes are copied by one thread: it is faster than a drive, and unlike torch's copy
# it never waits for the threads of a pool, which costs milliseconds where processors are busy.


def _copy_in(slot: Slot, at: int, source: torch.Tensor) -> None:
    """Copy a flat uint8 tensor to a slot, from its byte ``at`` on."""
    if source.device.type == "cpu":
        ctypes.memmove(slot.address + at, source.data_ptr(), source.numel())
    else:
        _bytes_of(slot, at + source.numel())[at:].copy_(source)


def _copy_out(slot: Slot, target: torch.Tensor) -> None:
    """Copy the first bytes of a slot to a flat uint8 tensor."""
    if target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), slot.address, target.numel())
        increment_version(target)  # so that autograd knows of the change
    else:
        target.copy_(_bytes_of(slot, target.numel()))


def _bytes_of(slot: Slot, nbytes: int) -> torch.Tensor:
    return slot.tensors(_bytes_spec(nbytes))["bytes"]


@functools.lru_cache(maxsize=1024)
def _bytes_spec(nbytes: int) -> RecordSpec:
    return RecordSpec("piece", (TensorSpec("bytes", torch.uint8, (nbytes,)),))


def _piece_bytes(capacity_bytes: int) -> int:
    """How much of a tensor one slot holds."""
    share = capacity_bytes // _PIECES_IN_FLIGHT // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return min(max(share, ALIGNMENT_BYTES), _PIECE_BYTES)


def _roots(path: Root | Iterable[Root]) -> list[Root]:
    """The paths that are named."""
    if isinstance(path, (str, os.PathLike)):
        return [path]
    _check_is("path", path, str, os.PathLike, Iterable)
    roots = list(path)
    for root in roots:
        _check_is("a path", root, str, os.PathLike)
    return roots


def _check_is(what: str, given: object, *wanted: type) -> None:
    """Refuse what is of none of these types."""
    if not isinstance(given, wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        article = "an" if names[0] in "aeiou" else "a"
        raise ConfigError(
            f"{what} must be {article} {names}, got {reprlib.repr(given)} "
            f"of type {type(given).__name__}"
        )


def _dense(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history, if its bytes are in memory."""
    _check_has_memory(repr(key), tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _check_fits(stored: _Stored, out: torch.Tensor) -> None:
    _check_has_memory(f"out for {stored.key!r}", out)
    if (out.dtype, tuple(out.shape)) != (stored.dtype, stored.shape):
        raise RecordError(
            f"{stored.key!r} holds {stored.nbytes} bytes, {stored.dtype} of shape {stored.shape}; "
            f"out has {out.numel() * out.element_size()} bytes, {out.dtype} of shape "
            f"{tuple(out.shape)}"
        )
    if not out.is_contiguous():
        raise RecordError(f"{stored.key!r}: out must be contiguous memory; pass None and copy")
    if out.is_conj() or out.is_neg():
        raise RecordError(
            f"{stored.key!r}: out is a conjugate or negative view, its memory holds other values; "
            "pass the tensor it is a view of, or None and copy"
        )


def _check_has_memory(what: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose bytes cannot be copied from or to where it says they are."""
    _check_is(what, tensor, torch.Tensor)
    if not _has_memory(tensor):
        raise ConfigError(
            f"{what} is a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on "
            f"{tensor.device}, and has no plain elements in memory of its own; only dense tensors "
            f"with contents can be swapped: pass the tensors it is made of, or a dense copy"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether all its elements lie in a storage of its own."""
    # A class that dispatches for itself may have its elements anywhere.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    is_quantized = tensor.is_quantized or str(tensor.dtype).startswith(("torch.q", "torch.quint"))
    if tensor.layout is not torch.strided or tensor.is_nested or is_quantized or tensor.is_meta:
        return False
    try:
        storage_bytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # torch.func has wrapped it
        return False
    if not tensor.numel():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return bool(address) and (last + 1) * tensor.element_size() <= storage_bytes


def _not_whole(stored: _Stored, cause: TieringError) -> RecordError:
    error = RecordError(f"{stored.key!r} was not written whole ({cause}); swap it out again")
    error.__cause__ = cause
    return error


def _about(job: _Job, error: TieringError) -> TieringError:
    """The error with the tensor's name added to it."""
    if not isinstance(error, TransferError):
        return error
    way = "out" if isinstance(job, _Writing) else "in"
    message = f"swapping {way} {job.stored.key!r}: {error.message}"
    named = type(error)(message, errno=error.errno or 0, path=str(error.filename))
    named.__cause__ = error
    return named


def _torn(stored: _Stored, cause: BaseException) -> RecordError:
    error = RecordError(f"the transfer of {stored.key!r} was broken off by {cause!r}")
    error.__cause__ = cause
    return error


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
