"""Memory for paged bytes: mapped once, freed when the last buffer over it is gone.

A tensor made from a buffer keeps that buffer alive, and the buffer keeps the mapping: the memory
cannot be unmapped under a tensor, whatever happens to the `PinnedMemory` it came from.

The mapping is made in C, or in Python where the compiled part is missing; `map_pages` is the one or
the other. What would break in both: a forked child that gets copies of the pages. The parent's next
store to one would go to a new page while the drive still writes to the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

from cffi import FFI

from tiering.aio.native import ffi, lib, loader_message
from tiering.errors import ConfigError

# Python has no names for these.
_MADV_WIPEONFORK: Final = 18
_MADV_POPULATE_WRITE: Final = 23

Buffer: TypeAlias = "FFI.buffer | memoryview"


class PageReport(NamedTuple):
    """How a mapping is backed.

    Args:
        mapped_bytes: all of it.
        resident_bytes: of them in memory.
        huge_bytes: of those on huge pages, which transfers like best.
    """

    mapped_bytes: int
    resident_bytes: int
    huge_bytes: int


class Pages(Protocol):
    """A mapping. It goes when neither it nor a buffer over it is held by anyone."""

    @property
    def address(self) -> int:
        """First byte."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """All of it, whole pages."""
        ...

    def buffer(self, at: int, nbytes: int) -> Buffer:
        """A fresh writable buffer, which can be weakly referenced and keeps the mapping alive."""
        ...


class NativePages:
    """Mapped in C, at a huge page where there is room for one. A forked child has no part of it.

    Args:
        nbytes: at least so many.

    Raises:
        OSError: the machine does not have them.
    """

    def __init__(self, nbytes: int) -> None:
        memory = ffi.new("struct aio_memory *")
        if error := -int(lib.aio_memory_map(nbytes, memory)):
            raise OSError(error, os.strerror(error))
        self._mapping = ffi.gc(memory, lib.aio_memory_unmap)
        self.address = int(ffi.cast("uintptr_t", memory.address))
        self.mapped_bytes = int(memory.bytes)

    def buffer(self, at: int, nbytes: int) -> FFI.buffer:
        """A buffer over a part."""
        # Pointer arithmetic makes a pointer that owns nothing. One with a destructor owns what the
        # destructor refers to.
        start = ffi.cast("char *", self._mapping.address) + at
        owner = ffi.gc(start, functools.partial(_let_go, self._mapping))
        buffer: FFI.buffer = ffi.buffer(owner, nbytes)
        return buffer


class PythonPages:
    """Mapped in Python; a forked child finds zeros there. Arguments as of `NativePages`.

    The view below keeps the map from being closed, and every buffer shares the view's hold on it.
    """

    def __init__(self, nbytes: int) -> None:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(_MADV_WIPEONFORK)
        with contextlib.suppress(OSError):  # a refusal of either costs speed only
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_POPULATE_WRITE)
        self._view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mapped_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def buffer(self, at: int, nbytes: int) -> memoryview:
        """A buffer over a part."""
        return self._view[at : at + nbytes]


map_pages: Callable[[int], Pages] = PythonPages if loader_message else NativePages


class PinnedMemory:
    """One piece of anonymous memory: on huge pages where the machine has them, touched once.

    A forked child has no part of its bytes.

    Args:
        nbytes: how much; the mapping may be larger.

    Raises:
        ConfigError: not a positive size, or the machine does not have that much.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ConfigError(f"memory needs a positive size, got {nbytes} bytes")
        try:
            self._pages = map_pages(nbytes)
        except (OSError, OverflowError) as error:
            reason = os.strerror(getattr(error, "errno", None) or errno.ENOMEM)
            raise ConfigError(
                f"cannot have {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of memory: "
                f"{reason}{_limits()}; ask for less"
            ) from error
        self._nbytes = nbytes

    @property
    def address(self) -> int:
        """First byte; a multiple of the huge page where the native mapping has at least one."""
        return self._pages.address

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    def buffer(self, at: int = 0, nbytes: int | None = None) -> Buffer:
        """A fresh writable buffer over a part, which keeps the whole mapping alive.

        It can be weakly referenced, and `torch.frombuffer` makes a tensor that owns it.

        Args:
            at: first byte.
            nbytes: how many; None: to the end.
        """
        length = self._nbytes - at if nbytes is None else nbytes
        if at < 0 or length < 0 or at + length > self._nbytes:
            raise ConfigError(f"bytes {at} to {at + length} of a memory of {self._nbytes}")
        return self._pages.buffer(at, length)

    def page_report(self) -> PageReport:
        """How the mapping is backed now, from ``/proc/self/smaps``.

        The kernel may have joined it with a neighbour of the same kind; the neighbour's pages
        then count as well, up to the size of the mapping.
        """
        address, mapped_bytes = self._pages.address, self._pages.mapped_bytes
        resident_bytes = huge_bytes = 0
        inside = False
        for line in (
            Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                first, last = (int(part, 16) for part in word.split("-"))
                inside = first < address + mapped_bytes and last > address
            elif inside and word == "Rss:":
                resident_bytes += int(rest.split()[0]) * 1024
            elif inside and word == "AnonHugePages:":
                huge_bytes += int(rest.split()[0]) * 1024
        return PageReport(
            mapped_bytes, min(resident_bytes, mapped_bytes), min(huge_bytes, mapped_bytes)
        )


def _let_go(mapping: object, pointer: object) -> None:
    """The mapping lives as long as this is bound to it."""


def _limits() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f" (the process is limited to {soft} bytes of address space, ulimit -v)"
