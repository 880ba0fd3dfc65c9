"""How large the arena is and how optimizer state is cut: a sum over the actual records.

Pure. It is made before any work starts, so that a budget that cannot do is refused with the sum
that shows why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infinity.partition import ALIGN_NUMEL
from tiering.errors import ConfigError
from tiering.records import ALIGNMENT_BYTES, aligned_bytes
from tiering.spec import Tier

STATE_BYTES = 12  # master, exp_avg, exp_avg_sq of one element
_TILE_NUMEL = 2**20  # a tile of 12 MiB keeps a drive's queue full and little else
_LEAST_TILE_NUMEL = 2**14
_TILES = 4  # one is read, one updated, two are written: their sizes vary by rounding
_SHARDS = 3  # one is used, one read ahead, one published


class UnitSize(NamedTuple):
    """What the plan must know of a unit on one rank."""

    shard_numel: int
    trained: bool


class Homes(NamedTuple):
    """Where each kind of record lives."""

    shards: Tier
    tiles: Tier


class Types(NamedTuple):
    """Bytes of one element."""

    storage_bytes: int
    gradient_bytes: int


class Plan(NamedTuple):
    """The outcome."""

    arena_bytes: int
    tile_numel: int
    gradient_home: Tier
    terms: tuple[tuple[str, int], ...]
    """What the arena is for, and bytes, in the order of the sum."""


def make_plan(
    units: Sequence[UnitSize],
    homes: Homes,
    types: Types,
    *,
    budget_bytes: int | None,
    sub_group_numel: int | None,
) -> Plan:
    """Choose the arena size, the tile size and the gradients' home.

    Args:
        units: all units.
        homes: from the config.
        types: element sizes.
        budget_bytes: ``tiering.host_memory``; None: what the sum says.
        sub_group_numel: ``sub_group_size``; None: what the budget allows.

    Raises:
        ConfigError: the budget is too small; shows the sum and the smallest budget that would do.
    """
    gradient_home = Tier.DEVICE if homes.tiles is Tier.DEVICE else Tier.HOST
    lasting = [*_kept(units, homes, types), _gradients(units, homes, types)]
    most, least = _tile_bounds(units, sub_group_numel)

    def held(tile_numel: int) -> list[_Term]:
        return [*lasting, *_passing(units, homes, types, tile_numel=tile_numel)]

    if budget_bytes is None or budget_bytes >= _total(held(most)):
        needed = max(_total(held(most)), ALIGNMENT_BYTES)
        useful = max(needed, _total(_everything(units, types)))
        return Plan(min(budget_bytes or needed, useful), most, gradient_home, tuple(held(most)))
    if homes.tiles is not Tier.NVME:
        raise ConfigError(_too_small(held(most), budget_bytes))
    fitting = _fitting_tile(budget_bytes - _total(held(0)))
    if fitting >= least:
        return Plan(budget_bytes, fitting, gradient_home, tuple(held(fitting)))
    lasting[-1] = _spilled_gradients(units, types)
    if budget_bytes < _total(held(least)):
        raise ConfigError(_too_small(held(least), budget_bytes))
    return Plan(budget_bytes, least, Tier.NVME, tuple(held(least)))


def _tile_bounds(units: Sequence[UnitSize], sub_group_numel: int | None) -> tuple[int, int]:
    """The most and the fewest elements a tile may have."""
    largest = max((u.shard_numel for u in units), default=0)
    most = min(sub_group_numel or _TILE_NUMEL, largest) // ALIGN_NUMEL * ALIGN_NUMEL
    most = max(most, ALIGN_NUMEL)
    return most, min(most, _LEAST_TILE_NUMEL)


def _fitting_tile(room_bytes: int) -> int:
    """The largest tile of which the room holds as many as are needed at once."""
    per_tile = max(room_bytes, 0) // _TILES // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return per_tile // STATE_BYTES // ALIGN_NUMEL * ALIGN_NUMEL


_Term = tuple[str, int]


def _kept(units: Sequence[UnitSize], homes: Homes, types: Types) -> list[_Term]:
    """Records at home in the arena.

    One shard more, for an update while the old weights are still looked at.
    """
    terms = []
    if homes.shards is Tier.HOST:
        shards = [aligned_bytes(u.shard_numel * types.storage_bytes) for u in units]
        terms.append(("weights at home in the host", sum(shards) + max(shards, default=0)))
    if homes.tiles is Tier.HOST:
        state = sum(u.shard_numel * STATE_BYTES + ALIGNMENT_BYTES for u in units if u.trained)
        cuts = sum(u.shard_numel // _TILE_NUMEL for u in units) * ALIGNMENT_BYTES
        terms.append(("optimizer state at home in the host", state + cuts))
    return terms


def _everything(units: Sequence[UnitSize], types: Types) -> list[_Term]:
    """All there is in host memory at once: a larger arena could not be filled."""
    homes = Homes(Tier.HOST, Tier.HOST)
    buffers = _passing(units, Homes(Tier.NVME, Tier.NVME), types, tile_numel=_TILE_NUMEL)
    return [*_kept(units, homes, types), _gradients(units, homes, types), *buffers]


def _gradients(units: Sequence[UnitSize], homes: Homes, types: Types) -> _Term:
    """All gradients, unless they stay on the device beside the optimizer state."""
    if homes.tiles is Tier.DEVICE:
        return ("gradients (on the device)", 0)
    sizes = (aligned_bytes(u.shard_numel * types.gradient_bytes) for u in units if u.trained)
    return ("gradients", sum(sizes))


def _spilled_gradients(units: Sequence[UnitSize], types: Types) -> _Term:
    """One produced, one on its way to or from the drive."""
    largest = max((u.shard_numel for u in units if u.trained), default=0)
    return (
        "gradients on their way to the drive",
        2 * aligned_bytes(largest * types.gradient_bytes),
    )


def _passing(
    units: Sequence[UnitSize], homes: Homes, types: Types, *, tile_numel: int
) -> list[_Term]:
    """Buffers for what passes through between the drive and its use."""
    terms = []
    if homes.shards is Tier.NVME:
        largest = max((u.shard_numel for u in units), default=0)
        shard = aligned_bytes(largest * types.storage_bytes)
        terms.append((f"{_SHARDS} of the largest shard", _SHARDS * shard))
    if homes.tiles is Tier.NVME:
        tile = aligned_bytes(tile_numel * STATE_BYTES)
        terms.append((f"{_TILES} tiles of {tile_numel} elements", _TILES * tile))
    return terms


def _total(terms: Sequence[_Term]) -> int:
    return sum(nbytes for _, nbytes in terms)


def _too_small(terms: Sequence[_Term], budget_bytes: int) -> str:
    lines = "".join(f"\n  {nbytes:>16,} bytes  {what}" for what, nbytes in terms)
    return (
        f"tiering.host_memory is {budget_bytes:,} bytes, which cannot hold what must be in host "
        f"memory at once:{lines}\n  {_total(terms):>16,} bytes  together: the smallest budget that "
        "would do"
    )
