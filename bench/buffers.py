"""The memory of a measurement: its pages, its data, and how contiguous it is.

The data of an area is random, so that no drive can compress it, and the same for the same seed; it
repeats every 64 MiB. For a file in which no two sectors are alike, it can be stamped.
Byte ``x`` of a file is written from, and read to, byte ``x % area_bytes`` of an area: so what a
file must contain is known, whoever wrote it and in whatever order.

Note: contiguity. A transfer from 4 KiB pages that lie scattered costs a drive one segment a page,
which on some drives is several times slower than a transfer from huge pages. So a figure without
the pages it was measured on says little.
"""

from __future__ import annotations

import mmap
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.job import Pages
from tiering.aio import PinnedMemory
from tiering.sizes import format_bytes

_MIB: Final = 2**20
_UNLIKE_BYTES: Final = 64 * _MIB  # further than any drive looks back to compress
_SECTOR_BYTES: Final = 512  # the least that a drive moves


class PageFacts(NamedTuple):
    """What memory a buffer got.

    Args:
        asked: huge or small.
        mapped_bytes: all of it.
        huge_bytes: of it on huge pages of either kind.
        reserved_bytes: of those on huge pages the system keeps in reserve.
        runs_per_mib: physically contiguous pieces a MiB, on average; None where only root may look.
    """

    asked: Pages
    mapped_bytes: int
    huge_bytes: int
    reserved_bytes: int
    runs_per_mib: float | None

    def describe(self) -> str:
        """In words."""
        if self.reserved_bytes == self.mapped_bytes:
            text = f"reserved huge pages, all {format_bytes(self.mapped_bytes)}"
        elif self.huge_bytes == self.mapped_bytes:
            text = f"huge pages, all {format_bytes(self.mapped_bytes)}"
        elif self.huge_bytes:
            text = (
                f"huge pages for {format_bytes(self.huge_bytes)} of "
                f"{format_bytes(self.mapped_bytes)}, small pages for the rest"
            )
        else:
            text = f"{format_bytes(mmap.PAGESIZE)} pages, all {format_bytes(self.mapped_bytes)}"
            text += " (huge pages were asked for)" if self.asked == "huge" else ""
        if self.runs_per_mib is None:
            return f"{text}; contiguity unknown (only root may read the page map)"
        return f"{text}; {self.runs_per_mib:.1f} physical runs a MiB"


class Buffer:
    """One or two areas of memory: the data, and, where there are two, a place to read to.

    It is a `tiering.aio.backend.Memory`.

    Args:
        area_bytes: of one area; a power of two.
        areas: 1 or 2. With 1, what is read lands on the equal data.
        pages: huge or small.
        seed: of the data.

    Raises:
        ConfigError: the machine does not have that much memory.
    """

    def __init__(self, area_bytes: int, areas: int, *, pages: Pages, seed: int) -> None:
        self._memory = PinnedMemory(
            area_bytes * areas, pages="small" if pages == "small" else "auto"
        )
        self._pages: Pages = pages
        self._seed = np.uint64(seed % 2**64)
        self._array = np.frombuffer(memoryview(self._memory.buffer()), dtype=np.uint8)
        self.area_bytes = area_bytes
        self.landing_at = area_bytes * (areas - 1)
        self._array[area_bytes:] = 0
        _fill(self._array[:area_bytes], seed)

    @property
    def address(self) -> int:
        """First byte."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        """Bytes of all areas."""
        return self._memory.nbytes

    def source_at(self, offset: int) -> int:
        """Where the data of a file offset stands in the memory."""
        return offset % self.area_bytes

    def target_at(self, offset: int) -> int:
        """Where what is read from a file offset goes."""
        return self.landing_at + offset % self.area_bytes

    def first_difference(self, offset: int, nbytes: int) -> int | None:
        """Compare what was read from a file offset with the data.

        Returns:
            The file offset of the first byte that differs, or None.
        """
        source, target = self.source_at(offset), self.target_at(offset)
        wanted = self._array[source : source + nbytes]
        differs = wanted != self._array[target : target + nbytes]
        return offset + int(differs.argmax()) if differs.any() else None

    def stamp(self, offset: int, nbytes: int) -> None:
        """Give each sector of the data of a file offset its own offset and the seed, at its start.

        Args:
            offset: of the file, at a sector.
            nbytes: whole sectors.
        """
        source = self.source_at(offset)
        stamps = self._stamps(source, nbytes)
        stamps[:, 0] = np.arange(offset, offset + nbytes, _SECTOR_BYTES, dtype=np.uint64)
        stamps[:, 1] = self._seed

    def stamped_for(self, offset: int) -> int | None:
        """For which file offset the sector was stamped that was read from another.

        Returns:
            Its offset, or None where it has no stamp or the right one.
        """
        sector = offset // _SECTOR_BYTES * _SECTOR_BYTES
        found = self._stamps(self.target_at(sector), _SECTOR_BYTES)[0]
        is_stamp = found[1] == self._seed and found[0] % _SECTOR_BYTES == 0
        return int(found[0]) if is_stamp and int(found[0]) != sector else None

    def _stamps(self, at: int, nbytes: int) -> npt.NDArray[np.uint64]:
        """The first 16 bytes of each sector of a piece of the memory."""
        words = self._array[at : at + nbytes].view(np.uint64)
        return words.reshape(-1, _SECTOR_BYTES // 8)[:, :2]

    def page_facts(self) -> PageFacts:
        """What memory it got."""
        report = self._memory.page_report()
        return PageFacts(
            asked=self._pages,
            mapped_bytes=self.nbytes,
            huge_bytes=min(report.huge_bytes, self.nbytes),
            reserved_bytes=min(report.reserved_bytes, self.nbytes),
            runs_per_mib=report.runs_per_mib,
        )


def _fill(array: npt.NDArray[np.uint8], seed: int) -> None:
    """Put random bytes into memory: the same ones over and over, far apart."""
    random = np.random.default_rng(seed)
    unlike = array[:_UNLIKE_BYTES]
    # In pieces, so that filling costs no second buffer.
    for at in range(0, len(unlike), _MIB):
        piece = unlike[at : at + _MIB]
        piece[:] = np.frombuffer(random.bytes(len(piece)), dtype=np.uint8)
    for at in range(len(unlike), len(array), len(unlike)):
        array[at : at + len(unlike)] = unlike
