"""DeepNVMe beside us: the real one where it is installed, and a library that is called like it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from bench.deepnvme import sides_of_file
from bench.job import Job
from tests.bench.conftest import Command

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
            print("it is all over", flush=True)
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
        ("abort", ["SIGABRT", "it is all over"]),
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
