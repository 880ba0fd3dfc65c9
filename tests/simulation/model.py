"""One pass repeated over and over: the real store and prefetcher over a drive that is a dictionary.

The drive moves bytes when it is told to, or after it has been asked some times whether it has; no
clock and no thread takes part, so every count is exact and comes out the same again. Sizes are in
pages of 4 KiB, which is what the arena cuts.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tiering.arena import Arena, Slot
from tiering.prefetch import Prefetcher
from tiering.records import ALIGNMENT_BYTES
from tiering.spec import RecordSpec, TensorSpec, Tier
from tiering.store import TieredStore
from tiering.tiers.device import DeviceTier
from tiering.trace import Access, Use


class Case(NamedTuple):
    """A pass, and what it has to run in."""

    sizes: Mapping[str, int]
    """Pages of each record."""
    uses: tuple[Use, ...]
    budget: int
    """Pages of the arena."""


class Moved(NamedTuple):
    """What one pass cost, in pages, and what became of its reads ahead."""

    read: int
    written: int
    misses: int
    wasted: int

    @property
    def pages(self) -> int:
        """Both ways."""
        return self.read + self.written


class MemoryTransfer:
    """Ends when it is waited for, or has been asked ``lag`` times whether it has ended."""

    def __init__(self, slot: Slot, kept: bytearray, *, reading: bool, lag: int) -> None:
        self._slot, self._kept, self._reading, self._left = slot, kept, reading, lag
        self._start = ctypes.string_at(slot.address, len(kept))
        self._ended = False

    def done(self) -> bool:
        """One more time it was asked."""
        self._left -= 1
        if self._left < 0:
            self.wait()
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Move the bytes now; nobody may have touched the memory meanwhile."""
        if self._ended:
            return
        self._ended = True
        held = ctypes.string_at(self._slot.address, len(self._kept))
        assert held == self._start, "a slot was changed under a transfer"
        if self._reading:
            ctypes.memmove(self._slot.address, bytes(self._kept), len(self._kept))
        else:
            self._kept[:] = held


class MemoryDrive:
    """An `NvmeTier` as far as a store can see: record files are entries of a dictionary."""

    def __init__(self, lag: int = 0) -> None:
        self._files: dict[str, bytearray] = {}
        self._lag = lag
        self.read_bytes = 0
        self.written_bytes = 0

    def create(self, spec: RecordSpec) -> None:
        """A file of zeros."""
        self._files[spec.key] = bytearray(spec.nbytes)

    def read(self, key: str, slot: Slot) -> MemoryTransfer:
        """Start a read."""
        kept = self._files[key]
        self.read_bytes += len(kept)
        return MemoryTransfer(slot, kept, reading=True, lag=self._lag)

    def write(self, key: str, slot: Slot) -> MemoryTransfer:
        """Start a write."""
        kept = self._files[key]
        self.written_bytes += len(kept)
        return MemoryTransfer(slot, kept, reading=False, lag=self._lag)


class Simulation:
    """A client that uses records one after another and knows what each must contain.

    Args:
        sizes: pages of each record.
        budget: pages of the arena.
        ahead: whether it reads ahead. Without, and with ``farthest`` false, it is demand paging
            that evicts the least recently used.
        farthest: whether the store evicts what is used farthest in the future.
        behind: whether it writes behind, as training does; else changes wait for eviction.
        lag: of the drive's transfers.
        near: pages that are fetched ahead at any price.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        budget: int,
        *,
        ahead: bool = True,
        farthest: bool = True,
        behind: bool = True,
        lag: int = 0,
        near: int = 1,
    ) -> None:
        self.arena = Arena(budget * ALIGNMENT_BYTES)
        self.drive = MemoryDrive(lag)
        self.store = TieredStore(self.arena, DeviceTier(torch.device("cpu")))
        self.pager = Prefetcher(self.store, near_bytes=near * ALIGNMENT_BYTES)
        self._ahead, self._behind = ahead, behind
        if not ahead:
            self.store.refill_by(lambda: None)
        if not farthest:
            self.store.order_by(lambda _key: 0.0)
        self._contents: dict[str, int] = {}
        self._clock = 0
        for key, pages in sizes.items():
            spec = RecordSpec(key, (TensorSpec("x", torch.int64, (pages * 512,)),))
            self.store.create(spec, Tier.NVME, drive=self.drive)  # type: ignore[arg-type]
            self._use(Use(key, Access.OVERWRITE))
        self.store.flush()

    def run(self, uses: Sequence[Use], kind: str = "train") -> Moved:
        """One pass."""
        before = self._counters()
        self.pager.begin(kind)
        self._advance()
        for use in uses:
            self._use(use)
            self._advance()
        self.pager.end(kind)
        return Moved(*(now - then for now, then in zip(self._counters(), before, strict=True)))

    def check(self) -> None:
        """Every record is what was last written, and the arena was never exceeded."""
        for key in self._contents:
            self._use(Use(key, Access.READ))
        stats = self.arena.stats()
        assert stats.peak_bytes <= stats.capacity_bytes
        assert not self.store._beside

    def close(self) -> None:
        """Forget everything."""
        self.store.flush()
        self.store.close()
        self.arena.close()

    def _use(self, use: Use) -> None:
        with self.pager.lease(use.key, use.access) as lease:
            if use.access is not Access.OVERWRITE:
                assert bool((lease["x"] == self._contents[use.key]).all())
            if use.access is not Access.READ:
                self._clock += 1
                self._contents[use.key] = self._clock
                lease["x"].fill_(self._clock)
        if self._behind and use.access is not Access.READ:
            self.pager.write_back(use.key)

    def _advance(self) -> None:
        if self._ahead:
            self.pager.advance()
        else:
            self.store.poll()

    def _counters(self) -> tuple[int, int, int, int]:
        pages = [n // ALIGNMENT_BYTES for n in (self.drive.read_bytes, self.drive.written_bytes)]
        return pages[0], pages[1], self.store.stats.misses, self.store.stats.wasted


def random_case(rng: random.Random, *, records: int, uses: int, largest: int = 1) -> Case:
    """Records of up to ``largest`` pages, each used; a budget that any single use fits into."""
    keys = [chr(ord("a") + at) for at in range(rng.randint(2, records))]
    sizes = {key: rng.randint(1, largest) for key in keys}
    order = keys + rng.choices(keys, k=rng.randint(0, max(uses - len(keys), 0)))
    rng.shuffle(order)
    accesses = rng.choices(list(Access), weights=(3, 1, 1), k=len(order))
    least = 2 * max(sizes.values())  # new contents are written beside the old ones
    budget = rng.randint(least, max(least, sum(sizes.values())))
    return Case(sizes, tuple(map(Use, order, accesses)), budget)
