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
