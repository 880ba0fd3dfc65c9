"""Where the compiled part cannot be loaded: what works, what is refused, and what is said."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.infinity.conftest import base_model, config_for, train
from tiering.aio import AioConfig, Faults, PinnedMemory, PureEngine, open_engine
from tiering.errors import (
    ConfigError,
    EngineClosedError,
    SpaceError,
    TransferError,
    TransferTimeoutError,
)

if TYPE_CHECKING:
    from conftest import Bench, MakeBench

ROOT = Path(__file__).parents[2]
PAGE = 4096
MESSAGE = "the loader's own words"

# Runs first in a process of its own: the extension is there, but loading it fails.
BROKEN = f"""
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "tiering.aio._native":
            raise ImportError({MESSAGE!r})

sys.meta_path.insert(0, Broken())
"""


def run(script: str, *arguments: str) -> str:
    """Run a script without the compiled part; returns what it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN + textwrap.dedent(script), *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def bench(make_bench: MakeBench) -> Bench:
    return make_bench("python")


class Kernel:
    """Stands between the engine and preadv and pwritev, and may hold, shorten or refuse them."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors: list[int] = []
        self.most_bytes = 2**30
        self.calls = 0

    def stands_before(
        self, call: Callable[[int, list[bytearray], int], int]
    ) -> Callable[[int, list[bytearray], int], int]:
        """The call, as this lets it through."""

        def instead(descriptor: int, buffers: list[bytearray], offset: int) -> int:
            self.calls += 1
            self.entered.set()
            self.gate.wait()
            if self.errors and (error := self.errors.pop(0)):
                raise OSError(error, os.strerror(error))
            return call(descriptor, [memoryview(buffers[0])[: self.most_bytes]], offset)

        return instead


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Faults for an engine that has no hooks for them."""
    kernel = Kernel()
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, kernel.stands_before(getattr(os, name)))
    yield kernel
    kernel.gate.set()


def test_with_the_compiled_part_it_is_what_opens() -> None:
    """And it takes faults."""
    with open_engine(faults=Faults()) as engine:
        assert engine.stats().backend in {"uring", "threads"}
    with open_engine(AioConfig(backend="threads", require_native=True)) as engine:
        assert engine.stats().backend == "threads"


def test_training_goes_on_with_equal_bits_and_one_warning(tmp_path: Path) -> None:
    """On all three homes; the reports name the backend in use and why."""
    printed = run(
        """
        import json, sys, warnings
        from pathlib import Path
        import infinity
        from tests.infinity.conftest import base_model, config_for, train
        runs = {}
        for home in ("none", "cpu", "nvme"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = config_for(Path(sys.argv[1]), param=home, optimizer=home)
                losses, weights = train(base_model(), config, steps=4)
            runs[home] = {
                "losses": [loss.hex() for loss in losses],
                "weights": {name: weight.tolist() for name, weight in weights.items()},
                "warnings": [f"{w.category.__name__}: {w.message}" for w in caught],
            }
        engine, *_ = infinity.initialize(model=base_model(), config=config)
        with engine:
            stats = engine.stats()
        print(json.dumps([runs, stats.backend, stats.backend_reason]))
        """,
        str(tmp_path),
    )
    runs, backend, reason = json.loads(printed)
    losses, weights = train(
        base_model(), config_for(tmp_path, param="none", optimizer="none"), steps=4
    )
    for ran in runs.values():
        assert ran["losses"] == [loss.hex() for loss in losses]
        assert ran["weights"] == {name: weight.tolist() for name, weight in weights.items()}
    assert runs["none"]["warnings"] == runs["cpu"]["warnings"] == []
    (warning,) = runs["nvme"]["warnings"]
    assert warning.startswith("TieringWarning: file I/O goes through threads of Python")
    for word in (MESSAGE, "reinstall", "make setup"):
        assert word in warning
        assert word in reason
    assert backend == "python"


def test_what_was_asked_for_by_name_is_never_replaced(tmp_path: Path) -> None:
    """Each is an error with the loader's message, through every entrance; auto is not."""
    printed = run(
        """
        import sys, warnings
        from pathlib import Path
        import infinity
        from tests.infinity.conftest import base_model, config_for
        from tiering import AioConfig, ConfigError, TensorSwapper
        from tiering.aio import AioEngine, Faults, open_engine

        path = Path(sys.argv[1])

        def initialize(**tiering):
            config = config_for(path, tiering=tiering)
            infinity.initialize(model=base_model(), config=config)

        warnings.simplefilter("error")
        for make in (
            lambda: open_engine(AioConfig(backend="uring")),
            lambda: open_engine(AioConfig(backend="threads")),
            lambda: open_engine(AioConfig(require_native=True)),
            lambda: open_engine(faults=Faults()),
            lambda: AioEngine(),
            lambda: TensorSwapper(path, aio=AioConfig(backend="uring")),
            lambda: initialize(aio_backend="uring"),
            lambda: initialize(aio_backend="threads"),
            lambda: initialize(require_native=True),
        ):
            try:
                make()
            except ConfigError as error:
                print(error)
        warnings.simplefilter("ignore")
        for aio in (None, AioConfig(backend="auto")):
            with TensorSwapper(path, aio=aio) as swapper:
                print(swapper._backend.stats().backend)
        """,
        str(tmp_path),
    )
    *errors, first, second = printed.splitlines()
    assert len(errors) == 9
    assert all(f"native I/O is not available: {MESSAGE}" in error for error in errors)
    for error, words in zip(errors, ("'uring' cannot", "'threads' cannot"), strict=False):
        assert words in error
    assert "require_native" in errors[2]
    assert "faults" in errors[3]
    assert first == second == "python"
    assert not list(tmp_path.iterdir())


def test_require_native_is_met_by_the_compiled_part(tmp_path: Path) -> None:
    losses, _ = train(base_model(), config_for(tmp_path, tiering={"require_native": True}), steps=1)
    assert len(losses) == 1


@pytest.mark.slow
@pytest.mark.parametrize("head", ["", BROKEN], ids=["native", "python"])
def test_many_processes_open_a_store_at_the_same_moment(head: str, tmp_path: Path) -> None:
    """8 on one folder, twice: nothing is compiled, rewritten or taken for another's."""
    script = head + textwrap.dedent(
        """
        import sys, warnings
        warnings.simplefilter("ignore")
        sys.stdin.readline()  # all begin together
        import torch
        from tiering import TensorSwapper
        tensor = torch.arange(5000)
        with TensorSwapper(sys.argv[1], host_memory_bytes=1 << 20) as swapper:
            swapper.swap_out("tensor", tensor).wait()
            assert torch.equal(swapper.swap_in("tensor").wait(), tensor)
        """
    )
    for _ in range(2):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE
            )
            for _ in range(8)
        ]
        for process in started:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in started:
            process.communicate()
        assert [process.returncode for process in started] == [0] * 8
    assert not list(tmp_path.iterdir())


def test_a_process_may_end_without_closing(tmp_path: Path) -> None:
    """What was started has then ended, chains included."""
    path = tmp_path / "data.bin"
    path.touch()
    run(
        """
        import sys
        from tiering.aio import PinnedMemory, PureEngine
        engine = PureEngine()
        memory = PinnedMemory(2**22)
        memory.buffer()[:] = b"x" * 2**22
        file, last = engine.open(sys.argv[1]), None
        for start in range(0, 2**22, 2**16):
            last = engine.write(
                file, memory, at=start, nbytes=2**16, offset=start, after=last
            )
        """,
        str(path),
    )
    assert path.read_bytes() == b"x" * 2**22


def test_an_engine_that_nobody_holds_ends_its_transfers_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.touch()
    engine = PureEngine()
    transfer = engine.write(engine.open(str(path)), PinnedMemory(2**20), nbytes=2**20, offset=0)
    gone = threading.Event()
    weakref.finalize(engine, gone.set)
    del engine
    transfer.wait()
    assert path.stat().st_size == 2**20
    del transfer
    gc.collect()
    assert gone.wait(60)


def test_a_long_chain_needs_neither_threads_nor_depth(make_bench: MakeBench) -> None:
    """600 transfers, each after the one before, by one thread."""
    bench = make_bench("python", threads=1)
    last = None
    for _ in range(300):
        last = bench.write(0, PAGE, 0, after=last)
        last = bench.read(0, PAGE, 0, after=last)
    assert last is not None
    last.wait()
    assert bench.is_same(0, PAGE)
    assert bench.engine.stats().pending_requests == 0


def test_short_operations_are_continued(bench: Bench, kernel: Kernel) -> None:
    """And counted."""
    before = bench.engine.stats()
    kernel.most_bytes = PAGE + 100
    assert bench.round_trip(0, 3 * 65536 + 5, 0)
    after = bench.engine.stats()
    assert after.short_transfers > before.short_transfers
    assert after.written_bytes - before.written_bytes == 3 * 65536 + 5


def test_refusals_that_pass_are_retried_and_counted(bench: Bench, kernel: Kernel) -> None:
    """Over and over, as long as one lets through in between."""
    before = bench.engine.stats().retries
    kernel.errors = [errno.EAGAIN, errno.EINTR, 0] * 3
    assert bench.round_trip(0, 2 * 65536, 0)
    assert bench.engine.stats().retries - before == 6


def test_a_refusal_that_never_passes_is_an_error(bench: Bench, kernel: Kernel) -> None:
    """After a bounded number of tries."""
    kernel.errors = [errno.EAGAIN] * 1000
    with pytest.raises(TransferError) as caught:
        bench.write(0, PAGE, 0).wait()
    assert caught.value.errno == errno.EAGAIN
    assert kernel.calls < 100


def test_direct_operations_that_are_refused_go_through_the_page_cache(
    make_bench: MakeBench, kernel: Kernel
) -> None:
    """The drive's unit may be larger than was assumed."""
    bench = make_bench("python")
    if not bench.info.direct:
        pytest.skip("the temporary folder has no direct I/O")
    kernel.errors = [errno.EINVAL]
    assert bench.round_trip(0, 3 * 65536, 0)
    assert (bench.info.direct, bench.info.direct_errno) == (False, errno.EINVAL)
    assert bench.engine.stats().buffered_blocks == 6


@pytest.mark.parametrize(
    ("error", "kind"),
    [(errno.EIO, TransferError), (errno.ENOSPC, SpaceError), (errno.EDQUOT, SpaceError)],
)
def test_a_failure_names_its_place_and_cancels_what_waits_for_it(
    bench: Bench, kernel: Kernel, error: int, kind: type[TransferError]
) -> None:
    """However far down the chain, and also what is started when it has failed already."""
    kernel.errors = [0, error]
    kernel.gate.clear()
    first = bench.write(0, 3 * 65536, 65536)
    chain = [bench.read(0, PAGE, 0, after=first)]
    for _ in range(1500):
        chain.append(bench.read(0, PAGE, 0, after=chain[-1]))
    kernel.gate.set()
    with pytest.raises(
        kind, match=r"write of 196608 bytes at offset 65536 of .*data\.bin"
    ) as caught:
        first.wait()
    assert "failed at offset 131072 with 65536 of 196608 bytes done" in str(caught.value)
    assert (caught.value.errno, caught.value.filename) == (error, bench.file.path)
    late = bench.write(0, PAGE, 0, after=first)
    assert late.done()
    for cancelled in (chain[-1], late):
        with pytest.raises(TransferError, match="waited for failed") as caught:
            cancelled.wait()
        assert caught.value.errno == errno.ECANCELED


def test_no_progress_is_an_error(bench: Bench, kernel: Kernel) -> None:
    """A write that moves nothing does not go on for ever."""
    kernel.most_bytes = 0
    with pytest.raises(TransferError) as caught:
        bench.write(0, PAGE, 0).wait()
    assert caught.value.errno == errno.EIO


def test_an_offset_no_file_has_is_an_error(bench: Bench) -> None:
    """Not a transfer that never ends."""
    with pytest.raises(TransferError):
        bench.write(0, 1, 2**64).wait()


def test_a_wait_in_vain_names_what_is_pending(make_bench: MakeBench, kernel: Kernel) -> None:
    """It may be waited for again; the file cannot be closed before."""
    bench = make_bench("python")
    kernel.gate.clear()
    write = bench.write(0, PAGE, 8192)
    assert not write.done()
    with pytest.raises(TransferTimeoutError, match="write of 4096 bytes at offset 8192") as caught:
        write.wait(0)
    assert "0 bytes done" in str(caught.value)
    with pytest.raises(TransferTimeoutError, match="cannot be closed"):
        bench.file.close(0)
    assert bench.engine.stats().pending_requests == 1
    kernel.gate.set()
    write.wait()
    bench.file.close()


def test_closing_gives_up_what_hangs_and_keeps_its_memory_and_file(
    tmp_path: Path, kernel: Kernel
) -> None:
    """The thread in the kernel still has both; when it comes back they go."""
    path = tmp_path / "data.bin"
    path.touch()
    engine = PureEngine(AioConfig(threads=1))
    file = engine.open(str(path))
    memory = PinnedMemory(PAGE)
    freed = threading.Event()
    weakref.finalize(memory, freed.set)
    kernel.gate.clear()
    hanging = engine.write(file, memory, nbytes=PAGE, offset=0)
    waiting = engine.write(file, memory, nbytes=PAGE, offset=0, after=hanging)
    queued = engine.write(file, memory, nbytes=PAGE, offset=0)
    del memory
    kernel.entered.wait()
    engine.close(0)
    for transfer in (hanging, waiting, queued):
        assert transfer.done()
        with pytest.raises(EngineClosedError, match="closed before the write"):
            transfer.wait()
    assert not freed.is_set()
    assert file.release.alive
    kernel.gate.set()
    assert freed.wait(60)
    assert kernel.calls == 1
    assert not file.release.alive


def test_closing_on_a_thread_of_the_engine_does_not_wait_for_itself(
    make_bench: MakeBench,
) -> None:
    """The garbage collector may run somebody's finalizer on any thread."""
    engine = make_bench("python").engine
    assert isinstance(engine, PureEngine)
    engine._threads.submit(engine.close).result()
    for thread in threading.enumerate():
        if thread.name == "aio-close":
            thread.join()
    with pytest.raises(EngineClosedError):
        engine.stats()


def test_a_setting_for_the_c_engine_alone_is_not_looked_at() -> None:
    """Whoever makes this engine by hand wants it."""
    with PureEngine(AioConfig(backend="uring")) as engine:
        engine.register(PinnedMemory(PAGE))
        stats = engine.stats()
    assert (stats.backend, stats.registered_bytes, stats.fixed_files) == ("python", 0, False)
    assert "fixed buffers: off" in stats.register_reason


def test_neither_a_folder_nor_a_pipe_is_opened(make_bench: MakeBench, tmp_path: Path) -> None:
    """And no descriptor of the attempt is left."""
    engine = make_bench("python").engine
    os.mkfifo(tmp_path / "pipe")
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is wanted
    for name in ("pipe", "nothing", "."):
        with pytest.raises(TransferError, match="cannot open"):
            engine.open(str(tmp_path / name))
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_foreign_object_is_refused(bench: Bench, make_bench: MakeBench) -> None:
    """A file of the C engine too."""
    other = make_bench("threads")
    with pytest.raises(ConfigError, match="not opened by this engine"):
        bench.engine.read(other.file, bench.memory, nbytes=1, offset=0)
    with pytest.raises(ConfigError, match="does not belong to this engine"):
        bench.write(0, PAGE, 0, after=other.write(0, PAGE, 0))
