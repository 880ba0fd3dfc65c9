"""Gradients: from the parameters to the unit's gradient record, as they are produced.

Note: the trip of a gradient

Autograd finishes a parameter's gradient; `UnitGradients.deposit` rounds it into its place in the
unit's buffer and lets the original go. When the unit's backward is over, `close` averages over
ranks (`reduce_scatter`) and the own part is the record, in host memory (or on the drive, when its
budget cannot hold all). With one rank the buffer *is* the record. More micro-batches add to what is
there. Parameters that got no gradient stay marked as such, and the update skips them, as torch
does. At the step `take` hands over what came; the record stays until the update has used it.
"""

from __future__ import annotations

from typing import Final

import torch

from infinity.comm import Communicator
from infinity.unit import Unit
from tiering.prefetch import Prefetcher
from tiering.store import Lease
from tiering.trace import Access

_PART_NUMEL: Final = 2**18  # squared at once: 1 MiB of them, which stays in the cache


class UnitGradients:
    """The gradients of one unit in one training cycle (all micro-batches of a step).

    Args:
        unit: whose.
        pager: leases the record.
        early: whether they are used under backward.
    """

    def __init__(
        self, unit: Unit, pager: Prefetcher, comm: Communicator, *, early: bool = False
    ) -> None:
        self.unit = unit
        self.early = early
        self.arrived: set[int] = set()
        """Parameters that got a gradient in this cycle, by index."""
        self.square_sum = 0.0
        """Of the own part of all that came in this cycle; valid after `close`."""
        self.is_spent = False
        """Whether the update has been made, and the cycle has not ended."""
        self._seen: set[int] = set()  # in this backward pass
        self._pager = pager
        self._comm = comm
        self._lease: Lease | None = None
        self._whole: torch.Tensor | None = None

    @torch.no_grad()
    def deposit(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient.

        Args:
            index: which parameter of the unit.
            gradient: its shape, any floating type and layout.

        Raises:
            RuntimeError: the unit was updated under this very backward, or the one before.
        """
        if self.is_spent:
            raise RuntimeError(
                f"parameter {self.unit.names[index]!r} got a gradient after its unit was updated: "
                "backward ran twice before a step, or visits the parameter more than once; set "
                "tiering.update_in_backward to false"
            )
        whole = self._open()
        place = self.unit.layout.parameters[index]
        target = whole[place.start : place.stop].view(gradient.shape)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if index in self.arrived:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        self.arrived.add(index)
        self._seen.add(index)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has got a gradient in this backward pass."""
        return len(self._seen) == len(self.unit.parameters)

    def close(self) -> None:
        """The unit's backward is over: reduce, and let the record go, if anything came."""
        self._seen.clear()
        if self._lease is None or self._whole is None:
            return
        record = self._lease["gradient"]
        self._fill_missing(self._whole)
        if self._whole is not record:
            shard = torch.empty_like(record, device=self._whole.device)
            record.add_(self._comm.reduce_scatter(self._whole, shard))
        self.square_sum = square_sum(record)
        self._lease.release()
        self._lease = self._whole = None

    def lease(self) -> Lease:
        """The record, for the update to read: ``gradient``, shape (shard numel,)."""
        return self._pager.lease(self.unit.records.gradient.key, Access.READ)

    def take(self) -> frozenset[int]:
        """Hand over this cycle's gradients, by index; the record is the taker's to `drop`."""
        self.close()
        arrived = frozenset(self.arrived)
        self.arrived.clear()
        return arrived

    def drop(self) -> None:
        """Forget the record."""
        self._pager.discard(self.unit.records.gradient.key)

    def discard(self) -> None:
        """Forget everything that came in this cycle."""
        if self.take():
            self.drop()

    def _open(self) -> torch.Tensor:
        if self._whole is not None:
            return self._whole
        self.unit.settle()  # or this would overwrite what an update still needs
        fresh = not self.arrived
        access = Access.OVERWRITE if fresh else Access.UPDATE
        self._lease = self._pager.lease(self.unit.records.gradient.key, access)
        record = self._lease["gradient"]
        self._whole = record
        if self._comm.size > 1:
            if fresh:
                record.zero_()
            self._whole = record.new_zeros(self.unit.layout.numel)
        return self._whole

    def _fill_missing(self, whole: torch.Tensor) -> None:
        """Zero what no gradient came for, and what pads the others."""
        for index, place in enumerate(self.unit.layout.parameters):
            padded = self.unit.layout.padded(index)
            whole[place.stop if index in self.arrived else place.start : padded.stop].zero_()


def square_sum(gradient: torch.Tensor) -> float:
    """The sum of the squares of a flat gradient of any floating type.

    Squares are made in fp32 and summed by pairs, part by part, so that the error does not grow with
    the number of elements.
    """
    squares = torch.empty(
        min(_PART_NUMEL, gradient.numel()), dtype=torch.float32, device=gradient.device
    )
    total = 0.0
    for part in gradient.split(_PART_NUMEL):
        square = squares[: part.numel()].copy_(part)
        total += float(square.mul_(square).sum())
    return total
