"""The picture of a step: what each resource did when, as a Chrome trace that Perfetto opens.

torch's profiler knows the processor and the GPU; what a drive did an engine tells, by another
clock. Both are put on the profiler's, and what a reader looks for first is gathered in a process
"step" with a track for each resource.

Note: a step in full flow. Nothing waits within the step, unlike in the measured ones. A step of its
own goes before it in the same recording and is cut off: reads ahead, and writes behind, are under
way when the step begins. What overlaps the step is kept, from the moment it is asked for until the
device has done all of it.

Note: the clocks. The profiler has its own; what is told by the host's monotonic clock
(`time.perf_counter_ns`) is moved onto it. Some ranges are recorded between two looks at the host's
clock: in the one with the closest looks both clocks are known at the same moment.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.steps.link import finish

Event = dict[str, Any]
"""One of a Chrome trace; times are microseconds."""

ROWS: Final = ("passes", "engine", "compute", "upload", "offload", "read", "write")
"""Tracks: the passes as the caller sees them, what the engine does in them, and the resources."""

PASSES: Final = ("forward", "backward", "update")
PID: Final = 2**23
"""Of the process "step": no real one has such a number."""

_ENGINE: Final = "infinity."
_THEIR_PASSES: Final = ("infinity.forward", "infinity.backward", "infinity.step")
_ROW_OF_CATEGORY: Final = {"kernel": "compute", "gpu_memset": "compute", "gpu_memcpy": "compute"}
_CLOCK: Final = "clock"
_STEP: Final = "whole step"
_LOOKS: Final = 10


class Transfer(NamedTuple):
    """One of a drive, by the host's monotonic clock.

    Args:
        row: "read" or "write".
        record: its key.
        nbytes: moved.
        asked_ns: when it was put on its way.
        begin_ns: when the drive began.
        end_ns: when it ended.
    """

    row: str
    record: str
    nbytes: int
    asked_ns: int
    begin_ns: int
    end_ns: int


class Span(NamedTuple):
    """A stretch of a row, by the profiler's clock.

    Args:
        row: one of `ROWS`.
        name: of what was done.
        begin_us: when it began.
        end_us: when it ended.
        facts: more of it, for a reader.
    """

    row: str
    name: str
    begin_us: float
    end_us: float
    facts: dict[str, Any]


class Window(NamedTuple):
    """The step, by the profiler's clock, in microseconds."""

    begin_us: float
    end_us: float

    def overlaps(self, begin_us: float, end_us: float) -> bool:
        """Whether any of that is in the step."""
        return end_us >= self.begin_us and begin_us <= self.end_us


def record(
    steps: Sequence[Callable[[], None]],
    ended: Callable[[], Iterable[Transfer]],
    *,
    device: torch.device,
    path: Path,
) -> None:
    """Record the last of some steps, and write the trace.

    Args:
        steps: run one after another; all but the last one only lead in.
        ended: waits for all transfers of the drive that have begun, and returns them.
        device: that computes.
        path: of the trace, JSON packed by gzip.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        looks = list(_look_at_clocks())
        for step in steps[:-1]:
            step()
        with record_function(_STEP):
            steps[-1]()
            finish(device)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"), strict=False)
    _save(path, merge(trace, ended(), looks))


def _look_at_clocks() -> Iterator[tuple[int, int]]:
    for number in range(_LOOKS):
        before_ns = time.perf_counter_ns()
        with record_function(f"{_CLOCK} {number}"):
            after_ns = time.perf_counter_ns()
        yield before_ns, after_ns


def merge(
    trace: dict[str, Any], transfers: Iterable[Transfer], looks: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Gather the step's rows, and cut off what is not of the step.

    Args:
        trace: the profiler's, of a recording by `record`.
        transfers: of the drive.
        looks: at the host's clock, in nanoseconds, before and within the range of that number.
    """
    events: list[Event] = trace["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    (whole,) = (e for e in complete if e["name"] == _STEP and e.get("cat") == "user_annotation")
    window = Window(whole["ts"], whole["ts"] + whole["dur"])
    ahead_us = _ahead_us(complete, looks)
    spans = [*_of_profiler(complete), *(_of_drive(one, ahead_us) for one in transfers)]
    rows = [span for span in spans if window.overlaps(span.begin_us, span.end_us)]
    kept = [
        event
        for event in events
        if event.get("ph") == "M" or window.overlaps(event["ts"], event["ts"] + event.get("dur", 0))
    ]
    return {
        **trace,
        "traceEvents": [*_events(rows), *kept],
        "otherData": window._asdict(),
    }


def _ahead_us(complete: Iterable[Event], looks: Sequence[tuple[int, int]]) -> float:
    """By how much the profiler's clock is ahead of the host's."""
    begins = {event["name"]: event["ts"] for event in complete}
    _, ahead_us = min(
        (after - before, begins[f"{_CLOCK} {number}"] - (before + after) / 2e3)
        for number, (before, after) in enumerate(looks)
    )
    return float(ahead_us)


def _of_drive(one: Transfer, ahead_us: float) -> Span:
    return Span(
        one.row,
        one.record,
        one.begin_ns / 1e3 + ahead_us,
        one.end_ns / 1e3 + ahead_us,
        {
            "bytes": one.nbytes,
            "GB/s": one.nbytes / max(one.end_ns - one.begin_ns, 1),
            "queued, ms": (one.begin_ns - one.asked_ns) / 1e6,
        },
    )


def _of_profiler(complete: Sequence[Event]) -> Iterator[Span]:
    """What is in its rows: without a GPU torch's outermost operations are the compute."""
    on_gpu = any(event.get("cat") in _ROW_OF_CATEGORY for event in complete)
    computed_until = 0.0
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        row = _row(event)
        is_op = event.get("cat") == "cpu_op" and event["name"].startswith("aten::")
        if is_op and not on_gpu and end > computed_until:
            row, computed_until = "compute", end
        if row is not None:
            yield Span(row, event["name"], begin, end, event.get("args", {}))


def _row(event: Event) -> str | None:
    name, category = event["name"], event.get("cat")
    if category == "user_annotation":
        if name in PASSES:
            return "passes"
        is_engines = name.startswith(_ENGINE) and not name.startswith(_THEIR_PASSES)
        return "engine" if is_engines else None
    if category == "gpu_memcpy" and "HtoD" in name:
        return "upload"
    if category == "gpu_memcpy" and "DtoH" in name:
        return "offload"
    return _ROW_OF_CATEGORY.get(str(category))


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans side by side where they overlap: each lane has one after another."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.begin_us):
        free = (lane for lane in found if lane[-1].end_us <= span.begin_us)
        lane = next(free, None)
        if lane is None:
            found.append([span])
        else:
            lane.append(span)
    return found


def _events(rows: Sequence[Span]) -> Iterator[Event]:
    yield _about(0, "process_name", name="step")
    yield _about(0, "process_sort_index", sort_index=-1)
    track = 0
    for row in ROWS:
        for number, lane in enumerate(lanes(s for s in rows if s.row == row), start=1):
            track += 1
            yield _about(track, "thread_name", name=row if number == 1 else f"{row} {number}")
            yield _about(track, "thread_sort_index", sort_index=track)
            for span in lane:
                yield {
                    "ph": "X",
                    "pid": PID,
                    "tid": track,
                    "cat": row,
                    "name": span.name,
                    "ts": span.begin_us,
                    "dur": span.end_us - span.begin_us,
                    "args": span.facts,
                }


def _about(track: int, what: str, **value: object) -> Event:
    return {"ph": "M", "pid": PID, "tid": track, "name": what, "args": value}


class Picture(NamedTuple):
    """What is to be seen in a trace.

    Args:
        spans: of the rows.
        window: the step.
        title: on which machine it ran, and the like; empty if nobody has said.
    """

    spans: list[Span]
    window: Window
    title: str


def entitle(path: Path, title: str) -> None:
    """Write into a trace what it shows."""
    trace = _load(path)
    trace["otherData"]["title"] = title
    _save(path, trace)


def _load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
        return trace


def _save(path: Path, trace: dict[str, Any]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


def read(path: Path) -> Picture:
    """Read a trace that `record` has written."""
    trace = _load(path)
    spans = [
        Span(event["cat"], event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
        for event in trace["traceEvents"]
        if event.get("pid") == PID and event["ph"] == "X"
    ]
    facts = trace["otherData"]
    return Picture(spans, Window(facts["begin_us"], facts["end_us"]), facts.get("title", ""))


def busy_share(spans: Iterable[Span], window: Window) -> float:
    """Part of the step in which any of the spans was under way."""
    busy_us, until = 0.0, window.begin_us
    for span in sorted(spans, key=lambda one: one.begin_us):
        begin, end = max(span.begin_us, until), min(span.end_us, window.end_us)
        busy_us += max(end - begin, 0.0)
        until = max(until, end)
    return busy_us / (window.end_us - window.begin_us)
