"""The timeline of a step: what is recorded, on one clock, and drawn."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from bench.step_bench import main
from bench.steps import timeline
from bench.steps.contestants import Ours, run_ranks
from bench.steps.model import SIZES
from bench.steps.timeline import Span, Transfer, Window, busy_share, lanes, merge, read
from bench.steps.wire import Training

CPU = torch.device("cpu")


def span(begin_us: float, end_us: float, row: str = "read") -> Span:
    return Span(row, "x", begin_us, end_us, {})


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of our engine with its states on a drive."""
    path = tmp_path_factory.mktemp("trace") / "step.json.gz"
    training = Training(SIZES["tiny"], warmup=1, steps=1, threads=1)
    ours = Ours("ours", "nvme", SIZES["tiny"].parameter_numel * 14 // 4)
    (outcome,) = run_ranks(
        ours, training, root=tmp_path_factory.mktemp("drive"), limit_s=300, timeline=path
    )
    assert len(outcome.steps) == 2, "the recorded steps are none of those that are measured"
    return path


def test_a_step_has_its_passes_its_compute_and_its_transfers(paged: Path) -> None:
    spans, window, _ = read(paged)
    assert {one.row for one in spans} == {"passes", "engine", "compute", "read", "write"}
    passes = sorted((one for one in spans if one.row == "passes"), key=lambda one: one.begin_us)
    assert [one.name for one in passes] == ["forward", "backward", "update"]
    assert window.begin_us <= passes[0].begin_us
    assert passes[-1].end_us <= window.end_us
    assert all(window.overlaps(one.begin_us, one.end_us) for one in spans)
    for one in spans:
        if one.row in {"read", "write"}:
            assert one.name.startswith("unit")
            assert one.facts["bytes"] > 0
            assert one.facts["queued, ms"] >= 0


def test_a_viewer_finds_a_named_track_for_each_row(paged: Path) -> None:
    with gzip.open(paged, "rt") as file:
        events = json.load(file)["traceEvents"]
    ours = [event for event in events if event.get("pid") == timeline.PID]
    names = {e["tid"]: e["args"]["name"] for e in ours if e["name"] == "thread_name"}
    assert {"passes", "engine", "compute", "read", "write"} <= set(names.values())
    for event in ours:
        if event["ph"] == "X":
            assert names[event["tid"]].split()[0] == event["cat"]
    assert any(event.get("pid") != timeline.PID for event in events), "the profiler's own are there"


def test_the_drives_clock_and_the_profilers_are_one(tmp_path: Path) -> None:
    """What is timed by the host around a range lies around it in the trace."""
    found: list[Transfer] = []

    def step() -> None:
        begin_ns = time.perf_counter_ns()
        with record_function("infinity.update"):
            torch.ones(1000).sum()
        found.append(Transfer("read", "r", 8, begin_ns, begin_ns, time.perf_counter_ns()))

    path = tmp_path / "x.json.gz"
    timeline.record([step, step], lambda: found, device=CPU, path=path)
    spans = read(path).spans
    (inner,) = (one for one in spans if one.row == "engine")
    (outer,) = (one for one in spans if one.row == "read")
    slack_us = 1000  # of clocks that count from different years
    assert outer.begin_us <= inner.begin_us + slack_us
    assert inner.end_us <= outer.end_us + slack_us
    assert outer.end_us - outer.begin_us == pytest.approx(
        (found[1].end_ns - found[1].begin_ns) / 1e3, rel=1e-3
    )


def test_a_gpus_kernels_and_copies_each_have_their_row() -> None:
    """By the names that torch's profiler gives them."""

    def event(name: str, category: str, ts: float, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": 5.0, "pid": 0, **more}

    step = {**event("whole step", "user_annotation", 100.0), "dur": 50.0}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("clock 0", "user_annotation", 10.0),
        step,
        {**step, "cat": "gpu_user_annotation"},
        event("gemm", "kernel", 101.0, args={"stream": 7}),
        event("Memset (Device)", "gpu_memset", 107.0),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 113.0),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 119.0),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 125.0),
        event("aten::mm", "cpu_op", 100.0),
        event("infinity.forward", "user_annotation", 100.0),
        event("infinity.gather unit", "user_annotation", 100.0),
        event("forward", "user_annotation", 100.0),
        event("early", "kernel", 20.0),
    ]
    transfer = Transfer("read", "shard", 4000, asked_ns=1000, begin_ns=94_000, end_ns=98_000)
    merged = merge({"traceEvents": events}, [transfer], [(3_000, 5_000)])
    rows = [
        (event["cat"], event["name"])
        for event in merged["traceEvents"]
        if event["ph"] == "X" and event["pid"] == timeline.PID
    ]
    assert rows == [
        ("passes", "forward"),
        ("engine", "infinity.gather unit"),
        ("compute", "gemm"),
        ("compute", "Memset (Device)"),
        ("compute", "Memcpy DtoD (Device -> Device)"),
        ("upload", "Memcpy HtoD (Pinned -> Device)"),
        ("offload", "Memcpy DtoH (Device -> Pinned)"),
        ("read", "shard"),
    ]
    (shard,) = (event for event in merged["traceEvents"] if event["name"] == "shard")
    assert (shard["ts"], shard["dur"], shard["args"]["GB/s"]) == (100.0, 4.0, 1.0)
    assert "early" not in {event["name"] for event in merged["traceEvents"]}


def test_spans_that_overlap_lie_in_lanes_of_their_own() -> None:
    found = lanes([span(0, 10), span(5, 7), span(7, 9), span(10, 12), span(8, 20)])
    assert [[(one.begin_us, one.end_us) for one in lane] for lane in found] == [
        [(0, 10), (10, 12)],
        [(5, 7), (7, 9)],
        [(8, 20)],
    ]


def test_a_busy_share_counts_each_moment_of_the_step_once() -> None:
    spans = [span(-5, 10), span(5, 20), span(15, 18), span(90, 200)]
    assert busy_share(spans, Window(0, 100)) == pytest.approx(0.3)
    assert busy_share([], Window(0, 100)) == 0


def test_the_command_records_and_draws_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    drive, trace, picture = tmp_path / "drive", tmp_path / "x.json.gz", tmp_path / "x.png"
    drive.mkdir()
    brief = ["--size", "tiny", "--threads", "1", "--warmup", "1", "--steps", "1"]
    drawn = ["--timeline", str(trace), "--timeline-plot", str(picture)]
    code = main([*brief, "--nvme-path", str(drive), "--budgets", "1/4,2/1", *drawn])
    assert code == 0, capsys.readouterr().err
    assert not list(drive.iterdir())
    found = read(trace)
    assert "read" not in {one.row for one in found.spans}, "the last run has all in memory"
    assert found.title.startswith("a step of ours 2 of states: 0.6 million parameters")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert int.from_bytes(picture.read_bytes()[16:20], "big") == 1600


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--timeline-plot", "x.png"), "--timeline records"),
        (("--timeline", "nowhere/x.json.gz"), "nowhere is not a directory"),
    ],
)
def test_a_timeline_that_cannot_be_is_told_before_the_work(
    arguments: tuple[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--size", "tiny", "--nvme-path", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err
