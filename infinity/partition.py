"""Where parameters lie in their unit, which part a rank owns, and how that is cut into tiles.

Pure arithmetic on element counts. Every boundary is a multiple of `ALIGN_NUMEL`, because vectorised
updates of ranges that begin elsewhere differ in the last bit, and then the cut would change
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN_NUMEL = 16


class Extent(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many."""
        return self.stop - self.start

    def intersect(self, other: Extent) -> Extent:
        """What both cover; empty (``numel`` 0) when nothing is."""
        start = max(self.start, other.start)
        return Extent(start, max(start, min(self.stop, other.stop)))

    def relative_to(self, origin: int) -> Extent:
        """The same elements counted from ``origin``."""
        return Extent(self.start - origin, self.stop - origin)


@dataclass(frozen=True)
class FlatLayout:
    """The flat buffer of a unit.

    Args:
        parameters: what each parameter covers, in order; the gap to the next one is padding.
        numel: all elements, padding included: the same number for every rank.
        world_size: how many ranks share it equally.
    """

    parameters: tuple[Extent, ...]
    numel: int
    world_size: int

    @classmethod
    def of(cls, numels: Sequence[int], *, world_size: int) -> FlatLayout:
        """Lay parameters of these element counts one after the other.

        Even a unit without elements gets some: its parameters are trained like others, and what
        trains them are records of more than nothing.
        """
        extents, at = [], 0
        for numel in numels:
            extents.append(Extent(at, at + numel))
            at = _align(at + numel, ALIGN_NUMEL)
        return cls(tuple(extents), _align(max(at, 1), ALIGN_NUMEL * world_size), world_size)

    @property
    def shard_numel(self) -> int:
        """Elements a rank owns."""
        return self.numel // self.world_size

    def shard(self, rank: int) -> Extent:
        """What the rank owns."""
        return Extent(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def padded(self, index: int) -> Extent:
        """What parameter ``index`` covers with the padding behind it."""
        start = self.parameters[index].start
        last = index + 1 == len(self.parameters)
        return Extent(start, self.numel if last else self.parameters[index + 1].start)


def tiles(shard: Extent, *, tile_numel: int) -> tuple[Extent, ...]:
    """Cut a shard into equal tiles of at most ``tile_numel`` elements (the last may be smaller).

    Raises:
        ValueError: ``tile_numel`` is below `ALIGN_NUMEL`.
    """
    if tile_numel < ALIGN_NUMEL:
        raise ValueError(f"tile_numel must be at least {ALIGN_NUMEL}, got {tile_numel}")
    if shard.numel == 0:
        return ()
    count = -(-shard.numel // (tile_numel // ALIGN_NUMEL * ALIGN_NUMEL))
    step = _align(-(-shard.numel // count), ALIGN_NUMEL)
    return tuple(
        Extent(start, min(start + step, shard.stop))
        for start in range(shard.start, shard.stop, step)
    )


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
