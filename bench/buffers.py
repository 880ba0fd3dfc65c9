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
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bench.job import Pages
from tiering.aio import PinnedMemory
from tiering.errors import ConfigError
from tiering.sizes import format_bytes

_MIB: Final = 2**20
_UNLIKE_BYTES: Final = 64 * _MIB  # further than any drive looks back to compress
_SECTOR_BYTES: Final = 512  # the least that a drive moves
_PAGEMAP: Final = Path("/proc/self/pagemap")
_FRAME_MASK: Final = 2**55 - 1  # of an entry of the page map; 0 for readers without the right


class PageFacts(NamedTuple):
    """What memory a buffer got.

    Args:
        asked: huge or small.
        mapped_bytes: all of it.
        huge_bytes: of it on huge pages.
        runs_per_mib: physically contiguous pieces a MiB, on average; None where only root may look.
    """

    asked: Pages
    mapped_bytes: int
    huge_bytes: int
    runs_per_mib: float | None

    def describe(self) -> str:
        """In words."""
        if self.huge_bytes == self.mapped_bytes:
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


class _Mapping(Protocol):
    """Memory of which we know the pages."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it."""
        ...

    def huge_bytes(self) -> int:
        """Of it on huge pages."""
        ...


class _HugePages:
    """Memory as the engine's users get it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = PinnedMemory(nbytes)
        self.address = self._memory.address
        self.nbytes = nbytes

    def array(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(memoryview(self._memory.buffer()), dtype=np.uint8)

    def huge_bytes(self) -> int:
        return min(self._memory.page_report().huge_bytes, self.nbytes)


class _SmallPages:
    """Memory that refuses huge pages."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"cannot have {format_bytes(nbytes)} of memory: {error.strerror}; ask for less"
            ) from error
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._array = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._array.ctypes.data)
        self.nbytes = nbytes

    def array(self) -> npt.NDArray[np.uint8]:
        return self._array

    def huge_bytes(self) -> int:
        return 0


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
        kind = _HugePages if pages == "huge" else _SmallPages
        self._mapping: _Mapping = kind(area_bytes * areas)
        self._pages: Pages = pages
        self._seed = np.uint64(seed % 2**64)
        self._array = self._mapping.array()
        self.area_bytes = area_bytes
        self.landing_at = area_bytes * (areas - 1)
        self._array[area_bytes:] = 0
        _fill(self._array[:area_bytes], seed)

    @property
    def address(self) -> int:
        """First byte."""
        return self._mapping.address

    @property
    def nbytes(self) -> int:
        """Bytes of all areas."""
        return self._mapping.nbytes

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
        return PageFacts(
            asked=self._pages,
            mapped_bytes=self.nbytes,
            huge_bytes=self._mapping.huge_bytes(),
            runs_per_mib=_runs_per_mib(self.address, self.nbytes),
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


def _runs_per_mib(address: int, nbytes: int) -> float | None:
    """Physically contiguous pieces a MiB, on average over the whole MiB of a piece of memory."""
    pages_a_mib = _MIB // mmap.PAGESIZE
    mibs = nbytes // _MIB
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            file.seek(address // mmap.PAGESIZE * 8)
            raw = file.read(mibs * pages_a_mib * 8)
    except OSError:
        return None
    frames = np.frombuffer(raw, dtype=np.uint64) & np.uint64(_FRAME_MASK)
    if not mibs or len(frames) < mibs * pages_a_mib or not frames.any():
        return None
    steps = np.diff(frames.reshape(mibs, pages_a_mib).astype(np.int64), axis=1)
    return float(1 + (steps != 1).sum(axis=1).mean())
