"""What is to be measured: sizes, depth, backend, and how long.

Note: requests and blocks. The engine cuts a request into blocks and keeps `queue_depth` of them at
the drive. A request costs Python tens of microseconds, and hundreds where it has slept long enough
for the caches to forget it. So bandwidth is measured with requests of many blocks, of which eight
are under way each way and four are made at a time: the drive never waits for Python, and Python's
share of the processor time is small. The requests take turns in the memory of one. In ``mixed``
the engine gives reads and writes half of the queue each, however large their requests are. Latency
is measured in a window of its own, with requests of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tiering.aio import AioConfig
from tiering.aio.config import BackendName
from tiering.errors import ConfigError
from tiering.sizes import (
    format_bytes,
    is_power_of_two,
    power_of_two_above,
    power_of_two_below,
    write_bytes,
)

Op = Literal["read", "write", "mixed"]
Cache = Literal["direct", "buffered"]
Registration = Literal["registered", "unregistered"]
Pages = Literal["huge", "small"]

OPS: Final[tuple[Op, ...]] = ("read", "write", "mixed")

_REQUEST_BYTES: Final = 256 * 2**20
_REQUESTS_EACH_WAY: Final = 8
_REQUESTS_A_FILE: Final = 16  # at least so many, where blocks allow, or the walk would meet itself
_QUEUES_EACH_WAY: Final = 4  # at least: while half of them are made anew the drive has two


@dataclass(frozen=True)
class Window:
    """How long to measure.

    Args:
        seconds: until then requests are started; ending them counts as well.
        warmup_s: before that, unmeasured.
        requests: when not 0, so many are measured instead, without a warm-up.
    """

    seconds: float = 5.0
    warmup_s: float = 1.0
    requests: int = 0

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.warmup_s < 0 or self.requests < 0:
            raise ConfigError(
                "a window needs more than 0 seconds, and neither a negative warm-up nor count; "
                f"got {self.seconds} s, {self.warmup_s} s and {self.requests}"
            )


@dataclass(frozen=True)
class Job:
    """One measurement on one file.

    Args:
        op: what is done; ``mixed`` is one read for one write.
        size_bytes: of the file.
        block_bytes: of one transfer of the drive; a power of two.
        queue_depth: blocks at the drive.
        threads: of the thread backend; 0: its own choice.
        backend: a named one is an error where it cannot be had.
        cache: past the page cache or through it.
        registration: whether the memory is registered with the ring.
        pages: what the memory asks the kernel for.
        asked_request_bytes: of one request; a power of two; 0: as the note at the head says.
        window: how long.
        seed: of the data.

    Raises:
        ConfigError: a value that cannot work.
    """

    op: Op
    size_bytes: int
    block_bytes: int = 2**20
    queue_depth: int = 32
    threads: int = 0
    backend: BackendName = "auto"
    cache: Cache = "direct"
    registration: Registration = "registered"
    pages: Pages = "huge"
    asked_request_bytes: int = 0
    window: Window = Window()
    seed: int = 0

    def __post_init__(self) -> None:
        self.config()
        blocks = round(self.size_bytes / self.block_bytes) or 1
        if self.size_bytes != blocks * self.block_bytes:
            raise ConfigError(
                f"a file of {self.size_bytes} bytes is not a multiple of blocks of "
                f"{self.block_bytes} bytes; the nearest that is has --size "
                f"{write_bytes(blocks * self.block_bytes)}; use that, or change --block-size"
            )
        asked_bytes = self.asked_request_bytes
        if asked_bytes and not (is_power_of_two(asked_bytes) and asked_bytes >= self.block_bytes):
            raise ConfigError(
                f"a request must be a power of two and at least a block of {self.block_bytes} "
                f"bytes, got {asked_bytes}"
            )

    def config(self) -> AioConfig:
        """The engine's settings."""
        return AioConfig(
            block_bytes=self.block_bytes,
            queue_depth=self.queue_depth,
            threads=self.threads,
            backend=self.backend,
            direct="off" if self.cache == "buffered" else "auto",
            max_files=1,
        )

    @property
    def queue_bytes(self) -> int:
        """At the drive at once."""
        return self.queue_depth * self.block_bytes

    @property
    def request_bytes(self) -> int:
        """Of one request in the bandwidth window: a power of two."""
        wanted_bytes = self.asked_request_bytes
        if not wanted_bytes:
            wanted_bytes = max(_REQUEST_BYTES, power_of_two_above(2 * self.queue_bytes))
        most_bytes = power_of_two_below(self.size_bytes // _REQUESTS_A_FILE)
        return max(self.block_bytes, min(wanted_bytes, most_bytes))

    @property
    def requests_each_way(self) -> int:
        """Under way at once in the bandwidth window, for each of reading and writing."""
        least = -(-_QUEUES_EACH_WAY * self.queue_bytes // self.request_bytes)
        return max(_REQUESTS_EACH_WAY, least)

    @property
    def requests_in_flight(self) -> int:
        """Under way at once in the bandwidth window."""
        return self.requests_each_way * (2 if self.op == "mixed" else 1)

    @property
    def memory_bytes(self) -> int:
        """Of one area of memory for it: a power of two, with a place for what is at the drive."""
        return power_of_two_above(max(self.request_bytes, 2 * self.queue_bytes))

    @property
    def requests_a_pass(self) -> int:
        """So many move as many bytes as the file has."""
        return -(-self.size_bytes // self.request_bytes)

    def describe(self) -> str:
        """In one line, for a title."""
        text = (
            f"{self.op}, {format_bytes(self.size_bytes)} in blocks of "
            f"{format_bytes(self.block_bytes)}, queue depth {self.queue_depth}"
        )
        return f"{text}, {self.threads} threads" if self.threads else text
