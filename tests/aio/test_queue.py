"""Many transfers, in order where asked for, in bounded memory, whoever still looks at them."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiering.aio import AioEngine, FaultRule, Faults, PinnedMemory
from tiering.aio.config import FaultAction
from tiering.errors import ConfigError, EngineClosedError, TransferError, TransferTimeoutError

if TYPE_CHECKING:
    from conftest import MakeBench

PAGE = 4096


@pytest.mark.parametrize("queue_depth", [1, 2, 4096])
def test_more_requests_than_the_queue_is_deep_all_end(
    make_bench: MakeBench, backend: str, queue_depth: int
) -> None:
    """500 in one go, and one that alone has more blocks than the queue."""
    bench = make_bench(backend, queue_depth=queue_depth)
    writes = [bench.write(i * PAGE, PAGE, i * PAGE) for i in range(500)]
    for write in writes:
        write.wait()
    bench.read(0, 500 * PAGE, 0).wait()
    assert bench.is_same(0, 500 * PAGE)
    assert bench.engine.stats().pending_requests == 0


def test_after_orders_transfers_of_the_same_memory(make_bench: MakeBench, backend: str) -> None:
    """Each read into a slot waits for the write from it, and each write for the read before."""
    bench = make_bench(backend)
    for i in range(8):
        bench.write(i * PAGE, PAGE, i * PAGE).wait()
    slot = 4 * 2**20
    last = None
    for i in range(8):
        read = bench.engine.read(
            bench.file, bench.memory, at=slot, nbytes=PAGE, offset=i * PAGE, after=last
        )
        last = bench.engine.write(
            bench.file, bench.memory, at=slot, nbytes=PAGE, offset=(8 + i) * PAGE, after=read
        )
    last.wait()
    bench.read(0, 8 * PAGE, 8 * PAGE).wait()
    assert bench.is_same(0, 8 * PAGE)


def test_a_failure_cancels_all_that_waits_for_it(
    make_bench: MakeBench, native_backend: str
) -> None:
    """However far down the chain, and also what is started when it has failed already."""
    failing = FaultRule(FaultAction.ERRNO, value=errno.EIO, reads=False)
    bench = make_bench(native_backend, faults=Faults(rules=(failing,)))
    first = bench.write(0, PAGE, 0)
    chain = [bench.read(0, PAGE, 0, after=first)]
    for _ in range(100):
        chain.append(bench.write(0, PAGE, 0, after=chain[-1]))
    with pytest.raises(TransferError) as caught:
        chain[-1].wait()
    assert caught.value.errno == errno.ECANCELED
    assert "waited for failed" in str(caught.value)
    with pytest.raises(TransferError, match="Input/output error"):
        first.wait()
    late = bench.write(0, PAGE, 0, after=first)
    assert late.done()
    with pytest.raises(TransferError, match="waited for failed"):
        late.wait()


def test_a_success_that_was_seen_can_still_be_waited_for(
    make_bench: MakeBench, backend: str
) -> None:
    """`after` a transfer that ended long ago starts at once."""
    bench = make_bench(backend)
    first = bench.write(0, PAGE, 0)
    first.wait()
    bench.read(0, PAGE, 0, after=first).wait()
    assert bench.is_same(0, PAGE)


def test_transfers_that_nobody_waits_for_do_not_pile_up(
    make_bench: MakeBench, native_backend: str
) -> None:
    """Each new one looks after two old ones."""
    bench = make_bench(native_backend)
    last = None
    for _ in range(2000):
        last = bench.write(0, PAGE, 0, after=last)
    last.wait()
    for _ in range(2500):
        bench.write(0, 0, 0)
    assert len(bench.engine._core._pending) <= 4


def test_a_transfer_may_be_dropped(make_bench: MakeBench, native_backend: str) -> None:
    """The engine keeps its memory alive until it has ended, and no longer."""
    delayed = FaultRule(FaultAction.DELAY, value=20_000)
    bench = make_bench(native_backend, faults=Faults(rules=(delayed,)))
    memory = PinnedMemory(PAGE)
    alive = weakref.ref(memory)
    bench.engine.write(bench.file, memory, nbytes=PAGE, offset=0)
    del memory
    gc.collect()
    assert alive() is not None
    bench.file.close()
    gc.collect()
    assert alive() is None


def test_a_closed_file_takes_nothing_more(make_bench: MakeBench, backend: str) -> None:
    """Closing waits for its transfers; its number may then be another file's."""
    bench = make_bench(backend)
    transfer = bench.write(0, 2**20, 0)
    bench.file.close()
    bench.file.close()
    transfer.wait()
    other = bench.engine.open(bench.file.path)
    with pytest.raises(ConfigError, match="closed"):
        bench.write(0, PAGE, 0)
    with pytest.raises(TransferError):
        bench.engine.sync(bench.file)
    other.close()


def test_what_belongs_to_another_engine_is_refused(make_bench: MakeBench, backend: str) -> None:
    """Files and transfers alike."""
    one, other = make_bench(backend), make_bench(backend)
    with pytest.raises(ConfigError, match="not opened by this engine"):
        one.engine.read(other.file, one.memory, nbytes=1, offset=0)
    with pytest.raises(ConfigError, match="does not belong to this engine"):
        one.write(0, PAGE, 0, after=other.write(0, PAGE, 0))


@pytest.mark.parametrize(
    ("at", "nbytes", "offset"), [(0, 8 * 2**20 + 1, 0), (-1, 1, 0), (0, -1, 0), (0, 1, -1)]
)
def test_bytes_outside_the_memory_are_refused(
    make_bench: MakeBench, backend: str, at: int, nbytes: int, offset: int
) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError):
        make_bench(backend).write(at, nbytes, offset)


def test_a_file_that_is_not_there_cannot_be_opened(
    make_bench: MakeBench, backend: str, tmp_path: Path
) -> None:
    """The error is the kernel's, with the name."""
    engine = make_bench(backend).engine
    with pytest.raises(TransferError, match="No such file") as caught:
        engine.open(str(tmp_path / "nothing"))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(TransferError, match="Is a directory"):
        engine.open(str(tmp_path))


def test_too_many_open_files_name_the_setting(make_bench: MakeBench, backend: str) -> None:
    """And one that is closed makes room."""
    bench = make_bench(backend, max_files=2)
    second = bench.engine.open(bench.file.path)
    with pytest.raises(TransferError, match="max_files"):
        bench.engine.open(bench.file.path)
    second.close()
    bench.engine.open(bench.file.path).close()


def test_a_closed_engine_says_so(make_bench: MakeBench, backend: str) -> None:
    """Closing twice is closing once; what had ended stays ended."""
    bench = make_bench(backend)
    ended = bench.write(0, PAGE, 0)
    bench.engine.close()
    bench.engine.close()
    ended.wait()
    bench.file.close()
    for call in (
        lambda: bench.write(0, PAGE, 0),
        lambda: bench.engine.open(bench.file.path),
        lambda: bench.engine.sync(bench.file),
        bench.engine.stats,
    ):
        with pytest.raises(EngineClosedError):
            call()


def test_an_engine_that_nobody_holds_closes_itself_and_ends_its_transfers(
    make_bench: MakeBench, native_backend: str, tmp_path: Path
) -> None:
    """A transfer that outlives its engine has ended well."""
    path = tmp_path / "data.bin"
    path.touch()
    memory = PinnedMemory(2**20)
    engine = AioEngine(make_bench(native_backend).engine.config)
    transfer = engine.write(engine.open(str(path)), memory, nbytes=2**20, offset=0)
    core = weakref.ref(engine._core)
    del engine
    gc.collect()
    transfer.wait()
    assert path.stat().st_size == 2**20
    del transfer
    gc.collect()
    assert core() is None


def test_an_engine_in_a_cycle_is_closed_by_the_collector_inside_a_call(
    make_bench: MakeBench, native_backend: str
) -> None:
    """The finalizer does not wait for the very call it runs in."""
    engine = AioEngine(make_bench(native_backend).engine.config)
    core = engine._core
    cycle = [engine]
    cycle.append(cycle)
    with core._use():
        del engine, cycle
        gc.collect()
        assert core._callers == 1
    for thread in threading.enumerate():
        if thread.name == "aio-close":
            thread.join()
    with pytest.raises(EngineClosedError):
        core.stats()


def test_what_is_waited_for_overtakes_what_nobody_waits_for(
    make_bench: MakeBench, native_backend: str
) -> None:
    """The read that was started last, and is waited for, ends before all that stood before it."""
    hold = Faults(rules=(FaultRule(FaultAction.DELAY, value=200_000, first=1),))
    bench = make_bench(native_backend, queue_depth=1, faults=hold)
    held = bench.write(0, PAGE, 0)
    ahead = [bench.read(i * PAGE, PAGE, 0, after=held) for i in range(20)]
    ahead += [bench.write(i * PAGE, PAGE, i * PAGE, after=held) for i in range(20)]
    demand = bench.read(30 * PAGE, PAGE, 0, after=held)
    demand.wait()
    for transfer in ahead:
        transfer.wait()
    assert all(transfer.queue_s > demand.queue_s for transfer in ahead)


def test_what_a_demanded_read_waits_for_overtakes_too(
    make_bench: MakeBench, native_backend: str
) -> None:
    """To wait for the end of a chain hurries all of the chain."""
    hold = Faults(rules=(FaultRule(FaultAction.DELAY, value=200_000, first=1),))
    bench = make_bench(native_backend, queue_depth=1, faults=hold)
    held = bench.write(0, PAGE, 0)
    ahead = [bench.write(i * PAGE, PAGE, 0, after=held) for i in range(20)]
    written = bench.write(64 * PAGE, PAGE, PAGE, after=held)
    bench.read(64 * PAGE, PAGE, PAGE, after=written).wait()
    for transfer in ahead:
        transfer.wait()
    assert all(transfer.queue_s > written.queue_s for transfer in ahead)
    assert bench.is_same(64 * PAGE, PAGE)


def test_times_of_transfers_add_up(make_bench: MakeBench, backend: str) -> None:
    """Each knows how long it stood in the queue and at the drive; the counters have the sums."""
    bench = make_bench(backend)
    transfers = [bench.write(i * PAGE, PAGE, i * PAGE) for i in range(10)]
    for transfer in transfers:
        transfer.wait()
    stats = bench.engine.stats()
    assert all(transfer.device_s > 0 for transfer in transfers)
    assert stats.queue_s == pytest.approx(sum(transfer.queue_s for transfer in transfers))
    assert stats.device_s == pytest.approx(sum(transfer.device_s for transfer in transfers))
    assert stats.ended_requests == 10


def test_each_device_has_a_queue_and_counters_of_its_own(
    make_bench: MakeBench, native_backend: str, memory_folder: Path
) -> None:
    """Files on the same one share them; what one moved is not counted for the other."""
    bench = make_bench(native_backend)
    (memory_folder / "other.bin").touch()
    other = bench.engine.open(str(memory_folder / "other.bin"))
    bench.engine.open(str(memory_folder / "other.bin"))
    bench.write(0, PAGE, 0).wait()
    bench.engine.write(other, bench.memory, nbytes=3 * PAGE, offset=0).wait()
    by_device = bench.engine.device_stats()
    assert sorted(stats.written_bytes for stats in by_device.values()) == [PAGE, 3 * PAGE]
    assert bench.engine.stats().written_bytes == 4 * PAGE


@pytest.mark.parametrize("count", [1, 7, 50, 60])
def test_some_of_several_can_be_waited_for(make_bench: MakeBench, backend: str, count: int) -> None:
    """Without a timeout while too few have ended; never for more than there are."""
    bench = make_bench(backend)
    flying = [bench.write(i * PAGE, PAGE, i * PAGE) for i in range(50)]
    while flying:
        bench.engine.wait_some(flying, count)
        ended = [transfer for transfer in flying if transfer.done()]
        assert len(ended) >= min(count, len(flying))
        flying = [transfer for transfer in flying if transfer not in ended]
    bench.engine.wait_some([], count)


def test_some_of_several_that_never_end_are_a_timeout(
    make_bench: MakeBench, native_backend: str
) -> None:
    """It says how many, and names the first."""
    swallow = Faults(rules=(FaultRule(FaultAction.SWALLOW, first=1, every=1),))
    bench = make_bench(native_backend, faults=swallow)
    flying = [bench.write(0, 0, 0), bench.write(0, PAGE, PAGE), bench.write(0, PAGE, 0)]
    with pytest.raises(
        TransferTimeoutError,
        match=rf"2 of 3 transfers .* 2 were to end; the first pending one is the write .*{PAGE}",
    ):
        bench.engine.wait_some(flying, 2, timeout_s=0.05)
