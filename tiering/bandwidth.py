"""How fast the paths of a tier are, measured shortly, so that each gets the share it can carry.

A file in the path's swap folder is written and read back through the backend that is going to be
used, one path after another. A record goes both ways in every step, so what counts is the time of
both together. Only ratios are used, and an error of a tenth costs about that much of the speed.

What would break: leaving the file behind. It lies in the swap folder, which goes however the
process ends.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import Final

from tiering.aio.backend import AioBackend, File, Transfer
from tiering.aio.memory import PinnedMemory
from tiering.errors import ConfigError, SpaceError, TransferError
from tiering.folder import SwapFolder
from tiering.volumes import Volume

_PROBE_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 4 << 20  # all requests are under way at once and share one piece of memory
_TIMEOUT_S: Final = 60.0


def make_volumes(
    folders: Sequence[SwapFolder],
    backend: AioBackend,
    *,
    gb_per_s: Sequence[float] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Volume]:
    """The folders with their speeds.

    Args:
        folders: one a path; nothing is measured for one alone.
        backend: what is going to move their bytes.
        gb_per_s: the speeds, if they are known; nothing is measured then.
        timeout_s: longest wait for one transfer.

    Raises:
        ConfigError: a speed is none, or there are more or fewer than folders.
        SpaceError: a path has too little room to be measured.
        TransferError: a path failed while it was measured.
    """
    if gb_per_s is not None and len(gb_per_s) != len(folders):
        raise ConfigError(f"{len(gb_per_s)} speeds were given for {len(folders)} paths")
    if gb_per_s is None and len(folders) > 1:
        gb_per_s = [measure_gb_per_s(f, backend, timeout_s=timeout_s) for f in folders]
    return list(map(Volume, folders, gb_per_s or [1.0] * len(folders)))


def measure_gb_per_s(
    folder: SwapFolder, backend: AioBackend, *, timeout_s: float = _TIMEOUT_S
) -> float:
    """Write 64 MiB and read them back; less, where less than twice that is free.

    Returns:
        The harmonic mean of both speeds, in 1e9 bytes a second.

    Raises:
        SpaceError: too little room to measure anything.
        TransferError: the drive failed.
        TransferTimeoutError: a transfer took longer than ``timeout_s``.
    """
    free_bytes = folder.free_bytes()
    nbytes = min(_PROBE_BYTES, free_bytes // 2 // _REQUEST_BYTES * _REQUEST_BYTES)
    if not nbytes:
        raise _no_room(folder, free_bytes, errno.ENOSPC)
    try:
        path = folder.make_file("probe", nbytes)
    except OSError as error:
        raise _no_room(folder, free_bytes, error.errno or errno.EIO) from error
    try:
        file = backend.open(str(path))
        elapsed_s = _write_and_read_s(file, backend, nbytes, timeout_s)
        file.close()  # after a failure this might wait for ever; the backend's own end does not
    finally:
        path.unlink(missing_ok=True)
    return 2 * nbytes / elapsed_s / 1e9


def _write_and_read_s(file: File, backend: AioBackend, nbytes: int, timeout_s: float) -> float:
    memory = PinnedMemory(_REQUEST_BYTES)
    memory.buffer()[:] = os.urandom(_REQUEST_BYTES)  # no drive can leave these out or compress them
    offsets, part = range(0, nbytes, _REQUEST_BYTES), _REQUEST_BYTES
    begin = time.perf_counter()
    _end([backend.write(file, memory, nbytes=part, offset=at) for at in offsets], timeout_s)
    backend.sync(file)
    _end([backend.read(file, memory, nbytes=part, offset=at) for at in offsets], timeout_s)
    return time.perf_counter() - begin


def _end(transfers: Sequence[Transfer], timeout_s: float) -> None:
    for transfer in transfers:
        transfer.wait(timeout_s)


def _no_room(folder: SwapFolder, free_bytes: int, number: int) -> TransferError:
    kind = SpaceError if number in (errno.ENOSPC, errno.EDQUOT) else TransferError
    return kind(
        f"the speed of the drive under {folder.root} cannot be measured with {free_bytes} bytes "
        "free; free some room there, give gb_per_s of every path, or leave this one out",
        errno=number,
        path=str(folder.path),
    )
