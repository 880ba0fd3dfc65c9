"""One file as Python moves its bytes: past the page cache where it can, through it where not.

Both ways have a descriptor of their own and may be used at once, so they must never share a page: a
page that is dirty in the cache would be written back over what went direct. What goes direct is
therefore made of whole pages and whole blocks of the file system, as in the C engine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import stat
import time
from typing import Final, NamedTuple

from tiering.aio.backend import FileInfo
from tiering.aio.config import DirectChoice

_ALIGNMENT_ASSUMED: Final = 4096  # Python cannot ask the kernel; every drive in use has 512 or this
_BLOCK_MOST: Final = 65536  # a file system's block size above is a hint for throughput, not a unit
_NO_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT})
_TRIES_AT_ONCE: Final = 8  # of an operation that is refused for the moment ...
_TRIES: Final = 36  # ... and in all, with pauses
_PAUSE_S: Final = 0.001
_PAUSE_DOUBLINGS: Final = 6


class Moved(NamedTuple):
    """What one operation did.

    Args:
        nbytes: moved.
        asked_bytes: of the kernel; more, when the operation was cut short.
        is_direct: past the page cache.
        retries: how often it had been refused for the moment before.
    """

    nbytes: int
    asked_bytes: int
    is_direct: bool
    retries: int


class Descriptors:
    """An open file.

    Args:
        path: of an existing file.
        direct: "auto" for past the page cache where that can be, "off" for always through it.

    Raises:
        OSError: it cannot be opened, or is neither a file nor a drive.
    """

    def __init__(self, path: str, *, direct: DirectChoice = "auto") -> None:
        self._buffered = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self.info = self._open_direct(direct)
        except OSError:
            self.close()
            raise

    def move(self, verb: str, address: int, offset: int, nbytes: int) -> Moved:
        """Read to or write from an address as many of the bytes as one operation does.

        Raises:
            OSError: the kernel's reason; one that passes was waited for a second and more.
        """
        is_direct = self._can_go_direct(address, offset, nbytes)
        asked_bytes = nbytes - nbytes % self.info.offset_align_bytes if is_direct else nbytes
        descriptor = self._direct if is_direct and self._direct is not None else self._buffered
        buffer = (ctypes.c_char * asked_bytes).from_address(address)
        call = os.preadv if verb == "read" else os.pwritev
        retries = 0
        while True:
            try:
                moved_bytes = call(descriptor, [buffer], offset)
            except (BlockingIOError, InterruptedError):  # noqa: PERF203 - that is what the loop is for
                retries += 1
                if retries == _TRIES:
                    raise
                if retries > _TRIES_AT_ONCE:
                    time.sleep(_PAUSE_S * 2 ** min(retries - _TRIES_AT_ONCE, _PAUSE_DOUBLINGS))
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                # The drive's unit is larger than was assumed.
                self.info = dataclasses.replace(self.info, direct=False, direct_errno=errno.EINVAL)
                return self.move(verb, address, offset, nbytes)
            else:
                return Moved(moved_bytes, asked_bytes, is_direct, retries)

    def sync(self) -> None:
        """Return when everything written is on the drive."""
        os.fdatasync(self._buffered)

    def close(self) -> None:
        """Close both; once."""
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def _can_go_direct(self, address: int, offset: int, nbytes: int) -> bool:
        info = self.info
        is_aligned = not address % info.memory_align_bytes and not offset % info.offset_align_bytes
        return info.direct and is_aligned and nbytes >= info.offset_align_bytes

    def _open_direct(self, choice: DirectChoice) -> FileInfo:
        status = os.fstat(self._buffered)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISBLK(status.st_mode):
            raise OSError(errno.EINVAL, "neither a file nor a drive")
        if choice == "off":
            return _buffered_info(0)
        name = f"/proc/self/fd/{self._buffered}"  # the path may be another file's by now
        try:
            self._direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return _buffered_info(error.errno or errno.EINVAL)
        # Reading ahead must not pull in what goes direct.
        os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)
        return FileInfo(
            direct=True,
            direct_errno=0,
            memory_align_bytes=_ALIGNMENT_ASSUMED,
            offset_align_bytes=_cache_unit(status.st_blksize),
        )


def _buffered_info(error: int) -> FileInfo:
    return FileInfo(direct=False, direct_errno=error, memory_align_bytes=1, offset_align_bytes=1)


def _cache_unit(block_bytes: int) -> int:
    """What the page cache reads and writes at once."""
    is_unit = block_bytes & (block_bytes - 1) == 0 and block_bytes <= _BLOCK_MOST
    return max(mmap.PAGESIZE, _ALIGNMENT_ASSUMED, block_bytes if is_unit else 0)
