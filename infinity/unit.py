"""The unit: parameters that are gathered, used and released together.

Note: the trip of a shard
------------------------- ``read`` (drive to arena) and ``upload`` (arena to device) end with the
lease and the device tier; `Unit.gather` then puts all ranks' shards together (`all_gather`) and
widens them if the model computes in another type than it stores. Each parameter becomes a view of
that flat buffer. `Unit.release` takes the views away again; if the user changed a parameter
meanwhile, the change is kept first (`adopt`). On a CPU with one rank and one type none of these
hops has work to do, and the parameters are views of the arena slot itself.

What would break it: using a flat buffer after `release`. Parameters are stubs then, and what
    autograd saved is packed as
a position in the unit (see `hooks`), so nothing has to.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from infinity.comm import Communicator
from infinity.parameters import Stubs
from infinity.partition import Extent, FlatLayout, tiles
from tiering.prefetch import Prefetcher
from tiering.spec import RecordSpec, TensorSpec, Tier
from tiering.store import Lease, TieredStore
from tiering.tiers.device import DeviceSlot, DeviceTier
from tiering.tiers.nvme import NvmeTier
from tiering.trace import Access


class UnitState(enum.Enum):
    """Whether the parameters can be used, and what memory that costs."""

    RELEASED = "released"
    """Stubs: no memory here. The shard may be anywhere."""

    PRESENT = "present"
    """Views of the flat buffer: the unit's elements in the compute type, or a lease on the shard's
    slot.
    """


class Home(NamedTuple):
    """Where records live, and on which drive if they live on one."""

    tier: Tier
    drive: NvmeTier | None


class Records:
    """The records of one unit on one rank: names and layout.

    Args:
        name: short and unique.
        layout: the unit's flat buffer.
        rank: whose shard.
        tile_numel: most elements of a tile; 0 for a frozen unit, which has none.
        storage_dtype: type of the shard.
        gradient_dtype: type gradients are kept in.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        layout: FlatLayout,
        *,
        rank: int,
        tile_numel: int,
        storage_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.own = layout.shard(rank)
        numel = (self.own.numel,)
        self.shard = RecordSpec(f"{name}.shard", (TensorSpec("shard", storage_dtype, numel),))
        self.gradient = RecordSpec(
            f"{name}.gradient", (TensorSpec("gradient", gradient_dtype, numel),)
        )
        self.extents = tiles(self.own, tile_numel=tile_numel) if tile_numel else ()
        self.tiles = tuple(
            RecordSpec(
                f"{name}.tile{number}",
                tuple(
                    TensorSpec(field, torch.float32, (extent.numel,))
                    for field in ("master", "exp_avg", "exp_avg_sq")
                ),
            )
            for number, extent in enumerate(self.extents)
        )


class Unit:
    """One group of parameters and its records.

    Args:
        names: the parameters' names in the model.
        parameters: the user's objects; their data is taken over by `store_initial`.
        layout: where each lies in the flat buffer.
        records: what the store holds of it.
        compute_dtype: type of the parameters as the model sees them.
    """

    def __init__(  # noqa: PLR0913
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        records: Records,
        *,
        compute_dtype: torch.dtype,
        pager: Prefetcher,
        device: DeviceTier,
        comm: Communicator,
        stubs: Stubs,
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.records = records
        self.compute_dtype = compute_dtype
        self.trained = bool(records.tiles)
        self.version = 0  # counts changes of the weights
        self.state = UnitState.RELEASED
        self.flat: torch.Tensor | None = None
        self._pager = pager
        self._device = device
        self._comm = comm
        self._stubs = stubs
        self._lease: Lease | None = None
        self._slot: DeviceSlot | None = None
        self._versions: tuple[int, ...] = ()
        self._exposed = False

    # -- into the store

    def store_initial(self, store: TieredStore, *, shards: Home, tiles: Home) -> None:
        """Create the records from the parameters' present values, then release the parameters.

        Master weights start from the values as given, before rounding to the storage type; moments
        start at zero.
        """
        store.create(self.records.shard, shards.tier, drive=shards.drive)
        with store.lease(self.records.shard.key, Access.OVERWRITE) as lease:
            self._collect(self.records.own, lease["shard"])
        store.write_back(self.records.shard.key)
        for spec, extent in zip(self.records.tiles, self.records.extents, strict=True):
            store.create(spec, tiles.tier, drive=tiles.drive)
            with store.lease(spec.key, Access.OVERWRITE) as lease:
                self._collect(extent, lease["master"])
                lease["exp_avg"].zero_()
                lease["exp_avg_sq"].zero_()
            store.write_back(spec.key)
        for parameter in self.parameters:
            self._stubs.release(parameter, self.compute_dtype)

    def _collect(self, extent: Extent, out: torch.Tensor) -> None:
        """Copy the parameters' elements of ``extent`` to ``out``; padding becomes zero."""
        out.zero_()
        for parameter, place in zip(self.parameters, self.layout.parameters, strict=True):
            part = place.intersect(extent)
            if part.numel:
                source = parameter.detach().reshape(-1)[slice(*part.relative_to(place.start))]
                out[slice(*part.relative_to(extent.start))].copy_(source)

    # -- gather and release

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters present; nothing to do if they are."""
        if self.state is UnitState.PRESENT:
            return
        with torch.inference_mode(mode=False):
            self.flat = self._gather_flat()
            for parameter, place in zip(self.parameters, self.layout.parameters, strict=True):
                view = self.flat[place.start : place.stop].view(parameter.shape)
                self._stubs.restore(parameter, view)
        self._versions = tuple(p._version for p in self.parameters)  # noqa: SLF001
        self.state = UnitState.PRESENT

    def _gather_flat(self) -> torch.Tensor:
        lease = self._pager.lease(self.records.shard.key, Access.READ)
        shard = self._device.upload(lease["shard"])
        whole = shard
        if self._comm.size > 1:
            whole = shard.new_empty(self.layout.numel)
        whole = self._comm.all_gather(shard, whole)
        if whole is lease["shard"] and whole.dtype == self.compute_dtype:
            self._lease = lease
            return whole
        if whole.dtype != self.compute_dtype:
            whole = self._flat_buffer().copy_(whole)
        lease.release()
        return whole

    def _flat_buffer(self) -> torch.Tensor:
        spec = RecordSpec("flat", (TensorSpec("flat", self.compute_dtype, (self.layout.numel,)),))
        self._slot = self._device.allocate(spec.nbytes)
        return self._slot.tensors(spec)["flat"]

    def release(self) -> None:
        """Take the parameters' memory away, if they have any. A change by the user is kept."""
        if self.state is UnitState.RELEASED:
            return
        if self._changed():
            self._adopt()
        self.forsake()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._slot is not None:
            self._slot.free()
            self._slot = None

    def forsake(self) -> None:
        """Point the parameters elsewhere, whatever becomes of their memory."""
        for parameter in self.parameters:
            self._stubs.release(parameter, self.compute_dtype)
        self.flat = None
        self.state = UnitState.RELEASED
        self._exposed = False

    @property
    def is_changed(self) -> bool:
        """Whether a release would have to keep a change by the user."""
        return self.state is UnitState.PRESENT and self._changed()

    @property
    def holds_arena(self) -> bool:
        """Whether a release would make arena room."""
        return self._lease is not None

    def expose(self) -> None:
        """The user was given memory through which changes cannot be seen: compare at release."""
        self._exposed = True

    # -- changes by the user

    def _changed(self) -> bool:
        assert self.flat is not None
        if self._exposed or self._versions != tuple(p._version for p in self.parameters):  # noqa: SLF001
            return True
        itemsize, base = self.flat.element_size(), self.flat.data_ptr()
        return any(
            p.data_ptr() != base + place.start * itemsize and p.numel() > 0
            for p, place in zip(self.parameters, self.layout.parameters, strict=True)
        )

    @torch.no_grad()
    def _adopt(self) -> None:
        """Keep the present values.

        In the shard, and in the master weights where they differ from what those round to.
        """
        assert self.flat is not None
        for parameter, place in zip(self.parameters, self.layout.parameters, strict=True):
            view = self.flat[place.start : place.stop]
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach().reshape(-1))
        own = self.flat[slice(*self.records.own)]
        for spec, extent in zip(self.records.tiles, self.records.extents, strict=True):
            self._adopt_tile(spec, self.flat[slice(*extent)])
        if self._lease is not None:
            self._lease.mark_changed()
        else:
            with self._pager.lease(self.records.shard.key, Access.OVERWRITE) as lease:
                lease["shard"].copy_(own)
        self.version += 1

    def _adopt_tile(self, spec: RecordSpec, values: torch.Tensor) -> None:
        storage = self.records.shard.tensors[0].dtype
        with self._pager.lease(spec.key, Access.READ) as lease:
            master = lease["master"]
            differs = master.to(storage) != values.to(storage).to(master.device)
            if not bool(differs.any()):
                return
            master[differs] = values.to(master)[differs]
            lease.mark_changed()
