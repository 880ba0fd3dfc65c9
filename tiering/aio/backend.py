"""The seam between tiering and whatever moves bytes: a protocol of seven methods.

`AioEngine` implements it over the C engine, `PureEngine` in Python alone; a test may implement it
over a dictionary. Everything above (the NVMe tier, the swapper, the store) uses only what stands
here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class FileInfo:
    """How an open file can be reached.

    Args:
        direct: O_DIRECT is in effect, so aligned transfers bypass the page cache.
        direct_errno: why not, when it is not; 0 otherwise, and when it was not asked for.
        memory_align_bytes: what a buffer's address must be a multiple of to go direct.
        offset_align_bytes: the same for file offsets and lengths.
    """

    direct: bool
    direct_errno: int
    memory_align_bytes: int
    offset_align_bytes: int

    @property
    def why_not_direct(self) -> str:
        """Why transfers go through the page cache, in words; empty when they need not."""
        if self.direct:
            return ""
        if not self.direct_errno:
            return "not asked for"
        name = errno.errorcode.get(self.direct_errno, str(self.direct_errno))
        return f"refused ({name}: {os.strerror(self.direct_errno)})"


class Memory(Protocol):
    """A piece of memory a transfer may use: it stays mapped as long as the object lives."""

    @property
    def address(self) -> int:
        """First byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes from there."""
        ...


class Transfer(Protocol):
    """One request on its way. It keeps its memory alive until it has ended."""

    @property
    def queue_s(self) -> float:
        """From when it could start until its first block did; 0 while it is pending."""
        ...

    @property
    def device_s(self) -> float:
        """From when its first block started until it ended; 0 while it is pending."""
        ...

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks, never raises for a failed transfer."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer has succeeded; may be called again, from any thread.

        What is waited for goes before what is not, and so does what it was told to start after.

        Raises:
            TransferError: it failed; names the operation, file, offset, bytes asked and done, and
                the errno.
            TransferTimeoutError: it is still pending after ``timeout_s``; names what is pending.
            EngineClosedError: the engine was closed before it ended, or belongs to another process.
        """
        ...


class File(Protocol):
    """An open file on one path of the backend."""

    @property
    def info(self) -> FileInfo:
        """How it can be reached."""
        ...

    def close(self) -> None:
        """Wait for its transfers and close it. A second call does nothing."""
        ...


class AioBackend(Protocol):
    """Moves bytes between memory and files, asynchronously and in any order.

    Reads and writes of overlapping ranges are ordered only by ``after`` or by waiting.
    """

    def open(self, path: str) -> File:
        """Open an existing file for reading and writing.

        Raises:
            TransferError: the file cannot be opened.
        """
        ...

    def read(  # noqa: PLR0913 - the six facts a read consists of
        self,
        file: File,
        memory: Memory,
        *,
        at: int = 0,
        nbytes: int,
        offset: int,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start reading ``nbytes`` at file ``offset`` into ``memory`` from its byte ``at``.

        With ``after``, it starts when that transfer has succeeded, and fails with ECANCELED when
        that fails.
        """
        ...

    def write(  # noqa: PLR0913 - the six facts a write consists of
        self,
        file: File,
        memory: Memory,
        *,
        at: int = 0,
        nbytes: int,
        offset: int,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start writing; the mirror image of `read`."""
        ...

    def wait_some(
        self, transfers: Sequence[Transfer], count: int = 1, timeout_s: float | None = None
    ) -> None:
        """Return when at least ``count`` of the transfers, or all, have ended, well or not.

        To wait for one transfer hurries it; this hurries none.

        Raises:
            TransferTimeoutError: too many are still pending after ``timeout_s``.
            EngineClosedError: the engine was closed, or belongs to another process.
        """
        ...

    def register(self, memory: Memory) -> None:
        """Pin the memory for cheaper transfers where that is allowed.

        It takes the place of what was pinned before. After a refusal all works without.
        """
        ...

    def sync(self, file: File) -> None:
        """Return when everything written to the file is on the drive (fdatasync)."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Let transfers end, at most ``timeout_s``, and free everything. Twice is once.

        Transfers that have not ended by then never will.
        """
        ...
