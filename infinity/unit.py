"""The unit: parameters that are gathered, used and released together.

Note: the trip of a shard

Its ``read`` (drive to arena) and ``upload`` (arena to device) are the store's and the device
tier's. `Unit.gather` puts all ranks' shards together (`all_gather`) and widens them if the model
computes in another type than it stores; each parameter becomes a view of that flat buffer.
`Unit.release` takes the views away again. On a CPU with one rank and one type none of these hops
has work to do, and the parameters are views of the arena slot itself.

Note: changes by the user

A weight may be changed by anybody at any time: in place, through ``.data``, through numpy, by
giving it other data. `release` looks for that (a version that moved on, memory that is elsewhere,
and, if the unit was fetched by an access from outside, a fingerprint of the bytes) and keeps the
change, in the shard and in the master weights. Not seen is a change through ``.data``, which moves
no version, made by the model's own forward or backward; nor, below stage 3, any such change: there
weights stay present between their uses, and nobody is asked for them.

What would break it: using a flat buffer after `release`. Parameters are stubs then, and what
autograd saved is packed as a place in the unit (see `hooks`), so nothing has to.
"""

from __future__ import annotations

import bisect
import ctypes
import enum
import hashlib
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from infinity.agreement import Agreement, Collective
from infinity.comm import Communicator
from infinity.parameters import Stubs
from infinity.partition import Extent, FlatLayout
from infinity.phases import Phases
from infinity.unit_records import UnitRecords
from tiering.prefetch import Prefetcher
from tiering.spec import RecordSpec, TensorSpec
from tiering.store import Lease
from tiering.tiers.device import DeviceSlot, DeviceTier
from tiering.tiers.link import Hop
from tiering.trace import Access

Update: TypeAlias = Callable[[], torch.Tensor | None]
"""Makes a unit's new values; returns the new shard if it was made away from its home."""


class UnitState(enum.Enum):
    """Whether the parameters can be used, and what memory that costs."""

    RELEASED = "released"
    """Stubs: no memory here. The shard may be anywhere."""

    PRESENT = "present"
    """Views of the flat buffer: memory of its own, or a lease on the shard's slot."""

    PARTIAL = "partial"
    """Some of either, after an interrupted gather or release; the next one clears it away."""


class Coming(NamedTuple):
    """A gather that was begun."""

    whole: torch.Tensor
    finish: Callable[[], None]
    lease: Lease | None
    """On the own shard, if that is in host memory."""
    hop: Hop | None


class Unit:
    """One group of parameters and its records.

    Args:
        names: the parameters' names in the model.
        parameters: the user's objects; their data is taken over by `store_initial`.
        layout: where each lies in the flat buffer.
        records: what the store holds of it.
        compute_dtype: type of the parameters as the model sees them.
        stays: whether the parameters stay present between their uses (stages below 3).
    """

    def __init__(  # noqa: PLR0913
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        records: UnitRecords,
        *,
        compute_dtype: torch.dtype,
        pager: Prefetcher,
        device: DeviceTier,
        comm: Communicator,
        agreement: Agreement,
        phases: Phases,
        stubs: Stubs,
        stays: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.records = records
        self.compute_dtype = compute_dtype
        self._changes = [0] * len(self.parameters)  # of each parameter
        self._starts = [place.start for place in layout.parameters]
        self.state = UnitState.RELEASED
        self.flat: torch.Tensor | None = None
        self._flat_spec = RecordSpec("flat", (TensorSpec("flat", compute_dtype, (layout.numel,)),))
        self._pager = pager
        self._device = device
        self.stays = stays
        self._comm = comm
        self._agreement = agreement
        self._phases = phases
        self._number = agreement.add(Collective(self._take_part, self._begin_gather))
        self._coming: Coming | None = None
        self._stubs = stubs
        self._lease: Lease | None = None
        self._slot: DeviceSlot | None = None
        self._versions: tuple[int, ...] = ()
        self._fingerprint: bytes | None = None
        self._is_changed = False
        self._update: Update | None = None
        self._updated: torch.Tensor | None = None  # the new shard, while it is on its way home
        self.order = device.order()

    # -- into the store

    def store_initial(self, keys: AbstractSet[str]) -> None:
        """Copy the parameters' values into those of the records; `forsake` comes after all of them.

        Master weights start from the values as given, before rounding to the storage type; moments
        start at zero.

        Args:
            keys: of records that exist.
        """
        if self.records.shard.key in keys:
            with self._pager.lease(self.records.shard.key, Access.OVERWRITE) as lease:
                self._collect(self.records.own, lease["shard"])
            self._pager.write_back(self.records.shard.key)
        for spec, extent in zip(self.records.tiles, self.records.extents, strict=True):
            if spec.key not in keys:
                continue
            with self._pager.lease(spec.key, Access.OVERWRITE) as lease:
                self._collect(extent, lease["master"])
                lease["exp_avg"].zero_()
                lease["exp_avg_sq"].zero_()
            self._pager.write_back(spec.key)

    def _collect(self, extent: Extent, out: torch.Tensor) -> None:
        """Copy the parameters' elements of ``extent`` to ``out``; padding becomes zero."""
        out.zero_()
        for parameter, place in zip(self.parameters, self.layout.parameters, strict=True):
            part = place.intersect(extent)
            if part.numel:
                source = parameter.detach().reshape(-1)[slice(*part.relative_to(place.start))]
                out[slice(*part.relative_to(extent.start))].copy_(source)

    # -- the update, which may come later than the step

    def update_by(self, update: Update, updated: Iterable[int]) -> None:
        """These parameters have new values from now on; `update` makes them, before their next use.

        The unit is released: what is present could still be looked at, and changed.
        """
        assert self.state is not UnitState.PRESENT
        assert self._coming is None  # or old values would come
        self.settle()
        self._update = update
        for index in updated:
            self._changes[index] += 1

    def changed(self, index: int) -> None:
        """A parameter has got other values while it was released."""
        self._changes[index] += 1

    @property
    def changes(self) -> int:
        """How often a parameter has got other values, by anybody, as far as it was seen."""
        return sum(self._changes)

    def settle(self) -> None:
        """Make the new values, if that was put off. `update` may be called again if it failed."""
        self.order.follow()
        if self._update is not None:
            self._updated = self._update()
            self._update = None

    def came_home(self) -> None:
        """The new shard that the last update has made is in its record."""
        self._updated = None

    # -- gather and release

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters present; nothing to do if they are."""
        if self.state is UnitState.PRESENT:
            assert self.flat is not None
            self.order.follow(self.flat)
            return
        self.release()
        self.settle()
        self.state = UnitState.PARTIAL
        with torch.inference_mode(mode=False), self._phases.of("gather", self.names[0]):
            self.flat = self._gather_flat()
            for parameter, place in zip(self.parameters, self.layout.parameters, strict=True):
                view = self.flat[place.start : place.stop].view(parameter.shape)
                self._stubs.restore(parameter, view)
        self._versions = self._versions_now()
        self.state = UnitState.PRESENT

    def _gather_flat(self) -> torch.Tensor:
        if self.layout.world_size > 1:
            whole = self._agreement.perform(self._number)
            assert whole is not None
            return self._computable(whole)
        shard, lease, hop = self._own_shard()
        if lease is None:
            return self._computable(shard)
        try:
            flat = self._computable(shard)
        except BaseException:
            lease.abandon()
            raise
        if flat is lease["shard"]:
            self._lease = lease  # the flat buffer is the slot itself
        else:
            lease.release_behind(hop)
        return flat

    def _own_shard(self) -> tuple[torch.Tensor, Lease | None, Hop | None]:
        """This rank's shard on the device, and what it comes from if it was not made there."""
        if self._updated is not None:
            self.order.follow(self._updated)
            return self._updated, None, None
        lease = self._pager.lease(self.records.shard.key, Access.READ)
        try:
            shard, hop = self._device.upload(lease["shard"])
        except BaseException:
            lease.abandon()
            raise
        return shard, lease, hop

    @torch.no_grad()
    def _begin_gather(self) -> None:
        """Give the own shard to all ranks, and begin to get theirs."""
        if self._coming is not None:
            return
        self.settle()
        with torch.inference_mode(mode=False):
            shard, lease, hop = self._own_shard()
            try:
                whole = shard.new_empty(self.layout.numel)
                finish = self._comm.begin_all_gather(shard, whole)
            except BaseException:
                if lease is not None:
                    lease.abandon()
                raise
            self._coming = Coming(whole, finish, lease, hop)

    def _take_part(self) -> torch.Tensor:
        """Gather with all ranks."""
        self._begin_gather()
        coming, self._coming = self._coming, None
        assert coming is not None
        self.order.follow(coming.whole)
        coming.finish()
        if coming.lease is not None:
            coming.lease.release_behind(coming.hop)
        return coming.whole

    def _computable(self, whole: torch.Tensor) -> torch.Tensor:
        """In the compute type."""
        if whole.dtype == self.compute_dtype:
            return whole
        self._slot = self._device.allocate(self._flat_spec.nbytes)
        return self._slot.tensors(self._flat_spec)["flat"].copy_(whole)

    def release(self) -> None:
        """Take the parameters' memory away, if they have any. A change by the user is kept."""
        if self.state is UnitState.RELEASED:
            return
        if self.state is UnitState.PRESENT:
            assert self.flat is not None
            self.order.follow(self.flat)
            if self.is_changed:
                self._adopt()
            self.state = UnitState.PARTIAL
        self._point_elsewhere()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._slot is not None:
            self._slot.free()
            self._slot = None
        self.state = UnitState.RELEASED

    def forsake(self) -> None:
        """Point the parameters elsewhere, whatever becomes of their memory."""
        self._point_elsewhere()
        self.state = UnitState.RELEASED

    def _point_elsewhere(self) -> None:
        for parameter in self.parameters:
            self._stubs.release(parameter, self.compute_dtype)
        self.flat = None
        self._fingerprint = None
        self._is_changed = False

    def forsake_in_child(self) -> None:
        """The same in a forked process, which must not give memory of a GPU back: it has none."""
        if self.flat is not None and self.flat.device.type != "cpu":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.flat))
        self.forsake()

    @property
    def holds_arena(self) -> bool:
        """Whether a release would make arena room."""
        return self._lease is not None and self._lease.is_in_arena

    # -- changes by the user

    def guard(self) -> None:
        """The user gets hold of the memory: remember its contents, to see changes at release."""
        if self._fingerprint is None:
            self._fingerprint = self._fingerprint_now()

    @property
    def is_changed(self) -> bool:
        """Whether the user has changed a present parameter since it was gathered."""
        if self.state is not UnitState.PRESENT:
            return False
        self.note_changes()
        if not self._is_changed and self._fingerprint is not None:
            self._is_changed = self._fingerprint != self._fingerprint_now()
            if self._is_changed:
                self._changes = [count + 1 for count in self._changes]
        return self._is_changed

    def note_changes(self) -> None:
        """Count what can be seen at once: weights changed in place, or given other data."""
        assert self.flat is not None
        now, moved = self._versions_now(), self._moved()
        if now != self._versions or any(moved):
            for index, (old, new) in enumerate(zip(self._versions, now, strict=True)):
                self._changes[index] += old != new or moved[index]
            self._take_back(moved)
            self._versions = self._versions_now()
            self._is_changed = True

    def version_at(self, offset: int) -> int:
        """How often the parameter at this element of the flat buffer has changed."""
        index = max(bisect.bisect_right(self._starts, offset) - 1, 0)
        if self.state is UnitState.PRESENT and self._looks_changed(index):
            self.note_changes()
        return self._changes[index]

    def _looks_changed(self, index: int) -> bool:
        """Whether one parameter's version or place is another than when it was last noted."""
        assert self.flat is not None
        parameter, place = self.parameters[index], self.layout.parameters[index]
        at = self.flat.data_ptr() + place.start * self.flat.element_size()
        is_elsewhere = parameter.numel() > 0 and parameter.data_ptr() != at
        return is_elsewhere or parameter._version != self._versions[index]  # noqa: SLF001

    def _take_back(self, moved: Sequence[bool]) -> None:
        """Copy parameters that were given other data to their places, and point them there."""
        assert self.flat is not None
        for parameter, place, elsewhere in zip(
            self.parameters, self.layout.parameters, moved, strict=True
        ):
            if elsewhere:
                view = self.flat[place.start : place.stop].view(parameter.shape)
                with torch.no_grad():
                    view.copy_(parameter)
                parameter.data = view

    def _moved(self) -> list[bool]:
        """Which parameters' data is not at its place in the flat buffer."""
        assert self.flat is not None
        itemsize, base = self.flat.element_size(), self.flat.data_ptr()
        return [
            parameter.numel() > 0 and parameter.data_ptr() != base + place.start * itemsize
            for parameter, place in zip(self.parameters, self.layout.parameters, strict=True)
        ]

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(parameter._version for parameter in self.parameters)  # noqa: SLF001

    def _fingerprint_now(self) -> bytes:
        assert self.flat is not None
        raw = self.flat.detach().view(torch.uint8).cpu().numpy()
        return hashlib.blake2b(raw.data).digest()

    @torch.no_grad()
    def _adopt(self) -> None:
        """Keep the present values.

        In the shard, and in the master weights where they differ from what those round to.
        """
        assert self.flat is not None
        for spec, extent in zip(self.records.tiles, self.records.extents, strict=True):
            self._adopt_tile(spec, self.flat[slice(*extent)])
        with self._pager.lease(self.records.shard.key, Access.OVERWRITE) as lease:
            lease["shard"].copy_(self.flat[slice(*self.records.own)])
        if self._coming is not None:  # begun with the old values; every rank has these
            self._coming.finish()
            self._coming.whole.copy_(self.flat)

    def _adopt_tile(self, spec: RecordSpec, values: torch.Tensor) -> None:
        storage = self.records.shard.tensors[0].dtype
        with self._pager.lease(spec.key, Access.READ) as lease:
            wide = values.to(lease["master"])
            differs = lease["master"].to(storage) != wide.to(storage)
        if bool(differs.any()):
            with self._pager.lease(spec.key, Access.UPDATE) as lease:
                lease["master"][differs] = wide[differs]
