"""Every exception that tiering raises on purpose, in one small tree.

The world's failures (a full disk, a lost completion, a bad argument) are these exceptions, never an
assertion and never an abort. A message names the thing, the numbers, the likely cause and the
remedy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable


class TieringError(Exception):
    """Base of all errors raised by tiering."""


class ConfigError(TieringError):
    """A setting or an argument that cannot work; raised before any work starts."""


class ArenaFullError(TieringError):
    """The arena has no room and nothing in flight could make some."""


class RecordError(TieringError):
    """A record is unknown, has another size than asked for, or is used against its state."""


class EngineClosedError(TieringError):
    """The engine was closed, or belongs to another process (a forked child cannot use it)."""


class RankError(TieringError):
    """Another rank failed, or did not come to what all ranks do together."""


class TransferError(TieringError, OSError):
    """A transfer failed. ``errno`` is the kernel's reason, ``filename`` the file."""

    def __init__(self, message: str, *, errno: int, path: str) -> None:
        super().__init__(errno, message, path)
        self.message = message

    def __reduce__(self) -> tuple[Callable[[str], TransferError], tuple[str]]:
        """Let it go to another process, as a worker's errors do."""
        remake = functools.partial(type(self), errno=self.errno or 0, path=self.filename)
        return remake, (self.message,)

    def __str__(self) -> str:
        return f"{self.message}: {os.strerror(self.errno or 0)}"


class TransferTimeoutError(TransferError):
    """A transfer did not end within the time given; it may be waited for again."""


class SpaceError(TransferError):
    """The drive has no room for what must be stored on it."""


class TieringWarning(RuntimeWarning):
    """Something works, but not as well as it could; names the reason and the remedy."""
