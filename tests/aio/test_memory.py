"""Memory lives as long as anything over it, and no longer."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiering.aio import PinnedMemory, open_engine
from tiering.aio import memory as aio_memory
from tiering.aio import pages as aio_pages
from tiering.errors import ConfigError

MIB = 2**20
RESERVED = Path("/proc/sys/vm/nr_hugepages")
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(params=["NativePages", "PythonPages"], autouse=True)
def mapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Memory mapped in C, and as it is mapped where the compiled part is missing."""
    name: str = request.param
    monkeypatch.setattr(aio_memory, "map_pages", getattr(aio_memory, name))
    return name


@contextlib.contextmanager
def kernel_setting(file: Path, value: str) -> Iterator[str]:
    """Set what only root may set, and set it back whatever happens. Gives what it became."""
    before = file.read_text().partition("[")[2].partition("]")[0] or file.read_text().strip()
    try:
        file.write_text(value)
    except OSError as error:
        pytest.skip(f"{file} cannot be set: {error.strerror}")
    try:
        yield file.read_text().strip()
    finally:
        file.write_text(before)


@pytest.fixture
def reserve() -> Iterator[int]:
    """Has the system keep 64 more huge pages in reserve; the size of one."""
    size = re.search(r"Hugepagesize: +(\d+) kB", Path("/proc/meminfo").read_text())
    if size is None or not RESERVED.exists():
        pytest.skip("this kernel keeps no huge pages in reserve")
    if int(size[1]) > 2048:
        pytest.skip(f"huge pages of {size[1]} KiB are too many bytes for a test")
    wanted = int(RESERVED.read_text()) + 64
    with kernel_setting(RESERVED, str(wanted)) as became:
        if int(became) < wanted:
            pytest.skip(f"the kernel found {became} huge pages, not {wanted}")
        yield int(size[1]) * 1024


def free_in_reserve() -> int:
    found = re.search(r"HugePages_Free: +(\d+)", Path("/proc/meminfo").read_text())
    assert found
    return int(found[1])


def in_child(check: Callable[[], bool]) -> bool:
    """Run a check in a forked child; whether it held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that we fork beside threads
        child = os.fork()
    if not child:
        held = False
        try:
            held = check()
        finally:
            os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1] == 0


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in re.split("[- ]", line, maxsplit=2)[:2])
        if first <= address < last:
            return True
    return False


def test_memory_is_writable_zeroed_and_aligned() -> None:
    """From a huge page on, it begins at one."""
    memory = PinnedMemory(4 * MIB + 1)
    assert memory.nbytes == 4 * MIB + 1
    assert memory.address % 4096 == 0
    assert bytes(memory.buffer(0, 4096)) == bytes(4096)
    memory.buffer(4 * MIB, 1)[:] = b"x"
    assert bytes(memory.buffer(4 * MIB)) == b"x"


def test_a_slice_keeps_the_whole_mapping_alive() -> None:
    """Also when only a tensor over the middle of it is left."""
    memory = PinnedMemory(4 * MIB)
    address = memory.address
    tensor = torch.frombuffer(memory.buffer(MIB, 64), dtype=torch.uint8)
    del memory
    gc.collect()
    tensor.fill_(7)
    view = tensor[32:]
    del tensor
    gc.collect()
    assert is_mapped(address)
    assert view.sum() == 32 * 7
    del view
    gc.collect()
    assert not is_mapped(address)


def test_the_end_of_a_buffer_can_be_observed() -> None:
    """A weak reference tells when the last tensor over a buffer is gone."""
    memory = PinnedMemory(MIB)
    ended = []
    buffer = memory.buffer(0, 4096)
    alive = weakref.ref(buffer, lambda _: ended.append(1))
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    del buffer
    gc.collect()
    assert alive() is not None
    alias = tensor.detach()[5:]
    del tensor
    gc.collect()
    assert not ended
    del alias
    gc.collect()
    assert ended
    assert memory.buffer(0, 4096) is not memory.buffer(0, 4096)


def test_all_of_it_is_touched_at_once_and_the_report_says_on_what_pages() -> None:
    """Huge pages cannot be promised, so only the sums are checked."""
    memory = PinnedMemory(8 * MIB)
    report = memory.page_report()
    assert report.resident_bytes == report.mapped_bytes >= 8 * MIB
    assert 0 <= report.reserved_bytes <= report.huge_bytes <= report.mapped_bytes
    assert report.runs_per_mib is None or 1 <= report.runs_per_mib <= 256
    assert memory.page_kind in {"small", "transparent", "reserved"}


def test_reserved_huge_pages_are_taken_where_enough_are_free_and_given_back(
    mapping: str, reserve: int
) -> None:
    """All of the memory is on them, in few runs; they go with the last buffer, not before."""
    if mapping == "PythonPages":
        pytest.skip("Python's own mapping takes none")
    before = free_in_reserve()
    memory = PinnedMemory(8 * reserve - 5)
    report = memory.page_report()
    assert memory.page_kind == "reserved"
    assert memory.address % reserve == 0
    assert report.reserved_bytes == report.huge_bytes == report.resident_bytes == 8 * reserve
    assert report.runs_per_mib in {None, 1.0}
    assert free_in_reserve() == before - 8
    buffer = memory.buffer()
    buffer[-1:] = b"x"
    del memory
    gc.collect()
    assert bytes(buffer[-2:]) == b"\0x"
    del buffer
    gc.collect()
    assert free_in_reserve() == before


def test_reserved_huge_pages_carry_the_same_bytes_registered_and_not(
    mapping: str, reserve: int, tmp_path: Path
) -> None:
    """To a drive they are memory like any other, at any address."""
    if mapping == "PythonPages":
        pytest.skip("Python's own mapping takes none")
    path = tmp_path / "data.bin"
    path.touch()
    memory = PinnedMemory(8 * reserve)
    assert memory.page_kind == "reserved"
    nbytes, half = 3 * reserve + 517, 4 * reserve
    with open_engine() as engine:
        file = engine.open(str(path))
        for at, is_registered in ((0, False), (4096, True), (513, True)):
            if is_registered:
                engine.register(memory)
            data = os.urandom(nbytes)
            memory.buffer(at, nbytes)[:] = data
            write = engine.write(file, memory, at=at, nbytes=nbytes, offset=4096)
            engine.read(file, memory, at=half + at, nbytes=nbytes, offset=4096, after=write).wait()
            assert bytes(memory.buffer(half + at, nbytes)) == data


def test_a_reserve_that_is_too_small_is_left_alone(mapping: str, reserve: int) -> None:
    """Part of the memory on reserved pages would be a crash later; the next rung is taken."""
    before = free_in_reserve()
    memory = PinnedMemory((before + 1) * reserve)
    assert memory.page_kind != "reserved"
    assert memory.page_report().reserved_bytes == 0
    assert free_in_reserve() == before


def test_a_reserved_page_is_not_taken_for_little(mapping: str, reserve: int) -> None:
    """Rounding up may cost an eighth and no more."""
    before = free_in_reserve()
    small = PinnedMemory(reserve // 2), PinnedMemory(reserve + 1)
    assert [memory.page_kind for memory in small].count("reserved") == 0
    assert free_in_reserve() == before


def test_a_forked_child_has_no_part_of_reserved_pages(mapping: str, reserve: int) -> None:
    """It takes none from the reserve, and the parent's bytes stay where the drive finds them."""
    if mapping == "PythonPages":
        pytest.skip("Python's own mapping takes none")
    memory = PinnedMemory(4 * reserve)
    memory.buffer(0, 5)[:] = b"bytes"
    before = free_in_reserve()
    assert in_child(lambda: not is_mapped(memory.address))
    memory.buffer(0, 5)[:] = b"again"
    assert free_in_reserve() == before
    assert memory.page_kind == "reserved"


def test_what_touching_did_not_make_huge_is_collapsed(mapping: str) -> None:
    """With transparent huge pages off, none come by touching."""
    if not TRANSPARENT.exists():
        pytest.skip("this kernel has no transparent huge pages")
    with kernel_setting(TRANSPARENT, "never"):
        memory = PinnedMemory(16 * MIB)
    if memory.page_kind == "reserved":
        pytest.skip("this machine keeps huge pages in reserve")
    report = memory.page_report()
    assert memory.page_kind == "transparent"
    assert report.resident_bytes == report.mapped_bytes
    if not report.huge_bytes:
        pytest.skip("this kernel collapses no pages when asked to (before Linux 6.1)")
    assert report.huge_bytes >= 12 * MIB


def test_small_pages_are_small_if_they_are_asked_for(mapping: str) -> None:
    """Whatever the system has."""
    memory = PinnedMemory(8 * MIB, pages="small")
    report = memory.page_report()
    assert memory.page_kind == "small"
    assert (report.huge_bytes, report.reserved_bytes) == (0, 0)
    assert report.resident_bytes == report.mapped_bytes == 8 * MIB
    with pytest.raises(ConfigError, match="pages must be auto or small, got 'large'"):
        PinnedMemory(MIB, pages="large")


def test_contiguity_is_unknown_where_the_page_map_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ordinary users find zeros in place of frames, or no file at all."""
    memory = PinnedMemory(2 * MIB)
    zeros = tmp_path / "pagemap"
    with zeros.open("wb") as file:
        file.truncate(2**47 // 4096 * 8)
    monkeypatch.setattr(aio_pages, "_PAGEMAP", zeros)
    assert memory.page_report().runs_per_mib is None
    monkeypatch.setattr(aio_pages, "_PAGEMAP", tmp_path / "none")
    assert memory.page_report().runs_per_mib is None
    assert PinnedMemory(4096).page_report().runs_per_mib is None


def test_runs_are_counted_as_the_page_map_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One MiB in one run, one in pieces of 16 pages, one with every page by itself."""
    frames = [*range(1, 257)]
    frames += [1000 * (i // 16) + i % 16 + 1 for i in range(256)]
    frames += [2 * i + 1 for i in range(256)]
    present = 2**63
    table = tmp_path / "pagemap"
    table.write_bytes(b"".join((present | frame).to_bytes(8, sys.byteorder) for frame in frames))
    monkeypatch.setattr(aio_pages, "_PAGEMAP", table)
    assert aio_pages.runs_per_mib(0, 3 * MIB + 5) == (1 + 16 + 256) / 3


@pytest.mark.parametrize("nbytes", [0, -1, 2**62, 2**70])
def test_an_impossible_size_is_refused(nbytes: int) -> None:
    """With the size in the message."""
    with pytest.raises(ConfigError, match=str(nbytes)):
        PinnedMemory(nbytes)


@pytest.mark.parametrize(("at", "nbytes"), [(-1, 1), (0, -1), (0, MIB + 1), (MIB, 1)])
def test_a_buffer_outside_the_memory_is_refused(at: int, nbytes: int) -> None:
    """An empty one at the very end is not."""
    memory = PinnedMemory(MIB)
    with pytest.raises(ConfigError):
        memory.buffer(at, nbytes)
    assert len(memory.buffer(MIB)) == 0


def test_too_little_memory_is_an_exception(mapping: str) -> None:
    """A process limited to little address space is told so and lives on."""
    script = (
        "import resource, sys, types\n"
        "sys.modules['tiering'] = types.ModuleType('tiering')\n"
        "sys.modules['tiering'].__path__ = ['tiering']  # without torch\n"
        "from tiering.aio import PinnedMemory, memory\n"
        "from tiering.errors import ConfigError\n"
        "memory.map_pages = getattr(memory, sys.argv[1])\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try:\n"
        "    PinnedMemory(2**30)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, mapping],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "Cannot allocate memory" in ran.stdout
    assert "ulimit -v" in ran.stdout


def test_a_forked_child_gets_no_copy_of_the_bytes(mapping: str) -> None:
    """With copies, the parent's pages would move while the drive writes to them."""
    if mapping == "NativePages":
        pytest.skip("the child would crash: it has not even the addresses")
    memory = PinnedMemory(MIB)
    memory.buffer(0, 5)[:] = b"bytes"
    assert in_child(lambda: bytes(memory.buffer(0, 5)) == bytes(5))
    assert bytes(memory.buffer(0, 5)) == b"bytes"
