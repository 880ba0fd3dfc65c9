"""`aio_bench compare`: with fio where it is installed, and with a program that talks like it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from bench.contest import ratio
from bench.fio_baseline import FioError, arguments, parse
from bench.job import Job
from tests.bench.conftest import FIO_JOB, Command


@pytest.mark.parametrize("op", ["read", "write", "mixed"])
def test_both_do_the_job_in_turn(bench: Command, op: str) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    found = bench("compare", "--op", op, "--pairs", "1", "--against", "psync")
    assert found.code == 0, found.err
    ours, other = found.json["contestants"]
    assert (ours["name"], other["name"], found.json["best"]) == ("ours", "fio psync", "fio psync")
    for one in (ours, other):
        assert len(one["runs"]) == 1
        for run in one["runs"]:
            assert run["read_bytes"] + run["written_bytes"] == 2**24
            assert (run["read_bytes"] > 0, run["written_bytes"] > 0) == (
                op != "write",
                op != "read",
            )
    assert other["throughput_ratio"]["least"] <= other["throughput_ratio"]["median"]
    assert "ours / this" in found.out


def test_ratios_are_taken_round_by_round(bench: Command, fake_fio: Path) -> None:
    found = bench("compare", "--pairs", "3")
    assert found.code == 0, found.err
    ours, other = found.json["contestants"]
    speeds = sorted(run["gb_per_s"] / 2.0 for run in ours["runs"])
    assert other["throughput_ratio"] == pytest.approx(
        {"median": speeds[1], "least": speeds[0], "greatest": speeds[2]}
    )
    assert found.json["fio_version"] == "fio-9.9"
    assert "not loadable" in found.json["unusable"]["fio libaio"]
    assert "not usable" in found.out


def test_a_fio_that_cannot_work_at_all_is_an_error(bench: Command, fake_fio: Path) -> None:
    found = bench("compare", "--against", "libaio")
    assert found.code == 1
    assert "nothing to compare with" in found.err


def test_fio_registers_its_memory_only_where_ours_could_be(bench: Command, fake_fio: Path) -> None:
    found = bench("compare", "--pairs", "1", "--backend", "threads", "--against", "io_uring")
    assert found.code == 0, found.err
    assert found.json["path"]["engine"]["registered_bytes"] == 0
    told = fake_fio.with_name("fio.log").read_text()
    assert "--fixedbufs=0" in told
    assert "--fixedbufs=1" not in told


def test_without_fio_it_is_said(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = bench("compare")
    assert found.code == 2
    assert "fio is not installed" in found.err


def test_processor_time_is_summed_over_the_jobs() -> None:
    figures = parse("a warning\n" + json.dumps({"jobs": [FIO_JOB, FIO_JOB]}))
    assert figures.cpu_s == pytest.approx(2 * 0.04 * 0.5)
    assert (figures.read_bytes, figures.blocks, figures.seconds) == (2 * 10**9, 2000, 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "cannot be read"), ('{"jobs": [{}]}', "cannot be read"), ("{", "cannot be read")],
)
def test_output_that_is_not_fios_is_an_error(text: str, words: str) -> None:
    with pytest.raises(FioError, match=words):
        parse(text)


def test_an_error_of_a_job_is_an_error() -> None:
    with pytest.raises(FioError, match=os.strerror(5)):
        parse(json.dumps({"jobs": [{**FIO_JOB, "error": 5}]}))


def test_fio_gets_the_settings_of_our_job() -> None:
    job = Job("mixed", 2**30, block_bytes=2**16, queue_depth=8)
    ring = arguments(job, Path("f"), engine="io_uring", passes=3)
    wanted = "rw=rw bs=65536 iodepth=8 direct=1 loops=3 fixedbufs=1 registerfiles=1 end_fsync=1"
    assert {f"--{word}" for word in wanted.split()} <= set(ring)
    plain = arguments(
        Job("read", 2**30, cache="buffered", registration="unregistered"),
        Path("f"),
        engine="io_uring",
        passes=1,
    )
    assert {"--direct=0", "--fixedbufs=0"} <= set(plain)
    assert "--end_fsync=1" not in plain
    pool = arguments(Job("read", 2**30, threads=4), Path("f"), engine="psync", passes=1)
    assert {"--numjobs=4", f"--size={2**28}", f"--offset_increment={2**28}"} <= set(pool)


def test_a_ratio_is_the_middle_and_the_ends() -> None:
    assert ratio([1.2, 0.8, 1.0]) == (1.0, 0.8, 1.2)
