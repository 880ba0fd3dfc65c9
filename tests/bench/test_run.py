"""`aio_bench run`."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench import lane as lane_module
from bench.lane import Place
from tests.bench.conftest import Command
from tiering.aio import Faults, open_engine
from tiering.aio.config import AioConfig

ROOT = Path(__file__).parents[2]
MIB = 2**20
# Says when the job runs, and then runs until it is stopped.
STOPPABLE = """
import sys
from bench import aio_bench, workload
plain = workload.write_through
def told(lane):
    span = plain(lane)
    print("running", flush=True)
    return span
import bench.run
bench.run.write_through = told
sys.exit(aio_bench.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("op", "rows"),
    [
        ("read", ["first write", "read"]),
        ("write", ["first write", "overwrite"]),
        ("mixed", ["first write", "mixed"]),
    ],
)
def test_every_operation_is_measured_verified_and_told(
    bench: Command, op: str, rows: list[str]
) -> None:
    found = bench("run", "--op", op, "--size", "64MiB", "--verify")
    assert found.code == 0, found.err
    (path,) = found.json["paths"]
    assert [row["name"] for row in path["results"]] == rows
    assert path["verified_bytes"] == 64 * MIB
    first, job = path["results"]
    assert first["written_bytes"] == 64 * MIB
    assert job["read_bytes"] + job["written_bytes"] == 4 * found.json["job"]["request_bytes"]
    if op == "mixed":
        assert job["read_bytes"] == job["written_bytes"]
    assert job["blocks"] == (job["read_bytes"] + job["written_bytes"]) // (256 * 1024)
    latency = job["latency"]
    assert latency["requests"] == 4
    order = [latency[f"{name}_us"] for name in ("p50", "p90", "p99", "p999", "max")]
    assert order == sorted(order)
    assert order[0] > 0
    assert all(name in found.out for name in (*rows, "GB/s", "p99.9", "memlock limit", "pages"))


def test_the_figures_are_those_of_their_parts(bench: Command) -> None:
    (path,) = bench("run", "--op", "write").json["paths"]
    for row in path["results"]:
        moved = row["read_bytes"] + row["written_bytes"]
        assert row["gb_per_s"] == pytest.approx(moved / 1e9 / row["seconds"])
        assert row["iops"] == pytest.approx(row["blocks"] / row["seconds"])
        assert row["cpu_s_per_gb"] == pytest.approx(row["cpu_s"] / (moved / 1e9))
        assert row["gb_per_s_per_core"] == pytest.approx(1 / row["cpu_s_per_gb"])


def test_the_result_says_on_what_it_was_measured(bench: Command) -> None:
    found = bench("run", "--seed", "7").json
    assert found["command"] == "run"
    assert found["job"]["seed"] == 7
    machine, (path,) = found["machine"], found["paths"]
    assert {"kernel", "cpu_count", "memlock", "version", "huge_pages"} <= set(machine)
    assert {"path", "drive", "file_system", "engine"} <= set(path)
    engine = path["engine"]
    assert engine["backend"] in {"uring", "threads", "python"}
    assert engine["direct"] or engine["direct_reason"]
    assert engine["registered_bytes"] or engine["register_reason"]
    assert engine["pages"]["mapped_bytes"] > 0
    assert found["aio"] == {
        "block_size": 256 * 1024,
        "queue_depth": 4,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    }


def test_small_pages_and_no_registration_are_what_they_say(bench: Command) -> None:
    found = bench("run", "--pages", "small", "--unregistered")
    engine = found.json["paths"][0]["engine"]
    assert engine["pages"]["huge_bytes"] == 0
    assert engine["registered_bytes"] == 0
    assert "not asked for" in engine["register_reason"]
    assert "KiB pages" in found.out


def test_a_buffered_job_says_so_and_when_it_was_served_from_memory(bench: Command) -> None:
    engine = bench("run", "--buffered").json["paths"][0]["engine"]
    assert (engine["direct"], engine["direct_reason"]) == (False, "not asked for")
    again = bench("run", "--buffered", "--requests", "64")
    assert "CACHED" in again.json["paths"][0]["results"][1]["page_cache"]
    assert "dropped" in again.out


def test_the_thread_backend_is_named_in_its_report(bench: Command) -> None:
    found = bench("run", "--backend", "threads", "--threads", "2")
    assert found.json["paths"][0]["engine"]["backend"] == "threads"
    assert found.json["job"]["threads"] == 2


def test_several_paths_are_measured_alone_and_together(bench: Command, tmp_path: Path) -> None:
    found = bench("run", "--op", "mixed", "--path", str(tmp_path))
    assert found.code == 0, found.err
    assert len(found.json["paths"]) == 2
    together = found.json["together"]
    parts = [part["read_bytes"] + part["written_bytes"] for part in together["parts"]]
    assert len(parts) == 2
    assert together["total"]["read_bytes"] + together["total"]["written_bytes"] == sum(parts)
    assert "all at once" in found.out
    assert {path.name for path in tmp_path.iterdir()} == {"drive", "result.json"}


def test_a_file_system_in_memory_works(bench: Command) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=shared) as place:
        found = bench("run", "--path", place, "--verify")
        assert found.code == 0, found.err
        path = found.json["paths"][1]
        assert (path["file_system"], path["drive"]) == ("tmpfs", "no block device")
        assert not list(Path(place).iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "5000TiB"], ["not enough room", "bytes", "--size"]),
        (["--size", "300KiB"], ["not a multiple of blocks", "nearest", "--size 256KiB;"]),
        (["--size", "10TB"], ["not a multiple of blocks", "nearest", "--size 9765625088KiB;"]),
        (["--block-size", "96KiB"], ["argument --block-size: must be a power of two, got 98304"]),
        (["--block-size", "1000"], ["argument --block-size: must be 4096 to", "got 1000"]),
        (["--request-size", "96KiB"], ["power of two"]),
        (["--queue-depth", "5000"], ["queue_depth", "4096"]),
        (["--size", "many"], ["is no size"]),
        (["--seconds", "0"], ["window"]),
        (["--backend", "tape"], ["invalid choice"]),
        (["--path", "/no/such/folder"], ["/no/such/folder", "not a directory"]),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    bench: Command, arguments: list[str], words: list[str]
) -> None:
    found = bench("run", *arguments)
    assert found.code == 2
    assert all(word in found.err for word in words), found.err
    assert not found.json


def test_a_named_backend_that_cannot_be_had_is_an_error(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: AioConfig) -> object:
        return open_engine(config, faults=Faults(refuse_uring_errno=errno.EPERM))

    monkeypatch.setattr(lane_module, "open_engine", refused)
    for name in ("uring", "io_uring"):
        found = bench("run", "--backend", name)
        assert found.code == 2
        assert "EPERM" in found.err
        assert "Traceback" not in found.err
    engine = bench("run").json["paths"][0]["engine"]
    assert engine["backend"] == "threads"
    assert "EPERM" in engine["backend_reason"]


UNDER_A_FILTER = """
import errno, sys
from tests import limits
from bench import aio_bench
limits.forbid(sys.argv[1], getattr(errno, sys.argv[2]))
sys.exit(aio_bench.main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("call", "error"),
    [("io_uring_setup", "EPERM"), ("io_uring_enter", "EPERM"), ("io_uring_setup", "ENOSYS")],
)
def test_where_a_filter_forbids_the_ring_it_is_said_and_threads_are_measured(
    folder: Path, call: str, error: str
) -> None:
    def run(backend: str) -> subprocess.CompletedProcess[str]:
        arguments = ["run", "--backend", backend, "--path", str(folder), "--size", "16MiB"]
        return subprocess.run(
            [sys.executable, "-c", UNDER_A_FILTER, call, error, *arguments, "--requests", "4"],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )

    refused = run("uring")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("aio_bench: backend 'uring' cannot be had")
    assert error in refused.stderr
    assert refused.stderr.count("\n") == 1
    measured = run("auto")
    assert (measured.returncode, measured.stderr) == (0, "")
    assert "threads" in measured.stdout
    assert error in measured.stdout
    assert not list(folder.iterdir())


def test_a_changed_byte_is_found(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(place: Place) -> None:
        with place.file.open("r+b") as file:
            file.seek(9 * MIB + 5)
            (old,) = file.read(1)
            file.seek(9 * MIB + 5)
            file.write(bytes([old ^ 1]))

    monkeypatch.setattr(Place, "drop_cache", change)
    found = bench("run", "--op", "write", "--verify")
    assert found.code == 1
    assert f"byte {9 * MIB + 5} is not what was written" in found.err


def test_a_block_in_anothers_place_is_found(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_alike = []

    def misplace(place: Place) -> None:
        with place.file.open("r+b") as file:
            blocks = []
            for offset in (9 * MIB, MIB):
                file.seek(offset)
                blocks.append(file.read(2**18))
            were_alike.append(blocks[0] == blocks[1])
            file.seek(MIB)
            file.write(blocks[0])

    monkeypatch.setattr(Place, "drop_cache", misplace)
    found = bench("run", "--op", "write", "--verify")
    assert found.code == 1
    # The offsets differ in their third byte.
    assert f"byte {MIB + 2} is not what was written" in found.err
    assert f"what stands there was written for {9 * MIB}" in found.err
    assert were_alike == [True, False]  # so only the second pass can see it


def test_a_failed_transfer_is_an_error_and_leaves_nothing(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lane_module.Lane.sync

    def cut(lane: lane_module.Lane) -> None:
        plain(lane)
        with lane.place.file.open("r+b") as file:
            file.truncate(MIB)

    monkeypatch.setattr(lane_module.Lane, "sync", cut)
    found = bench("run", "--op", "read")
    assert found.code == 1
    assert "the file ends" in found.err


def test_an_interrupt_ends_it_and_removes_the_files(folder: Path) -> None:
    arguments = ["run", "--path", str(folder), "--size", "64MiB", "--seconds", "3600"]
    with subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            assert list(folder.iterdir())
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_in_the_middle_of_transfers_leaves_nothing(
    bench: Command, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, word: str
) -> None:
    plain = lane_module.Lane.start

    def start(lane: lane_module.Lane, order: lane_module.Order) -> object:
        transfer = plain(lane, order)
        if order.verb == "read":
            signal.raise_signal(number)
        return transfer

    monkeypatch.setattr(lane_module.Lane, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    found = bench("run", "--op", "mixed")
    assert found.code == 128 + number
    assert word in found.err
    assert signal.getsignal(signal.SIGTERM) == before
