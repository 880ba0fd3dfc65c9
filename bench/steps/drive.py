"""What the drive gives right now, through our own engine, in requests like those of training."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.facts import EngineFacts, PathFacts, engine_facts, path_facts
from bench.job import OPS, Job, Window
from bench.lane import Lane, open_places
from bench.run import make_buffer
from bench.steps.ideal import Speeds
from bench.workload import bandwidth, measure, write_through

_REQUEST_BYTES: Final = 8 * 2**20  # a tile of optimizer state is of that order
_WARMUP: Final = 0.2  # of the window


@dataclass(frozen=True)
class Drive:
    """One probe.

    Args:
        speeds: found.
        path: where.
        engine: what our engine was granted there.
    """

    speeds: Speeds
    path: PathFacts
    engine: EngineFacts


@dataclass(frozen=True)
class Probe:
    """How to look.

    Args:
        root: a folder on the drive.
        seconds: for each of reading, writing and both.
        size_bytes: of the file.
    """

    root: Path
    seconds: float
    size_bytes: int = 2**28

    def look(self) -> Drive:
        """Measure.

        Raises:
            ConfigError: the path is no folder, or without room.
            TransferError: the drive failed.
        """
        window = Window(self.seconds, self.seconds * _WARMUP)
        request_bytes = min(_REQUEST_BYTES, self.size_bytes)
        job = Job("mixed", self.size_bytes, asked_request_bytes=request_bytes, window=window)
        with contextlib.ExitStack() as closing:
            (place,) = closing.enter_context(open_places([self.root], self.size_bytes))
            lane = closing.enter_context(Lane(place, make_buffer(job, areas=2), job))
            write_through(lane)
            found = {op: bandwidth([measure(lane, op, window=window)]) for op in OPS}
            bytes_per_s = {op: each.moved_bytes / each.seconds for op, each in found.items()}
            speeds = Speeds(bytes_per_s["read"], bytes_per_s["write"], bytes_per_s["mixed"])
            return Drive(speeds, path_facts(place), engine_facts(lane))
