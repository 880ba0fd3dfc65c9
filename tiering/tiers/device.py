"""The device tier: memory next to the compute, and the two hops between it and the arena.

On a GPU it is the GPU's memory and both hops are copies. On a CPU-only machine it is ordinary
memory, and `upload` of a host tensor is the tensor itself: the same hop with no work.

Memory is handed out as slots. A slot whose tensors are all gone is used again; one that a caller
still holds a tensor of is left to that tensor, so nothing that was handed out is ever overwritten.

Note: copies that are under way

A GPU's copies run beside its compute, on a stream for each direction, and Python waits for them
only when very much is on its way. On the device the order is kept by events: the compute waits for
an upload, an offload for the compute. On the host it is kept by the `Hop` that a copy returns: the
host memory may be used for something else when that is done, so a lease ends behind it
(`Lease.release_behind`).

What would break it: host memory that is given up, or written, while a hop still reads it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from tiering.spec import RecordSpec

_AHEAD_BYTES: Final = 2**29
_ALIGN_BYTES = 4096  # the arena's alignment, so that kernels see the same addresses on every tier


class _Block(NamedTuple):
    """One reusable piece of ordinary memory."""

    array: np.ndarray[tuple[int], np.dtype[np.uint8]]
    nbytes: int


class DeviceSlot:
    """Room for one record on the device. Created by `DeviceTier.allocate`."""

    def __init__(self, tier: DeviceTier, nbytes: int, block: _Block | None) -> None:
        self.nbytes = nbytes
        self._tier = tier
        self._block = block
        self._base: torch.Tensor | None = None
        self._handed_out: list[weakref.ref[memoryview]] = []
        if block is None:
            self._base = torch.empty(nbytes, dtype=torch.uint8, device=tier.device)

    def tensors(self, spec: RecordSpec) -> dict[str, torch.Tensor]:
        """Views of the record's tensors over this slot, by name; they share one storage."""
        base = self._base if self._block is None else self._fresh_base(self._block)
        assert base is not None
        return spec.views(base)

    def _fresh_base(self, block: _Block) -> torch.Tensor:
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        buffer = block.array.data  # a fresh memoryview
        self._handed_out = [r for r in self._handed_out if r() is not None]
        self._handed_out.append(weakref.ref(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def is_aliased(self) -> bool:
        """Whether a tensor handed out earlier is still alive.

        On a GPU the allocator looks after that, and this is False.
        """
        return any(r() is not None for r in self._handed_out)

    def free(self) -> None:
        """Give the room back as soon as no tensor uses it."""
        block, self._block, self._base = self._block, None, None
        if block is not None and not self.is_aliased:
            self._tier.recycle(block)


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


class DeviceTier:
    """Memory of one device.

    Args:
        device: where the model computes.
        ahead_bytes: most that is on its way to the device before the caller has to wait.
    """

    def __init__(self, device: torch.device, *, ahead_bytes: int = _AHEAD_BYTES) -> None:
        self.device = device
        self._spare: defaultdict[int, list[_Block]] = defaultdict(list)
        self._ahead_bytes = ahead_bytes
        self._uploads: deque[tuple[Hop, int]] = deque()
        self._uploading_bytes = 0
        self._registered: list[int] = []
        self._up = self._down = None
        if device.type == "cuda":
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def register(self, address: int, nbytes: int) -> None:
        """Let copies reach this host memory directly; without it they go through a buffer.

        Does nothing on a CPU, and where the driver refuses.
        """
        if self._up is None or not nbytes:
            return
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) == 0:
            self._registered.append(address)
            return
        with contextlib.suppress(RuntimeError):  # or the next call would be told of the error
            torch.zeros(1, device=self.device)

    def unregister(self) -> None:
        """Wait for all copies, and take back what was registered."""
        if self._up is None or self._down is None:
            return
        self._up.synchronize()
        self._down.synchronize()
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Room for ``nbytes``; used again from what was freed where that fits exactly."""
        if self.device.type != "cpu":
            return DeviceSlot(self, nbytes, None)
        spare = self._spare[nbytes]
        return DeviceSlot(self, nbytes, spare.pop() if spare else _block(nbytes))

    def recycle(self, block: _Block) -> None:
        """Take back memory that nothing refers to any more."""
        self._spare[block.nbytes].append(block)

    def upload(self, host: torch.Tensor) -> tuple[torch.Tensor, Hop | None]:
        """Bring a tensor to the device.

        Args:
            host: contiguous.

        Returns:
            The tensor on the device, complete for all later work on the current stream, and the
            copy if there is one; what is there already is given back as it is.
        """
        if self._up is None or host.device.type != "cpu":
            return host, None
        while self._uploads and (
            self._uploads[0][0].is_done() or self._uploading_bytes > self._ahead_bytes
        ):
            first, nbytes = self._uploads.popleft()
            first.wait()
            self._uploading_bytes -= nbytes
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._up):
            here = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            here.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._up)
        current.wait_event(event)
        here.record_stream(current)
        hop = _CudaHop(event)
        self._uploads.append((hop, host.nbytes))
        self._uploading_bytes += host.nbytes
        return here, hop

    def offload(self, here: torch.Tensor, host: torch.Tensor) -> Hop | None:
        """Copy what all work so far on the current stream makes of a tensor.

        Args:
            here: on the device.
            host: of the same shape; in host memory, or on the device as well.

        Returns:
            The copy if it is under way; None if it is done, or ordered by the stream.
        """
        if self._down is None or host.device.type != "cpu":
            if here.data_ptr() != host.data_ptr() or here.dtype != host.dtype:
                host.copy_(here)
            return None
        here = here.to(host.dtype)
        ready, event = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        self._down.wait_event(ready)
        with torch.cuda.stream(self._down):
            host.copy_(here, non_blocking=True)
            event.record(self._down)
        here.record_stream(self._down)
        return _CudaHop(event)

    def spare_bytes(self) -> int:
        """Bytes kept for use again."""
        return sum(b.nbytes for b in self._blocks())

    def _blocks(self) -> Iterator[_Block]:
        for blocks in self._spare.values():
            yield from blocks


def _block(nbytes: int) -> _Block:
    whole = np.empty(nbytes + _ALIGN_BYTES, dtype=np.uint8)
    start = -whole.ctypes.data % _ALIGN_BYTES
    return _Block(whole[start : start + nbytes], nbytes)
