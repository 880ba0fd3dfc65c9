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
from typing import Final, Protocol, TypeAlias

from cffi import FFI

from tiering.aio.headroom import headroom, reserved_huge_bytes
from tiering.aio.native import ffi, lib, loader_message
from tiering.aio.pages import PageKind, PageReport, PagesWanted, report_on
from tiering.errors import ConfigError

# Python has no names for these.
_MADV_WIPEONFORK: Final = 18
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25

Buffer: TypeAlias = "FFI.buffer | memoryview"


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

    @property
    def kind(self) -> PageKind:
        """What it is made of."""
        ...

    def buffer(self, at: int, nbytes: int) -> Buffer:
        """A fresh writable buffer, which can be weakly referenced and keeps the mapping alive."""
        ...


class NativePages:
    """Mapped in C, at a huge page where there is room for one. A forked child has no part of it.

    Args:
        nbytes: at least so many.
        wanted: "auto" for the most contiguous there is, "small" for ordinary pages alone.

    Raises:
        OSError: the machine does not have them.
    """

    def __init__(self, nbytes: int, wanted: PagesWanted = "auto") -> None:
        memory = ffi.new("struct aio_memory *")
        asked = lib.AIO_PAGES_SMALL if wanted == "small" else lib.AIO_PAGES_AUTO
        if error := -int(lib.aio_memory_map(nbytes, asked, memory)):
            raise OSError(error, os.strerror(error))
        self._mapping = ffi.gc(memory, lib.aio_memory_unmap)
        self.address = int(ffi.cast("uintptr_t", memory.address))
        self.mapped_bytes = int(memory.bytes)
        self.kind = _kind(int(memory.pages))

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

    It takes no reserved huge pages: the kernel cannot wipe them for a child.

    The view below keeps the map from being closed, and every buffer shares the view's hold on it.
    """

    def __init__(self, nbytes: int, wanted: PagesWanted = "auto") -> None:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(_MADV_WIPEONFORK)
        advice = mmap.MADV_NOHUGEPAGE if wanted == "small" else mmap.MADV_HUGEPAGE
        is_taken = _advise(mapping, advice)
        _advise(mapping, _MADV_POPULATE_WRITE)
        self.kind: PageKind = "transparent" if wanted == "auto" and is_taken else "small"
        if self.kind == "transparent":
            _advise(mapping, _MADV_COLLAPSE)
        self._view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mapped_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def buffer(self, at: int, nbytes: int) -> memoryview:
        """A buffer over a part."""
        return self._view[at : at + nbytes]


map_pages: Callable[[int, PagesWanted], Pages] = PythonPages if loader_message else NativePages


class PinnedMemory:
    """One piece of anonymous memory: as contiguous as the machine gives, touched once.

    That is, from huge pages the system keeps in reserve if enough of them are free, else from
    transparent huge pages where the kernel finds some. A forked child has no part of its bytes.

    Args:
        nbytes: how much; the mapping may be larger.
        pages: ``"auto"``, as above, or ``"small"``, from ordinary pages alone.

    Raises:
        ConfigError: not a positive size, or the machine does not have that much.
    """

    def __init__(self, nbytes: int, *, pages: PagesWanted = "auto") -> None:
        if pages not in {"auto", "small"}:
            raise ConfigError(f"pages must be auto or small, got {pages!r}")
        if nbytes <= 0:
            raise ConfigError(f"memory needs a positive size, got {nbytes} bytes")
        left = headroom()
        if left and nbytes > max(left.nbytes, reserved_huge_bytes()):
            raise ConfigError(
                f"cannot have {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of memory: {left.nbytes} "
                f"bytes are {left.limit}; ask for less"
            )
        try:
            self._pages = map_pages(nbytes, pages)
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

    @property
    def page_kind(self) -> PageKind:
        """What it is made of: ``"reserved"`` huge pages, ``"transparent"`` ones, or ``"small"``.

        Of transparent ones there may be fewer than wished; `page_report` counts them.
        """
        return self._pages.kind

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
        """How the mapping is backed now, as `tiering.aio.pages` finds out."""
        return report_on(self._pages.address, self._pages.mapped_bytes)


def _kind(rung: int) -> PageKind:
    if rung == lib.AIO_PAGES_RESERVED:
        return "reserved"
    return "transparent" if rung == lib.AIO_PAGES_TRANSPARENT else "small"


def _advise(mapping: mmap.mmap, advice: int) -> bool:
    """Give advice that costs nothing but speed when it is not taken. Returns whether it was."""
    with contextlib.suppress(OSError):
        mapping.madvise(advice)
        return True
    return False


def _let_go(mapping: object, pointer: object) -> None:
    """The mapping lives as long as this is bound to it."""


def _limits() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f" (the process is limited to {soft} bytes of address space, ulimit -v)"
