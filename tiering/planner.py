"""What to get ready ahead: a pure function of the uses to come, what is where, and the room.

It walks the uses in order and gives each record the room it needs until the room is spent. A record
that is already there keeps its place, and one that will be written without being read claims its
room, so that nothing fetched now has to go before it is used.

Note: near and far

To fetch a record early, another one has to go early. The fewest bytes are moved if that waits until
the record is used: by then the uses in between have left behind others that are needed even later
(Belady's rule; `tests/simulation` counts what it saves). But a drive needs work ahead of time. So
the next few bytes to be used are fetched in the place of anything that is used after them, and
whatever is farther away only into room that nobody needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tiering.trace import Holding, Use


class Ahead(NamedTuple):
    """A use to get ready for."""

    use: Use
    away: float
    """Uses before it; inf if nothing may be given up for it that is needed at all."""


def plan_ahead(
    upcoming: Iterable[tuple[int, Use]],
    *,
    holding: Callable[[Use], Holding],
    room_bytes: int,
    near_bytes: int,
) -> list[Ahead]:
    """Choose the records to start reading now, and those to claim room for, in order of use.

    Args:
        upcoming: the uses from here on, each with the number of those before it.
        holding: what a use's record holds or needs.
        room_bytes: free room, plus all evictable bytes.
        near_bytes: of the drive's records, from here on, that are near.

    Returns:
        First uses of records that lack room. Together they fit the room without giving up anything
        that is used before them.
    """
    chosen: list[Ahead] = []
    met: set[str] = set()
    for away, use in upcoming:
        if use.key in met:
            continue
        met.add(use.key)
        held = holding(use)
        room_bytes -= held.evictable_bytes + held.missing_bytes
        if room_bytes < 0:
            break
        if held.missing_bytes:
            chosen.append(Ahead(use, away if near_bytes > 0 else math.inf))
        near_bytes -= held.moved_bytes
    return chosen
