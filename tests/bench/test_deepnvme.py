"""DeepNVMe beside us: the real one where it is installed, and a library that is called like it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.deepnvme import sides_of_file
from bench.job import Job
from tests.bench.conftest import Command, Outcome
from tiering import TensorSwapper

MIB = 2**20
AGAINST = ("--against", "deepnvme")
# Does in `wait` what it was asked, one after another.
LIBRARY = """
import os, torch
FAULT = os.environ.get("STAND_IN_FAULT", "")

class Handle:
    def __init__(self, **settings):
        self.asked = []

    def new_cpu_locked_tensor(self, count, like):
        return torch.empty(count, dtype=like.dtype)

    def free_cpu_locked_tensor(self, memory):
        return True

    def async_pread(self, *request):
        self.asked.append((os.preadv, os.O_RDONLY, *request))
        return -1 if FAULT == "refuse" else 0

    def async_pwrite(self, *request):
        self.asked.append((os.pwritev, os.O_WRONLY | os.O_CREAT, *request))
        return 0

    def wait(self):
        if FAULT == "abort":
            print("mlock failed: it is all over", flush=True)
            os.abort()
        for move, flags, memory, file, offset in self.asked if FAULT != "lazy" else ():
            descriptor = os.open(file, flags, 0o600)
            assert move(descriptor, [memory.numpy()], offset) == memory.numel()
            os.close(descriptor)
        count = len(self.asked)
        self.asked.clear()
        return count

class AsyncIOBuilder:
    def load(self, verbose):
        if FAULT == "build":
            raise RuntimeError("no compiler")
        return self

    aio_handle = Handle
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package called deepspeed where child processes find it."""
    package = tmp_path / "packages" / "deepspeed"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '99.9'\n")
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "op_builder.py").write_text(LIBRARY)
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def run_small(bench: Command) -> Callable[..., Outcome]:
    """Runs ``aio_bench small`` for one round."""
    return functools.partial(bench, "small", "--rounds", "1")


@pytest.mark.parametrize("op", ["read", "write", "mixed"])
def test_it_does_the_job_in_turn_with_us(bench: Command, library: None, op: str) -> None:
    found = bench("compare", "--op", op, "--pairs", "2", "--passes", "2", *AGAINST)
    assert found.code == 0, found.err
    ours, other = found.json["contestants"]
    assert (ours["name"], other["name"]) == ("ours", "deepnvme")
    assert found.json["versions"] == {"DeepSpeed": "99.9"}
    for one in (ours, other):
        for run in one["runs"]:
            both = (run["read_bytes"], run["written_bytes"])
            assert sum(both) == 32 * MIB
            assert (both[0] > 0, both[1] > 0) == (op != "write", op != "read")
            assert run["blocks"] == 128
            assert run["cpu_s"] > 0
    assert other["mapped_bytes"] == ours["mapped_bytes"]
    assert "deepnvme 0 bytes of" in found.out or other["huge_bytes"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("abort", ["SIGABRT", "it is all over", "ulimit -l"]),
        ("refuse", ["refused a request"]),
        ("lazy", ["brought no data"]),
    ],
)
def test_its_failures_are_said(
    bench: Command, library: None, monkeypatch: pytest.MonkeyPatch, fault: str, words: list[str]
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    found = bench("compare", *AGAINST)
    assert found.code == 1
    assert all(word in found.err for word in words), found.err


def test_an_op_that_cannot_be_built_is_said(
    bench: Command, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "build")
    found = bench("compare", *AGAINST)
    assert found.code == 2
    assert all(word in found.err for word in ("async_io", "no compiler", "libaio-dev"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--buffered"], ["deepnvme", "--buffered"]),
        (["--deepspeed-parallelism", "3"], ["divide", "--deepspeed-parallelism"]),
        (["--against", "deepnvme-huge", "--pages", "small"], ["deepnvme-huge", "--pages"]),
    ],
)
def test_what_it_could_never_do_is_refused(
    bench: Command, library: None, arguments: list[str], words: list[str]
) -> None:
    found = bench("compare", *AGAINST, *arguments)
    assert found.code == 2
    assert all(word in found.err for word in words), found.err


def test_an_interpreter_that_is_none_is_refused(bench: Command, tmp_path: Path) -> None:
    found = bench("compare", *AGAINST, "--deepspeed-python", str(tmp_path / "python"))
    assert found.code == 2
    assert "--deepspeed-python" in found.err


def test_an_interpreter_without_deepspeed_is_refused(bench: Command) -> None:
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is installed here")
    found = bench("compare", *AGAINST)
    assert found.code == 2
    assert all(word in found.err for word in (sys.executable, "deepspeed", "--deepspeed-python"))


def test_the_real_one_says_which_pages_it_got(bench: Command, deepspeed_python: str) -> None:
    arguments = ["--op", "mixed", "--size", "64MiB", "--pairs", "1"]
    both = [*AGAINST, "--against", "deepnvme-huge", "--deepspeed-python", deepspeed_python]
    found = bench("compare", *arguments, *both)
    assert found.code == 0, found.err
    _, plain, *huge = found.json["contestants"]
    assert plain["huge_bytes"] in range(plain["mapped_bytes"] + 1)
    assert all(one["huge_bytes"] >= one["mapped_bytes"] // 2 for one in huge)
    assert huge or "huge pages" in found.json["unusable"]["deepnvme-huge"]


@pytest.mark.parametrize("through", ["swapper", "engine"])
def test_small_tensors_go_out_and_come_back(run_small, library: None, through: str) -> None:
    sizes = ["--tensor-bytes", "64KiB,128KiB", "--count", "8", "--passes", "2"]
    found = run_small(*AGAINST, *sizes, "--through", through)
    assert found.code == 0, found.err
    rows = found.json["rows"]
    assert [(row["tensor_bytes"], row["op"]) for row in rows] == [
        (2**16, "write"),
        (2**16, "read"),
        (2**17, "write"),
        (2**17, "read"),
    ]
    for row in rows:
        ours, other = row["contestants"]
        assert (ours["name"], other["name"]) == ("ours", "deepnvme")
        for run in (*ours["runs"], *other["runs"]):
            moved_bytes = 2 * 8 * row["tensor_bytes"]
            both = (run["read_bytes"], run["written_bytes"])
            assert both == ((moved_bytes, 0) if row["op"] == "read" else (0, moved_bytes))
            assert run["blocks"] == 16
    assert found.json["path"]["engine"]["backend"] in {"uring", "threads", "python"}
    assert all(word in found.out for word in ("overwrite", "64 KiB", "128 KiB", "deepnvme"))
    assert found.json["through"] == through


def test_small_tensors_of_uneven_size_are_refused(run_small, library: None) -> None:
    found = run_small(*AGAINST, "--tensor-bytes", "5000")
    assert found.code == 2
    assert "--tensor-bytes" in found.err


def test_a_small_tensor_that_comes_back_changed_is_an_error(
    run_small, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TensorSwapper.swap_in

    def changed(swapper: TensorSwapper, key: str, out: torch.Tensor) -> object:
        transfer = plain(swapper, key, out)
        transfer.wait()
        out[5] ^= 1
        return transfer

    monkeypatch.setattr(TensorSwapper, "swap_in", changed)
    found = run_small(*AGAINST, "--tensor-bytes", "64KiB", "--count", "2")
    assert found.code == 1
    assert "did not come back as it went out" in found.err


def test_fio_moves_a_small_tensor_as_a_block(run_small) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    arguments = ["--tensor-bytes", "64KiB", "--count", "8", "--block-size", "16KiB"]
    found = run_small("--against", "psync", *arguments)
    assert found.code == 0, found.err
    for row in found.json["rows"]:
        ours, other = row["contestants"]
        assert (ours["name"], other["name"]) == ("ours", "fio psync")
        assert [run["blocks"] for run in other["runs"]] == [8 * 8]


@pytest.mark.parametrize("op", ["read", "mixed"])
def test_its_requests_cover_the_file(op: str) -> None:
    job = Job(op, 9 * MIB, block_bytes=2**18, queue_depth=4)
    sides = sides_of_file(job, Path("file"), passes=1)
    extents = sorted(request[1:4:2] for side in sides for request in side.requests)
    ends = [0, *(offset + nbytes for offset, nbytes in extents)]
    assert [offset for offset, _ in extents] == ends[:-1]
    assert ends[-1] == 9 * MIB
    for side in sides:
        assert all(one.at + one.nbytes <= side.memory_bytes for one in side.requests)
