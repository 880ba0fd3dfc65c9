"""Walks the trace against the store, and has records fetched before their use.

One `Prefetcher` serves one store. Its clients bracket each pass with `begin` and `end` and lease
records through it. Fetching ahead happens in `advance`, which its client calls where time passes:
at module boundaries, and between optimizer tiles.
"""

from __future__ import annotations

import itertools
import math

from tiering.planner import fetch_ahead
from tiering.store import Lease, TieredStore
from tiering.trace import Access, Trace, TraceCursor, Use

_WINDOW_USES = 64  # how far ahead one step of planning looks; bounds its cost, not what is right


class Prefetcher:
    """Follows the trace of the pass under way and keeps the store's queue ahead of it.

    Args:
        store: whose records are used. Its eviction order becomes "farthest next use first".
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._traces: dict[str, Trace] = {}
        self._passes: list[tuple[str, TraceCursor]] = []
        store.order_by(self.distance)

    def begin(self, kind: str) -> None:
        """A pass of this kind starts; inside another, perhaps, which goes on after its `end`."""
        self._passes.append((kind, TraceCursor(self._traces.get(kind))))

    def end(self) -> None:
        """The innermost pass is over; its kind is expected to use the same next time."""
        kind, cursor = self._passes.pop()
        self._traces[kind] = cursor.recorded()

    def abandon(self) -> None:
        """The innermost pass was interrupted; what is known of its kind stays as it was."""
        self._passes.pop()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The passes under way, outermost first."""
        return tuple(kind for kind, _ in self._passes)

    def lease(self, key: str, access: Access) -> Lease:
        """Note the use in the pass under way, if any, and lease the record from the store."""
        if self._passes:
            self._passes[-1][1].use(Use(key, access))
        return self._store.lease(key, access)

    def is_next(self, key: str) -> bool:
        """Whether the trace expects this record's use next."""
        return self.distance(key) == 0

    def distance(self, key: str) -> float:
        """Uses until the next of ``key``, in the innermost pass that knows it; inf if none does."""
        for _, cursor in reversed(self._passes):
            away = cursor.expected.distance(key, cursor.position)
            if away < math.inf:
                return away
        return math.inf

    def advance(self) -> None:
        """Finish hops that have ended, then start reads of what is used soon, if there is room."""
        self._store.poll()
        if not self._passes:
            return
        cursor = self._passes[-1][1]
        window = itertools.islice(cursor.expected.upcoming(cursor.position), _WINDOW_USES)
        ahead = fetch_ahead(
            window, holding=self._store.holding, room_bytes=self._store.room_bytes()
        )
        for key in ahead:
            if not self._store.prefetch(key):
                break
