"""What to fetch ahead: a pure function of the uses to come, what is where, and the room.

It walks the uses in order and gives each record the room it needs until the room is spent. A record
that is already there keeps its place, one that will be written without being read only claims its
room, so that nothing fetched now has to go before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiering.trace import Access, Holding, Use


def fetch_ahead(
    upcoming: Iterable[Use], *, holding: Callable[[Use], Holding], room_bytes: int
) -> list[str]:
    """Choose the records to start reading now, in the order of their use.

    Args:
        upcoming: the uses from here on.
        holding: what a use's record holds or needs.
        room_bytes: free room, plus all evictable bytes.

    Returns:
        Keys to fetch; their sum fits the room without giving up anything that is used before them.
    """
    chosen: list[str] = []
    met: set[str] = set()
    for use in upcoming:
        if use.key in met:
            continue
        met.add(use.key)
        held = holding(use)
        room_bytes -= held.evictable_bytes + held.missing_bytes
        if room_bytes < 0:
            break
        if held.missing_bytes and use.access is not Access.OVERWRITE:
            chosen.append(use.key)
    return chosen
