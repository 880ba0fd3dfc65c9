"""The records of one unit on one rank: their names, what they hold, and where they live."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infinity.partition import Extent, FlatLayout, tiles
from tiering.spec import RecordSpec, TensorSpec, Tier
from tiering.tiers.nvme import NvmeTier

TILE_FIELDS = ("master", "exp_avg", "exp_avg_sq")


class Home(NamedTuple):
    """Where a record lives, and on which drive if it lives on one."""

    tier: Tier
    drive: NvmeTier | None = None


class Homes(NamedTuple):
    """Where each kind of record lives."""

    shards: Home
    tiles: Home
    gradients: Home


class Types(NamedTuple):
    """The element types of a unit's records, and of the model's arithmetic."""

    storage: torch.dtype
    gradient: torch.dtype
    compute: torch.dtype


class UnitRecords:
    """What the store holds of a unit.

    Args:
        name: short and unique.
        layout: the unit's flat buffer.
        types: of the elements.
        rank: whose part.
        tile_numel: most elements of a tile; 0 for a frozen unit, which has none.
        whole_gradient: whether the gradient record covers the whole unit.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        layout: FlatLayout,
        types: Types,
        *,
        rank: int,
        tile_numel: int,
        whole_gradient: bool = False,
    ) -> None:
        self.own: Extent = layout.shard(rank)
        """The part of the flat buffer that is this rank's."""
        numel = (self.own.numel,)
        self.shard = RecordSpec(f"{name}.shard", (TensorSpec("shard", types.storage, numel),))
        gradient_extent = Extent(0, layout.numel) if whole_gradient else self.own
        self.own_of_gradient: Extent = self.own.relative_to(gradient_extent.start)
        """Where in the gradient record this rank's part is."""
        gradient = TensorSpec("gradient", types.gradient, (gradient_extent.numel,))
        self.gradient = RecordSpec(f"{name}.gradient", (gradient,))
        self.extents: tuple[Extent, ...] = (
            tiles(self.own, tile_numel=tile_numel) if tile_numel else ()
        )
        """What each tile covers of the flat buffer."""
        self.tiles = tuple(
            RecordSpec(
                f"{name}.tile{number}",
                tuple(TensorSpec(f, torch.float32, (extent.numel,)) for f in TILE_FIELDS),
            )
            for number, extent in enumerate(self.extents)
        )

    def homes(self, homes: Homes) -> list[tuple[RecordSpec, Home]]:
        """All of them with where they live."""
        gradient = [(self.gradient, homes.gradients)] if self.tiles else []
        tiles = [(tile, homes.tiles) for tile in self.tiles]
        return [(self.shard, homes.shards), *tiles, *gradient]
