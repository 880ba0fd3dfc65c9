"""Gradients: from the parameters to the unit's gradient record, as they are produced.

Note: the trip of a gradient

Autograd finishes a parameter's gradient; `UnitGradients.deposit` rounds it into its place in the
unit's buffer and lets the original go. When the unit's backward is over, `close` brings the buffer
to the record, in host memory (or on the drive, when its budget cannot hold all). More micro-batches
add to what is there. Parameters that got no gradient stay marked as such, and the update skips
them, as torch does. At the step `take` hands over what came; the record stays until the update has
used it.

Note: what the buffer is

    one rank, record on the same device:     the record itself; `close` has only to let it go
    one rank, record in another place:       memory of the device; `close` offloads it
    several ranks, gradients partitioned     memory of the device; `close` sums it over the ranks
      (stages 2 and 3):                        and adds the own part of the mean to the record
    several ranks, gradients whole           the record itself, whole; `reduce` makes it the mean
      (stages 0 and 1):                        at the step

(On a GPU whose states are elsewhere gradients are partitioned at every stage: whole ones would have
to wait in the host. See `Outline.whole_gradients`.)

A rank adds what it has got when the ranks come to sum a unit, be it all, a part or nothing; what
comes later goes into a further sum. So the mean does not depend on who used what, and when. A sum
is made while backward goes on with the unit before; it is added to the record when the next sum has
begun, when backward ends, or when somebody wants to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from infinity.agreement import Agreement, Collective
from infinity.comm import Communicator
from infinity.partition import Extent
from infinity.unit import Unit
from tiering.prefetch import Prefetcher
from tiering.store import Lease
from tiering.tiers.device import DeviceTier
from tiering.trace import Access

_SUMS: Final = 1  # under way beside backward, each of a unit
_PART_NUMEL: Final = 2**18  # squared at once: 1 MiB of them, which stays in the cache


@dataclass(frozen=True)
class Reduction:
    """How the ranks' gradients become one, their mean."""

    comm: Communicator
    agreement: Agreement
    device: DeviceTier
    """Where the sum is made."""
    whole_gradients: bool = False
    """Whether all of each gradient waits for the sum at the step; else the own part of the sum does
    that is made after each backward pass.
    """
    dtype: torch.dtype | None = None
    """What travels; None: the type of the record."""
    scale: Callable[[], float] = lambda: 1.0
    """By which gradients are too large."""
    predivisor: float = 1.0
    """Of gradients before the sum; what is left of the number of ranks divides it."""
    under_way: list[UnitGradients] = field(default_factory=list)
    """Those whose sum was begun, and not added to the record yet."""


class UnitGradients:
    """The gradients of one unit in one training cycle (all micro-batches of a step).

    Args:
        unit: whose.
        pager: leases the record.
        reduction: over the ranks.
        early: whether they are used under backward.
        on_device: whether the record is where gradients are made.
    """

    def __init__(
        self,
        unit: Unit,
        pager: Prefetcher,
        reduction: Reduction,
        *,
        early: bool = False,
        on_device: bool = True,
    ) -> None:
        self.unit = unit
        self.early = early
        self.arrived: set[int] = set()
        """Parameters that got a gradient in this cycle, by index."""
        self._square_sum: torch.Tensor | float = 0.0
        self._sum: Callable[[], torch.Tensor] | None = None  # ends the one under way: the mean
        self.is_spent = False
        """Whether the update has been made, and the cycle has not ended."""
        self._seen: set[int] = set()  # in this backward pass
        self._pager = pager
        self._reduction = reduction
        # Whether gradients are collected in the record itself.
        self._in_record = on_device and (reduction.comm.size == 1 or reduction.whole_gradients)
        self._number = reduction.agreement.add(Collective(self._begin_sum))
        self._lease: Lease | None = None
        self._whole: torch.Tensor | None = None
        self._is_fresh = True  # nothing of this cycle is in the record

    @torch.no_grad()
    def deposit(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient.

        Args:
            index: which parameter of the unit.
            gradient: its shape, any floating type and layout.

        Raises:
            RuntimeError: the unit was updated under this very backward, or the one before.
        """
        self._refuse_if_spent(index)
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

    def _refuse_if_spent(self, index: int) -> None:
        if self.is_spent:
            raise RuntimeError(
                f"the unit of parameter {self.unit.names[index]!r} was updated under backward "
                "already: backward ran twice before a step, visits the parameter more than once, "
                "or its gradient is asked for; set tiering.update_in_backward to false"
            )

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has got a gradient in this backward pass."""
        return len(self._seen) == len(self.unit.parameters)

    def close(self) -> None:
        """The unit's backward is over: reduce, and let the record go, if anything came."""
        self._seen.clear()
        if self._whole is None:
            return
        self.unit.order.follow(self._whole)
        if not self._in_record:
            self._reduction.agreement.perform(self._number)
            return
        self._fill_missing(self._whole)
        if self._reduction.comm.size == 1:
            self._square_sum = square_sum(self._whole)
        self._end_lease()

    @property
    def square_sum(self) -> torch.Tensor | float:
        """Of the own part of all that came in this cycle; valid after `close`, or `reduce`."""
        self.finish()
        return self._square_sum

    def reduce(self) -> None:
        """At the step, all ranks together: make whole gradients the mean of all.

        Where that has been done already there is nothing left to do.
        """
        reduction = self._reduction
        if reduction.comm.size == 1 or not self._in_record:
            return
        self.unit.settle()  # as in `_open`, where this rank may not have been
        fresh = self._is_fresh
        with self._pager.lease(self.unit.records.gradient.key, _access(fresh)) as lease:
            record = lease["gradient"]
            if fresh:
                record.zero_()
            own = record[slice(*self.unit.records.own_of_gradient)]
            own.copy_(self._begin_mean(record)())
            self._square_sum = square_sum(own)
        self._is_fresh = False

    def lease(self) -> Lease:
        """The record, for the update to read: ``gradient``, shape (shard numel,)."""
        self.finish()
        return self._pager.lease(self.unit.records.gradient.key, Access.READ)

    def take(self) -> frozenset[int]:
        """Hand over this cycle's gradients, by index; the record is the taker's to `drop`."""
        self.close()
        self.finish()
        arrived = frozenset(self.arrived)
        self.arrived.clear()
        self._is_fresh = True
        return arrived

    def drop(self) -> None:
        """Forget the record."""
        self._pager.discard(self.unit.records.gradient.key)

    def discard(self) -> None:
        """Forget everything that came in this cycle, on this rank."""
        self._seen.clear()
        if self._sum is not None:
            self._sum()
            self._end_sum()
        if self._lease is not None:
            self._end_lease()
        self._whole = None
        empty = self._is_fresh
        self.arrived.clear()
        self._is_fresh = True
        if not empty:
            self.drop()

    @torch.no_grad()
    def read(self, index: int, out: torch.Tensor) -> bool:
        """Copy this rank's part of a parameter's gradient.

        Args:
            index: which parameter of the unit.
            out: zeros, shape (numel,); the sum of it over the ranks is the gradient.

        Returns:
            Whether the parameter has one on this rank.

        Raises:
            RuntimeError: it was used under backward already.
        """
        self._refuse_if_spent(index)
        self.close()
        self.finish()
        if self._is_fresh:
            return index in self.arrived
        with self.lease() as lease:
            for mine, theirs in self._parts(index):
                out[mine].copy_(lease["gradient"][theirs])
        out.div_(self._reduction.scale())
        if self._in_record:
            out.div_(self._reduction.comm.size)
        return index in self.arrived

    @torch.no_grad()
    def write(self, index: int, value: torch.Tensor) -> None:
        """Put this rank's part of a parameter's gradient, shape (numel,), in place of what came."""
        self._refuse_if_spent(index)
        self.close()
        self.finish()
        fresh, self._is_fresh = self._is_fresh, False
        with self._pager.lease(self.unit.records.gradient.key, _access(fresh)) as lease:
            record = lease["gradient"]
            if fresh:
                record.zero_()
            for mine, theirs in self._parts(index):
                record[theirs].copy_(value[mine]).mul_(self._reduction.scale())
            self._square_sum = square_sum(record[slice(*self.unit.records.own_of_gradient)])
        self.arrived.add(index)

    def _parts(self, index: int) -> Iterator[tuple[slice, slice]]:
        """What of a parameter the record holds: which of its elements, at which of the record's."""
        records, place = self.unit.records, self.unit.layout.parameters[index]
        start = records.own.start - records.own_of_gradient.start
        held = Extent(start, start + records.gradient.tensors[0].numel)
        part = place.intersect(held)
        if part.numel:
            yield slice(*part.relative_to(place.start)), slice(*part.relative_to(start))

    def first_nonfinite(self) -> int | None:
        """The first parameter, by index, with an infinity or no number in this rank's part."""
        records = self.unit.records
        with self.lease() as lease:
            own = lease["gradient"][slice(*records.own_of_gradient)]
            for index, place in enumerate(self.unit.layout.parameters):
                part = place.intersect(records.own)
                values = own[slice(*part.relative_to(records.own.start))]
                if part.numel and not bool(values.isfinite().all()):
                    return index
        return None

    def _open(self) -> torch.Tensor:
        if self._whole is not None:
            self.unit.order.follow(self._whole)
            return self._whole
        self.unit.settle()  # or this would overwrite what an update still needs
        records = self.unit.records
        if self._in_record:
            self._lease = self._pager.lease(records.gradient.key, _access(self._is_fresh))
            self._is_fresh = False
            self._whole = self._lease["gradient"]
        else:
            dtype = records.gradient.tensors[0].dtype
            numel = self.unit.layout.numel
            self._whole = torch.zeros(numel, dtype=dtype, device=self._reduction.device.device)
        return self._whole

    def _end_lease(self) -> None:
        assert self._lease is not None
        self._lease.release()
        self._lease = self._whole = None

    def _fill_missing(self, whole: torch.Tensor) -> None:
        """Zero what no gradient came for, and what pads the others."""
        for index, place in enumerate(self.unit.layout.parameters):
            padded = self.unit.layout.padded(index)
            whole[place.stop if index in self.arrived else place.start : padded.stop].zero_()

    @torch.no_grad()
    def _begin_sum(self) -> None:
        """Take part in a sum with what has come so far."""
        self.finish()
        self._sum, self._whole = self._begin_mean(self._open()), None
        under_way = self._reduction.under_way
        under_way.append(self)
        most = 0 if self._reduction.comm.size == 1 else _SUMS
        while len(under_way) > most:
            under_way[0].finish()

    def finish(self) -> None:
        """Add the sum under way, if there is one, to the record."""
        if self._sum is not None:
            self._add(self._reduction.agreement.guarded(self._sum))

    @torch.no_grad()
    def _add(self, mean: torch.Tensor) -> None:
        device = self._reduction.device
        self.unit.order.follow(mean)
        lease = self._pager.lease(self.unit.records.gradient.key, _access(self._is_fresh))
        try:
            if not self._is_fresh:
                before, _ = device.upload(lease["gradient"])
                mean = mean.to(before.dtype) + before  # beside it: this may fail, and be done again
            mean = mean.to(lease["gradient"].dtype)
            self._square_sum = square_sum(mean)
            hop = device.offload(mean, lease["gradient"])
        except BaseException:
            lease.abandon()
            raise
        lease.release_behind(hop)
        self._end_sum()
        self._is_fresh = False

    def _end_sum(self) -> None:
        self._sum = None
        self._reduction.under_way.remove(self)

    def _begin_mean(self, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum over all ranks; ``whole`` is used up.

        Returns:
            What ends that, and returns this rank's part of the mean, as often as it is called.
        """
        comm, predivisor = self._reduction.comm, self._reduction.predivisor
        if comm.size == 1:
            return lambda: whole
        given = whole.to(self._reduction.device.device, self._reduction.dtype or whole.dtype)
        if predivisor != 1.0:
            given.div_(predivisor)
        if self.unit.layout.world_size == 1:
            summed, finish = given, comm.begin_all_reduce(given)
        else:
            summed = given.new_empty(self.unit.layout.shard_numel)
            finish = comm.begin_reduce_scatter(given, summed)

        @functools.cache
        def end() -> torch.Tensor:
            finish()
            return summed.div_(comm.size / predivisor) if predivisor != comm.size else summed

        return end


def _access(fresh: bool) -> Access:  # noqa: FBT001
    return Access.OVERWRITE if fresh else Access.UPDATE


def square_sum(gradient: torch.Tensor) -> torch.Tensor | float:
    """The sum of the squares of a flat gradient of any floating type.

    On a CPU squares are made in fp32 and summed by pairs, part by part, so that the error does not
    grow with the number of elements. A GPU does that by itself, and the sum stays there.
    """
    if gradient.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return norm.double().square()
    squares = torch.empty(min(_PART_NUMEL, gradient.numel()), dtype=torch.float32, device="cpu")
    total = 0.0
    for part in gradient.split(_PART_NUMEL):
        square = squares[: part.numel()].copy_(part)
        total += float(square.mul_(square).sum())
    return total
