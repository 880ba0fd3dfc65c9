"""The link between host memory and a GPU: copies beside its compute, on a stream for each way.

Note: the order of copies

On the device it is kept by events: the compute waits for an upload, an offload for the compute. On
the host it is kept by the `Hop` that a copy returns: the host memory may be used for something else
when that is done, so a lease ends behind it (`Lease.release_behind`).

What would break it: host memory that is given up, or written, while a hop still reads it.

Note: how far ahead Python may be

Whoever asks for copies and compute is ahead of the device that makes them, and what was uploaded
takes memory there until the last work that uses it is done. When its last tensor is gone, an event
behind the work asked for so far marks that moment; before a copy the caller waits until no more
than ``ahead_bytes`` are between the two. So the memory of the device is bounded however far ahead
the caller could be, and one upload runs beside the work on the one before it, whatever their size.

Note: poison

In debug mode what is uploaded is filled with bytes of 255 before it comes, and again when its last
use is done: no number in any floating type. Whoever reads it too early or too late has NaN, not
values that happen to be right.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiering.arena import POISON
from tiering.errors import TieringWarning

AHEAD_BYTES: Final = 2**29


class Hop(Protocol):
    """A copy between the host and a device that is under way."""

    def is_done(self) -> bool:
        """Whether both ends are free."""
        ...

    def wait(self) -> None:
        """Until it is done."""
        ...


class _CudaHop:
    """One that a stream reaches."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


@dataclass
class LinkStats:
    """Counters since the link was made."""

    uploaded_bytes: int = 0
    offloaded_bytes: int = 0
    upload_waited_s: float = 0.0
    """Seconds in which the compute of the device had nothing to do but wait for an upload."""


class Order:
    """Keeps the order of work on one thing that is asked for on one stream, then on another.

    Args:
        device: where; on a CPU there is nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._last: torch.cuda.Stream | None = None
        self._is_shared = False

    def follow(self, *tensors: torch.Tensor) -> None:
        """Have what is asked for on the current stream from now on done after what was before.

        Args:
            tensors: that it is about to use; their memory is not used again before it is done.
        """
        if self._device is None:
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            self._is_shared = True
            current.wait_stream(self._last)
        if self._is_shared:
            for tensor in tensors:
                tensor.record_stream(current)
        self._last = current


class _Uploaded:
    """What was uploaded, until all tensors over it are gone."""

    def __init__(self, here: torch.Tensor, stream: torch.cuda.Stream, *, poison: bool) -> None:
        self.stream = stream
        storage = here.untyped_storage()
        self.nbytes = here.nbytes
        self._address = storage.data_ptr()
        self._storage = storage if poison else None
        self._alive = StorageWeakRef(storage)

    def is_gone(self) -> bool:
        if self._storage is None:
            return bool(self._alive.expired())
        return uses_of(self._storage) == 1

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in it, or could: by the address."""
        return self._address == tensor.untyped_storage().data_ptr()

    def poison(self, stream: torch.cuda.Stream) -> None:
        """Fill it, on the current stream, if this is debug mode."""
        if self._storage is not None:
            whole = _fill(self._storage)
            whole.record_stream(stream)
            self._storage = None


class Link:
    """Copies between the host and one GPU.

    Args:
        device: the GPU.
        ahead_bytes: most that the caller has let go and the device has not.
        poison: see the note.
    """

    def __init__(self, device: torch.device, *, ahead_bytes: int, poison: bool) -> None:
        self._device = device
        self._ahead_bytes = ahead_bytes
        self._poison = poison
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stats = LinkStats()
        self._registered: list[int] = []
        self._uploaded: list[_Uploaded] = []
        self._leaving: deque[tuple[torch.cuda.Event, int]] = deque()
        self._leaving_bytes = 0
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    # -- host memory

    def register(self, address: int, nbytes: int) -> None:
        """Let copies reach this memory directly; where the driver refuses, by a buffer of its."""
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
            if not error:
                self._registered.append(address)
                return
            with contextlib.suppress(RuntimeError):  # or the next call would be told of the error
                torch.zeros(1, device=self._device)
        warnings.warn(
            f"the driver does not pin {nbytes} bytes of host memory for copies (CUDA error "
            f"{error}); they go through a buffer of its own, at a third of the speed",
            TieringWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Wait for all copies, and take back what was registered."""
        try:
            self._up.synchronize()
            self._down.synchronize()
        finally:  # a device that has failed makes no copies
            while self._registered:
                torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    # -- copies

    def upload(self, host: torch.Tensor) -> tuple[torch.Tensor, Hop]:
        """Bring a tensor to the device; it is complete for all later work on the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._let_go(current)
        self._wait_for_room(host.nbytes)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._up):
            here = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            if self._poison:
                _fill(here.untyped_storage())
            here.copy_(host, non_blocking=True)
            arrived.record(self._up)
        self._await(arrived, current)
        here.record_stream(current)
        self._uploaded.append(_Uploaded(here, current, poison=self._poison))
        self._stats.uploaded_bytes += host.nbytes
        return here, _CudaHop(arrived)

    def offload(self, here: torch.Tensor, host: torch.Tensor) -> Hop:
        """Copy what all work so far on the current stream makes of a tensor."""
        self._wait_for_room(here.nbytes)
        here = here.to(host.dtype)
        made, arrived = torch.cuda.Event(), torch.cuda.Event()
        made.record(torch.cuda.current_stream(self._device))
        self._down.wait_event(made)
        with torch.cuda.stream(self._down):
            host.copy_(here, non_blocking=True)
            arrived.record(self._down)
        here.record_stream(self._down)
        if not any(one.is_of(here) for one in self._uploaded):
            self._leave(arrived, here.nbytes)
        self._stats.offloaded_bytes += host.nbytes
        return _CudaHop(arrived)

    @property
    def stats(self) -> LinkStats:
        """What was copied, and waited for."""
        self._count_stalls()
        return self._stats

    # -- how far ahead

    def _let_go(self, current: torch.cuda.Stream) -> None:
        """Mark the end of all work so far as that of what has no tensor any more."""
        gone = [one for one in self._uploaded if one.is_gone()]
        if not gone:
            return
        left = set(gone)
        self._uploaded = [one for one in self._uploaded if one not in left]
        for stream in {current, *(one.stream for one in gone)}:
            self._down.wait_stream(stream)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._down):
            for one in gone:
                one.poison(self._down)
            done.record(self._down)
        self._leave(done, sum(one.nbytes for one in gone))

    def _leave(self, done: torch.cuda.Event, nbytes: int) -> None:
        self._leaving.append((done, nbytes))
        self._leaving_bytes += nbytes

    def _wait_for_room(self, nbytes: int) -> None:
        most_bytes = max(self._ahead_bytes, nbytes)
        while self._leaving and (
            self._leaving_bytes > most_bytes or bool(self._leaving[0][0].query())
        ):
            done, left_bytes = self._leaving.popleft()
            done.synchronize()
            self._leaving_bytes -= left_bytes

    # -- stalls

    def _await(self, arrived: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Have the stream wait, between two events whose distance is the wait."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(arrived)
        after.record(stream)
        self._stalls.append((before, after))
        self._count_stalls()

    def _count_stalls(self) -> None:
        while self._stalls and self._stalls[0][1].query():
            before, after = self._stalls.popleft()
            self._stats.upload_waited_s += before.elapsed_time(after) / 1000


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many hold it: tensors, and this object."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001 - has no other name


def _fill(storage: torch.UntypedStorage) -> torch.Tensor:
    """Fill all its bytes with no number, and return them: uint8, shape (nbytes,)."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole.set_(storage)
    return whole.fill_(POISON)
