"""The paths of one NVMe tier: how fast each is, what is free on them, whose turn it is.

A record lies whole on one path. A new one goes where it would be done first: to the path of which
the bytes it holds and the new ones, divided by its speed, are least. Records of one kind (those
that hold tensors of the same names: shards, tiles, gradients) are dealt by themselves, because the
kinds are used at different times: a pass over the shards alone must keep all drives busy, however
the tiles lie. Records are used in about the order in which they were made, so what holds for every
stretch of that order holds for what is in flight at any moment.

What would break: counting free bytes twice where two paths are on one file system.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tiering.errors import ConfigError
from tiering.folder import SwapFolder
from tiering.spec import RecordSpec

Kind: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Volume:
    """One of the paths over which records are spread.

    Args:
        folder: where its files lie; stays the caller's to close.
        gb_per_s: how fast it is, in 1e9 bytes a second; only the ratio to its siblings counts.

    Raises:
        ConfigError: no such speed.
    """

    folder: SwapFolder
    gb_per_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gb_per_s < math.inf:
            raise ConfigError(
                f"{self.folder.root}: gb_per_s must be a number above 0, got {self.gb_per_s}"
            )


@dataclass(frozen=True)
class VolumeStats:
    """What one path holds and has moved.

    Args:
        path: the user's.
        share: of the records' bytes that it is to hold, 0 to 1.
        held_bytes: its record files now.
        read_bytes: of all reads started so far, padding included.
        written_bytes: the same for writes; what wears the drive.
    """

    path: str
    share: float
    held_bytes: int
    read_bytes: int
    written_bytes: int


class Room(NamedTuple):
    """What one file system has free, under some of the paths."""

    roots: tuple[Path, ...]
    free_bytes: int
    device: int
    """Number of the file system on this machine."""

    def __str__(self) -> str:
        return f"the drive under {' and '.join(map(str, self.roots))} has {self.free_bytes} free"


class Dealer:
    """Deals records out over paths, which it knows by their numbers.

    Args:
        speeds: of each path, in any unit.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = tuple(speeds)
        self._held_bytes: dict[Kind, list[int]] = {}

    def turns(self, spec: RecordSpec, nbytes: int) -> list[int]:
        """All paths, in the order in which each would be done with this record beside its own."""
        held = self._held(spec)
        return sorted(range(len(held)), key=lambda path: (held[path] + nbytes) / self._speeds[path])

    def give(self, spec: RecordSpec, path: int, nbytes: int) -> None:
        """Note that the path holds the record from now on."""
        self._held(spec)[path] += nbytes

    def take_back(self, spec: RecordSpec, path: int, nbytes: int) -> None:
        """Note that it does so no more."""
        self._held(spec)[path] -= nbytes

    def share(self, path: int) -> float:
        """The part of all bytes that the path is to hold."""
        return self._speeds[path] / sum(self._speeds)

    def held_bytes(self, path: int) -> int:
        """What it holds of all kinds."""
        return sum(held[path] for held in self._held_bytes.values())

    def _held(self, spec: RecordSpec) -> list[int]:
        kind = tuple(tensor.name for tensor in spec.tensors)
        return self._held_bytes.setdefault(kind, [0] * len(self._speeds))


def rooms(folders: Iterable[SwapFolder]) -> list[Room]:
    """What is free under these folders, each file system once.

    Raises:
        TransferError: a folder is gone.
    """
    on_device: dict[int, list[SwapFolder]] = {}
    for folder in folders:
        on_device.setdefault(folder.device(), []).append(folder)
    return [
        Room(tuple(folder.root for folder in same), same[0].free_bytes(), device)
        for device, same in on_device.items()
    ]


def open_folders(roots: Sequence[str | os.PathLike[str]]) -> list[SwapFolder]:
    """A swap folder under each path, all or none.

    Raises:
        ConfigError: no path at all, one twice, or one that cannot be used.
    """
    if not roots:
        raise ConfigError("no path was given for the record files; name a directory on each drive")
    seen: dict[str, str] = {}
    for root in (os.fspath(root) for root in roots):
        real = os.path.realpath(root)
        if real in seen:
            raise ConfigError(f"{seen[real]!r} and {root!r} are one directory; name each path once")
        seen[real] = root
    with contextlib.ExitStack() as undoing:
        folders = [undoing.enter_context(SwapFolder(root)) for root in roots]
        undoing.pop_all()
    return folders
