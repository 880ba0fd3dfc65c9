"""The device tier: memory next to the compute, and the way between it and the arena.

On a GPU it is the GPU's memory, and a `Link` copies both ways. On a CPU-only machine it is ordinary
memory, and `upload` of a host tensor is the tensor itself: the same hop with no work.

Memory is handed out as slots. A slot whose tensors are all gone is used again; one that a caller
still holds a tensor of is left to that tensor, so nothing that was handed out is ever overwritten.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from tiering.arena import POISON
from tiering.spec import RecordSpec
from tiering.tiers.link import AHEAD_BYTES, Hop, Link, LinkStats, Order, uses_of

_ALIGN_BYTES = 4096  # the arena's alignment, so that kernels see the same addresses on every tier


class _Block(NamedTuple):
    """One reusable piece of ordinary memory."""

    array: np.ndarray[tuple[int], np.dtype[np.uint8]]
    nbytes: int


_OWN_USES: Final = 2  # of a slot's storage: by the slot's tensor, and by whoever asks


class DeviceSlot:
    """Room for one record on the device. Created by `DeviceTier.allocate`."""

    def __init__(self, tier: DeviceTier, nbytes: int, block: _Block | None) -> None:
        self.nbytes = nbytes
        self._tier = tier
        self._block = block
        self._base: torch.Tensor | None = None
        self._handed_out: list[weakref.ref[memoryview]] = []
        if block is None:
            with torch.inference_mode(mode=False):
                self._base = torch.empty(nbytes, dtype=torch.uint8, device=tier.device)
            if tier.poison:
                self._base.fill_(POISON)

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
        """Whether a tensor handed out earlier is still alive."""
        if self._base is not None:
            return uses_of(self._base.untyped_storage()) > _OWN_USES
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
        ahead_bytes: most that the caller has let go and the device has not; see `tiers.link`.
        poison: debug mode: what nobody should use is no number, see there.
    """

    def __init__(
        self, device: torch.device, *, ahead_bytes: int = AHEAD_BYTES, poison: bool = False
    ) -> None:
        self.device = device
        self.poison = poison
        self._spare: defaultdict[int, list[_Block]] = defaultdict(list)
        self._link: Link | None = None
        if device.type == "cuda":
            self._link = Link(device, ahead_bytes=ahead_bytes, poison=poison)

    def register(self, address: int, nbytes: int) -> None:
        """Let copies reach this host memory directly; without it they go through a buffer.

        Does nothing on a CPU; where the driver refuses, there is a warning.
        """
        if self._link is not None and nbytes:
            self._link.register(address, nbytes)

    def unregister(self) -> None:
        """Wait for all copies, and take back what was registered."""
        if self._link is not None:
            self._link.close()

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Room for ``nbytes``; used again from what was freed where that fits exactly."""
        if self.device.type != "cpu":
            return DeviceSlot(self, nbytes, None)
        spare = self._spare[nbytes]
        return DeviceSlot(self, nbytes, spare.pop() if spare else self._poisoned(_block(nbytes)))

    def recycle(self, block: _Block) -> None:
        """Take back memory that nothing refers to any more."""
        self._spare[block.nbytes].append(self._poisoned(block))

    def _poisoned(self, block: _Block) -> _Block:
        if self.poison:
            block.array.fill(POISON)
        return block

    def upload(self, host: torch.Tensor) -> tuple[torch.Tensor, Hop | None]:
        """Bring a tensor to the device.

        Args:
            host: contiguous.

        Returns:
            The tensor on the device, complete for all later work on the current stream, and the
            copy if there is one; what is there already is given back as it is.
        """
        if self._link is None or host.device.type != "cpu":
            return host, None
        return self._link.upload(host)

    def offload(self, here: torch.Tensor, host: torch.Tensor) -> Hop | None:
        """Copy what all work so far on the current stream makes of a tensor.

        Args:
            here: on the device.
            host: of the same shape; in host memory, or on the device as well.

        Returns:
            The copy if it is under way; None if it is done, or ordered by the stream.
        """
        if self._link is None or host.device.type != "cpu":
            if here.data_ptr() != host.data_ptr() or here.dtype != host.dtype:
                host.copy_(here)
            return None
        return self._link.offload(here, host)

    def order(self) -> Order:
        """For one thing that several streams may work on."""
        return Order(self.device)

    def link_stats(self) -> LinkStats:
        """What was copied, and waited for; nothing on a CPU."""
        return LinkStats() if self._link is None else self._link.stats

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
