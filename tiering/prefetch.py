"""Walks the trace against the store, and has it ready for each use before it comes.

One `Prefetcher` serves one store. Its clients bracket each pass with `begin` and `end` and lease
records through it. Fetching ahead happens in `advance`, which its clients call where time passes:
at module boundaries, and between optimizer tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from tiering.planner import plan_ahead
from tiering.store import Lease, TieredStore
from tiering.trace import Access, Trace, TraceCursor, Use

_WINDOW_USES = 64  # how far ahead one step of planning looks; bounds its cost, not what is right
_NEAR_BYTES = 2**27  # a fast drive's work for some tens of milliseconds


class Prefetcher:
    """Follows the trace of the pass under way and keeps the store's queue ahead of it.

    Args:
        store: whose records are used. Its eviction order becomes "farthest next use first".
        near_bytes: so much is fetched ahead at any price; see the planner's note.
    """

    def __init__(self, store: TieredStore, *, near_bytes: int = _NEAR_BYTES) -> None:
        self._store = store
        self._near_bytes = near_bytes
        self._limited: dict[str, int] = {}
        self._limit_bytes: float = math.inf
        self._traces: dict[str, Trace] = {}
        self._passes: list[tuple[str, TraceCursor]] = []
        store.order_by(self.distance)
        store.refill_by(self.fetch)

    def limit(self, sizes_bytes: Mapping[str, int], most_bytes: int) -> None:
        """Read no more than so many bytes of these records ahead, the last of them whole.

        Args:
            sizes_bytes: by key.
            most_bytes: of the next uses; 0 for none.
        """
        self._limited, self._limit_bytes = dict(sizes_bytes), most_bytes

    @property
    def traces(self) -> Mapping[str, Trace]:
        """What is known of each kind of pass."""
        return dict(self._traces)

    def adopt(self, traces: Mapping[str, Trace]) -> None:
        """Know these kinds of passes, from the next one of each on."""
        self._traces.update(traces)

    def begin(self, kind: str) -> None:
        """A pass of this kind starts; inside another, perhaps, which goes on after its `end`."""
        self._passes.append((kind, TraceCursor(self._traces.get(kind))))

    def end(self, kind: str) -> None:
        """The pass of this kind is over; the next one is expected to use the same."""
        cursor = self._stop(kind)
        if cursor is not None:
            self._traces[kind] = cursor.recorded()

    def abandon(self, kind: str) -> None:
        """The pass of this kind was interrupted; what is known of its kind stays as it was."""
        self._stop(kind)

    def _stop(self, kind: str) -> TraceCursor | None:
        """Take the pass off, with those inside it that never ended."""
        if not self.is_under_way(kind):
            return None
        while True:
            name, cursor = self._passes.pop()
            if name == kind:
                return cursor

    def is_under_way(self, kind: str) -> bool:
        """Whether a pass of this kind has begun and not ended."""
        return any(name == kind for name, _ in self._passes)

    def lease(self, key: str, access: Access) -> Lease:
        """Note the use in the pass under way, if any, and lease the record from the store."""
        if self._passes:
            self._passes[-1][1].use(Use(key, access))
        return self._store.lease(key, access)

    def write_back(self, key: str) -> None:
        """Start writing the record if it is newer in memory; see `TieredStore.write_back`."""
        self._store.write_back(key)

    def discard(self, key: str) -> None:
        """Forget the record's contents; see `TieredStore.discard`."""
        self._store.discard(key)

    def distance(self, key: str) -> float:
        """Uses until ``key`` is needed, in the innermost pass that knows it.

        inf if none knows it, and if it is overwritten first: to keep the contents saves nothing.
        """
        for _, cursor in reversed(self._passes):
            away = cursor.expected.needed(key, cursor.position)
            if away is not None:
                return away
        return math.inf

    def advance(self) -> None:
        """Finish hops that have ended, then get ready for what is used soon, if there is room."""
        self._store.poll()
        self.fetch()

    def fetch(self) -> None:
        """Start reads of what is used soon, and claim room to overwrite, if there is room."""
        if not self._store.has_absent():
            return
        if not self._passes:
            self._store.drop_claims()
            return
        cursor = self._passes[-1][1]
        upcoming = itertools.islice(cursor.expected.upcoming(cursor.position), _WINDOW_USES)
        window = list(self._within_limit(enumerate(upcoming)))
        self._store.drop_claims(but={use.key for _, use in window})
        for use, away in plan_ahead(
            window,
            holding=self._store.holding,
            room_bytes=self._store.room_bytes(),
            near_bytes=self._near_bytes,
        ):
            if not self._store.prefetch(use, away):
                break

    def _within_limit(self, upcoming: Iterable[tuple[int, Use]]) -> Iterator[tuple[int, Use]]:
        left_bytes = self._limit_bytes
        for away, use in upcoming:
            if use.access is Access.READ and use.key in self._limited:
                if left_bytes <= 0:
                    continue
                left_bytes -= self._limited[use.key]
            yield away, use
