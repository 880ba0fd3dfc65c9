"""Forks, limits, descriptors and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiering.errors import EngineClosedError

if TYPE_CHECKING:
    from conftest import MakeBench, StartEngine

ROOT = Path(__file__).parents[2]
# tiering imports torch, which takes seconds; what is tested here stands on its own.
WITHOUT_TORCH = """
import sys, types
sys.modules["tiering"] = types.ModuleType("tiering")
sys.modules["tiering"].__path__ = ["tiering"]
"""


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


def run(script: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + textwrap.dedent(script), *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def descriptors() -> set[str]:
    entries = Path("/proc/self/fd").iterdir()
    return {f"{entry.name} -> {entry.readlink()}" for entry in entries if entry.is_symlink()}


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_forked_child_gets_an_exception_and_the_parent_goes_on(
    make_bench: MakeBench, backend: str
) -> None:
    """Whatever the child calls; closing there does nothing."""
    bench = make_bench(backend)
    ended = bench.write(0, 4096, 0)
    ended.wait()
    transfer = bench.write(0, 2**20, 0)

    def is_refused() -> bool:
        for call in (
            ended.wait,
            ended.done,
            lambda: bench.write(0, 4096, 0),
            lambda: bench.engine.open(bench.file.path),
            bench.file.close,
            transfer.wait,
            bench.engine.stats,
        ):
            try:
                call()
            except EngineClosedError as error:
                if f"belongs to process {os.getppid()}" not in str(error):
                    return False
            else:
                return False
        bench.engine.close()
        return True

    assert in_child(is_refused)
    transfer.wait()
    assert bench.round_trip(0, 2**20, 0)


def test_a_child_forked_in_the_middle_of_waits_is_refused_all_the_same(
    make_bench: MakeBench, backend: str
) -> None:
    """It may have inherited a lock that a thread it lacks holds; it must not take it."""
    bench = make_bench(backend)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            bench.write(0, 4096, 0).wait()

    def is_refused() -> bool:
        try:
            bench.engine.stats()
        except EngineClosedError:
            return True
        return False

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert all(in_child(is_refused) for _ in range(20))
    finally:
        stop.set()
        worker.join()


def test_no_descriptor_is_left_behind(
    start_engine: StartEngine, backend: str, tmp_path: Path
) -> None:
    """Neither of files, nor of rings, nor of what was never closed by hand."""
    path = tmp_path / "data.bin"
    path.touch()
    start_engine(backend).close()
    before = descriptors()
    for _ in range(20):
        with start_engine(backend) as engine:
            opened = [engine.open(str(path)) for _ in range(5)]
            opened[0].close()
    assert descriptors() <= before


def test_no_thread_is_left_behind(start_engine: StartEngine, backend: str) -> None:
    """Every worker has gone when close returns."""
    start_engine(backend).close()
    before = thread_count()
    for _ in range(20):
        start_engine(backend).close()
    assert thread_count() <= before


def test_a_process_may_end_without_closing(native_backend: str, tmp_path: Path) -> None:
    """What was started has then ended."""
    path = tmp_path / "data.bin"
    path.touch()
    run(
        """
        import sys
        from tiering.aio import AioConfig, AioEngine, PinnedMemory
        engine = AioEngine(AioConfig(backend=sys.argv[1]))
        memory = PinnedMemory(2**22)
        memory.buffer()[:] = b"x" * 2**22
        engine.write(engine.open(sys.argv[2]), memory, nbytes=2**22, offset=0)
        """,
        native_backend,
        str(path),
    )
    assert path.read_bytes() == b"x" * 2**22


@pytest.mark.parametrize("limit_kib", [64, 8192])
def test_an_ordinary_user_under_a_lock_limit_works_unregistered(
    has_uring: bool, tmp_path_factory: pytest.TempPathFactory, limit_kib: int
) -> None:
    """One warning with limit and wish; equal bytes; and rings come and go 200 times."""
    if os.getuid() != 0:
        pytest.skip("only root can become an ordinary user")
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    folder = tmp_path_factory.mktemp("nobody")
    path = folder / "data.bin"
    path.touch()
    path.chmod(0o666)
    folder.chmod(0o755)
    printed = run(
        """
        import os, resource, sys, warnings
        from tiering.aio import AioConfig, AioEngine, PinnedMemory
        from tiering.errors import TieringWarning
        os.chdir(os.path.dirname(sys.argv[1]))
        limit = int(sys.argv[2]) * 1024
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        for _ in range(200):
            AioEngine(AioConfig(backend="uring")).close()
        memory = PinnedMemory(16 * 2**20)
        memory.buffer(0, 5 * 2**20)[:] = os.urandom(5 * 2**20)
        with AioEngine(AioConfig(backend="uring")) as engine:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.register(memory)
            file = engine.open("data.bin")
            write = engine.write(file, memory, nbytes=5 * 2**20, offset=0)
            half = 8 * 2**20
            engine.read(
                file, memory, at=half, nbytes=5 * 2**20, offset=0, after=write
            ).wait()
            assert bytes(memory.buffer(0, 5 * 2**20)) == bytes(
                memory.buffer(half, 5 * 2**20)
            )
            assert engine.stats().registered_bytes == 0
        print(*[warning.message for warning in caught], sep="\\n")
        """,
        str(path),
        str(limit_kib),
    )
    assert printed.count("\n") == 1
    assert f"fixed buffers: off (lock limit {limit_kib} KiB, want 16 MiB" in printed


@pytest.mark.parametrize("forbidden", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_where_ring_calls_are_forbidden_threads_do_the_work(
    has_uring: bool, tmp_path: Path, forbidden: str
) -> None:
    """A filter like a container's: auto works and says why; a named ring is an error."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine anyway")
    path = tmp_path / "data.bin"
    path.touch()
    printed = run(
        """
        import ctypes, struct, sys, warnings
        from tiering.aio import AioConfig, AioEngine, PinnedMemory
        from tiering.errors import ConfigError
        # The same numbers on all machines but alpha.
        number = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
        program = b"".join(
            struct.pack("HBBI", *instruction)
            for instruction in (
                (0x20, 0, 0, 0),  # load the number of the system call
                (0x15, 0, 1, number[sys.argv[2]]),  # is it the one?
                (0x06, 0, 0, 0x00050001),  # fail with EPERM
                (0x06, 0, 0, 0x7FFF0000),  # allow
            )
        )
        code = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        assert prctl(22, 2, ctypes.c_char_p(head), 0, 0) == 0  # filter
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = AioEngine()
        memory = PinnedMemory(2**21)
        memory.buffer(0, 5)[:] = b"bytes"
        file = engine.open(sys.argv[1])
        engine.write(file, memory, nbytes=2**20 + 1, offset=0).wait()
        engine.read(file, memory, at=2**20, nbytes=5, offset=0).wait()
        assert bytes(memory.buffer(2**20, 5)) == b"bytes"
        print(engine.stats().backend, *[warning.message for warning in caught])
        try:
            AioEngine(AioConfig(backend="uring"))
        except ConfigError as error:
            print(error)
        """,
        str(path),
        forbidden,
    )
    first, second = printed.splitlines()
    assert first.startswith("threads file I/O goes through threads: io_uring is refused (EPERM")
    assert "seccomp" in first
    assert "backend 'uring' cannot be had" in second


def test_many_processes_may_start_at_once(native_backend: str) -> None:
    """Nothing is compiled or rewritten when the package is imported."""
    script = (
        WITHOUT_TORCH + "from tiering.aio import AioConfig, AioEngine\n"
        "AioEngine(AioConfig(backend=sys.argv[1])).close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", script, native_backend], cwd=ROOT)
        for _ in range(8)
    ]
    assert [process.wait() for process in started] == [0] * 8
