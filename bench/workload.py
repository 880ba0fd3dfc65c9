"""One timed window on one lane: bandwidth or latency.

Bandwidth: requests of many blocks, many queues' worth under way, walk the file from its start over
and over; new ones are made when half of them have ended. The clock runs from the end of the
warm-up, with the queue full, until the last request has ended and, where anything was written, a
flush has returned. The processor time is the whole process's, Python included.

Latency: requests of one block, twice as many as the queue is deep. A request's time runs in the
engine, from when it is given to the kernel until the kernel has ended it; those that stand in the
engine's queue meanwhile keep the drive's queue full and are not counted.

In ``mixed`` reads and writes are started in turn, and every write follows the read of the same
bytes some requests later, as in training, where what was read is updated and written back.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.job import Job, Op, Window
from bench.lane import Lane, Mark, Order
from tiering.aio import AioTransfer, PureTransfer

_QUEUES_WATCHED: Final = 2  # one at the drive, one behind it


@dataclass(frozen=True)
class Bandwidth:
    """What a window moved.

    Args:
        seconds: its length, flush included.
        read_bytes: in it.
        written_bytes: in it.
        blocks: in it, both ways.
        cpu_s: processor time of the process in it, user and system.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    blocks: int
    cpu_s: float

    @property
    def moved_bytes(self) -> int:
        """Both ways."""
        return self.read_bytes + self.written_bytes

    @property
    def gb_per_s(self) -> float:
        """In units of 10**9 bytes."""
        return self.moved_bytes / 1e9 / self.seconds

    @property
    def iops(self) -> float:
        """Blocks a second."""
        return self.blocks / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds for 10**9 bytes."""
        return self.cpu_s / (self.moved_bytes / 1e9) if self.moved_bytes else math.inf

    @property
    def gb_per_s_per_core(self) -> float:
        """What one fully busy processor would move: 10**9 bytes for a processor second."""
        return self.moved_bytes / 1e9 / self.cpu_s if self.cpu_s else math.inf


class Latency(NamedTuple):
    """How long requests of one block took, in microseconds.

    Args:
        requests: how many were measured.
        p50_us: half of them took no longer; the others likewise.
        p90_us: nine in ten.
        p99_us: all but one in a hundred.
        p999_us: all but one in a thousand.
        max_us: the longest.
    """

    requests: int
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float


class Span(NamedTuple):
    """The two ends of a window."""

    first: Mark
    last: Mark


def bandwidth(spans: Sequence[Span]) -> Bandwidth:
    """The figures of one window, or of several that ran at the same time."""
    begin = min((span.first for span in spans), key=lambda mark: mark.at_s)
    end = max((span.last for span in spans), key=lambda mark: mark.at_s)
    return Bandwidth(
        seconds=end.at_s - begin.at_s,
        read_bytes=sum(span.last.read_bytes - span.first.read_bytes for span in spans),
        written_bytes=sum(span.last.written_bytes - span.first.written_bytes for span in spans),
        blocks=sum(span.last.blocks - span.first.blocks for span in spans),
        cpu_s=end.cpu_s - begin.cpu_s,
    )


def walk(job: Job, op: Op, request_bytes: int) -> Iterator[Order]:
    """Requests over the whole file, for ever."""
    extents = [
        (offset, min(request_bytes, job.size_bytes - offset))
        for offset in range(0, job.size_bytes, request_bytes)
    ]
    lag = min(job.requests_in_flight, len(extents) // 2)
    for index in itertools.cycle(range(len(extents))):
        if op != "mixed":
            yield Order(op, *extents[index])
        else:
            yield Order("read", *extents[index])
            yield Order("write", *extents[index - lag])


class _Queue:
    """Requests under way.

    Args:
        lane: of what.
        most: at once.
        at_once: so many must have ended before new ones are made.
    """

    def __init__(self, lane: Lane, most: int, at_once: int = 1) -> None:
        self._lane = lane
        self._most = most
        self._at_once = at_once
        self._flying: list[AioTransfer | PureTransfer] = []
        self.taken_s: list[float] = []

    def start(self, order: Order) -> None:
        """Start one; before that wait until some have ended where there are enough."""
        if len(self._flying) >= self._most:
            self._take_ended(self._at_once)
        self._flying.append(self._lane.start(order))

    def drain(self) -> None:
        """Wait for all."""
        self._take_ended(len(self._flying))

    def _take_ended(self, count: int) -> None:
        self._lane.wait_some(self._flying, count)
        still = []
        for transfer in self._flying:
            if transfer.done():
                transfer.wait()  # raises what went wrong
                self.taken_s.append(transfer.device_s)
            else:
                still.append(transfer)
        self._flying = still


def measure(lane: Lane, op: Op, *, window: Window, stop: threading.Event | None = None) -> Span:
    """Run the bandwidth window of a job.

    Args:
        lane: on what.
        op: what; the job's own, or another.
        window: how long.
        stop: when set, the window ends early.

    Raises:
        TransferError: a transfer failed.
    """
    stop = stop or threading.Event()
    job = lane.job
    queue = _Queue(lane, job.requests_in_flight, job.requests_in_flight // 2)
    orders = walk(job, op, job.request_bytes)
    writes = op != "read"
    if window.warmup_s and not window.requests:
        _flow(queue, orders, Window(seconds=window.warmup_s), stop)
        if writes and not lane.file.info.direct:  # or the flush would pay for the warm-up too
            queue.drain()
            lane.sync()
    first = lane.mark()
    _flow(queue, orders, window, stop)
    queue.drain()
    if writes:
        lane.sync()
    return Span(first, lane.mark())


def _flow(queue: _Queue, orders: Iterator[Order], window: Window, stop: threading.Event) -> None:
    until_s = time.perf_counter() + window.seconds
    count = 0
    while not stop.is_set():
        if count == window.requests if window.requests else time.perf_counter() >= until_s:
            return
        queue.start(next(orders))
        count += 1


def write_through(lane: Lane) -> Span:
    """Write the file once from its start to its end."""
    return measure(lane, "write", window=Window(requests=lane.job.requests_a_pass))


def measure_latency(lane: Lane, op: Op, *, window: Window) -> Latency:
    """Run the latency window of a job.

    Args:
        lane: on what.
        op: what.
        window: half of its seconds, or its count of requests.

    Raises:
        TransferError: a transfer failed.
    """
    job = lane.job
    until_s = time.perf_counter() + window.seconds / 2
    orders = walk(job, op, job.block_bytes)
    if window.requests:
        orders = itertools.islice(orders, window.requests)
    else:
        orders = itertools.takewhile(lambda _: time.perf_counter() < until_s, orders)
    return _watch(lane, orders)


def _watch(lane: Lane, orders: Iterator[Order]) -> Latency:
    queue = _Queue(lane, _QUEUES_WATCHED * lane.job.queue_depth)
    for order in orders:
        queue.start(order)
    queue.drain()
    taken_s = sorted(queue.taken_s)
    return Latency(
        requests=len(taken_s),
        p50_us=rank(taken_s, 0.5) * 1e6,
        p90_us=rank(taken_s, 0.9) * 1e6,
        p99_us=rank(taken_s, 0.99) * 1e6,
        p999_us=rank(taken_s, 0.999) * 1e6,
        max_us=rank(taken_s, 1.0) * 1e6,
    )


def rank(ordered: Sequence[float], part: float) -> float:
    """The value that this part of an ascending sequence does not exceed; 0 for an empty one."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0
