"""The device tier: memory next to the compute, and the two hops between it and the arena.

On a GPU it is the GPU's memory and both hops are copies. On a CPU-only machine it is ordinary
memory, and
`upload` of a host tensor is the tensor itself: the same hop with no work.

Memory is handed out as slots. A slot whose tensors are all gone is used again; one that a caller
still holds a tensor of is left to that tensor, so nothing that was handed out is ever overwritten.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from tiering.spec import RecordSpec

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
        return {
            t.name: base[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for t, at in zip(spec.tensors, spec.offsets_bytes, strict=True)
        }

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


class DeviceTier:
    """Memory of one device.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: defaultdict[int, list[_Block]] = defaultdict(list)

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Room for ``nbytes``; used again from what was freed where that fits exactly."""
        if self.device.type != "cpu":
            return DeviceSlot(self, nbytes, None)
        spare = self._spare[nbytes]
        return DeviceSlot(self, nbytes, spare.pop() if spare else _block(nbytes))

    def recycle(self, block: _Block) -> None:
        """Take back memory that nothing refers to any more."""
        self._spare[block.nbytes].append(block)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """The tensor on the device: itself on a CPU, a copy on a GPU.

        The copy is complete for all later work on the current stream.
        """
        return host if self.device.type == "cpu" else host.to(self.device)

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
