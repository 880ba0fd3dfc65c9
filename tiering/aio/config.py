"""What an engine is told, and what it tells: settings, deliberate faults, counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from tiering.errors import ConfigError

DirectChoice = Literal["auto", "off"]
BackendName = Literal["auto", "uring", "threads"]
BACKENDS: dict[str, int] = {"auto": 0, "uring": 1, "threads": 2}

_BLOCK_BYTES_MIN = 4096
_BLOCK_BYTES_MAX = 2**32
_QUEUE_DEPTH_MAX = 4096
_THREADS_MAX = 4096
_FILES_MAX = 65536
_RULES_MAX = 8
_DIRECT_CHOICES: tuple[DirectChoice, ...] = ("auto", "off")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be {least} to {most}, got {value}")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class AioConfig:
    """How an engine drives a drive.

    Args:
        block_bytes: a request is split at multiples of this; a power of two from 4096 on.
        queue_depth: blocks in flight, 1 to 4096.
        threads: threads of the thread backend; 0: as many as the queue is deep, at most 16.
        backend: ``"uring"``, ``"threads"``, or ``"auto"``, which falls back to threads where
            io_uring is not to be had; a named one is an error then.
        direct: ``"auto"``, past the page cache (O_DIRECT) wherever the file system allows, or
            ``"off"``, through the page cache everywhere, by choice and without a warning.
        max_files: files open at once, 1 to 65536. A file needs two descriptors.
        require_native: without the compiled part, ``"auto"`` is an error as well, and does not fall
            back to threads of Python.

    Raises:
        ConfigError: a value that cannot work.
    """

    block_bytes: int = 2**20
    queue_depth: int = 32
    threads: int = 0
    backend: BackendName = "auto"
    direct: DirectChoice = "auto"
    max_files: int = 4096
    require_native: bool = False

    def __post_init__(self) -> None:
        _check_range("block_bytes", self.block_bytes, _BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX)
        if not _is_power_of_two(self.block_bytes):
            below = 1 << (self.block_bytes.bit_length() - 1)
            raise ConfigError(
                f"block_bytes must be a power of two, got {self.block_bytes}; "
                f"the nearest are {below} and {2 * below}"
            )
        _check_range("queue_depth", self.queue_depth, 1, _QUEUE_DEPTH_MAX)
        _check_range("threads", self.threads, 0, _THREADS_MAX)
        _check_range("max_files", self.max_files, 1, _FILES_MAX)
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.direct not in _DIRECT_CHOICES:
            raise ConfigError(
                f"direct must be one of {', '.join(_DIRECT_CHOICES)}, got {self.direct!r}"
            )


class FaultAction(IntEnum):
    """What happens to an operation that a rule hits; the values are those of ``aio.h``."""

    SHORT = 1
    """It moves at most ``value`` bytes."""
    ERRNO = 2
    """It is not performed and fails with errno ``value``."""
    SWALLOW = 3
    """It is performed, but its completion never arrives."""
    DELAY = 4
    """Its completion arrives ``value`` microseconds later."""


@dataclass(frozen=True)
class FaultRule:
    """One deliberate fault, counted over the operations an engine gives to the kernel.

    Args:
        action: what happens.
        value: bytes, errno or microseconds, as the action says.
        first: number of the first operation hit, from 1, among those of the kinds below.
        every: then every so many; 0: only that one.
        reads: reads are hit and counted.
        writes: writes are hit and counted.
    """

    action: FaultAction
    value: int = 0
    first: int = 1
    every: int = 0
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class Faults:
    """Faults for tests; the defaults are none.

    Args:
        refuse_uring_errno: setting up the ring fails with this errno.
        refuse_register_errno: registering memory fails with this errno.
        refuse_direct_errno: opening a file with O_DIRECT fails with this errno.
        force_alignment_bytes: alignment the kernel is taken to report for direct I/O.
        force_memory_alignment_bytes: the same of addresses alone; 0: as the one above.
        max_transfer_bytes: cap on one kernel transfer; 0: 1 GiB.
        rules: at most 8; the first that hits an operation acts.
    """

    refuse_uring_errno: int = 0
    refuse_register_errno: int = 0
    refuse_direct_errno: int = 0
    force_alignment_bytes: int = 0
    force_memory_alignment_bytes: int = 0
    max_transfer_bytes: int = 0
    rules: tuple[FaultRule, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.rules) > _RULES_MAX:
            raise ConfigError(f"at most {_RULES_MAX} fault rules, got {len(self.rules)}")
        for name in ("force_alignment_bytes", "force_memory_alignment_bytes"):
            value: int = getattr(self, name)
            if value and not _is_power_of_two(value):
                raise ConfigError(f"{name} must be a power of two, got {value}")


@dataclass(frozen=True)
class AioStats:
    """Counters of an engine; totals since it was opened unless they say otherwise.

    Args:
        backend: the one in use, ``"uring"``, ``"threads"``, or ``"python"`` where the compiled part
            is missing.
        backend_reason: why io_uring is not in use; empty when it is or was not asked for.
        fixed_files: files are registered with the ring.
        registered_bytes: memory registered with the ring now.
        register_reason: why memory is not registered; empty when it is or was not asked for.
        read_bytes: moved from files.
        written_bytes: moved to files.
        read_blocks: blocks read.
        written_blocks: blocks written.
        buffered_blocks: of both, those that could not go direct.
        retries: operations repeated because of EAGAIN or EINTR.
        short_transfers: operations that moved less than asked.
        pending_requests: not ended, now.
        ended_requests: well or not.
        busy_s: time with at least one block in flight.
        queue_s: sum over ended requests of the time until their first block started.
        device_s: the same of the time from then until they ended.
        waits: times that somebody had to sleep for a request; one long wait may count as several.
        waited_s: how long that was in all.
    """

    backend: str
    backend_reason: str
    fixed_files: bool
    registered_bytes: int
    register_reason: str
    read_bytes: int
    written_bytes: int
    read_blocks: int
    written_blocks: int
    buffered_blocks: int
    retries: int
    short_transfers: int
    pending_requests: int
    ended_requests: int
    busy_s: float
    queue_s: float
    device_s: float
    waits: int
    waited_s: float
