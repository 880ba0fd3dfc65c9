"""What the link between host memory and a device gives: copies of pinned memory, both ways.

Needs torch alone: see the head of the package. `bench.link` sets our own copies beside these.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

Way = Literal["upload", "offload", "both"]

WAYS: Final[tuple[Way, ...]] = ("upload", "offload", "both")
"""From host memory to the device, from the device to host memory, and both at once."""


@dataclass(frozen=True)
class Pieces:
    """What is copied at once.

    Args:
        nbytes: of a piece.
        count: so many each way, in memory of their own.
    """

    nbytes: int
    count: int


class Copies(Protocol):
    """Somebody's way to copy pieces; copies may be under way when a call returns."""

    def upload(self, number: int) -> None:
        """Begin to bring a piece to the device."""
        ...

    def offload(self, number: int) -> None:
        """Begin to bring a piece to the host."""
        ...


class RawCopies:
    """torch's: pinned memory, and a stream for each way. On a CPU they are plain copies.

    Args:
        device: the other end.
        pieces: what is copied.
    """

    def __init__(self, device: torch.device, pieces: Pieces) -> None:
        on_gpu = device.type == "cuda"
        shape = (pieces.count, pieces.nbytes)
        self._sent, self._brought = (
            torch.ones(shape, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)
        )
        self._arrived, self._leaving = (
            torch.ones(shape, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._up, self._down = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))

    def upload(self, number: int) -> None:
        """Begin to bring a piece to the device."""
        with torch.cuda.stream(self._up):
            self._arrived[number].copy_(self._sent[number], non_blocking=True)

    def offload(self, number: int) -> None:
        """Begin to bring a piece to the host."""
        with torch.cuda.stream(self._down):
            self._brought[number].copy_(self._leaving[number], non_blocking=True)


def bytes_per_s(
    copies: Copies, way: Way, pieces: Pieces, *, device: torch.device, passes: int
) -> float:
    """Copy all pieces so often, and say how fast that was, both ways together.

    The clock is the host's, between two moments at which the device has nothing to do: whoever
    copies has streams of his own, on which nobody else can place events.

    Args:
        copies: who copies.
        way: where to.
        pieces: what.
        device: the other end.
        passes: how often.
    """
    finish(device)
    begin = time.perf_counter()
    for _ in range(passes):
        for number in range(pieces.count):
            # First what leaves: it waits for work that the device was given before it.
            if way != "upload":
                copies.offload(number)
            if way != "offload":
                copies.upload(number)
    finish(device)
    seconds = time.perf_counter() - begin
    return passes * pieces.count * pieces.nbytes * (2 if way == "both" else 1) / seconds


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked; a CPU has always."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
