"""The NVMe tier: one file a record, and the transfers between those files and arena slots.

A tier may have several paths, on a drive each. A record is dealt to one of them when it is created
(`tiering.volumes` says which) and stays there; nothing above this module knows of it.

Bytes come from a slot of the arena and go to the payload part of the record's file, or back; the
backend moves them, past the page cache. All that is known of a record here is its spec and its
file's name. The size of a file is never looked at: it is padded, and the spec alone says what is in
it.

A file's whole room is reserved when the record is created, because a full drive must show before a
step begins, not in the middle of one. Files stay open between transfers, since opening costs more
than a small read; but a process may open only so many, so the ones unused for longest are closed
when there are too many.

What would break: closing or removing a file under a transfer. Each record keeps its pending
transfers, and a file with any of them is neither closed nor evicted.
"""

from __future__ import annotations

import difflib
import errno
import os
import resource
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from tiering import records
from tiering.aio.backend import AioBackend, File, Memory, Transfer
from tiering.errors import (
    EngineClosedError,
    RecordError,
    SpaceError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)
from tiering.folder import SwapFolder
from tiering.spec import RecordSpec
from tiering.volumes import Dealer, Room, Volume, VolumeStats, rooms

PATIENCE_S: Final = 60.0

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)

# The rest is for the user's own files, for data loaders and sockets. A backend may need two
# descriptors a file.
_DESCRIPTOR_SHARE: Final = 8
_FEWEST_FILES: Final = 8
_MOST_FILES: Final = 2048
_TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE)


@dataclass
class _RecordFile:
    """All that is known of one record on the drive."""

    spec: RecordSpec
    path: Path
    payload_offset: int
    volume: int
    """Number of the path it is on."""
    file: File | None = None
    pending: list[Transfer] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.payload_offset + records.aligned_bytes(self.spec.nbytes)

    def is_busy(self) -> bool:
        """Whether a transfer on it is pending."""
        self.pending = [transfer for transfer in self.pending if not transfer.done()]
        return bool(self.pending)


class Part(NamedTuple):
    """A stretch of a record's payload, for a record that moves in pieces.

    Args:
        start_bytes: where it begins in the payload, a multiple of the alignment.
        nbytes: how long it is; only the last part may end off the alignment, where the payload
            ends.
    """

    start_bytes: int
    nbytes: int


class Observer(Protocol):
    """Sees each transfer of a tier when it has been put on its way."""

    def __call__(self, verb: str, key: str, nbytes: int, transfer: Transfer) -> None:
        """A read or a write of so many bytes of a record begins."""
        ...


def _unobserved(verb: str, key: str, nbytes: int, transfer: Transfer) -> None:
    """Nobody looks."""


class NvmeTier:
    """Records as files, moved by ``backend``.

    Safe to use from several threads, as long as one record is not used by two at once.

    Args:
        folders: where the files lie: one folder, or several paths over which the records are
            spread, to each what its speed is worth. They stay the caller's to close.
        backend: moves the bytes; the caller's to close as well.
        patience_s: longest wait for one transfer on a file that is to be closed.
    """

    def __init__(
        self,
        folders: SwapFolder | Sequence[Volume],
        backend: AioBackend,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        volumes = [Volume(folders)] if isinstance(folders, SwapFolder) else folders
        self._folders = [volume.folder for volume in volumes]
        self._dealer = Dealer([volume.gb_per_s for volume in volumes])
        self._backend = backend
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._records: dict[str, _RecordFile] = {}
        self._open: dict[str, _RecordFile] = {}  # in the order of last use
        self._most_open = most_open_files()
        self._created = 0
        self._detours_told: set[int] = set()
        self._full_told: set[int] = set()
        self._read_bytes = [0] * len(self._folders)
        self._written_bytes = [0] * len(self._folders)
        self._observe: Observer = _unobserved

    def observe_by(self, observer: Observer) -> None:
        """Tell this of each transfer from now on, in the thread that begins it."""
        self._observe = observer

    @property
    def read_bytes(self) -> int:
        """Bytes of all reads started so far, padding included."""
        return sum(self._read_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes of all writes started so far, padding included, headers not."""
        return sum(self._written_bytes)

    def volumes(self) -> tuple[VolumeStats, ...]:
        """What each path holds and has moved."""
        with self._lock:
            return tuple(
                VolumeStats(
                    path=str(folder.root),
                    share=self._dealer.share(number),
                    held_bytes=self._dealer.held_bytes(number),
                    read_bytes=self._read_bytes[number],
                    written_bytes=self._written_bytes[number],
                )
                for number, folder in enumerate(self._folders)
            )

    def keys(self) -> list[str]:
        """The records there are, in the order of their creation."""
        with self._lock:
            return list(self._records)

    def rooms(self) -> list[Room]:
        """What is free under its paths, each file system once.

        Raises:
            TransferError: a path is gone.
        """
        return rooms(self._folders)

    def create(self, spec: RecordSpec) -> None:
        """Make the record's file, with its whole room reserved; its payload is undefined so far.

        Raises:
            RecordError: the key exists.
            ConfigError: the file format cannot hold the record.
            SpaceError: no room on any path; nothing is left behind.
            TransferError: the file could not be made for another reason; names its path.
        """
        head = records.header(spec)
        with self._lock:
            if spec.key in self._records:
                raise RecordError(f"record {spec.key!r} exists; delete it before creating it anew")
            turns = self._dealer.turns(spec, len(head) + records.aligned_bytes(spec.nbytes))
            record = self._place(spec, head, turns)
            self._records[spec.key] = record
            self._dealer.give(spec, record.volume, record.nbytes)
            if record.volume != turns[0]:
                self._tell_full(turns[0])

    def read(
        self, key: str, memory: Memory, *, part: Part | None = None, after: Transfer | None = None
    ) -> Transfer:
        """Start reading a record, or a part of one, into ``memory`` from its first byte.

        Args:
            key: the record.
            memory: a slot, at least as large as what is read is when rounded up to the alignment.
            part: what to read; everything if None.
            after: a transfer that must succeed first.

        Raises:
            RecordError: no such record, or the slot is too small.
            TransferError: the file could not be opened.
            TransferTimeoutError: as many files are open as can be, and a transfer on the one to be
                closed did not end in time; names that one's record.
            EngineClosedError: the backend was closed or belongs to another process.
        """
        with self._lock:
            record, part = self._checked(key, memory, part)
            nbytes = records.aligned_bytes(part.nbytes)
            offset = record.payload_offset + part.start_bytes
            transfer = self._backend.read(
                self._opened(key, record), memory, nbytes=nbytes, offset=offset, after=after
            )
            record.pending.append(transfer)
            self._read_bytes[record.volume] += nbytes
        self._tell("read", key, nbytes, transfer)
        return transfer

    def write(
        self, key: str, memory: Memory, *, part: Part | None = None, after: Transfer | None = None
    ) -> Transfer:
        """Start writing a record, or a part of one; the mirror image of `read`."""
        with self._lock:
            record, part = self._checked(key, memory, part)
            nbytes = records.aligned_bytes(part.nbytes)
            offset = record.payload_offset + part.start_bytes
            transfer = self._backend.write(
                self._opened(key, record), memory, nbytes=nbytes, offset=offset, after=after
            )
            record.pending.append(transfer)
            self._written_bytes[record.volume] += nbytes
        self._tell("write", key, nbytes, transfer)
        return transfer

    def _tell(
        self, verb: Literal["read", "write"], key: str, nbytes: int, transfer: Transfer
    ) -> None:
        """Tell the observer; what it raises must not look as if the transfer had not begun."""
        try:
            self._observe(verb, key, nbytes, transfer)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            warnings.warn(
                f"the observer of transfers failed at the {verb} of {key!r}: {error!r}",
                TieringWarning,
                stacklevel=3,
            )

    def sync(self, key: str) -> None:
        """Return when everything that was written of the record is on the drive.

        Only what has been waited for counts as written.

        Raises:
            RecordError: no such record.
            TransferError: the drive reports an error.
        """
        with self._lock:
            file = self._opened(key, self._known(key))
        self._backend.sync(file)

    def path(self, key: str) -> Path:
        """The record's file.

        Raises:
            RecordError: no such record.
        """
        with self._lock:
            return self._known(key).path

    def delete(self, key: str) -> None:
        """Wait for the record's transfers and remove its file.

        Raises:
            RecordError: no such record.
            TransferTimeoutError: a transfer did not end in time; the record is still there.
        """
        with self._lock:
            record = self._known(key)
        self._settle(record)
        with self._lock:
            self._close(record)
            del self._records[key]
            self._dealer.take_back(record.spec, record.volume, record.nbytes)
        record.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for all transfers and close the files; they stay where they are.

        A second call does nothing.

        Raises:
            TransferTimeoutError: a transfer did not end in time; what is busy is still open.
        """
        with self._lock:
            self._evict(down_to=0)

    def _known(self, key: str) -> _RecordFile:
        try:
            return self._records[key]
        except KeyError:
            nearest = difflib.get_close_matches(key, self._records, n=1, cutoff=0.4)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise RecordError(
                f"no record {key!r} among the {len(self._records)} on the drive{hint}"
            ) from None

    def _checked(self, key: str, memory: Memory, part: Part | None) -> tuple[_RecordFile, Part]:
        """The record and the part that is meant, after a check that they agree with the memory."""
        record = self._known(key)
        payload_bytes = record.spec.nbytes
        part = Part(0, payload_bytes) if part is None else part
        end = part.start_bytes + part.nbytes
        is_cut_right = end == payload_bytes or end % records.ALIGNMENT_BYTES == 0
        if not 0 <= part.start_bytes <= end <= payload_bytes or not is_cut_right:
            raise RecordError(f"record {key!r} has {payload_bytes} bytes; {part} is no part of it")
        if part.start_bytes % records.ALIGNMENT_BYTES:
            raise RecordError(f"record {key!r}: {part} starts off the alignment")
        if memory.nbytes < records.aligned_bytes(part.nbytes):
            raise RecordError(
                f"record {key!r}: {part.nbytes} bytes are to be moved, which takes a slot of "
                f"{records.aligned_bytes(part.nbytes)} bytes, but the slot has {memory.nbytes}"
            )
        return record, part

    def _opened(self, key: str, record: _RecordFile) -> File:
        """The record's file, opened if it is not, and marked as the one used last."""
        if record.file is None:
            self._evict(down_to=self._most_open - 1)
            record.file = self._open_file(record.path)
            self._tell_detour(record.volume, record.file)
        self._open.pop(key, None)
        self._open[key] = record
        record.is_busy()  # drops what has ended, so that the list stays short
        return record.file

    def _open_file(self, path: Path) -> File:
        """Open a file; where the process or the backend has no place left, close others first."""
        while True:
            try:
                return self._backend.open(str(path))
            except TransferError as error:
                if error.errno not in _TOO_MANY_FILES or not self._open:
                    raise
            self._evict(down_to=len(self._open) // 2)

    def _tell_detour(self, volume: int, file: File) -> None:
        """Warn, once a path, where transfers cannot go past the page cache though they should."""
        if file.info.direct or not file.info.direct_errno or volume in self._detours_told:
            return
        self._detours_told.add(volume)
        folder = self._folders[volume]
        kind = folder.file_system() or "its file system"
        reason = os.strerror(file.info.direct_errno)
        warnings.warn(
            f"{folder.root}: {kind} has no direct I/O ({reason}); transfers go through the "
            f"page cache, which costs memory and time; a path on ext4 or xfs avoids that",
            TieringWarning,
            stacklevel=4,
        )

    def _evict(self, *, down_to: int) -> None:
        """Close the files unused for longest; if all are busy, wait for the oldest."""
        while len(self._open) > down_to:
            idle = (record for record in self._open.values() if not record.is_busy())
            self._close(next(idle, None) or next(iter(self._open.values())))

    def _close(self, record: _RecordFile) -> None:
        """Close a record's file, if it is open, when its transfers have ended."""
        self._settle(record)
        if record.file is not None:
            record.file.close()
            record.file = None
            self._open.pop(record.spec.key, None)

    def _settle(self, record: _RecordFile) -> None:
        """Wait until a record's transfers have ended."""
        for transfer in record.pending:
            self._wait(record, transfer)
        record.pending.clear()

    def _wait(self, record: _RecordFile, transfer: Transfer) -> None:
        """Wait until a transfer has ended. Whoever started it sees how."""
        try:
            transfer.wait(self._patience_s)
        except TransferTimeoutError as error:
            raise TransferTimeoutError(
                f"the file of record {record.spec.key!r} can't be closed: {error.message}",
                errno=error.errno or errno.ETIME,
                path=str(record.path),
            ) from error
        except (TransferError, EngineClosedError):
            pass

    def _place(self, spec: RecordSpec, head: bytes, turns: Sequence[int]) -> _RecordFile:
        """Make the record's file on the path whose turn it is, or on the next that has room."""
        name = f"{self._created:08x}.safetensors"
        self._created += 1
        nbytes = len(head) + records.aligned_bytes(spec.nbytes)
        needed = f"record {spec.key!r} needs a file of {nbytes} bytes"
        refusal: OSError | None = None
        for volume in self._roomy_first(turns, nbytes):
            try:
                path = self._folders[volume].make_file(name, nbytes, head=head)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise self._not_made(needed, error, self._folders[volume]) from error
                refusal = error
                continue
            return _RecordFile(spec, path, len(head), volume)
        assert refusal is not None
        number = refusal.errno or errno.ENOSPC
        raise self._no_space(needed, number, rooms(self._folders)) from refusal

    def _roomy_first(self, turns: Sequence[int], nbytes: int) -> list[int]:
        """Those that seem full come last: what is said to be free is no promise either way."""
        return sorted(turns, key=lambda volume: self._folders[volume].free_bytes() < nbytes)

    def _tell_full(self, volume: int) -> None:
        """Warn, once a path, that its records go elsewhere."""
        if volume in self._full_told:
            return
        self._full_told.add(volume)
        folder = self._folders[volume]
        warnings.warn(
            f"{folder.root} has {folder.free_bytes()} bytes free, too few for its share; records "
            "go to the other paths, and all together are slower; free some room there, or leave "
            "the path out",
            TieringWarning,
            stacklevel=4,
        )

    @staticmethod
    def _not_made(needed: str, error: OSError, folder: SwapFolder) -> TransferError:
        return TransferError(
            f"{needed}, which could not be made under {folder.root}",
            errno=error.errno or errno.EIO,
            path=str(folder.path),
        )

    def _no_space(self, needed: str, number: int, found: Sequence[Room]) -> SpaceError:
        return SpaceError(
            f"{needed}, {', '.join(map(str, found))}",
            errno=number,
            path=os.pathsep.join(str(folder.path) for folder in self._folders),
        )


def most_open_files() -> int:
    """How many files one tier keeps open: a share of what this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_FILES
    return min(max(limit // _DESCRIPTOR_SHARE, _FEWEST_FILES), _MOST_FILES)
