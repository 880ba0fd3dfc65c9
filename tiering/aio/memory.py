"""Memory for paged bytes: allocated in C, freed when the last buffer over it is gone.

A tensor made from a buffer keeps that buffer alive, and the buffer keeps the mapping: the memory
cannot be unmapped under a tensor, whatever happens to the `PinnedMemory` it came from.
"""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path
from typing import NamedTuple

from cffi import FFI

from tiering.aio.native import check_native, ffi, lib
from tiering.errors import ConfigError


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


class PinnedMemory:
    """One piece of anonymous memory: on huge pages where the machine has them, touched once.

    A forked child has no part of it.

    Args:
        nbytes: how much; the mapping may be larger.

    Raises:
        ConfigError: not a positive size, or the machine does not have that much.
    """

    def __init__(self, nbytes: int) -> None:
        check_native()
        if nbytes <= 0:
            raise ConfigError(f"memory needs a positive size, got {nbytes} bytes")
        memory = ffi.new("struct aio_memory *")
        error = -int(lib.aio_memory_map(nbytes, memory)) if nbytes < 2**63 else 12
        if error:
            raise ConfigError(
                f"cannot have {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of memory: "
                f"{os.strerror(error)}{_limits()}; ask for less"
            )
        self._mapping = ffi.gc(memory, lib.aio_memory_unmap)
        self._address = int(ffi.cast("uintptr_t", memory.address))
        self._nbytes = nbytes

    @property
    def address(self) -> int:
        """First byte; a multiple of the huge page where the mapping has at least one."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    def buffer(self, at: int = 0, nbytes: int | None = None) -> FFI.buffer:
        """A fresh writable buffer over a part, which keeps the whole mapping alive.

        It can be weakly referenced, and `torch.frombuffer` makes a tensor that owns it.

        Args:
            at: first byte.
            nbytes: how many; None: to the end.
        """
        length = self._nbytes - at if nbytes is None else nbytes
        if at < 0 or length < 0 or at + length > self._nbytes:
            raise ConfigError(f"bytes {at} to {at + length} of a memory of {self._nbytes}")
        # Pointer arithmetic makes a pointer that owns nothing. One with a destructor owns what the
        # destructor refers to.
        start = ffi.cast("char *", self._mapping.address) + at
        owner = ffi.gc(start, functools.partial(_let_go, self._mapping))
        buffer: FFI.buffer = ffi.buffer(owner, length)
        return buffer

    def page_report(self) -> PageReport:
        """How the mapping is backed now, from ``/proc/self/smaps``.

        The kernel may have joined it with a neighbour of the same kind; the neighbour's pages
        then count as well, up to the size of the mapping.
        """
        mapped_bytes = int(self._mapping.bytes)
        resident_bytes = huge_bytes = 0
        inside = False
        for line in (
            Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                first, last = (int(part, 16) for part in word.split("-"))
                inside = first < self._address + mapped_bytes and last > self._address
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
