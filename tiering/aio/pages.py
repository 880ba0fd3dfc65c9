"""What a piece of memory is made of, as the kernel tells.

Contiguity is what counts: a drive gets one segment for each physically contiguous run of a buffer.
From memory of 2 to 16 runs a MiB a virtual disk gave four times the bandwidth that it gave from
memory of 256.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple, TypeAlias

PagesWanted: TypeAlias = Literal["auto", "small"]
PageKind: TypeAlias = Literal["small", "transparent", "reserved"]

_MIB: Final = 2**20
_SAMPLES_MOST: Final = 256  # MiBs looked at, so that a large memory is not looked at for seconds
_SMAPS: Final = Path("/proc/self/smaps")
_PAGEMAP: Final = Path("/proc/self/pagemap")
_ENTRY_BYTES: Final = 8
_FRAME_MASK: Final = 2**55 - 1  # of an entry of the page map; 0 for readers without the right
_RESERVED_WORDS: Final = frozenset({"Private_Hugetlb:", "Shared_Hugetlb:"})


class PageReport(NamedTuple):
    """How a mapping is backed.

    Args:
        mapped_bytes: all of it.
        resident_bytes: of them in memory.
        huge_bytes: of those on huge pages of either kind, which transfers like best.
        reserved_bytes: of those on huge pages that the system keeps in reserve (hugetlb).
        runs_per_mib: physically contiguous pieces a MiB, on average, where every page lies by
            itself 256; None where the page map may not be read (only root may) or there is no
            whole MiB.
    """

    mapped_bytes: int
    resident_bytes: int
    huge_bytes: int
    reserved_bytes: int
    runs_per_mib: float | None


def report_on(address: int, nbytes: int) -> PageReport:
    """Look at a mapping of this process.

    The kernel may have joined it with a neighbour of the same kind; the neighbour's pages then
    count as well, up to the size of the mapping.

    Args:
        address: first byte, at a page.
        nbytes: all of it.

    Raises:
        OSError: there is no ``/proc``.
    """
    resident_bytes = transparent_bytes = reserved_bytes = 0
    for word, size_bytes in _sizes(address, nbytes):
        if word == "Rss:":
            resident_bytes += size_bytes
        elif word == "AnonHugePages:":
            transparent_bytes += size_bytes
        elif word in _RESERVED_WORDS:  # which the kernel leaves out of the resident ones
            reserved_bytes += size_bytes
    return PageReport(
        mapped_bytes=nbytes,
        resident_bytes=min(resident_bytes + reserved_bytes, nbytes),
        huge_bytes=min(transparent_bytes + reserved_bytes, nbytes),
        reserved_bytes=min(reserved_bytes, nbytes),
        runs_per_mib=runs_per_mib(address, nbytes),
    )


def runs_per_mib(address: int, nbytes: int) -> float | None:
    """Physically contiguous pieces a MiB, on average over at most 256 MiBs, evenly spread.

    Args:
        address: first byte, at a page.
        nbytes: how many.

    Returns:
        1 to 256 on pages of 4 KiB; None as of `PageReport`.
    """
    mibs = nbytes // _MIB
    looked_at = min(mibs, _SAMPLES_MOST)
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            runs = [_runs(file, address + i * mibs // looked_at * _MIB) for i in range(looked_at)]
    except OSError:
        return None
    known = [count for count in runs if count]
    return sum(known) / len(known) if known else None


def _runs(pagemap: BinaryIO, address: int) -> int:
    """Of the MiB there; 0 when it cannot be told."""
    pages = _MIB // mmap.PAGESIZE
    pagemap.seek(address // mmap.PAGESIZE * _ENTRY_BYTES)
    entries = memoryview(pagemap.read(pages * _ENTRY_BYTES))
    if len(entries) < pages * _ENTRY_BYTES:
        return 0
    frames = [entry & _FRAME_MASK for entry in entries.cast("Q")]
    if not any(frames):
        return 0
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(frames))


def _sizes(address: int, nbytes: int) -> Iterator[tuple[str, int]]:
    """What the kernel says of each mapping that has a part there: words, and bytes."""
    inside = False
    for line in _SMAPS.read_text(encoding="ascii", errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            first, last = (int(part, 16) for part in word.split("-"))
            inside = first < address + nbytes and last > address
        elif inside and rest.endswith(" kB"):
            yield word, int(rest.split()[0]) * 1024
