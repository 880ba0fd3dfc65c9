"""Bytes written are bytes read, however they are split, placed and interrupted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import strategies as st

from tiering.aio import FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import TransferError

if TYPE_CHECKING:
    from conftest import Bench, MakeBench

BLOCK = 65536
LENGTHS = st.one_of(
    st.integers(0, 3 * BLOCK),
    st.integers(0, 48).map(lambda n: n * 4096),
    st.sampled_from([1, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]),
)
STARTS = st.one_of(st.integers(0, 2 * BLOCK), st.sampled_from([0, 1, 512, 4096, BLOCK]))
settings = hypothesis.settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module")
def bench(make_bench: MakeBench, backend: str) -> Bench:
    return make_bench(backend)


@settings
@hypothesis.given(at=STARTS, nbytes=LENGTHS, offset=STARTS)
def test_any_piece_of_memory_comes_back_as_it_was_written(
    bench: Bench, at: int, nbytes: int, offset: int
) -> None:
    """Whatever the alignment of address, offset and length."""
    assert bench.round_trip(at, nbytes, offset)


@settings
@hypothesis.given(
    pieces=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40_000)), max_size=8)
)
def test_a_write_leaves_its_neighbours_alone(bench: Bench, pieces: list[tuple[int, int]]) -> None:
    """Pieces that share pages, one after the other, leave what a plain file would hold."""
    total = 4 * BLOCK
    expected = bytearray(total)
    bench.memory.buffer(4 * 2**20, total)[:] = bytes(total)
    transfer = bench.engine.write(bench.file, bench.memory, at=4 * 2**20, nbytes=total, offset=0)
    for start, nbytes in pieces:
        at = start * 3001
        transfer = bench.write(at, nbytes, at, after=transfer)
        expected[at : at + nbytes] = bench.memory.buffer(at, nbytes)[:]
    bench.read(0, total, 0, after=transfer).wait()
    assert bytes(bench.memory.buffer(4 * 2**20, total)) == bytes(expected)


RULES = st.builds(
    lambda kind, first, every, reads: FaultRule(
        kind[0], value=kind[1], first=first, every=every, reads=reads
    ),
    kind=st.sampled_from(
        [
            (FaultAction.SHORT, 4096 + 100),
            (FaultAction.SHORT, 1),
            (FaultAction.SHORT, 0),
            (FaultAction.ERRNO, errno.EAGAIN),
            (FaultAction.ERRNO, errno.EINTR),
            (FaultAction.ERRNO, errno.EIO),
            (FaultAction.ERRNO, errno.ENOSPC),
            (FaultAction.DELAY, 300),
        ]
    ),
    first=st.integers(1, 12),
    every=st.integers(0, 5),
    reads=st.booleans(),
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    rules=st.lists(RULES, max_size=4),
    cap=st.sampled_from([0, 4096, 10_000]),
    at=STARTS,
    nbytes=LENGTHS,
    offset=STARTS,
)
def test_faults_end_in_equal_bytes_or_in_an_exception(
    make_bench: MakeBench,
    native_backend: str,
    tmp_path_factory: pytest.TempPathFactory,
    rules: list[FaultRule],
    cap: int,
    at: int,
    nbytes: int,
    offset: int,
) -> None:
    """Short transfers, refusals, failures and delays in any order never end in wrong bytes."""
    faults = Faults(rules=tuple(rules), max_transfer_bytes=cap)
    bench = make_bench(native_backend, faults=faults, queue_depth=4)
    with bench.engine:
        try:
            is_same = bench.round_trip(at, nbytes, offset)
        except TransferError as error:
            is_same = error.filename == bench.file.path  # typed, and it names its file
    assert is_same


def test_more_than_one_kernel_transfer_is_continued(
    make_bench: MakeBench, native_backend: str
) -> None:
    """A cap on one transfer splits; it is not taken for a short one."""
    bench = make_bench(native_backend, faults=Faults(max_transfer_bytes=2**20), block_bytes=2**22)
    assert bench.round_trip(0, 3 * 2**20 + 517, 0)
    assert bench.engine.stats().short_transfers == 0


@pytest.mark.parametrize("align", [512, 4096, 65536])
def test_the_alignment_that_is_reported_is_respected(
    make_bench: MakeBench, native_backend: str, align: int
) -> None:
    """Aligned parts go direct, the rest through the page cache, and the bytes are the same."""
    bench = make_bench(native_backend, faults=Faults(force_alignment_bytes=align), block_bytes=4096)
    if not bench.info.direct:
        pytest.skip("the temporary folder has no direct I/O")
    assert bench.info.memory_align_bytes == align
    assert bench.info.offset_align_bytes == max(align, os.sysconf("SC_PAGESIZE"))
    assert bench.round_trip(0, 3 * 65536, 65536)
    assert bench.engine.stats().buffered_blocks == 0
    assert bench.round_trip(1, 3 * 65536 + 1, 4096)
    assert bench.engine.stats().buffered_blocks > 0


@pytest.mark.parametrize(
    ("memory", "offset"), [(512, 4096), (4096, 512), (65536, 4096), (512, 65536)]
)
def test_memory_and_file_may_be_aligned_differently(
    make_bench: MakeBench, native_backend: str, memory: int, offset: int
) -> None:
    """Each counts by itself: what meets both goes direct, what misses one does not."""
    faults = Faults(force_alignment_bytes=offset, force_memory_alignment_bytes=memory)
    bench = make_bench(native_backend, faults=faults, block_bytes=65536)
    if not bench.info.direct:
        pytest.skip("the temporary folder has no direct I/O")
    assert bench.info.memory_align_bytes == memory
    assert bench.info.offset_align_bytes == max(offset, os.sysconf("SC_PAGESIZE"))
    assert bench.round_trip(memory, 3 * 65536, 65536)
    assert bench.engine.stats().buffered_blocks == 0
    assert bench.round_trip(memory // 2, 65536, 65536)
    crooked = bench.engine.stats().buffered_blocks
    assert crooked > 0
    assert bench.round_trip(memory, 65536, offset // 2)
    assert bench.engine.stats().buffered_blocks > crooked
    for at in (0, 1, memory // 2, memory):
        assert bench.round_trip(at, 3 * 65536 + 517, offset // 2 + 1)


def test_an_aligned_request_with_a_ragged_end_goes_direct_but_for_the_end(
    make_bench: MakeBench, backend: str
) -> None:
    """Only the last bytes are buffered."""
    bench = make_bench(backend)
    if not bench.info.direct:
        pytest.skip("the temporary folder has no direct I/O")
    bench.write(0, 2 * BLOCK + 517, 0).wait()
    stats = bench.engine.stats()
    assert (stats.written_blocks, stats.buffered_blocks) == (3, 1)


def test_a_refusal_of_direct_io_is_not_an_error(make_bench: MakeBench, native_backend: str) -> None:
    """The file is used through the page cache and says why."""
    bench = make_bench(native_backend, faults=Faults(refuse_direct_errno=errno.EINVAL))
    assert (bench.info.direct, bench.info.direct_errno) == (False, errno.EINVAL)
    assert bench.info.why_not_direct == "refused (EINVAL: Invalid argument)"
    assert bench.round_trip(0, 3 * BLOCK + 1, 0)


def test_direct_io_can_be_done_without(make_bench: MakeBench, backend: str) -> None:
    """By choice, on a file system that has it: the file says so, and nobody warns."""
    bench = make_bench(backend, direct="off")
    assert (bench.info.direct, bench.info.direct_errno) == (False, 0)
    assert (bench.info.memory_align_bytes, bench.info.offset_align_bytes) == (1, 1)
    assert bench.info.why_not_direct == "not asked for"
    assert bench.round_trip(0, 3 * BLOCK, 0)
    assert bench.round_trip(1, 3 * BLOCK + 1, 4097)
    stats = bench.engine.stats()
    assert stats.buffered_blocks == stats.read_blocks + stats.written_blocks


def test_a_file_in_memory_is_buffered(make_bench: MakeBench, native_backend: str) -> None:
    """There is nothing that direct I/O could bypass there, even if the open succeeds."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no file system in memory")
    bench = make_bench(native_backend, folder=shm)
    try:
        assert not bench.info.direct
        assert bench.round_trip(3, 3 * BLOCK + 1, 5)
    finally:
        Path(bench.file.path).unlink()


def test_nothing_to_move_is_a_transfer_that_succeeds(bench: Bench) -> None:
    """Also after another one, and also at an offset where there is no file."""
    first = bench.write(0, 0, 0)
    bench.read(0, 0, 2**40, after=first).wait()
    assert first.done()


def test_a_read_past_the_end_says_where_the_file_ends(make_bench: MakeBench, backend: str) -> None:
    """It names what was asked, what was had, and the offset."""
    bench = make_bench(backend)
    bench.write(0, 100_000, 0).wait()
    with pytest.raises(TransferError, match="file ends at 100000") as caught:
        bench.read(0, 200_000, 0).wait()
    assert caught.value.errno == errno.ENODATA
    assert "200000 bytes at offset 0" in str(caught.value)
    assert "100000 of 200000 bytes done" in str(caught.value)


def test_what_was_synced_is_in_the_file(make_bench: MakeBench, backend: str) -> None:
    """The file can be read by anyone."""
    bench = make_bench(backend)
    bench.write(0, BLOCK + 5, 0).wait()
    bench.engine.sync(bench.file)
    assert Path(bench.file.path).read_bytes() == bytes(bench.memory.buffer(0, BLOCK + 5))
