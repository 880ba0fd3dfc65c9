"""Whether a file holds what was written to it, byte for byte, and where it belongs.

Two passes, neither in a timed window. First, what the job left is compared. A job's data repeats,
since it comes from one memory over and over; a block that landed just a repetition away from its
place would not be seen. So the second pass writes the whole file anew, every sector stamped with
its own offset in the file and the seed, and compares that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bench.job import Op
from bench.lane import Lane, Order
from bench.workload import walk
from tiering.errors import TieringError


class VerifyError(TieringError):
    """What was written did not come back."""


def verify(lane: Lane) -> int:
    """Compare the file with what must be in it, then once more with contents that never repeat.

    The buffer needs two areas; its data is stamped afterwards.

    Returns:
        Bytes of the file, all of which were compared.

    Raises:
        VerifyError: the first byte that differs.
        TransferError: a transfer failed.
    """
    lane.place.drop_cache()
    for order in _once(lane, "read"):
        _compare(lane, order)
    for order in _once(lane, "write"):
        lane.buffer.stamp(order.offset, order.nbytes)
        lane.start(order).wait()
    lane.sync()
    lane.place.drop_cache()
    for order in _once(lane, "read"):
        lane.buffer.stamp(order.offset, order.nbytes)
        _compare(lane, order)
    return lane.job.size_bytes


def _once(lane: Lane, verb: Op) -> Iterator[Order]:
    job = lane.job
    return itertools.islice(walk(job, verb, job.request_bytes), job.requests_a_pass)


def _compare(lane: Lane, order: Order) -> None:
    lane.start(order).wait()
    wrong_at = lane.buffer.first_difference(order.offset, order.nbytes)
    if wrong_at is None:
        return
    belongs_at = lane.buffer.stamped_for(wrong_at)
    misplaced = "" if belongs_at is None else f"; what stands there was written for {belongs_at}"
    raise VerifyError(
        f"{lane.place.file}: byte {wrong_at} is not what was written (data of seed "
        f"{lane.job.seed}){misplaced}; memory, drive or engine changed it"
    )
