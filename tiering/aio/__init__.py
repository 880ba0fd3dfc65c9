"""Asynchronous file I/O: the C engine behind the `AioBackend` protocol. No torch.

In the order of a byte's way: `memory` and `pages` (where it stands), `engine` (who moves it),
`flight` (one transfer), `config` (how), `backend` (the seam that everything above uses), `native`
(the compiled part), `pure` and `descriptors` (who moves it where that is missing), `opening` (which
of them).
"""

from tiering.aio.config import AioConfig, AioStats, FaultRule, Faults
from tiering.aio.engine import AioEngine, AioFile, AioTransfer
from tiering.aio.memory import PinnedMemory
from tiering.aio.opening import AnyEngine, open_engine
from tiering.aio.pure import PureEngine, PureTransfer

__all__ = [
    "AioConfig",
    "AioEngine",
    "AioFile",
    "AioStats",
    "AioTransfer",
    "AnyEngine",
    "FaultRule",
    "Faults",
    "PinnedMemory",
    "PureEngine",
    "PureTransfer",
    "open_engine",
]
