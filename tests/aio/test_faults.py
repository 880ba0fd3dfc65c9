"""What the kernel refuses, loses or delays ends in equal bytes or in an exception that says so."""

from __future__ import annotations

import errno
import pickle
import signal
import threading
import warnings
from typing import TYPE_CHECKING

import pytest

from tiering.aio import AioConfig, AioEngine, FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import (
    ConfigError,
    EngineClosedError,
    SpaceError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)

if TYPE_CHECKING:
    from conftest import MakeBench

MIB = 2**20
SWALLOW_READS = Faults(rules=(FaultRule(FaultAction.SWALLOW, writes=False),))


def rules(*given: FaultRule) -> Faults:
    return Faults(rules=given)


def test_a_short_completion_is_continued_from_the_aligned_offset_below(
    make_bench: MakeBench, native_backend: str
) -> None:
    """4096 + 100 bytes reported, of which only the aligned 4096 moved: all bytes arrive."""
    short = FaultRule(FaultAction.SHORT, value=4096 + 100, writes=False)
    bench = make_bench(native_backend, faults=rules(short), block_bytes=MIB)
    assert bench.round_trip(0, MIB, 0)
    assert bench.engine.stats().short_transfers == 1


@pytest.mark.parametrize(("reads", "error"), [(True, errno.ENODATA), (False, errno.EIO)])
def test_two_attempts_without_progress_are_an_error(
    make_bench: MakeBench, native_backend: str, reads: bool, error: int
) -> None:
    """There is no endless loop."""
    stuck = FaultRule(FaultAction.SHORT, value=0, every=1, reads=reads, writes=not reads)
    bench = make_bench(native_backend, faults=rules(stuck))
    with pytest.raises(TransferError) as caught:
        bench.round_trip(0, 4096, 0)
    assert caught.value.errno in {error, errno.ECANCELED}


def test_transient_refusals_are_retried_and_counted(
    make_bench: MakeBench, native_backend: str
) -> None:
    """Every third EAGAIN, every fifth EINTR: a batch arrives whole."""
    bench = make_bench(
        native_backend,
        faults=rules(
            FaultRule(FaultAction.ERRNO, value=errno.EAGAIN, first=3, every=3),
            FaultRule(FaultAction.ERRNO, value=errno.EINTR, first=5, every=5),
        ),
    )
    writes = [bench.write(i * 8192, 8192, i * 8192) for i in range(64)]
    reads = [bench.read(i * 8192, 8192, i * 8192, after=write) for i, write in enumerate(writes)]
    for read in reads:
        read.wait()
    assert bench.is_same(0, 64 * 8192)
    assert bench.engine.stats().retries > 64


def test_a_refusal_that_never_ends_is_an_error(make_bench: MakeBench, native_backend: str) -> None:
    """Retries are bounded."""
    again = FaultRule(FaultAction.ERRNO, value=errno.EAGAIN, every=1)
    bench = make_bench(native_backend, faults=rules(again))
    with pytest.raises(TransferError) as caught:
        bench.write(0, 4096, 0).wait()
    assert caught.value.errno == errno.EAGAIN


def test_a_failure_names_operation_file_offset_and_bytes(
    make_bench: MakeBench, native_backend: str
) -> None:
    """The third block of a write fails."""
    failing = FaultRule(FaultAction.ERRNO, value=errno.EIO, first=3)
    bench = make_bench(native_backend, faults=rules(failing), queue_depth=1)
    transfer = bench.write(0, 4 * 65536, 65536)
    for _ in range(2):  # it is raised as often as it is asked for
        with pytest.raises(TransferError) as caught:
            transfer.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, bench.file.path)
    for fact in ("write of 262144", "offset 65536", bench.file.path, "offset 196608", "131072 of"):
        assert fact in str(caught.value)
    assert transfer.done()


def test_a_full_drive_has_its_own_exception(make_bench: MakeBench, native_backend: str) -> None:
    """Callers that make room can tell it from the rest."""
    full = FaultRule(FaultAction.ERRNO, value=errno.ENOSPC)
    with pytest.raises(SpaceError):
        make_bench(native_backend, faults=rules(full)).write(0, 4096, 0).wait()


@pytest.mark.parametrize("kind", [TransferError, SpaceError, TransferTimeoutError])
def test_an_error_can_be_sent_to_another_process(kind: type[TransferError]) -> None:
    """A pool of workers hangs on an exception that cannot be made again."""
    error = kind("write of 5 bytes failed", errno=errno.ENOSPC, path="/drive/file")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.errno, again.filename) == (errno.ENOSPC, "/drive/file")


def test_a_lost_completion_ends_in_a_timeout_and_close_ends_all_the_same(
    make_bench: MakeBench, native_backend: str
) -> None:
    """The timeout names what is pending; after the close the transfer says it never ended."""
    bench = make_bench(native_backend, faults=SWALLOW_READS)
    bench.write(0, 8192, 0).wait()
    transfer = bench.read(0, 4096, 4096)
    with pytest.raises(TransferTimeoutError, match=r"pending after 0\.01 s") as caught:
        transfer.wait(0.01)
    for fact in ("read of 4096 bytes", "offset 4096", bench.file.path):
        assert fact in str(caught.value)
    assert not transfer.done()
    with pytest.raises(TransferTimeoutError, match="cannot be closed"):
        bench.file.close(0)
    bench.engine.close(0.01)
    assert transfer.done()
    with pytest.raises(EngineClosedError, match="closed before the read of 4096 bytes"):
        transfer.wait()


def test_a_wait_can_be_interrupted(make_bench: MakeBench, native_backend: str) -> None:
    """A signal handler that raises ends the wait; the transfer stays pending."""
    bench = make_bench(native_backend, faults=SWALLOW_READS)
    bench.write(0, 4096, 0).wait()
    transfer = bench.read(0, 4096, 0)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not transfer.done()


def test_a_wait_lets_other_threads_run(make_bench: MakeBench, native_backend: str) -> None:
    """The interpreter lock is free while a delayed read is waited for."""
    delayed = FaultRule(FaultAction.DELAY, value=300_000, writes=False)
    bench = make_bench(native_backend, faults=rules(delayed))
    bench.write(0, 4096, 0).wait()
    waiter = threading.Thread(target=bench.read(0, 4096, 0).wait)
    waiter.start()
    turns = 0
    while waiter.is_alive():
        turns += 1
    assert turns >= 10


def test_delayed_completions_overlap(make_bench: MakeBench, native_backend: str) -> None:
    """The second of two reads ends while the first one is still held back."""
    delayed = FaultRule(FaultAction.DELAY, value=60_000_000, writes=False)
    bench = make_bench(native_backend, faults=rules(delayed))
    bench.write(0, 8192, 0).wait()
    held = bench.read(0, 4096, 0)
    later = bench.write(4096, 4096, 4096)  # when it has begun, so has the first read
    bench.read(4096, 4096, 4096, after=later).wait()
    assert not held.done()


def test_many_threads_wait_for_one_transfer(make_bench: MakeBench, native_backend: str) -> None:
    """Each of them sees it end."""
    delayed = FaultRule(FaultAction.DELAY, value=20_000)
    transfer = make_bench(native_backend, faults=rules(delayed)).write(0, 4096, 0)
    ended = []

    def wait() -> None:
        transfer.wait()
        ended.append(1)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 8


def test_a_named_backend_that_is_refused_is_an_error() -> None:
    """It says why and what to do."""
    with pytest.raises(ConfigError, match=r"(?s)'uring' cannot be had.*(EPERM|no io_uring)"):
        AioEngine(AioConfig(backend="uring"), faults=Faults(refuse_uring_errno=errno.EPERM))


def test_auto_falls_back_with_one_warning() -> None:
    """The statistics name backend and reason."""
    with pytest.warns(TieringWarning, match="through threads") as caught:
        engine = AioEngine(faults=Faults(refuse_uring_errno=errno.EPERM))
    with engine:
        stats = engine.stats()
    assert len(caught) == 1
    assert stats.backend == "threads"
    assert stats.backend_reason


def test_a_ring_that_cannot_do_an_operation_is_left_in_the_middle_of_work(
    make_bench: MakeBench, has_uring: bool
) -> None:
    """One EOPNOTSUPP: one warning, no failed request, threads from then on."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    unsupported = FaultRule(FaultAction.ERRNO, value=errno.EOPNOTSUPP, first=20)
    bench = make_bench("auto", faults=rules(unsupported))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(bench.round_trip(0, 4 * 65536, 0) for _ in range(10))
        stats = bench.engine.stats()
    assert [warning.category for warning in caught] == [TieringWarning]
    assert stats.backend == "threads"
    assert "EOPNOTSUPP" in stats.backend_reason or "ENOTSUP" in stats.backend_reason


def test_a_named_ring_is_never_left(make_bench: MakeBench, has_uring: bool) -> None:
    """An explicit choice that cannot be met is an error."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    unsupported = FaultRule(FaultAction.ERRNO, value=errno.EOPNOTSUPP)
    bench = make_bench("uring", faults=rules(unsupported))
    with pytest.raises(TransferError) as caught:
        bench.write(0, 4096, 0).wait()
    assert caught.value.errno == errno.EOPNOTSUPP
    assert bench.engine.stats().backend == "uring"


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EOPNOTSUPP])
def test_a_refused_registration_costs_one_warning_and_no_bytes(
    make_bench: MakeBench, has_uring: bool, error: int
) -> None:
    """Everything works unregistered; the statistics say why."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    bench = make_bench("uring", faults=Faults(refuse_register_errno=error))
    with pytest.warns(TieringWarning, match="fixed buffers: off") as caught:
        bench.engine.register(bench.memory)
    assert len(caught) == 1
    bench.engine.register(bench.memory)  # a second warning would be an error here
    stats = bench.engine.stats()
    assert stats.registered_bytes == 0
    assert "fixed buffers: off" in stats.register_reason
    assert bench.round_trip(0, 4 * 65536, 0)


def test_registered_memory_carries_the_same_bytes(
    make_bench: MakeBench, native_backend: str
) -> None:
    """With the ring it counts as registered; threads say that they have no use for it."""
    bench = make_bench(native_backend)
    bench.engine.register(bench.memory)
    assert bench.round_trip(1, 4 * 65536 + 1, 3)
    stats = bench.engine.stats()
    if native_backend == "threads":
        assert "thread backend" in stats.register_reason
    elif not stats.register_reason:
        assert stats.registered_bytes == bench.memory.nbytes
