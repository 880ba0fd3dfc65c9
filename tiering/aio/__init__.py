"""Asynchronous file I/O: the C engine behind the `AioBackend` protocol. No torch.

In the order of a byte's way: `memory` (where it stands), `engine` (who moves it), `config` (how),
`backend` (the seam that everything above uses), `native` (the compiled part).
"""

from tiering.aio.config import AioConfig, AioStats, FaultRule, Faults
from tiering.aio.engine import AioEngine, AioFile, AioTransfer
from tiering.aio.memory import PinnedMemory

__all__ = [
    "AioConfig",
    "AioEngine",
    "AioFile",
    "AioStats",
    "AioTransfer",
    "FaultRule",
    "Faults",
    "PinnedMemory",
]
