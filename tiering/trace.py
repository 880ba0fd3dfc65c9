"""The trace: in which order a pass uses its records, and where in it we are.

A pass is one training cycle (all micro-batches and the update) or one evaluation. The first pass of
a kind is recorded; later ones are followed. Passes repeat, so the use after the last one is the
first. A pass that departs from the trace is no error: the cursor looks ahead for the record it met,
and what was recorded this time becomes the trace of the next pass.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST_USES = 2**20  # a pass that never ends (forwards without a step) is not recorded for ever


class Access(enum.Enum):
    """What a use does to the record."""

    READ = "read"
    """Look at it. Many at once."""

    UPDATE = "update"
    """Change it in place. Alone."""

    OVERWRITE = "overwrite"
    """Give it new contents; the old ones are not needed."""


class Use(NamedTuple):
    """One use of a record."""

    key: str
    access: Access


class Holding(NamedTuple):
    """What the arena holds of one record, or would have to give for it, in bytes."""

    evictable_bytes: int
    """Counted as room, unless the record is used soon."""

    missing_bytes: int
    """Room it still needs to be used."""

    moved_bytes: int = 0
    """What it moves between arena and drive where it is not there."""


class Trace:
    """A recorded order of uses, with the position of every key's next use."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = tuple(uses)
        self._positions: defaultdict[str, list[int]] = defaultdict(list)
        for at, use in enumerate(self.uses):
            self._positions[use.key].append(at)

    def __len__(self) -> int:
        return len(self.uses)

    def distance(self, key: str, position: int) -> float:
        """Uses from ``position`` to the next one of ``key``, cyclically; inf if there is none."""
        positions = self._positions.get(key)
        if not positions:
            return math.inf
        index = bisect.bisect_left(positions, position)
        if index < len(positions):
            return positions[index] - position
        return positions[0] + len(self.uses) - position

    def needed(self, key: str, position: int) -> float | None:
        """Uses from ``position`` to the next that needs the contents; inf if they go before.

        None if there is no use.

        Args:
            key: of a record that has contents now.
            position: as for `distance`.
        """
        away = self.distance(key, position)
        if away == math.inf:
            return None
        use = self.uses[(position + int(away)) % len(self.uses)]
        return math.inf if use.access is Access.OVERWRITE else away

    def upcoming(self, position: int) -> Iterator[Use]:
        """The uses from ``position`` on, once round."""
        for at in range(position, position + len(self.uses)):
            yield self.uses[at % len(self.uses)]


class TraceCursor:
    """Follows one pass: what is expected (an earlier pass), and what happens (the recording)."""

    def __init__(self, expected: Trace | None) -> None:
        self.expected = Trace(()) if expected is None else expected
        self.position = 0
        self._seen: list[Use] = []

    def use(self, use: Use) -> None:
        """Note a use. The position moves behind it, or stays if it was not expected at all."""
        if len(self._seen) < MOST_USES:
            self._seen.append(use)
        away = self.expected.distance(use.key, self.position)
        if self.position + away < len(self.expected):
            self.position += int(away) + 1

    def recorded(self) -> Trace:
        """The trace of this pass; the expected one if nothing was different, or far too long."""
        if self.expected.uses == tuple(self._seen) or len(self._seen) == MOST_USES:
            return self.expected
        return Trace(self._seen)
