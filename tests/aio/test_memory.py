"""Memory lives as long as anything over it, and no longer."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from tiering.aio import PinnedMemory
from tiering.aio import memory as aio_memory
from tiering.errors import ConfigError

MIB = 2**20


@pytest.fixture(params=["NativePages", "PythonPages"], autouse=True)
def mapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Memory mapped in C, and as it is mapped where the compiled part is missing."""
    name: str = request.param
    monkeypatch.setattr(aio_memory, "map_pages", getattr(aio_memory, name))
    return name


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
    report = PinnedMemory(8 * MIB).page_report()
    assert report.resident_bytes == report.mapped_bytes >= 8 * MIB
    assert 0 <= report.huge_bytes <= report.mapped_bytes


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that we fork beside threads
        child = os.fork()
    if not child:
        os._exit(bytes(memory.buffer(0, 5)) != bytes(5))
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory.buffer(0, 5)) == b"bytes"
