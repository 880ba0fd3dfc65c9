"""A transfer on its way and how it ended, apart from who moves it.

Every engine has flights of its own kind; what they are asked, how they end, and the exceptions that
follow from that are the same, so that nothing above can tell the engines apart by their errors.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

from tiering.aio.backend import Memory
from tiering.errors import (
    ConfigError,
    EngineClosedError,
    SpaceError,
    TransferError,
    TransferTimeoutError,
)

_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class Order(NamedTuple):
    """What a transfer is asked to do.

    Args:
        verb: "read" or "write".
        memory: from where or to where.
        at: first byte of the memory.
        nbytes: how many.
        offset: first byte of the file.
    """

    verb: str
    memory: Memory
    at: int
    nbytes: int
    offset: int

    def check(self, path: str) -> None:
        """Raise `ConfigError` where the numbers cannot be."""
        if self.nbytes < 0 or self.offset < 0 or self.at < 0:
            raise ConfigError(
                f"{self.verb} of {path}: at={self.at}, nbytes={self.nbytes}, offset={self.offset}; "
                "none may be negative"
            )
        if self.at + self.nbytes > self.memory.nbytes:
            raise ConfigError(
                f"{self.verb} of {path}: bytes {self.at} to {self.at + self.nbytes} of a memory "
                f"of {self.memory.nbytes} bytes"
            )


class Outcome(NamedTuple):
    """How a transfer ended.

    Args:
        errno: 0 or the kernel's reason.
        done_bytes: how far it got.
        error_offset: file offset where it failed.
        queue_ns: from when it could start until its first block did.
        device_ns: from then until it ended.
    """

    errno: int
    done_bytes: int
    error_offset: int
    queue_ns: int = 0
    device_ns: int = 0


class Flight:
    """One transfer on its way, and then how it ended.

    Args:
        path: of which file.
        order: what is to be done.
    """

    def __init__(self, path: str, order: Order) -> None:
        self.path = path
        self.verb = order.verb
        self.nbytes = order.nbytes
        self.offset = order.offset
        self.outcome: Outcome | None = None
        self.was_closed = False
        self.memory: Memory | None = order.memory  # kept alive until the end

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{self.verb} of {self.nbytes} bytes at offset {self.offset} of {self.path}"

    @property
    def has_ended(self) -> bool:
        """Well or not."""
        return self.outcome is not None or self.was_closed

    @property
    def has_failed(self) -> bool:
        """Whether what waits for it must not start."""
        return self.was_closed or (self.outcome is not None and self.outcome.errno != 0)

    @property
    def queue_s(self) -> float:
        """From when it could start until its first block did; 0 while it is pending."""
        return self.outcome.queue_ns / 1e9 if self.outcome else 0.0

    @property
    def device_s(self) -> float:
        """From when its first block started until it ended; 0 while it is pending."""
        return self.outcome.device_ns / 1e9 if self.outcome else 0.0

    def end(self, outcome: Outcome | None) -> None:
        """Note the outcome, or None when the engine closed first, and let go of what was kept."""
        self.outcome = outcome
        self.was_closed = outcome is None
        self.memory = None

    def raise_failure(self) -> None:
        """Raise what the outcome means, if it is a failure."""
        outcome = self.outcome
        if outcome is None:
            raise EngineClosedError(f"the engine was closed before the {self.text} had ended")
        if not outcome.errno:
            return
        message = (
            f"{self.text} failed at offset {outcome.error_offset} "
            f"with {outcome.done_bytes} of {self.nbytes} bytes done"
        )
        if outcome.errno == errno.ECANCELED:
            message = f"{self.text} was not started, since the transfer it waited for failed"
        elif outcome.errno == errno.ENODATA:
            message += f", where the file ends at {outcome.error_offset}"
        raise failure(message, outcome.errno, self.path)

    def timeout(self, timeout_s: float | None, done_bytes: int) -> TransferTimeoutError:
        """What says that it is still pending."""
        return TransferTimeoutError(
            f"{self.text} is still pending after {timeout_s} s, with {done_bytes} bytes done",
            errno=errno.ETIME,
            path=self.path,
        )

    def in_the_way(self, timeout_s: float | None) -> TransferTimeoutError:
        """What says that its file cannot be closed."""
        return TransferTimeoutError(
            f"{self.path} cannot be closed: {self.text} is still pending after {timeout_s} s",
            errno=errno.ETIME,
            path=self.path,
        )


def failure(message: str, error: int, path: str) -> TransferError:
    """The exception for an errno: a full drive has one of its own."""
    kind = SpaceError if error in _OUT_OF_SPACE else TransferError
    return kind(message, errno=error, path=path)


def too_few_ended(
    flights: Sequence[Flight], wanted: int, timeout_s: float | None
) -> TransferTimeoutError:
    """What says that fewer of some have ended than were waited for."""
    pending = [flight for flight in flights if not flight.has_ended]
    first = (pending or flights)[0]  # another thread may have seen the rest end meanwhile
    return TransferTimeoutError(
        f"{len(pending)} of {len(flights)} transfers are still pending after {timeout_s} s, and "
        f"{wanted} were to end; the first pending one is the {first.text}",
        errno=errno.ETIME,
        path=first.path,
    )


def foreign_process(owner: int, pid: int) -> EngineClosedError:
    """What a forked child is told."""
    return EngineClosedError(
        f"this engine belongs to process {owner}; process {pid} was forked from it and must open "
        "its own"
    )
