"""One block of pinned memory, cut into exact-size slots; all paged bytes in host memory stand here.

Bytes come into a slot from a record file or from a device and leave the same way; transfers use the
slot itself as their memory, and tensors are views of it. Slots are cut to the bytes asked for,
rounded up to the direct-I/O alignment, because records have few sizes but those differ by orders of
magnitude: equal buffers would waste most of the memory. What passes through is cut from the low end
and what stays from the high end, so that the passing slots meet each other again when they are
freed. Where the free room is in pieces all the same, `join` moves slots that nobody is using.

What would break: giving out memory over which somebody still holds a tensor. A tensor can outlive
the slot it was made from (a user's ``.detach()``, a view saved by autograd), so freeing a slot
gives its room back only when the last tensor over it is gone. The tensor's storage owns a buffer
object, and a weak reference tells when that dies. It may die on any thread and in the middle of a
garbage collection, even one that starts while this arena's lock is held; therefore the callback
only appends to a queue, and the allocator looks into the queue when it is next asked. A slot may be
freed by a finalizer, at just such moments, and takes the same way.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import enum
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch

from tiering.aio.memory import PinnedMemory
from tiering.errors import ArenaFullError, ConfigError, EngineClosedError, RecordError
from tiering.records import aligned_bytes
from tiering.spec import RecordSpec, TensorSpec

_HOLDERS_NAMED = 4  # in an error message
POISON = 255
_Extent: TypeAlias = tuple[int, int]  # start, end


class Placement(enum.Enum):
    """How long a slot is going to live, which decides the end it is cut from."""

    PASSING = "passing"
    """Freed soon: what a transfer or a step needs. Cut from the low end."""

    LASTING = "lasting"
    """Kept for many steps: gradients, residents. Cut from the high end."""


class ArenaStats(NamedTuple):
    """Where an arena's bytes are.

    Args:
        capacity_bytes: all of it.
        used_bytes: in slots, those included that were freed but are kept by tensors.
        peak_bytes: the largest ``used_bytes`` so far.
        retained_bytes: freed, but tensors over them are still alive.
        largest_free_bytes: the largest slot that could be had now.
    """

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    retained_bytes: int
    largest_free_bytes: int


class Arena:
    """Cuts slots from one block of pinned memory.

    Safe to use from several threads. A forked child has no part of the memory and gets an
    exception.

    Args:
        capacity_bytes: room for all slots together, rounded up to the alignment.
        poison: debug mode: what is free is filled with bytes of 255, no number in any floating
            type, so that whoever reads a slot before it is filled or after it was freed has NaN.

    Raises:
        ConfigError: not a positive size.
    """

    def __init__(self, capacity_bytes: int, *, poison: bool = False) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"an arena needs a positive size, got {capacity_bytes} bytes")
        self._capacity_bytes = aligned_bytes(capacity_bytes)
        self._memory: PinnedMemory | None = PinnedMemory(self._capacity_bytes)
        self._lock = threading.Lock()
        self._free = _FreeList(self._capacity_bytes)
        self._slots: dict[int, Slot] = {}
        self._news: collections.deque[_Alias | Slot] = collections.deque()
        self._peak_bytes = 0
        self._pid = os.getpid()
        self.poison = poison
        self._poison(0, self._capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Room for all slots together."""
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        """In free extents, however small they are."""
        with self._lock:
            self._drain()
            return self._free.total_bytes

    @property
    def memory(self) -> PinnedMemory:
        """The whole block, for registration with a backend or a device.

        Raises:
            EngineClosedError: the arena was closed, or belongs to another process.
        """
        self._check_process()
        if self._memory is None:
            raise EngineClosedError("the arena was closed; its memory is gone")
        return self._memory

    def allocate(
        self, nbytes: int, *, owner: str, placement: Placement = Placement.PASSING
    ) -> Slot:
        """Cut a slot.

        Args:
            nbytes: what it must hold; the slot is this rounded up to the alignment, and at least
                one such unit.
            owner: who holds it, for messages.
            placement: how long it is going to live.

        Raises:
            ArenaFullError: no free extent is large enough; says who holds the rest.
            EngineClosedError: the arena was closed, or belongs to another process.
        """
        slot = self.try_allocate(nbytes, owner=owner, placement=placement)
        if slot is None:
            raise ArenaFullError(self._explain(nbytes, owner))
        return slot

    def try_allocate(
        self, nbytes: int, *, owner: str, placement: Placement = Placement.PASSING
    ) -> Slot | None:
        """Cut a slot, or return None where `allocate` would raise `ArenaFullError`."""
        assert nbytes >= 0
        memory = self.memory
        slot_bytes = aligned_bytes(max(nbytes, 1))
        with self._lock:
            self._drain()
            start = self._free.cut(slot_bytes, placement)
            if start is None:
                return None
            slot = Slot(self, start, slot_bytes, owner=owner)
            self._slots[start] = slot
            self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        # What pads the slot is zero, so that equal records make equal files.
        if tail_bytes := slot_bytes - nbytes:
            memory.buffer(slot.start + nbytes, tail_bytes)[:] = bytes(tail_bytes)
        return slot

    def join(self, nbytes: int, *, movable: Iterable[Slot]) -> bool:
        """Make one free extent by moving slots together, as few of their bytes as will do.

        Args:
            nbytes: what a slot cut from it must hold.
            movable: slots that nobody is using, no transfer either. Those that tensors look at stay
                where they are.

        Returns:
            False if no stretch between slots that stay has that much free.

        Raises:
            EngineClosedError: the arena was closed, or belongs to another process.
        """
        memory, wanted_bytes = self.memory, aligned_bytes(max(nbytes, 1))
        with self._lock:
            self._drain()
            slots = {slot.start: slot for slot in movable if self._can_move(slot)}
            stretch = self._cheapest_stretch(wanted_bytes, slots)
            if stretch is None:
                return False
            start, end = stretch
            inside = sorted(at for at in slots if start <= at < end)
            for slot in [self._slots.pop(at) for at in inside][::-1]:
                end -= slot.nbytes
                ctypes.memmove(memory.address + end, memory.address + slot.start, slot.nbytes)
                slot.start = end
                self._slots[end] = slot
            self._free.gather(start, end, until=stretch[1])
            self._poison(start, end)
            return True

    def _can_move(self, slot: Slot) -> bool:
        is_here = self._slots.get(slot.start) is slot
        return is_here and not slot.is_freed and not slot.is_aliased

    def _cheapest_stretch(self, nbytes: int, movable: Mapping[int, Slot]) -> _Extent | None:
        """Between slots that stay: enough free room, and the fewest bytes to be moved."""
        slots = [(slot.start, slot.start + slot.nbytes) for slot in self._slots.values()]
        best: tuple[int, _Extent] | None = None
        window: collections.deque[tuple[int, int, int]] = collections.deque()  # with free bytes
        free_bytes = 0
        for start, end in sorted([*self._free.extents, *slots]):
            if start in self._slots and start not in movable:
                window.clear()
                free_bytes = 0
                continue
            window.append((start, end, 0 if start in movable else end - start))
            free_bytes += window[-1][2]
            while free_bytes - window[0][2] >= nbytes:
                free_bytes -= window.popleft()[2]
            if free_bytes >= nbytes:
                moved_bytes = end - window[0][0] - free_bytes
                if best is None or moved_bytes < best[0]:
                    best = moved_bytes, (window[0][0], end)
        return best and best[1]

    def close(self) -> None:
        """Let go of the memory. It is unmapped when the last tensor over it is gone.

        Slots can be freed afterwards, but neither made nor used. A second call does nothing.
        """
        self._memory = None

    def stats(self) -> ArenaStats:
        """Where the bytes are now."""
        with self._lock:
            self._drain()
            return ArenaStats(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes(),
                peak_bytes=self._peak_bytes,
                retained_bytes=sum(s.nbytes for s in self._slots.values() if s.is_freed),
                largest_free_bytes=self._free.largest_bytes,
            )

    def _used_bytes(self) -> int:
        return self._capacity_bytes - self._free.total_bytes

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this arena belongs to process {self._pid}; process {os.getpid()} was forked from "
                f"it and has no part of its memory; open a new one here"
            )

    def _drain(self) -> None:
        """Take in which tensors have died and which slots were freed; reuse what nobody keeps."""
        while self._news:
            news = self._news.popleft()
            slot = news if isinstance(news, Slot) else news.slot
            if isinstance(news, _Alias):
                slot.forget(news)
            self._reclaim(slot)

    def _reclaim(self, slot: Slot) -> None:
        if slot.is_freed and not slot.is_aliased and self._slots.get(slot.start) is slot:
            del self._slots[slot.start]
            self._free.give_back(slot.start, slot.nbytes)
            self._poison(slot.start, slot.start + slot.nbytes)

    def _poison(self, start: int, end: int) -> None:
        """Fill what is free, if this is debug mode and the memory is still there."""
        if self.poison and self._memory is not None:
            ctypes.memset(self._memory.address + start, POISON, end - start)

    def _free_slot(self, slot: Slot) -> None:
        """The other half of `Slot.free`: never blocks, since a finalizer may be what calls it."""
        slot.is_freed = True
        self._news.append(slot)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _buffer(self, slot: Slot, nbytes: int) -> tuple[object, _Alias]:
        """A fresh buffer over the slot's first bytes, and the reference that tells of its end."""
        buffer = self.memory.buffer(slot.start, nbytes)
        with self._lock:
            self._drain()
        return buffer, _Alias(buffer, self._news, slot)

    def _explain(self, nbytes: int, owner: str) -> str:
        with self._lock:
            held = _by_owner(s for s in self._slots.values() if not s.is_freed)
            kept = _by_owner(s for s in self._slots.values() if s.is_freed)
            free_bytes, largest_bytes = self._free.total_bytes, self._free.largest_bytes
        return (
            f"arena exhausted: {owner!r} asked for {nbytes} bytes; of {self._capacity_bytes} bytes "
            f"{free_bytes} are free, the largest extent {largest_bytes}; held by {_named(held)}; "
            f"freed but kept by tensors that are still alive: {_named(kept)}; "
            f"raise tiering.host_memory"
        )


class Slot:
    """A piece of the arena; it is the memory of transfers, and tensors are views of it.

    The owner must not free a slot while a transfer on it is pending.
    """

    def __init__(self, arena: Arena, start: int, nbytes: int, *, owner: str) -> None:
        """Only the arena makes slots: ``start`` is its offset there."""
        self.start = start
        self.nbytes = nbytes
        self.owner = owner
        self.is_freed = False
        self._arena = arena
        self._aliases: dict[int, _Alias] = {}  # by id: weak references compare their targets

    @property
    def address(self) -> int:
        """First byte, a multiple of the alignment.

        Raises:
            RecordError: the slot was freed.
        """
        self._check_usable()
        return self._arena.memory.address + self.start

    @property
    def is_aliased(self) -> bool:
        """Whether some tensor handed out earlier, or a view of it, is still alive."""
        return any(alias() is not None for alias in tuple(self._aliases.values()))

    def tensors(self, spec: RecordSpec) -> dict[str, torch.Tensor]:
        """The record's tensors as views of this slot, by name.

        Every call makes new tensors on one storage of their own, so that the death of the last one
        can be seen. They are no autograd views of each other: an in-place change of one does not
        mark the rest as changed.

        Args:
            spec: what stands in the slot; at most as many bytes as it has.

        Raises:
            RecordError: the slot was freed, or the record does not fit.
            EngineClosedError: called in a forked child.
        """
        self._check_usable()
        if spec.nbytes > self.nbytes:
            raise RecordError(
                f"record {spec.key!r} has {spec.nbytes} bytes, "
                f"the slot of {self.owner!r} only {self.nbytes}"
            )
        buffer, alias = self._arena._buffer(self, max(spec.nbytes, 1))  # noqa: SLF001 - one thing
        self._aliases[id(alias)] = alias
        with torch.inference_mode(mode=False):
            storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            return {
                tensor.name: _view(storage, tensor, start)
                for tensor, start in zip(spec.tensors, spec.offsets_bytes, strict=True)
            }

    def free(self) -> None:
        """Give the room back, now or when the last tensor over it is gone.

        A second call does nothing.
        """
        if not self.is_freed:
            self._arena._free_slot(self)  # noqa: SLF001 - one thing

    def forget(self, alias: _Alias) -> None:
        """Drop the record of a tensor that has died; the arena calls this."""
        self._aliases.pop(id(alias), None)

    def _check_usable(self) -> None:
        if self.is_freed:
            raise RecordError(
                f"the slot of {self.owner!r} ({self.nbytes} bytes) was freed; allocate another"
            )


class _Alias(weakref.ref[object]):
    """Tells of the end of one buffer by putting itself into a queue, and does nothing else then."""

    __slots__ = ("slot",)

    def __new__(cls, buffer: object, news: collections.deque[_Alias | Slot], slot: Slot) -> _Alias:
        self = super().__new__(cls, buffer, news.append)
        self.slot = slot
        return self

    def __init__(self, buffer: object, news: collections.deque[_Alias | Slot], slot: Slot) -> None:
        super().__init__(buffer, news.append)  # type: ignore[call-arg]
        self.slot = slot


class _FreeList:
    """Free extents in the order of their addresses, neighbours always joined."""

    def __init__(self, nbytes: int) -> None:
        self._extents: list[_Extent] = [(0, nbytes)]
        self.total_bytes = nbytes

    @property
    def extents(self) -> tuple[_Extent, ...]:
        """All of them."""
        return tuple(self._extents)

    def gather(self, start: int, end: int, *, until: int) -> None:
        """What was free from ``start`` until ``until`` is the extent from ``start`` to ``end``."""
        outside = [extent for extent in self._extents if not start <= extent[0] < until]
        self._extents = sorted([*outside, (start, end)])

    @property
    def largest_bytes(self) -> int:
        """The largest extent; 0 when nothing is free."""
        return max((end - start for start, end in self._extents), default=0)

    def cut(self, nbytes: int, placement: Placement) -> int | None:
        """Take ``nbytes`` from the smallest extent that has them. Returns their start, or None."""
        lasting = placement is Placement.LASTING
        fits = [
            (end - start, -start if lasting else start, at)
            for at, (start, end) in enumerate(self._extents)
            if end - start >= nbytes
        ]
        if not fits:
            return None
        at = min(fits)[-1]
        start, end = self._extents[at]
        cut = end - nbytes if lasting else start
        rest = (start, cut) if lasting else (start + nbytes, end)
        self._extents[at : at + 1] = [rest] if rest[0] < rest[1] else []
        self.total_bytes -= nbytes
        return cut

    def give_back(self, start: int, nbytes: int) -> None:
        """Return an extent and join it with its neighbours."""
        end = start + nbytes
        at = bisect.bisect_left(self._extents, (start, end))
        first, last = at, at
        if at and self._extents[at - 1][1] == start:
            first, start = at - 1, self._extents[at - 1][0]
        if at < len(self._extents) and self._extents[at][0] == end:
            last, end = at + 1, self._extents[at][1]
        self._extents[first:last] = [(start, end)]
        self.total_bytes += nbytes


def _view(storage: torch.UntypedStorage, tensor: TensorSpec, start: int) -> torch.Tensor:
    """One tensor of a record on the record's storage, from byte ``start``."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage, start // tensor.dtype.itemsize, tensor.shape)  # type: ignore[call-overload, no-any-return]


def _by_owner(slots: Iterable[Slot]) -> list[tuple[str, int]]:
    """Owners with the bytes they hold, the largest first."""
    held_bytes: collections.Counter[str] = collections.Counter()
    for slot in slots:
        held_bytes[slot.owner] += slot.nbytes
    return held_bytes.most_common()


def _named(holders: list[tuple[str, int]]) -> str:
    """The largest few of them, in words."""
    return ", ".join(_phrases(holders)) or "nobody"


def _phrases(holders: list[tuple[str, int]]) -> Iterator[str]:
    for owner, nbytes in holders[:_HOLDERS_NAMED]:
        yield f"{owner} ({nbytes} bytes)"
    if rest := holders[_HOLDERS_NAMED:]:
        yield f"{len(rest)} more ({sum(nbytes for _, nbytes in rest)} bytes)"
