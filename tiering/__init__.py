"""A tensor store over three tiers: device, host memory and NVMe.

Useful on its own; it knows nothing of models or of torch.distributed. The modules, in the order of
a tensor's trip from the drive to its user:

- `tiering.spec`: what is moved: a record, which is a key and some named tensors.
- `tiering.folder`: where its file lies: a private folder under the user's path.
- `tiering.volumes`, `tiering.bandwidth`: which path, when there are several, and how fast each is.
- `tiering.records`: how it lies there: a safetensors header, then the payload, aligned.
- `tiering.aio`: who moves it: a C engine with io_uring, or threads where that is forbidden.
- `tiering.arena`: where it arrives: a slot of one pinned block of memory.
- `tiering.tiers`: the places themselves: NVMe files, host slots, device memory.
- `tiering.store`: who decides: one entry a record, leases for those who use it.
- `tiering.trace`, `tiering.planner`, `tiering.prefetch`: when: uses are recorded, planned and
  fetched ahead of.
- `tiering.swapper`: the smallest entrance: single tensors out to a drive and back.
- `tiering.errors`: what can go wrong, in one small tree.
"""

from tiering.aio import AioConfig
from tiering.errors import (
    ArenaFullError,
    ConfigError,
    EngineClosedError,
    RecordError,
    SpaceError,
    TieringError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)
from tiering.swapper import SwapperStats, SwapTransfer, TensorSwapper
from tiering.volumes import VolumeStats

__all__ = [
    "AioConfig",
    "ArenaFullError",
    "ConfigError",
    "EngineClosedError",
    "RecordError",
    "SpaceError",
    "SwapTransfer",
    "SwapperStats",
    "TensorSwapper",
    "TieringError",
    "TieringWarning",
    "TransferError",
    "TransferTimeoutError",
    "VolumeStats",
]
