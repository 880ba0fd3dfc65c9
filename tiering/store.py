"""The tiered store: one entry a record; leases for those who use it, hops for the bytes.

Note: the states of a record

A record at home on the device or in the host arena is RESIDENT (or EMPTY before it has contents)
and does no I/O. One at home on NVMe goes round:

    EMPTY --overwrite--> DIRTY --write--> WRITING --done--> CLEAN --evict--> COLD
                         | ^ ^               |               | ^              |
                         | | +--- failed ----+               | +--- READING <-+
                         | +------ update, overwrite --------+
                         +-- discard --> EMPTY

`lease` returns when the bytes are there; `prefetch` is the first half of the same path, begun
earlier and never waiting. Hops that have ended are taken in by `poll` and by whoever waits for
them, nobody else, so the order of events is the caller's.

New contents are written beside the old ones and take their place when the lease ends well; if it
ends with an exception, the record is as it was. (One at home in memory, or kept there, is
overwritten where it is, since there is no room for it twice.) A record is changed in place only
while no other tensor looks at its memory; otherwise it moves to a slot of its own first.

What would break it: giving a slot back, or changing what is in it, while a transfer uses it. Only
entries without leases that are CLEAN or DIRTY are evicted or written, and neither state has a
transfer.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch

from tiering.aio.backend import Transfer
from tiering.arena import Arena, Placement, Slot
from tiering.errors import RecordError, TieringWarning, TransferError, TransferTimeoutError
from tiering.records import aligned_bytes
from tiering.spec import RecordSpec, Tier
from tiering.tiers.device import DeviceSlot, DeviceTier
from tiering.tiers.link import Hop
from tiering.tiers.nvme import PATIENCE_S, NvmeTier
from tiering.trace import Access, Holding, Use

_SLICE_S = 0.001


class State(enum.Enum):
    """Where the newest bytes are, and what memory that costs."""

    EMPTY = "empty"
    """Nowhere: created or discarded. No memory."""

    RESIDENT = "resident"
    """At home on the device or in the arena, for good. A slot."""

    COLD = "cold"
    """On the drive only. No memory."""

    READING = "reading"
    """On the drive, on their way into a slot."""

    CLEAN = "clean"
    """In a slot and on the drive, equal."""

    DIRTY = "dirty"
    """In a slot, newer than the drive."""

    WRITING = "writing"
    """In a slot, on their way to the drive."""


@dataclass(eq=False)
class Entry:
    """All that the store knows of one record."""

    spec: RecordSpec
    home: Tier
    drive: NvmeTier | None
    state: State = State.EMPTY
    slot: Slot | DeviceSlot | None = None
    filling: Slot | DeviceSlot | None = None
    """Where an overwriting lease puts the new contents."""
    claim: Slot | None = None
    """Room taken ahead for the overwriting lease to come; its `filling` then."""
    leases: int = 0
    transfer: Transfer | None = None
    """Only while READING or WRITING."""
    fetched_ahead: bool = False
    """Prefetched and not used since."""
    is_kept: bool = False
    """Stays in the arena unless there is no other way; see `TieredStore.keep`."""

    @property
    def slot_bytes(self) -> int:
        """Room it takes in the arena."""
        return aligned_bytes(max(self.spec.nbytes, 1))


@dataclass
class StoreStats:
    """Counters since the store was made. Seconds are time the caller was blocked."""

    hits: int = 0
    """Leases of NVMe records that found the bytes in the arena or on their way."""
    misses: int = 0
    """Leases that had to start the read themselves."""
    wasted: int = 0
    """Records fetched ahead and evicted without a use."""
    waited_s: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})


class EvictionOrder(Protocol):
    """Says how far away the next use of a record is; the farthest is evicted first."""

    def __call__(self, key: str) -> float:
        """Distance to the next use of ``key``, in uses; inf when none is known."""
        ...


def _nothing() -> None:
    """What follows when nothing is asked for."""


class Lease:
    """The right to use a record's tensors, until `release` or the end of a ``with`` block.

    Its attributes are the store's, which ends it: an interrupt leaves it whole or ended.
    """

    def __init__(self, store: TieredStore, entry: Entry, access: Access) -> None:
        slot = entry.filling if access is Access.OVERWRITE else entry.slot
        assert slot is not None
        self._store = store
        self.entry = entry
        self.access = access
        self.slot: Slot | DeviceSlot | None = slot
        self.views: dict[str, torch.Tensor] = {}
        if access is Access.READ:  # the record may get another slot: these keep this one
            self.views = slot.tensors(entry.spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name. A view of it may outlive the lease and keeps its memory."""
        slot = self._open_slot()
        if not self.views:
            self.views = slot.tensors(self.entry.spec)
        return self.views[name]

    def _open_slot(self) -> Slot | DeviceSlot:
        if self.slot is None:
            raise RecordError(f"record {self.entry.spec.key!r}: the lease was released")
        return self.slot

    def release(self) -> None:
        """End the use; what was written is the record's contents now. Twice is once.

        Raises:
            TransferTimeoutError: a transfer of the contents before did not end in time. The lease
                is as it was, and may be released again.
        """
        if self.slot is not None:
            self._store.settle_old(self.entry, self.access)
            self._store.commit(self)

    def release_behind(self, hop: Hop | None, then: Callable[[], None] = _nothing) -> None:
        """End the use when a copy from or to the device has been made, without waiting for it.

        Args:
            hop: the copy; None: there is none, and the use ends now.
            then: called when it has ended.

        Raises:
            TransferTimeoutError: as `release`, where there is no copy. The store ends the use
                later, as that behind a copy.
        """
        self._store.end_behind(self, hop, then)

    @property
    def key(self) -> str:
        """Of the record."""
        return self.entry.spec.key

    @property
    def is_in_arena(self) -> bool:
        """Whether its end would make room there."""
        return isinstance(self.slot, Slot)

    def whole(self) -> torch.Tensor:
        """All tensors of the record as one, uint8, of which `RecordSpec.views` makes them again."""
        return self._open_slot().tensors(self.entry.spec.as_bytes)["bytes"]

    def abandon(self) -> None:
        """End the use after a failure: what was overwritten beside its old contents keeps them."""
        if self.slot is not None:
            self._store.abandon(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.release()
        else:
            self.abandon()


class TieredStore:
    """Records on three tiers.

    Args:
        arena: host memory for everything that passes or stays there.
        device: the device tier.
        patience_s: longest wait for one transfer; a drive that takes longer is reported, not
            waited for.
    """

    def __init__(self, arena: Arena, device: DeviceTier, *, patience_s: float = PATIENCE_S) -> None:
        self.arena = arena
        self.stats = StoreStats()
        self._device = device
        self._patience_s = patience_s
        self._entries: dict[str, Entry] = {}
        # Those below are of records at home on NVMe, by key; the longest unused come first.
        self._moving: dict[str, Entry] = {}  # READING and WRITING
        self._arrivals = 0  # transfers that have ended
        self._failed_join = 0, -1  # how large, and at which of them
        self._idle: dict[State, dict[str, Entry]] = {State.CLEAN: {}, State.DIRTY: {}}
        self._kept: dict[str, Entry] = {}  # CLEAN or DIRTY without leases, like those in _idle
        self._absent: set[str] = set()  # records of the drive that have no slot
        self._claims: dict[str, Entry] = {}  # the first to be used come first
        self._failed_writes: dict[str, TransferError] = {}
        self._clean_bytes = 0
        self._beside: weakref.WeakSet[Arena] = weakref.WeakSet()
        self._distance: EvictionOrder = lambda _key: 0.0
        self._relieve: Callable[[], bool] = lambda: False
        self._refill: Callable[[], None] = lambda: None
        self._is_waiting = False
        # Leases that end by themselves, behind a copy if there is one; the oldest come first.
        self._behind: dict[Lease, tuple[Hop | None, Callable[[], None]]] = {}
        self._are_behind: Counter[str] = Counter()  # of each record

    # -- set-up

    def create(self, spec: RecordSpec, home: Tier, *, drive: NvmeTier | None = None) -> None:
        """Make a record without contents.

        Args:
            spec: what it is.
            home: where it lives when nobody uses it.
            drive: which drive that is, for `Tier.NVME`; its space is reserved now.

        Raises:
            RecordError: the key exists, or home and drive do not go together.
            SpaceError: the drive cannot hold it.
        """
        if spec.key in self._entries:
            raise RecordError(f"record {spec.key!r} exists already")
        if (home is Tier.NVME) != (drive is not None):
            raise RecordError(f"record {spec.key!r} at home on {home.value} needs a drive, or none")
        if drive is not None:
            drive.create(spec)
        self._entries[spec.key] = Entry(spec, home, drive)
        self._list(self._entries[spec.key])

    def keep(self, key: str) -> None:
        """Have a record of the drive stay in the arena once it is there, and not be written.

        Where no room is left at all it goes like any other: it costs time, never an error.
        """
        self._entry(key).is_kept = True

    def order_by(self, distance: EvictionOrder) -> None:
        """Evict by this order from now on."""
        self._distance = distance

    def relieve_by(self, relieve: Callable[[], bool]) -> None:
        """Ask this before giving up for lack of room: it releases leases and says if it did."""
        self._relieve = relieve

    def refill_by(self, refill: Callable[[], None]) -> None:
        """Call this during long waits, when hops may have ended: it starts reads ahead."""
        self._refill = refill

    def close(self) -> None:
        """Forget all records and free their memory. No transfer may be under way any more."""
        self._behind.clear()
        for entry in self._entries.values():
            for slot in (entry.slot, entry.filling, entry.claim):
                if slot is not None:
                    slot.free()
        self._entries.clear()
        self._claims.clear()

    # -- use

    def lease(self, key: str, access: Access = Access.READ) -> Lease:
        """Wait until the record can be used and lease it.

        Raises:
            RecordError: it is unknown, has no contents yet, or others use it and it would be
                changed in place.
            ArenaFullError: there is no room and nothing that could make some.
            TransferError: a read failed, and the record stays on the drive; or the write that
                would have made room failed, and that record stays in memory.
            TransferTimeoutError: a transfer did not end in time; names it.
        """
        entry = self._entry(key)
        self._finish_hops(key)
        is_idle = entry.leases == 0 and entry.state is State.CLEAN
        if access is Access.OVERWRITE and is_idle and not entry.is_kept:
            self._evict(entry)
        entry.leases += 1  # before anything waits, so that making room never takes its own slot
        filling = entry.filling
        try:
            self._list(entry)
            self._prepare(entry, access)
            lease = Lease(self, entry, access)
        except BaseException:
            begun, entry.filling = entry.filling, filling
            if begun is not None and begun not in (filling, entry.slot):
                begun.free()
            entry.leases -= 1
            self._list(entry)
            raise
        entry.fetched_ahead = False
        return lease

    def end_behind(self, lease: Lease, hop: Hop | None, then: Callable[[], None]) -> None:
        """Release the lease when the copy has been made; called by `Lease.release_behind`."""
        self._behind[lease] = hop, then
        self._are_behind[lease.key] += 1
        if hop is None:
            self._finish_hop(lease)

    def _finish_hops(self, key: str) -> None:
        """Wait for the copies from and to a record, and end their leases."""
        if self._are_behind[key]:
            for lease in [one for one in self._behind if one.key == key]:
                self._finish_hop(lease)

    def _finish_done_hops(self) -> bool:
        """End the leases behind copies that have been made; whether there were any."""
        done = [lease for lease, (hop, _) in self._behind.items() if hop is None or hop.is_done()]
        for lease in done:
            self._finish_hop(lease)
        return bool(done)

    def _finish_hop(self, lease: Lease) -> None:
        """Release the lease; a failure of what follows is kept, as that of any write behind."""
        hop, then = self._behind[lease]
        if hop is not None:
            hop.wait()
            self._arrivals += 1
        lease.release()
        del self._behind[lease]  # only now, so that a wait that is given up loses nothing
        self._are_behind[lease.key] -= 1
        try:
            then()
        except TransferError as error:
            self._failed_writes[lease.key] = error

    def settle_old(self, entry: Entry, access: Access) -> None:
        """Wait for the contents that go with the lease's end; called by `Lease.release`."""
        if access is Access.OVERWRITE:
            self._settle_quietly(entry)

    def commit(self, lease: Lease) -> None:
        """The good end of a lease, behind `settle_old`; called by `Lease.release`."""
        entry = lease.entry
        if lease.access is Access.OVERWRITE and entry.filling is not None:
            if entry.filling is not entry.slot:
                self._drop_slot(entry)
            entry.slot, entry.filling = entry.filling, None
        if lease.access is not Access.READ:
            entry.state = State.DIRTY if entry.home is Tier.NVME else State.RESIDENT
        self._end(lease)

    def abandon(self, lease: Lease) -> None:
        """The bad end of a lease; called by `Lease.abandon`."""
        entry, lease.views = lease.entry, {}  # which would keep its memory
        if lease.access is Access.OVERWRITE and entry.filling is not None:
            filled, entry.filling = entry.filling, None
            if filled is not entry.slot:
                filled.free()
            elif entry.state is State.CLEAN:
                self._drop_slot(entry)  # the old contents are on the drive
                entry.state = State.COLD
        elif lease.access is Access.UPDATE and entry.state is State.CLEAN:
            entry.state = State.DIRTY  # some of it may be changed
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        lease.slot, lease.views = None, {}  # an interrupt before this leaves a lease to be ended
        lease.entry.leases -= 1
        self._list(lease.entry)

    def prefetch(self, use: Use, away: float) -> bool:
        """Get ready for a lease to come: start its read, or claim the room it will overwrite.

        Args:
            use: what the lease will do.
            away: by the eviction order; only what is farther away is given up for it.

        Returns:
            False if it could not be done.
        """
        entry = self._entry(use.key)
        claims = use.access is Access.OVERWRITE
        if not self.holding(use).missing_bytes or not (claims or entry.state is State.COLD):
            return True
        slot = self._slot_ahead(entry, away)
        if slot is None:
            return False
        if claims:
            entry.claim = slot
            self._claims[use.key] = entry
            return True
        try:
            self._start_read(entry, slot)
        except TransferError:
            return False  # whoever needs the record tries again and is told
        entry.fetched_ahead = True
        return True

    def drop_claims(self, *, but: AbstractSet[str] = frozenset()) -> None:
        """Give the room back that was claimed ahead, except of these keys."""
        for key in self._claims.keys() - but:
            self._drop_claim(key)

    def write_back(self, key: str) -> None:
        """Start writing the record to the drive if it is newer in memory. Never waits.

        A record that is kept is not written before it has to go.
        """
        entry = self._entry(key)
        if entry.state is State.DIRTY and entry.leases == 0 and not entry.is_kept:
            self._start_write(entry)

    def discard(self, key: str) -> None:
        """Forget the contents: the record is EMPTY and its memory free."""
        entry = self._entry(key)
        self._finish_hops(key)
        if entry.leases:
            raise RecordError(
                f"record {key!r} is leased {entry.leases} times and can't be discarded"
            )
        self._settle_quietly(entry)
        self._failed_writes.pop(key, None)
        self._drop_claim(key)
        self._drop_slot(entry)
        entry.state = State.EMPTY
        self._list(entry)

    def poll(self) -> None:
        """Take in every hop that has ended. A failure is kept for whoever must know of it."""
        self._finish_done_hops()
        self._take_in(list(self._moving.values()))

    def _take_in(self, moving: Iterable[Entry]) -> None:
        for entry in moving:
            if _transfer(entry).done():
                self._settle_quietly(entry)

    def flush(self) -> None:
        """Write everything that is newer in memory, and wait until it is written.

        Raises:
            TransferError: as `raise_failed_writes`.
        """
        while self._behind:
            self._finish_hop(next(iter(self._behind)))
        for entry in (*self._idle[State.DIRTY].values(), *self._kept.values()):
            if entry.state is State.DIRTY:
                self._start_write(entry)
        for entry in list(self._moving.values()):
            self._settle_quietly(entry)
        self.raise_failed_writes()

    def raise_failed_writes(self) -> None:
        """Raise the first write that has failed since this was last asked.

        The bytes are still in memory and the record is DIRTY: it is written again when its room is
        needed, or by `flush`.

        Raises:
            TransferError: names the file and the reason.
        """
        failed, self._failed_writes = self._failed_writes, {}
        for error in failed.values():
            raise error

    # -- what is where, for the planner and the curious

    def state(self, key: str) -> State:
        """Where the record's newest bytes are."""
        return self._entry(key).state

    def sizes_bytes(self) -> dict[str, int]:
        """Of all records, by key."""
        return {key: entry.spec.nbytes for key, entry in self._entries.items()}

    def holding(self, use: Use) -> Holding:
        """What the arena holds for this use of a record, or would have to give."""
        entry = self._entry(use.key)
        passes = entry.home is Tier.NVME and not entry.is_kept
        nothing = Holding(0, 0, moved_bytes=entry.slot_bytes if passes else 0)
        stays = entry.home is Tier.HOST or entry.is_kept
        if entry.home is Tier.DEVICE or (stays and entry.slot is not None):
            return nothing
        if entry.filling is not None:
            return nothing  # being overwritten: what comes next will find the new contents
        if use.access is Access.OVERWRITE and entry.claim is not None:
            return nothing
        if entry.slot is None or use.access is Access.OVERWRITE:
            return nothing._replace(missing_bytes=entry.slot_bytes)
        if use.key in self._idle[State.CLEAN]:
            return nothing._replace(evictable_bytes=entry.slot_bytes)
        return nothing

    def has_absent(self) -> bool:
        """Whether any record of the drive is not in the arena."""
        return bool(self._absent)

    def room_bytes(self) -> int:
        """Arena bytes that are free or can be given up at once, without I/O."""
        return self.arena.free_bytes + self._clean_bytes

    # -- the hops

    def _prepare(self, entry: Entry, access: Access) -> None:
        """Bring the record into the state that the access needs."""
        if access is Access.OVERWRITE:
            if entry.filling is not None:
                raise RecordError(f"record {entry.spec.key!r} is being overwritten already")
            entry.filling = self._slot_to_fill(entry)
            return
        self._bring(entry)
        if access is Access.UPDATE:
            self._own(entry)

    def _slot_to_fill(self, entry: Entry) -> Slot | DeviceSlot:
        """A fresh one, beside what is there; of what stays, its own if nobody looks at it."""
        if entry.claim is not None:
            return self._take_claim(entry)
        stays = entry.state is State.RESIDENT or (entry.is_kept and entry.transfer is None)
        if stays and entry.slot is not None and entry.leases == 1 and not entry.slot.is_aliased:
            return entry.slot
        return self._make_slot(entry)

    def _bring(self, entry: Entry) -> None:
        """Have the bytes in a slot."""
        if entry.state is State.EMPTY:
            raise RecordError(f"record {entry.spec.key!r} has no contents yet; overwrite it first")
        if entry.home is not Tier.NVME:
            return
        if entry.state is State.COLD:
            self.stats.misses += 1
            self._start_read(entry, self._make_slot(entry))
        else:
            self.stats.hits += 1
        if entry.state is State.READING:
            self._settle(entry)

    def _own(self, entry: Entry) -> None:
        """Have the slot to oneself, so that it can be changed in place."""
        if entry.leases > 1:
            raise RecordError(
                f"record {entry.spec.key!r} has {entry.leases - 1} other leases and can't be "
                "changed in place"
            )
        self._settle_quietly(entry)
        assert entry.slot is not None
        if entry.slot.is_aliased:
            fresh = self._make_slot(entry)
            old = entry.slot.tensors(entry.spec)
            for name, tensor in fresh.tensors(entry.spec).items():
                tensor.copy_(old[name])
            self._drop_slot(entry)
            entry.slot = fresh

    def _start_read(self, entry: Entry, slot: Slot | DeviceSlot) -> None:
        assert entry.drive is not None
        assert isinstance(slot, Slot)
        try:
            entry.transfer = entry.drive.read(entry.spec.key, slot)
        except BaseException:
            slot.free()
            raise
        entry.slot = slot
        entry.state = State.READING
        self._moving[entry.spec.key] = entry

    def _start_write(self, entry: Entry) -> None:
        assert entry.drive is not None
        assert isinstance(entry.slot, Slot)
        entry.transfer = entry.drive.write(entry.spec.key, entry.slot)
        entry.state = State.WRITING
        self._moving[entry.spec.key] = entry
        self._list(entry)

    def _settle(self, entry: Entry) -> None:
        """Wait for the entry's transfer, if it has one, and take the state behind it."""
        if entry.transfer is None:
            return
        reading = entry.state is State.READING
        begin = time.perf_counter()
        try:
            self._wait(entry, entry.transfer)
        except TransferTimeoutError:
            raise  # still under way: nothing has changed
        except TransferError:
            self._arrive(entry, State.COLD if reading else State.DIRTY)
            raise
        else:
            self._arrive(entry, State.CLEAN)
        finally:
            self.stats.waited_s["read" if reading else "write"] += time.perf_counter() - begin

    def _wait(self, entry: Entry, transfer: Transfer) -> None:
        """Wait for a transfer. Long waits are used: other hops end, and room is filled again.

        Only for an entry that is leased, whose slot nothing that happens meanwhile can take.
        """
        end = time.perf_counter() + self._patience_s
        while entry.leases and not self._is_waiting and time.perf_counter() < end - _SLICE_S:
            with contextlib.suppress(TransferTimeoutError):
                return transfer.wait(_SLICE_S)
            self._is_waiting = True
            try:
                self._meanwhile(entry)
            finally:
                self._is_waiting = False
        return transfer.wait(max(end - time.perf_counter(), 0.0))

    def _meanwhile(self, waiting: Entry) -> None:
        """Take in what else has ended, and let the client start more."""
        self._take_in([e for e in self._moving.values() if e is not waiting])
        self._refill()

    def _settle_quietly(self, entry: Entry) -> None:
        """The same for one who does not need the bytes to have arrived.

        A read that failed is no error then: whoever needs the record reads it again. A write that
        failed is remembered.
        """
        writing = entry.state is State.WRITING
        try:
            self._settle(entry)
        except TransferTimeoutError:
            raise
        except TransferError as error:
            if writing:
                self._failed_writes[entry.spec.key] = error

    def _arrive(self, entry: Entry, state: State) -> None:
        """The transfer has ended; nothing else clears it, so state and transfer always agree."""
        self._arrivals += 1
        entry.transfer = None
        entry.state = state
        if state is State.COLD:
            self._drop_slot(entry)
            entry.fetched_ahead = False
        del self._moving[entry.spec.key]
        self._list(entry)

    # -- room

    def _make_slot(self, entry: Entry) -> Slot | DeviceSlot:
        """Room for the record where it lives or passes, evicting and waiting as needed."""
        if entry.home is Tier.DEVICE:
            return self._device.allocate(entry.spec.nbytes)
        while True:
            slot = self._passing_slot(entry)
            if slot is not None:
                return slot
            if not self._make_room(entry):
                return self._last_resort(entry)

    def _slot_ahead(self, entry: Entry, away: float) -> Slot | None:
        """Room for a lease to come, at the cost of what is farther away only.

        Where room is there, but in pieces, to give up something that was used is cheaper than to
        join them, and to join them is cheaper than to give up what was itself fetched ahead.
        """
        while (slot := self._try_slot(entry)) is None:
            victim = self._farthest(State.CLEAN)
            farthest = self._distance(victim.spec.key) if victim else 0.0
            is_beyond = farthest > away or farthest == math.inf
            in_pieces = self.arena.free_bytes >= entry.slot_bytes
            if in_pieces and (victim is None or victim.fetched_ahead or not is_beyond):
                return self._joined_slot(entry) if away < math.inf else None
            if victim is None or not is_beyond:
                return None
            self._evict(victim)
        return slot

    def _joined_slot(self, entry: Entry) -> Slot | None:
        """One joined from pieces; where that failed, not tried again until a transfer has ended."""
        failed_bytes, at = self._failed_join
        if at == self._arrivals and entry.slot_bytes >= failed_bytes:
            return None
        slot = self._passing_slot(entry)
        if slot is None:
            self._failed_join = entry.slot_bytes, self._arrivals
        return slot

    def _take_claim(self, entry: Entry) -> Slot:
        slot, entry.claim = entry.claim, None
        assert slot is not None
        del self._claims[entry.spec.key]
        return slot

    def _drop_claim(self, key: str) -> None:
        if key in self._claims:
            self._take_claim(self._claims[key]).free()

    def _passing_slot(self, entry: Entry) -> Slot | None:
        """A slot for it if there is room; where the room is in pieces, they are joined."""
        slot = self._try_slot(entry)
        if slot is None and self.arena.free_bytes >= entry.slot_bytes:
            idle = (e for e in self._entries.values() if not e.leases and not e.transfer)
            movable = (slot for e in idle for slot in (e.slot, e.claim) if isinstance(slot, Slot))
            if self.arena.join(entry.spec.nbytes, movable=movable):
                slot = self._try_slot(entry)
        return slot

    def _try_slot(self, entry: Entry) -> Slot | None:
        return self.arena.try_allocate(
            entry.spec.nbytes, owner=entry.spec.key, placement=_placement(entry)
        )

    def _last_resort(self, entry: Entry) -> Slot:
        """Room beside the arena, as much as tensors that outlive their leases keep of it.

        Raises:
            ArenaFullError: they do not keep that much.
        """
        key, nbytes, placement = entry.spec.key, entry.spec.nbytes, _placement(entry)
        beside = [arena.stats() for arena in self._beside]
        kept_bytes = sum(stats.retained_bytes for stats in (self.arena.stats(), *beside))
        if entry.slot is not None and entry.slot.is_aliased:
            kept_bytes += entry.slot_bytes  # it is about to be left to them
        beside_bytes = sum(s.capacity_bytes for s in beside if s.used_bytes)  # the rest is going
        if beside_bytes + entry.slot_bytes > kept_bytes:
            return self.arena.allocate(nbytes, owner=key, placement=placement)
        if not beside_bytes:
            warnings.warn(
                f"tensors taken from parameters keep {kept_bytes} bytes of the arena; as much "
                "memory is taken beside tiering.host_memory; let them go, or clone() them, to stay "
                "within it",
                TieringWarning,
                stacklevel=2,
            )
        arena = Arena(nbytes, poison=self.arena.poison)
        self._beside.add(arena)
        return arena.allocate(nbytes, owner=key, placement=placement)

    def _make_room(self, entry: Entry) -> bool:
        """Take one step towards room for this, the cheapest there is. False when there is none."""
        if self._finish_done_hops():
            return True
        moving = [e for e in self._moving.values() if e.leases == 0]
        writing = next((e for e in moving if e.state is State.WRITING), None)
        if moving and self.arena.free_bytes >= entry.slot_bytes:
            # The room is there, in pieces between transfers. A write that fails would fail again.
            first = moving[0]
            (self._settle if first is writing else self._settle_quietly)(first)
        elif self._claims:
            self._drop_claim(next(reversed(self._claims)))
        elif (clean := self._farthest(State.CLEAN)) is not None:
            self._evict(clean)
        elif writing is not None:
            self._settle(writing)
        elif (dirty := self._farthest(State.DIRTY)) is not None:
            self._start_write(dirty)
        elif moving:
            self._settle_quietly(moving[0])
        elif self._behind:
            self._finish_hop(next(iter(self._behind)))
        else:
            return self._relieve() or self._give_up_kept()
        return True

    def _give_up_kept(self) -> bool:
        """Take a step towards the room of a record that is kept. False when there is none."""
        entry = max(
            self._kept.values(),
            key=lambda e: (e.state is State.CLEAN, self._distance(e.spec.key)),
            default=None,
        )
        if entry is None:
            return False
        if entry.state is State.CLEAN:
            self._evict(entry)
        else:
            self._start_write(entry)
        return True

    def _farthest(self, state: State) -> Entry | None:
        return max(
            self._idle[state].values(), key=lambda e: self._distance(e.spec.key), default=None
        )

    def _evict(self, entry: Entry) -> None:
        self.stats.wasted += entry.fetched_ahead
        entry.fetched_ahead = False
        self._drop_slot(entry)
        entry.state = State.COLD
        self._list(entry)

    @staticmethod
    def _drop_slot(entry: Entry) -> None:
        if entry.slot is not None:
            entry.slot.free()
            entry.slot = None

    def _list(self, entry: Entry) -> None:
        """Keep the lists of what may be evicted or written: after each change of state or lease."""
        key = entry.spec.key
        for entries in self._idle.values():
            if entries.pop(key, None) is not None and entries is self._idle[State.CLEAN]:
                self._clean_bytes -= entry.slot_bytes
        self._kept.pop(key, None)
        if entry.slot is None and entry.home is Tier.NVME:
            self._absent.add(key)
        else:
            self._absent.discard(key)
        if entry.leases == 0 and entry.state in self._idle:
            if entry.is_kept:
                self._kept[key] = entry
                return
            self._idle[entry.state][key] = entry
            if entry.state is State.CLEAN:
                self._clean_bytes += entry.slot_bytes

    def _entry(self, key: str) -> Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise RecordError(f"no record {key!r}") from None


def _transfer(entry: Entry) -> Transfer:
    assert entry.transfer is not None
    return entry.transfer


def _placement(entry: Entry) -> Placement:
    stays = entry.home is Tier.HOST or entry.is_kept
    return Placement.LASTING if stays else Placement.PASSING
