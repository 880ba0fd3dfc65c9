"""What a record is: a key, and named tensors that are stored and moved together.

A record's tensors follow each other without a gap, in the order given, in memory and on the drive
alike. So one transfer moves the whole record, and a view of any of its tensors is a slice.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from tiering.errors import ConfigError


class Tier(enum.Enum):
    """Where a record is at home. The values are the config's ``device`` names."""

    DEVICE = "none"
    HOST = "cpu"
    NVME = "nvme"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a record.

    Args:
        name: unique within the record; it is the tensor's name in the record file.
        dtype: any torch dtype.
        shape: sizes; an empty tuple is a 0-d tensor, a zero among them an empty tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements alone."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class RecordSpec:
    """A record: what the store moves, and what one record file holds.

    Args:
        key: unique within a store; any string.
        tensors: at least one. Each must start at a multiple of its own element size, which the
            order from wide to narrow dtypes guarantees.

    Raises:
        ConfigError: no tensor, a name twice, or a tensor that would start misaligned.
    """

    key: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"record {self.key!r} needs tensors with distinct names, got {names}")
        for tensor, offset in zip(self.tensors, self.offsets_bytes, strict=True):
            if offset % tensor.dtype.itemsize:
                raise ConfigError(
                    f"record {self.key!r}: tensor {tensor.name!r} ({tensor.dtype}) would start at "
                    f"byte {offset}; order the tensors from wide to narrow dtypes"
                )

    @cached_property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Where each tensor starts within the payload."""
        offsets, at = [], 0
        for tensor in self.tensors:
            offsets.append(at)
            at += tensor.nbytes
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def as_bytes(self) -> RecordSpec:
        """The same payload as one tensor ``bytes``, uint8."""
        return RecordSpec(self.key, (TensorSpec("bytes", torch.uint8, (self.nbytes,)),))

    def views(self, payload: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, by name, as views of a payload.

        Args:
            payload: uint8, at least `nbytes`, on any device.
        """
        return {
            t.name: payload[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for t, at in zip(self.tensors, self.offsets_bytes, strict=True)
        }
