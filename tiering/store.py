"""The tiered store: one entry a record; leases for those who use it, hops for the bytes.

Note: the states of a record
----------------------------
A record at home on the device or in the host arena is RESIDENT (or EMPTY before it has contents)
and does no I/O. One at home on NVMe goes round::

      EMPTY --overwrite--> DIRTY --write--> WRITING --done--> CLEAN --evict--> COLD
                             ^                 |                ^               |
                             +---- failed -----+                +--- READING <--+
                             +------------- update, overwrite --+

`lease` returns when the bytes are there; `prefetch` is the first half of the same path, begun
earlier and never waiting. `poll` moves finished hops to their next state; nothing else does, so the
order of events is the caller's. A lease that changes a record never changes memory another tensor
still looks at: it gets a slot of its own.

What would break it: giving a slot back while a transfer uses it. Only CLEAN and DIRTY entries
    without leases
are ever evicted, and both have no transfer.
"""

from __future__ import annotations

import enum
import time
import warnings
import weakref
from collections.abc import Callable
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
from tiering.tiers.nvme import NvmeTier
from tiering.trace import Access, Holding

PATIENCE_S = 60.0


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
    leases: int = 0
    transfer: Transfer | None = None
    fetched_ahead: bool = False
    """Prefetched and not used since."""

    @property
    def slot_bytes(self) -> int:
        """Arena room it takes."""
        return aligned_bytes(max(self.spec.nbytes, 1))


@dataclass
class StoreStats:
    """Counters since the store was made (or `reset`). Seconds are time the caller was blocked."""

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


class Lease:
    """The right to use a record's tensors until `release`. Also a context manager."""

    def __init__(self, store: TieredStore, entry: Entry, access: Access) -> None:
        assert entry.slot is not None
        self._store = store
        self._entry = entry
        self._access = access
        self._tensors: dict[str, torch.Tensor] | None = entry.slot.tensors(entry.spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name. A view of it may outlive the lease and keeps its memory."""
        if self._tensors is None:
            raise RecordError(f"record {self._entry.spec.key!r}: the lease was released")
        return self._tensors[name]

    def mark_changed(self) -> None:
        """Say that a READ lease's memory was changed after all, so that the change is kept."""
        self._access = Access.UPDATE

    def release(self) -> None:
        """End the use. A second call does nothing."""
        if self._tensors is None:
            return
        self._tensors = None
        self._store.end_lease(self._entry, self._access)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


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
        self._beside: weakref.WeakSet[Arena] = weakref.WeakSet()
        self._held: dict[str, Entry] = {}  # at home on NVMe, with a slot; last used last
        self._moving: dict[str, Entry] = {}  # of these READING and WRITING, oldest first
        self._distance: EvictionOrder = lambda _key: 0.0
        self._relieve: Callable[[], bool] = lambda: False

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

    def order_by(self, distance: EvictionOrder) -> None:
        """Evict by this order from now on."""
        self._distance = distance

    def relieve_by(self, relieve: Callable[[], bool]) -> None:
        """Ask this before giving up for lack of room: it releases leases and says if it did."""
        self._relieve = relieve

    # -- use

    def lease(self, key: str, access: Access = Access.READ) -> Lease:
        """Wait until the record can be used and lease it.

        Raises:
            RecordError: it is unknown, has no contents yet, or is leased by others and would be
                changed in place.
            ArenaFullError: there is no room and nothing that could make some.
            TransferError: the read failed; the record stays on the drive.
            TransferTimeoutError: it did not end in time; names it.
        """
        entry = self._entry(key)
        entry.leases += 1  # first, so that making room for it never takes its own slot
        try:
            if access is Access.OVERWRITE:
                self._prepare_overwrite(entry)
            else:
                self._prepare_read(entry)
            if access is Access.UPDATE:
                self._prepare_update(entry)
        except BaseException:
            entry.leases -= 1
            raise
        entry.fetched_ahead = False
        if key in self._held:
            self._held[key] = self._held.pop(
                key
            )  # among equals, the one unused for longest goes first
        return Lease(self, entry, access)

    def end_lease(self, entry: Entry, access: Access) -> None:
        """Called by `Lease.release`."""
        entry.leases -= 1
        if access is not Access.READ and entry.home is Tier.NVME:
            entry.state = State.DIRTY
        elif access is not Access.READ:
            entry.state = State.RESIDENT

    def prefetch(self, key: str) -> bool:
        """Start the read of a lease to come, if there is room for it now.

        Returns:
            False if there is no room without giving up a record that is used earlier.
        """
        entry = self._entry(key)
        if entry.state is not State.COLD:
            return True
        slot = self.arena.try_allocate(entry.spec.nbytes, owner=key, placement=Placement.PASSING)
        while slot is None:
            victim = self._farthest(State.CLEAN)
            if victim is None or self._distance(victim.spec.key) <= self._distance(key):
                return False
            self._evict(victim)
            slot = self.arena.try_allocate(
                entry.spec.nbytes, owner=key, placement=Placement.PASSING
            )
        self._start_read(entry, slot)
        entry.fetched_ahead = True
        return True

    def write_back(self, key: str) -> None:
        """Start writing the record to the drive if it is newer in memory. Never waits."""
        entry = self._entry(key)
        if entry.state is State.DIRTY and entry.leases == 0:
            self._start_write(entry)

    def discard(self, key: str) -> None:
        """Forget the contents: the record is EMPTY and its memory free."""
        entry = self._entry(key)
        if entry.leases:
            raise RecordError(
                f"record {key!r} is leased {entry.leases} times and can't be discarded"
            )
        self._settle(entry)
        self._drop_slot(entry)
        entry.state = State.EMPTY

    def poll(self) -> None:
        """Advance every hop that has ended.

        Raises:
            TransferError: a write failed. The bytes are still in memory and the record is DIRTY
                again.
        """
        for entry in [e for e in self._moving.values() if _transfer(e).done()]:
            self._settle_unasked(entry)

    def flush(self) -> None:
        """Write everything that is newer in memory, and wait until it is written."""
        for entry in self._entries.values():
            self.write_back(entry.spec.key)
        for entry in list(self._moving.values()):
            self._settle(entry)

    # -- what is where, for the planner and the curious

    def state(self, key: str) -> State:
        """Where the record's newest bytes are."""
        return self._entry(key).state

    def holding(self, key: str) -> Holding:
        """What the arena holds of the record, or would have to give to use it."""
        entry = self._entry(key)
        if entry.home is Tier.DEVICE:
            return Holding(evictable_bytes=0, missing_bytes=0)
        if entry.slot is None:
            return Holding(evictable_bytes=0, missing_bytes=entry.slot_bytes)
        evictable = _is_victim(entry, State.CLEAN)
        return Holding(evictable_bytes=entry.slot_bytes if evictable else 0, missing_bytes=0)

    def room_bytes(self) -> int:
        """Arena bytes that are free or can be given up at once, without I/O."""
        arena = self.arena.stats()
        evictable = (e.slot_bytes for e in self._held.values() if _is_victim(e, State.CLEAN))
        return arena.capacity_bytes - arena.used_bytes + sum(evictable)

    # -- the hops

    def _prepare_read(self, entry: Entry) -> None:
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

    def _prepare_update(self, entry: Entry) -> None:
        if entry.leases > 1:
            raise RecordError(
                f"record {entry.spec.key!r} has {entry.leases - 1} other leases and can't be "
                "changed in place"
            )
        self._settle(entry)
        assert entry.slot is not None
        if entry.slot.is_aliased:
            old = entry.slot.tensors(entry.spec)
            self._replace_slot(entry)
            for name, tensor in entry.slot.tensors(entry.spec).items():
                tensor.copy_(old[name])

    def _prepare_overwrite(self, entry: Entry) -> None:
        self._settle(entry)
        if entry.slot is None or entry.leases > 1 or entry.slot.is_aliased:
            self._replace_slot(entry)

    def _replace_slot(self, entry: Entry) -> None:
        """Give the entry a new slot; the memory of the old one goes when its last tensor does."""
        self._drop_slot(entry)
        self._attach(entry, self._make_slot(entry))

    def _attach(self, entry: Entry, slot: Slot | DeviceSlot) -> None:
        entry.slot = slot
        if entry.home is Tier.NVME:
            self._held[entry.spec.key] = entry

    def _drop_slot(self, entry: Entry) -> None:
        self._held.pop(entry.spec.key, None)
        if entry.slot is not None:
            entry.slot.free()
            entry.slot = None

    def _start_read(self, entry: Entry, slot: Slot | DeviceSlot) -> None:
        assert isinstance(slot, Slot)
        self._attach(entry, slot)
        entry.transfer = _drive(entry).read(entry.spec.key, slot)
        entry.state = State.READING
        self._moving[entry.spec.key] = entry

    def _start_write(self, entry: Entry) -> None:
        assert isinstance(entry.slot, Slot)
        entry.transfer = _drive(entry).write(entry.spec.key, entry.slot)
        entry.state = State.WRITING
        self._moving[entry.spec.key] = entry

    def _settle(self, entry: Entry) -> None:
        """Wait for the entry's transfer, if it has one, and take the next state."""
        if entry.transfer is None:
            return
        hop = "read" if entry.state is State.READING else "write"
        begin = time.perf_counter()
        try:
            self._finish(entry)
        finally:
            self.stats.waited_s[hop] += time.perf_counter() - begin

    def _settle_unasked(self, entry: Entry) -> None:
        """The same for an entry nobody needs yet.

        A read that failed is no error then: whoever needs the record reads it again and is told.
        """
        reading = entry.state is State.READING
        try:
            self._settle(entry)
        except TransferError:
            if not reading:
                raise

    def _finish(self, entry: Entry) -> None:
        """Take the state behind a hop; blocks while the hop is under way."""
        transfer, reading = _transfer(entry), entry.state is State.READING
        try:
            transfer.wait(self._patience_s)
            entry.state = State.CLEAN
        except TransferTimeoutError:
            raise  # still under way: nothing has changed
        except TransferError:
            if reading:
                self._drop_slot(entry)
                entry.fetched_ahead = False
            entry.state = State.COLD if reading else State.DIRTY
            raise
        finally:
            if transfer.done():
                entry.transfer = None
                self._moving.pop(entry.spec.key, None)

    # -- room

    def _make_slot(self, entry: Entry) -> Slot | DeviceSlot:
        """Room for the record where it lives or passes, evicting and waiting as needed."""
        if entry.home is Tier.DEVICE:
            return self._device.allocate(entry.spec.nbytes)
        placement = Placement.LASTING if entry.home is Tier.HOST else Placement.PASSING
        key, nbytes = entry.spec.key, entry.spec.nbytes
        while True:
            slot = self.arena.try_allocate(nbytes, owner=key, placement=placement)
            if slot is not None:
                return slot
            if not self._make_room():
                return self._last_resort(key, nbytes, placement)

    def _last_resort(self, key: str, nbytes: int, placement: Placement) -> Slot:
        """Room beside the arena, as much as the caller's own tensors keep of it.

        Raises:
            ArenaFullError: nobody keeps that much.
        """
        kept_bytes = self.arena.stats().retained_bytes
        beside_bytes = sum(arena.capacity_bytes for arena in self._beside)
        if beside_bytes + nbytes > kept_bytes:
            return self.arena.allocate(nbytes, owner=key, placement=placement)
        if not beside_bytes:
            warnings.warn(
                f"tensors that you took from parameters keep {kept_bytes} bytes of the arena; as "
                "much memory is taken beside tiering.host_memory; let them go, or clone() them, to "
                "stay within it",
                TieringWarning,
                stacklevel=2,
            )
        arena = Arena(nbytes)
        self._beside.add(arena)
        return arena.allocate(nbytes, owner=key, placement=placement)

    def _make_room(self) -> bool:
        """Take one step towards more room, the cheapest there is. False when there is none."""
        moving = [e for e in self._moving.values() if e.leases == 0]
        writing = [e for e in moving if e.state is State.WRITING]
        if (clean := self._farthest(State.CLEAN)) is not None:
            self._evict(clean)
        elif writing:
            self._settle(writing[0])
        elif (dirty := self._farthest(State.DIRTY)) is not None:
            self._start_write(dirty)
        elif moving:
            self._settle_unasked(moving[0])
        else:
            return self._relieve()
        return True

    def _farthest(self, state: State) -> Entry | None:
        victims = [e for e in self._held.values() if _is_victim(e, state)]
        return max(victims, key=lambda e: self._distance(e.spec.key), default=None)

    def _evict(self, entry: Entry) -> None:
        self.stats.wasted += entry.fetched_ahead
        entry.fetched_ahead = False
        self._drop_slot(entry)
        entry.state = State.COLD

    def _entry(self, key: str) -> Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise RecordError(f"no record {key!r}") from None


def _transfer(entry: Entry) -> Transfer:
    assert entry.transfer is not None
    return entry.transfer


def _drive(entry: Entry) -> NvmeTier:
    assert entry.drive is not None
    return entry.drive


def _is_victim(entry: Entry, state: State) -> bool:
    return entry.state is state and entry.leases == 0
