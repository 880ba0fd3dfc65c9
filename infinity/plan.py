"""How large the arena is and how optimizer state is cut: a sum over the actual records.

Pure. It is made before any work starts, so that a budget that cannot do is refused with the sum
that shows why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from infinity.partition import ALIGN_NUMEL, Extent, tiles
from tiering.errors import ConfigError
from tiering.records import ALIGNMENT_BYTES, aligned_bytes
from tiering.sizes import write_bytes
from tiering.spec import Tier

STATE_BYTES = 12  # master, exp_avg, exp_avg_sq of one element
TILE_NUMEL = 2**19  # a few tiles of 6 MiB keep a drive's queue full; larger ones only take room
_LEAST_TILE_NUMEL = 2**14
_TILES = 6  # one is updated, some are read, some written; more and smaller ones cost more turns
_SHARDS = 2  # beside those in use: one is read ahead, one published
_WRITTEN_IN_MIB_BYTES = 2**24  # from here on what rounding up to a MiB adds is little
_TENSORS_A_TILE = 4  # in DeepSpeed's counting: master, exp_avg, exp_avg_sq, gradient


class ElementBytes(NamedTuple):
    """Bytes of one element."""

    storage_bytes: int
    gradient_bytes: int


class Here(NamedTuple):
    """Which of a unit's records are on the device for good, wherever their home would be."""

    gradient: bool = False
    shard: bool = False
    tiles: bool = False


_NOTHING_HERE: Final = Here()


class UnitSize(NamedTuple):
    """What the plan must know of a unit on one rank."""

    shard_numel: int
    trained: bool
    element_bytes: ElementBytes
    early: bool = False
    """Updated under backward: its gradients need not wait for the step."""
    whole_gradient_numel: int = 0
    """Where a rank keeps whole gradients until the step, of all the unit."""
    here: Here = _NOTHING_HERE

    @property
    def shard_bytes(self) -> int:
        """Of the weights."""
        return aligned_bytes(self.shard_numel * self.element_bytes.storage_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradient record."""
        numel = self.whole_gradient_numel or self.shard_numel
        return aligned_bytes(numel * self.element_bytes.gradient_bytes)


class ModelSize(NamedTuple):
    """What the plan must know of a model on one rank."""

    units: Sequence[UnitSize]
    active_bytes: int
    """Most bytes of shards in use at once: of a scope and all scopes around it."""
    storage_bytes: int
    """Of an element of most weights: what elements in the configuration are counted in."""


class Tiers(NamedTuple):
    """Where each kind of record lives."""

    shards: Tier
    tiles: Tier


class Wishes(NamedTuple):
    """What the config says; None: what the plan finds right."""

    budget_bytes: int | None = None
    """``tiering.host_memory``."""
    sub_group_numel: int | None = None
    """``sub_group_size``."""
    weight_numel: int | None = None
    """``offload_param.buffer_count`` x ``buffer_size``: of weights on their way."""
    tile_tensors: int | None = None
    """``offload_optimizer.buffer_count``: tensors of a tile's size on their way."""
    resident_numel: int | None = None
    """``offload_param.max_in_cpu``: of weights that stay in the arena."""


_NO_WISHES = Wishes()


class Plan(NamedTuple):
    """The outcome."""

    arena_bytes: int
    tile_numel: int
    gradient_home: Tier
    spare_bytes: int
    """Of the arena, beyond what must be there: room for records that need not move; see `stays`."""
    spare_weight_bytes: int
    """Of these, at most, for weights."""
    terms: tuple[tuple[str, int], ...]
    """What the arena is for, and bytes, in the order of the sum."""


def make_plan(
    model: ModelSize,
    tiers: Tiers,
    wishes: Wishes = _NO_WISHES,
    *,
    tile_numel: int = TILE_NUMEL,
) -> Plan:
    """Choose the arena size, the tile size and the gradients' home.

    A budget is all there is. Without one there is what must be in host memory at once, what else is
    wished for, and no more.

    Args:
        model: its units.
        tiers: from the config.
        wishes: from the config.
        tile_numel: most elements of a tile.

    Raises:
        ConfigError: the budget is too small; shows the sum and the smallest budget that would do.
    """
    sizes, budget_bytes = _Sizes(model, tiers), wishes.budget_bytes
    gradient_home = Tier.DEVICE if tiers.tiles is Tier.DEVICE else Tier.HOST
    most, least = _tile_bounds(model.units, min(wishes.sub_group_numel or tile_numel, tile_numel))
    held = sizes.terms(most)
    if budget_bytes is None:
        held += sizes.wished(wishes, most)
        resident = sizes.resident(wishes.resident_numel or 0)
        arena_bytes = max(_total([*held, resident]), ALIGNMENT_BYTES)
        terms = [*held, *([resident] if resident[1] else [])]
        return Plan(arena_bytes, most, gradient_home, resident[1], resident[1], tuple(terms))
    if budget_bytes >= _total(held):
        needed = max(_total(held), ALIGNMENT_BYTES)
        arena_bytes = min(budget_bytes, max(needed, sizes.everything(most)))
        spare_bytes = arena_bytes - needed
        weight_bytes = spare_bytes
        if wishes.resident_numel is not None:
            weight_bytes = min(spare_bytes, sizes.resident(wishes.resident_numel)[1])
        return Plan(arena_bytes, most, gradient_home, spare_bytes, weight_bytes, tuple(held))
    if tiers.tiles is not Tier.NVME:
        raise ConfigError(_too_small(held, budget_bytes))
    fitting = _fitting_tile(budget_bytes - _total(sizes.terms(0)))
    if fitting >= least:
        return Plan(budget_bytes, fitting, gradient_home, 0, 0, tuple(sizes.terms(fitting)))
    fitting = _fitting_tile(budget_bytes - _total(sizes.terms(0, spilling=True)))
    if fitting < least:
        ways = (sizes.terms(least), sizes.terms(least, spilling=True))
        raise ConfigError(_too_small(min(ways, key=_total), budget_bytes))
    tile_numel = min(most, fitting)
    held = sizes.terms(tile_numel, spilling=True)
    return Plan(budget_bytes, tile_numel, Tier.NVME, 0, 0, tuple(held))


def updated_early(trained_numel: Sequence[int]) -> list[bool]:
    """Choose the units that are updated under backward: about half of all elements, evenly spread.

    So that link and drive have as much to do in backward as in forward, and from its beginning to
    its end. Not the first trained unit: backward ends with its gradients, and the next forward
    begins with its weights.

    Args:
        trained_numel: elements of each unit in the order of the model; 0 where it is frozen.
    """
    first = next((i for i, numel in enumerate(trained_numel) if numel), 0)
    eligible = sum(trained_numel[first + 1 :])
    share = min(sum(trained_numel) / 2 / eligible, 1.0) if eligible else 0.0
    owed = 0.0
    chosen = [False] * len(trained_numel)
    for index in range(len(trained_numel) - 1, first, -1):  # as backward reaches them
        numel = trained_numel[index]
        owed += share * numel
        chosen[index] = numel > 0 and owed >= numel / 2
        owed -= numel * chosen[index]
    return chosen


def reside(
    units: Sequence[UnitSize], tiers: Tiers, *, device_bytes: int, early_near: bool = False
) -> list[Here]:
    """Choose what is on the device for good: gradients first, then weights, then states.

    A byte of each saves as much on the way to the host and to the drive. A gradient also leaves its
    room in the host to something else, and a weight is not waited for.

    Args:
        units: of the model.
        tiers: from the config; what is at home on the device is counted there already.
        device_bytes: for all that stays.
        early_near: whether gradients that are used under backward never leave the device; they are
            few at a time, and not among those that stay.
    """
    passing = [u.early and early_near for u in units]
    left_bytes = device_bytes
    chosen = []
    for are_away, sizes_bytes in (
        (
            tiers.tiles is not Tier.DEVICE,
            [u.trained * (not p) * u.gradient_bytes for u, p in zip(units, passing, strict=True)],
        ),
        (tiers.shards is not Tier.DEVICE, [u.shard_bytes for u in units]),
        (tiers.tiles is not Tier.DEVICE, [u.trained * u.shard_numel * STATE_BYTES for u in units]),
    ):
        stay = stays(sizes_bytes, room_bytes=left_bytes if are_away else 0)
        stay = [
            stays_here and nbytes > 0 for stays_here, nbytes in zip(stay, sizes_bytes, strict=True)
        ]
        left_bytes -= sum(itertools.compress(sizes_bytes, stay))
        chosen.append(stay)
    chosen[0] = [stay or near for stay, near in zip(chosen[0], passing, strict=True)]
    return list(itertools.starmap(Here, zip(*chosen, strict=True)))


def device_terms(  # noqa: PLR0913
    units: Sequence[UnitSize],
    tiers: Tiers,
    *,
    used_bytes: int,
    tile_numel: int,
    ahead_bytes: int,
    ranks: int = 1,
) -> list[tuple[str, int]]:
    """What a GPU holds at once beside the model's activations: what for, and bytes.

    Args:
        units: of the model.
        tiers: from the config.
        used_bytes: of whole weights in use at once, as the model sees them.
        tile_numel: most elements of a tile.
        ahead_bytes: most that is between the caller and the device.
        ranks: over which units are divided.
    """
    trained = [u for u in units if u.trained]
    tiles_near, shards_near = tiers.tiles is Tier.DEVICE, tiers.shards is Tier.DEVICE
    states = sum(u.shard_numel * STATE_BYTES for u in trained if tiles_near or u.here.tiles)
    near = [u for u in trained if tiles_near or u.here.gradient]
    passing_gradients = sorted(u.gradient_bytes for u in near if u.early)[-2:]
    gradients = sum(u.gradient_bytes for u in near if not u.early) + sum(passing_gradients)
    largest_shard = max((u.shard_bytes for u in units), default=0)
    tile_bytes = aligned_bytes(tile_numel * STATE_BYTES)
    passing = [] if tiles_near or not trained else [tile_bytes]
    passing += [] if shards_near else [largest_shard]
    made = [u.gradient_bytes * ranks for u in trained if ranks > 1 or u not in near]
    return [
        ("weights that stay", sum(u.shard_bytes for u in units if shards_near or u.here.shard)),
        ("optimizer states that stay", states),
        ("gradients", gradients),
        ("weights in use", used_bytes),
        ("weights gathered ahead", largest_shard * ranks if ranks > 1 else 0),
        ("copies under way", ahead_bytes + max(passing) if passing else 0),
        ("gradients being made, and leaving", 2 * max(made, default=0)),
        ("a gradient and new weights in the update", tile_numel * 4 + 2 * largest_shard),
    ]


def stays(sizes_bytes: Sequence[int], *, room_bytes: int) -> list[bool]:
    """Choose which records of one kind stay in the arena for good.

    A pass uses records in order, over and over; whichever stay, the same bytes are saved. They are
    spread evenly, so that the drive's work is spread evenly too.

    Args:
        sizes_bytes: of the records, in the order of their use.
        room_bytes: for all that stay together.

    Returns:
        For each record whether it stays.
    """
    total_bytes = sum(sizes_bytes)
    chosen: list[bool] = []
    met_bytes = kept_bytes = 0
    for nbytes in sizes_bytes:
        met_bytes += nbytes
        due_bytes = room_bytes * met_bytes // total_bytes if total_bytes > room_bytes else met_bytes
        chosen.append(kept_bytes + nbytes <= due_bytes)
        kept_bytes += nbytes * chosen[-1]
    return chosen


def sum_of(terms: Sequence[tuple[str, int]]) -> str:
    """The terms of a plan, a line each."""
    return "".join(f"\n  {nbytes:>16,} bytes  {what}" for what, nbytes in terms)


def _tile_bounds(units: Sequence[UnitSize], most_numel: int) -> tuple[int, int]:
    """The most and the fewest elements a tile may have."""
    largest = max((u.shard_numel for u in units), default=0)
    most = min(most_numel, largest) // ALIGN_NUMEL * ALIGN_NUMEL
    most = max(most, ALIGN_NUMEL)
    return most, min(most, _LEAST_TILE_NUMEL)


def _fitting_tile(room_bytes: int) -> int:
    """The largest tile of which the room holds as many as are needed at once."""
    per_tile = max(room_bytes, 0) // _TILES // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return per_tile // STATE_BYTES // ALIGN_NUMEL * ALIGN_NUMEL


_Term = tuple[str, int]


class _Sizes:
    """The terms of the sum."""

    def __init__(self, model: ModelSize, tiers: Tiers) -> None:
        self._model = model
        self._tiers = tiers

    def terms(self, tile_numel: int, *, spilling: bool = False) -> list[_Term]:
        """What must be in host memory at once."""
        return [
            *self._kept_shards(self._tiers.shards),
            *self._kept_tiles(self._tiers.tiles, tile_numel),
            *(self._spilled_gradients() if spilling else self._gradients(self._tiers.tiles)),
            *self._passing(self._tiers, tile_numel),
        ]

    def everything(self, tile_numel: int) -> int:
        """Bytes of all there is in host memory at once: a larger arena could not be filled."""
        terms = [
            *self._kept_shards(Tier.HOST),
            *self._kept_tiles(Tier.HOST, tile_numel),
            *self._gradients(Tier.HOST),
            *self._passing(Tiers(Tier.NVME, Tier.NVME), tile_numel),
        ]
        return _total(terms)

    def wished(self, wishes: Wishes, tile_numel: int) -> list[_Term]:
        """Room for what passes that the config asks for, beyond what must be there."""
        terms = []
        if self._tiers.shards is Tier.NVME and wishes.weight_numel is not None:
            wanted = min(wishes.weight_numel * self._model.storage_bytes, self._all_shards())
            more = wanted - _total(self._passing(Tiers(Tier.NVME, Tier.HOST), tile_numel))
            if more > 0:
                terms.append(("more buffers for weights, as configured", aligned_bytes(more)))
        if self._tiers.tiles is Tier.NVME and wishes.tile_tensors is not None:
            wanted = -(-wishes.tile_tensors // _TENSORS_A_TILE)
            more = min(wanted, self._tile_count(tile_numel)) - _TILES
            if more > 0:
                tile = aligned_bytes(tile_numel * STATE_BYTES)
                terms.append(("more buffers for optimizer state, as configured", more * tile))
        return terms

    def resident(self, numel: int) -> _Term:
        """Weights of the drive that stay, so many at most."""
        on_drive = self._tiers.shards is Tier.NVME
        nbytes = min(numel * self._model.storage_bytes, self._all_shards() * on_drive)
        return ("weights that stay, as configured", nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)

    def _all_shards(self) -> int:
        return sum(self._shard_bytes(u) for u in self._model.units)

    def _tile_count(self, tile_numel: int) -> int:
        return sum(-(-u.shard_numel // tile_numel) for u in self._paged())

    def _kept_shards(self, home: Tier) -> list[_Term]:
        """Weights at home in the arena; one shard more, since new ones are written beside them."""
        if home is not Tier.HOST:
            return []
        largest = max((self._shard_bytes(u) for u in self._model.units), default=0)
        return [("weights at home in the host", self._all_shards() + largest)]

    def _kept_tiles(self, home: Tier, tile_numel: int) -> list[_Term]:
        """Optimizer state at home in the arena, tile by tile."""
        if home is not Tier.HOST:
            return []
        extents = (
            extent
            for unit in self._paged()
            for extent in tiles(Extent(0, unit.shard_numel), tile_numel=tile_numel)
        )
        state = sum(aligned_bytes(extent.numel * STATE_BYTES) for extent in extents)
        return [("optimizer state at home in the host", state)]

    def _gradients(self, tiles_home: Tier) -> list[_Term]:
        """All gradients, unless they stay on the device beside the optimizer state.

        Of units that are updated early there are two at most: one complete, one being produced. If
        there come to be more (accumulation, a parameter without gradient), they go to the drive
        where the optimizer state is; elsewhere they have room.
        """
        if tiles_home is Tier.DEVICE:
            return []
        waiting = [self._gradient_bytes(u) for u in self._trained() if not u.early]
        early = sorted(self._gradient_bytes(u) for u in self._trained() if u.early)
        at_once = early[-2:] if tiles_home is Tier.NVME else early
        return [("gradients", sum(waiting) + sum(at_once))]

    def _spilled_gradients(self) -> list[_Term]:
        """One produced, one on its way to or from the drive."""
        largest = max((self._gradient_bytes(u) for u in self._trained()), default=0)
        return [("gradients on their way to the drive", 2 * largest)]

    def _passing(self, tiers: Tiers, tile_numel: int) -> list[_Term]:
        """Buffers for what passes through between the drive and its use."""
        terms = []
        if tiers.shards is Tier.NVME:
            active = self._model.active_bytes
            active += len(self._model.units) * ALIGNMENT_BYTES  # rounding, at the very most
            largest = max((self._shard_bytes(u) for u in self._model.units), default=0)
            terms.append(("weights in use at once", aligned_bytes(active)))
            terms.append(("weights being read ahead and written", _SHARDS * largest))
        if tiers.tiles is Tier.NVME and self._paged():
            tile = aligned_bytes(tile_numel * STATE_BYTES)
            terms.append(("optimizer state on its way from and to the drive", _TILES * tile))
        return terms

    def _trained(self) -> Iterator[UnitSize]:
        return (unit for unit in self._model.units if unit.trained)

    def _paged(self) -> list[UnitSize]:
        """Those whose states are not on the device for good."""
        return [u for u in self._trained() if not u.here.tiles]

    @staticmethod
    def _shard_bytes(unit: UnitSize) -> int:
        return 0 if unit.here.shard else unit.shard_bytes

    @staticmethod
    def _gradient_bytes(unit: UnitSize) -> int:
        return 0 if unit.here.gradient else unit.gradient_bytes


def _total(terms: Sequence[_Term]) -> int:
    return sum(nbytes for _, nbytes in terms)


def _too_small(terms: Sequence[_Term], budget_bytes: int) -> str:
    least_bytes = _total(terms)
    unit_bytes = 2**20 if least_bytes > _WRITTEN_IN_MIB_BYTES else 2**10
    enough = write_bytes(-(-least_bytes // unit_bytes) * unit_bytes)
    return (
        f"tiering.host_memory is {budget_bytes:,} bytes, which cannot hold what must be in host "
        f'memory at once; set it to at least "{enough}":{sum_of(terms)}\n  {least_bytes:>16,} bytes'
        "  together: the smallest budget that would do"
    )
