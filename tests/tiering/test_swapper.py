from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.interrupts import Interrupted
from tiering import TensorSwapper
from tiering.aio import AioConfig, AioEngine, FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import (
    ArenaFullError,
    ConfigError,
    EngineClosedError,
    RecordError,
    SpaceError,
    TieringError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)
from tiering.folder import SwapFolder

MakeEngine = Callable[..., AioEngine]
OpenFiles = Callable[[], list[str]]
BLOCK = 4096
MIB = 1 << 20


@pytest.fixture
def swapper(tmp_path: Path) -> Iterator[TensorSwapper]:
    """A swapper with an arena of 1 MiB, so that tensors move in pieces of 128 KiB."""
    with TensorSwapper(tmp_path, host_memory_bytes=MIB) as opened:
        yield opened


@pytest.fixture
def with_faults(tmp_path: Path, make_engine: MakeEngine) -> Callable[..., TensorSwapper]:
    """Makes swappers whose drive fails as told; small blocks give the faults something to hit."""

    def make(*rules: FaultRule, host_memory_bytes: int = MIB, **others: int) -> TensorSwapper:
        engine = make_engine(AioConfig(block_bytes=BLOCK), faults=Faults(rules=rules, **others))
        return TensorSwapper(tmp_path, host_memory_bytes=host_memory_bytes, backend=engine)

    return make


def engine_of(swapper: TensorSwapper) -> AioEngine:
    """The engine under a swapper."""
    engine = swapper._backend
    assert isinstance(engine, AioEngine)
    return engine


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: equality that holds for NaN and for dtypes without arithmetic too."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and raw(left).equal(raw(right))


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits of any dtype."""
    flat = torch.empty(shape, dtype=dtype)
    raw(flat).random_(0, 2 if dtype is torch.bool else 256)
    return flat


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nbytes=st.integers(0, 3 * BLOCK + 1), seed=st.integers(0, 1000))
def test_every_length_up_to_three_blocks_comes_back(
    nbytes: int, seed: int, swapper: TensorSwapper
) -> None:
    """The index knows the length; the file is padded, and nobody looks at its size."""
    torch.manual_seed(seed)
    tensor = random((nbytes,), torch.uint8)
    swapper.swap_out("a", tensor)
    assert same(swapper.swap_in("a").wait(), tensor)


@pytest.mark.parametrize("nbytes", [1, *(k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1))])
def test_lengths_around_the_block_come_back_on_each_backend(
    nbytes: int, each_backend: str, tmp_path: Path
) -> None:
    """The edges, with the smallest block there is."""
    config = AioConfig(block_bytes=BLOCK, backend=each_backend)
    tensor = random((nbytes,), torch.uint8)
    with TensorSwapper(tmp_path, host_memory_bytes=MIB, aio=config) as swapper:
        swapper.swap_out("a", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)


@pytest.mark.parametrize("numel", [14_412_000, 257, 1, 513, 1_048_577])
def test_half_precision_tensors_of_odd_sizes_come_back(numel: int, tmp_path: Path) -> None:
    """None is a multiple of the alignment; the last bytes count as much as the first."""
    tensor = random((numel,), torch.float16)
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out("a", tensor)
        back = swapper.swap_in("a").wait()
        assert same(back, tensor)
        assert back.numel() * back.element_size() == swapper.stats().stored_bytes == 2 * numel


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.int8, torch.int16, torch.uint32, torch.int64, torch.float16),
        *(torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.complex128),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5, 3), (1, 1, 40_001)], ids=str)
def test_any_dtype_and_any_shape_come_back(
    dtype: torch.dtype, shape: tuple[int, ...], swapper: TensorSwapper
) -> None:
    """Scalars, empty tensors, and dtypes that the file format has no name for."""
    tensor = random(shape, dtype)
    swapper.swap_out("a", tensor)
    back = swapper.swap_in("a").wait()
    assert same(back, tensor)
    assert back.device.type == "cpu"
    assert not back.requires_grad


def misaligned() -> torch.Tensor:
    """Bytes that start three past an aligned address."""
    return random((1_000_003,), torch.uint8)[3:]


@pytest.mark.parametrize(
    "source",
    [
        misaligned(),
        random((700, 501), torch.float32)[:, 1:],
        random((700, 501), torch.float32).t(),
        random((4, 300, 501), torch.float32).permute(2, 0, 1),
        random((1, 501), torch.float32).expand(400, 501),
        random((600_000,), torch.int16)[::2],
        random((3, 70_001), torch.float64)[:, ::2],
        random((50, 40), torch.complex64).conj(),
        random((50, 40), torch.complex64).conj().imag,
        torch.nn.Parameter(random((300, 300), torch.float32)),
    ],
    ids=[
        *("misaligned", "columns", "transposed", "permuted", "expanded", "strided"),
        *("long rows", "conjugate", "negative", "parameter"),
    ],
)
def test_whatever_the_memory_of_the_source_looks_like_it_comes_back(
    source: torch.Tensor, swapper: TensorSwapper
) -> None:
    """Misaligned, not contiguous, lazily conjugated, with a gradient: equal values return."""
    swapper.swap_out("a", source)
    assert same(swapper.swap_in("a").wait(), source.detach().clone().resolve_conj().resolve_neg())


def test_a_source_may_be_changed_as_soon_as_the_call_returns(swapper: TensorSwapper) -> None:
    """All of it has been copied by then, however large it is against the arena."""
    source = random((3 * MIB,), torch.uint8)
    kept = source.clone()
    swapper.swap_out("a", source)
    source.zero_()
    assert same(swapper.swap_in("a").wait(), kept)


def test_a_tensor_larger_than_the_arena_moves_in_pieces(swapper: TensorSwapper) -> None:
    """The arena bounds the memory in use, not the size of a tensor; pieces overlap in flight."""
    tensor = random((5 * MIB // 4 + 1001,), torch.float32)
    swapper.swap_out("a", tensor)
    assert same(swapper.swap_in("a").wait(), tensor)
    arena = swapper.stats().arena
    assert arena.used_bytes == 0
    assert arena.capacity_bytes // 2 < arena.peak_bytes <= arena.capacity_bytes


def test_an_arena_without_room_says_which_argument_to_raise(swapper: TensorSwapper) -> None:
    """Here something else holds all of it."""
    held = swapper._arena.allocate(MIB, owner="else")
    with pytest.raises(ArenaFullError, match=r"'a' needs 8 bytes.* raise host_memory_bytes"):
        swapper.swap_out("a", torch.ones(2))
    held.free()
    swapper.swap_out("a", torch.ones(2)).wait()
    assert same(swapper.swap_in("a").wait(), torch.ones(2))


def test_an_arena_of_one_page_is_enough(tmp_path: Path) -> None:
    """Then pieces follow one another."""
    tensor = random((10 * BLOCK + 5,), torch.uint8)
    with TensorSwapper(tmp_path, host_memory_bytes=1) as swapper:
        swapper.swap_out("a", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)


@pytest.mark.parametrize("queue_depth", [1, 2, 4096])
def test_five_hundred_swaps_at_once_need_no_waiting_in_between(
    queue_depth: int, each_backend: str, tmp_path: Path
) -> None:
    """More requests than the queue has entries, and more bytes than the arena has."""
    config = AioConfig(queue_depth=queue_depth, backend=each_backend)
    tensors = [torch.full((1000 + number,), number) for number in range(500)]
    with TensorSwapper(tmp_path, host_memory_bytes=MIB, aio=config) as swapper:
        for number, tensor in enumerate(tensors):
            swapper.swap_out(f"{number}", tensor)
        assert swapper.wait() == 500
        reads = [swapper.swap_in(f"{number}") for number in range(500)]
        assert all(same(read.wait(), t) for read, t in zip(reads, tensors, strict=True))
        assert swapper.wait() == 0


def test_waiting_with_nothing_pending_returns_zero_at_once(swapper: TensorSwapper) -> None:
    """Once and again; and what was waited for one by one is not counted."""
    assert swapper.wait() == swapper.wait() == 0
    swapper.swap_out("a", torch.ones(5)).wait()
    assert swapper.wait() == 0
    swapper.swap_out("a", torch.ones(5))
    swapper.swap_in("a")
    assert swapper.wait() == 2
    assert swapper.wait() == 0


def test_a_transfer_tells_when_it_is_done(swapper: TensorSwapper) -> None:
    """Waiting again returns the same tensor, and so does waiting after the swapper was closed."""
    out = swapper.swap_out("a", torch.ones(5))
    back = swapper.swap_in("a")
    first = back.wait()
    assert out.done()
    assert back.done()
    swapper.close()
    assert back.wait() is first
    out.wait()


def test_transfers_nobody_waited_for_are_complete_after_close(tmp_path: Path) -> None:
    """Close waits, and a tensor that was on its way in can still be taken."""
    tensor = random((3 * MIB,), torch.uint8)
    with TensorSwapper(tmp_path, host_memory_bytes=MIB) as swapper:
        swapper.swap_out("a", tensor)
        back = swapper.swap_in("a")
    assert same(back.wait(), tensor)


def test_a_destination_is_filled_in_place(swapper: TensorSwapper) -> None:
    """Also one that needs a gradient, whose history then knows of the change."""
    tensor = random((1000, 300), torch.float32)
    swapper.swap_out("a", tensor)
    out = torch.zeros(1000, 300, requires_grad=True)
    version = out._version
    assert swapper.swap_in("a", out).wait() is out
    assert same(out, tensor)
    assert out._version > version


@pytest.mark.parametrize(
    ("out", "numbers"),
    [
        (torch.empty(4, 100, dtype=torch.float32), ("800 bytes", "1600 bytes")),
        (torch.empty(4, 99, dtype=torch.bfloat16), ("800 bytes", "792 bytes")),
        (torch.empty(400, dtype=torch.bfloat16), ("(4, 100)", "(400,)")),
        (torch.empty(4, 100, dtype=torch.float16), ("torch.bfloat16", "torch.float16")),
    ],
    ids=["wider", "shorter", "another shape", "another dtype"],
)
def test_a_destination_that_does_not_fit_is_refused_with_both_sizes(
    out: torch.Tensor, numbers: tuple[str, str], swapper: TensorSwapper
) -> None:
    """A buffer of another width would be filled with nonsense, or only in part."""
    swapper.swap_out("weight", torch.zeros(4, 100, dtype=torch.bfloat16))
    with pytest.raises(RecordError, match="'weight'") as caught:
        swapper.swap_in("weight", out)
    assert all(number in str(caught.value) for number in numbers)


def test_a_destination_that_is_not_contiguous_is_refused(swapper: TensorSwapper) -> None:
    """It is not silently replaced by another tensor."""
    swapper.swap_out("a", torch.zeros(4, 4))
    with pytest.raises(RecordError, match="contiguous"):
        swapper.swap_in("a", torch.zeros(4, 4).t())


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_a_destination_that_is_a_lazy_view_is_refused_at_once(
    view: Callable[[torch.Tensor], torch.Tensor], swapper: TensorSwapper
) -> None:
    """Not when it is waited for; its memory holds other values than it shows."""
    swapper.swap_out("a", torch.zeros(4, dtype=torch.complex64)).wait()
    with pytest.raises(RecordError, match=r"'a': out is a conjugate or negative view"):
        swapper.swap_in("a", view(torch.zeros(4, dtype=torch.complex64)))
    assert swapper.stats().pending_transfers == 0


def freed() -> torch.Tensor:
    """What somebody gave the storage back of, as sharding does."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short() -> torch.Tensor:
    """Its storage holds all but the last element."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(999 * 4)
    return tensor


def fake() -> torch.Tensor:
    """What stands for a tensor while a graph is traced."""
    with FakeTensorMode():
        return torch.ones(1000)


WITHOUT_MEMORY = {
    "sparse": lambda: torch.ones(1000).to_sparse(),
    "meta": lambda: torch.empty(1000, device="meta"),
    "zeros nobody stored": lambda: torch._efficientzerotensor((1000,)),
    "wrapper": lambda: TwoTensor(torch.ones(1000), torch.ones(1000)),
    "fake": fake,
    "freed": freed,
    "cut short": cut_short,
}


@pytest.mark.parametrize("make", WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY.keys())
def test_a_tensor_without_memory_of_its_own_is_refused_and_what_was_there_stays(
    make: Callable[[], torch.Tensor], swapper: TensorSwapper
) -> None:
    """Before anything is made on the drive; as a source and as a destination."""
    with pytest.raises(ConfigError, match=r"'new' is a \w+ of torch.* only dense.* pass"):
        swapper.swap_out("new", make())
    assert swapper.keys() == []
    swapper.swap_out("a", torch.ones(1000)).wait()
    with pytest.raises(ConfigError, match=r"'a' is a .* only dense"):
        swapper.swap_out("a", make())
    with pytest.raises(ConfigError, match=r"out for 'a' is a .* only dense"):
        swapper.swap_in("a", make())
    assert same(swapper.swap_in("a").wait(), torch.ones(1000))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_what_a_transform_of_functions_wraps_is_refused(
    transform: Callable[..., Callable[[torch.Tensor], object]], swapper: TensorSwapper
) -> None:
    """Looked at from inside, it has no storage."""

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        swapper.swap_out("a", tensor)
        return tensor.sum()

    with pytest.raises(ConfigError, match=r"'a' is a Tensor of torch.float32.* only dense"):
        transform(swap)(torch.ones(3))
    assert swapper.keys() == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda out: out.untyped_storage().resize_(0), ConfigError),
        (lambda out: out.resize_(10), RecordError),
        (lambda out: out.t_(), RecordError),
    ],
    ids=["freed", "cut short", "transposed"],
)
def test_a_destination_that_is_changed_under_way_is_not_written_to(
    change: Callable[[torch.Tensor], object], kind: type[TieringError], swapper: TensorSwapper
) -> None:
    """It is looked at again whenever bytes have come; the tensor can be read into another."""
    tensor = random((1024, 2048), torch.float32)
    swapper.swap_out("a", tensor).wait()
    out = torch.empty(1024, 2048)
    read = swapper.swap_in("a", out)
    change(out)
    with pytest.raises(kind, match="'a'"):
        read.wait()
    assert same(swapper.swap_in("a").wait(), tensor)


class Named(torch.Tensor):
    """A class of somebody's own, with ordinary memory."""


def test_a_tensor_of_another_class_with_memory_of_its_own_comes_back(
    swapper: TensorSwapper,
) -> None:
    """What counts is where the elements are, not what the class is called."""
    tensor = random((300, 7), torch.float32)
    swapper.swap_out("a", tensor.as_subclass(Named))
    out = torch.empty(300, 7).as_subclass(Named)
    assert swapper.swap_in("a", out).wait() is out
    assert same(out.as_subclass(torch.Tensor), tensor)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda swapper: swapper.swap_out("q", [1, 2]),
            r"'q'.* a Tensor, got \[1, 2\] of type list",
        ),
        (lambda swapper: swapper.swap_in("a", [0]), r"'a' .* a Tensor, got \[0\] of type list"),
        (lambda swapper: swapper.swap_out(3, torch.ones(1)), "a key .* a str, got 3 of type int"),
        (lambda swapper: swapper.swap_in(3), "a key .* a str, got 3 of type int"),
        (lambda swapper: swapper.delete(b"a"), "a key .* a str, got b'a' of type bytes"),
        (lambda _: TensorSwapper(None), "path .* PathLike or Iterable, got None of type NoneType"),
        (
            lambda _: TensorSwapper("path", host_memory_bytes="1GiB"),
            "host_memory_bytes must be an int, got '1GiB' of type str",
        ),
        (
            lambda _: TensorSwapper("path", host_memory_bytes=None),
            "host_memory_bytes must be an int, got None of type NoneType",
        ),
        (lambda _: TensorSwapper([None]), "a path .* a str or PathLike, got None of type NoneType"),
    ],
    ids=[
        *("a list", "a list as out", "key out", "key in", "key deleted", "no path"),
        *("size in words", "no size", "paths of none"),
    ],
)
def test_what_is_of_another_type_is_refused_with_the_one_that_is_wanted(
    call: Callable[[TensorSwapper], object], message: str, swapper: TensorSwapper
) -> None:
    """And nothing is done."""
    swapper.swap_out("a", torch.ones(1))
    with pytest.raises(ConfigError, match=message):
        call(swapper)
    assert swapper.keys() == ["a"]
    assert swapper.swap_in("a").wait().eq(1).all()


def test_an_unknown_key_is_refused_with_the_nearest_one(swapper: TensorSwapper) -> None:
    """In every call that takes a key."""
    swapper.swap_out("weight", torch.ones(1))
    for call in (swapper.swap_in, swapper.delete):
        with pytest.raises(RecordError, match=r"'wieght' among 1; the nearest is 'weight'"):
            call("wieght")


def test_a_key_can_be_written_again_while_it_is_still_moving(swapper: TensorSwapper) -> None:
    """What was asked for first is what comes first: each read gets what was there at its time."""
    reads = []
    for value in range(20):
        swapper.swap_out("a", torch.full((100_000,), value))
        reads.append(swapper.swap_in("a"))
    for value, read in enumerate(reads):
        assert read.wait().eq(value).all()


def test_a_key_can_be_written_again_with_another_size(swapper: TensorSwapper) -> None:
    """The old file goes; keys keep the order of their first coming."""
    swapper.swap_out("a", torch.ones(1000))
    swapper.swap_out("b", torch.ones(1))
    for tensor in (random((7, 3), torch.float64), random((0,), torch.int8), random((), torch.half)):
        swapper.swap_out("a", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)
    assert swapper.keys() == ["a", "b"]
    assert len(list(swapper._folders[0].path.glob("*.safetensors"))) == 2


def test_a_deleted_key_is_gone_and_can_come_again(swapper: TensorSwapper) -> None:
    """Deleting waits for what moves."""
    swapper.swap_out("a", torch.ones(MIB))
    read = swapper.swap_in("a")
    swapper.delete("a")
    assert read.done()
    assert swapper.keys() == []
    with pytest.raises(RecordError, match="no tensor 'a'"):
        swapper.swap_in("a")
    swapper.swap_out("a", torch.zeros(3))
    assert swapper.swap_in("a").wait().eq(0).all()


def test_statistics_count_tensors_bytes_and_transfers(swapper: TensorSwapper) -> None:
    """Stored bytes are the tensors' own; moved bytes have their padding."""
    swapper.swap_out("a", torch.ones(5, dtype=torch.uint8))
    swapper.swap_out("b", torch.ones(5, dtype=torch.float64))
    swapper.wait()
    swapper.swap_in("a").wait()
    stats = swapper.stats()
    assert (stats.tensors, stats.stored_bytes, stats.pending_transfers) == (2, 45, 0)
    assert (stats.written_bytes, stats.read_bytes) == (2 * BLOCK, BLOCK)


def test_a_short_completion_in_the_middle_of_a_read_is_continued(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    """It ends off the alignment; the rest is read from the last aligned byte before."""
    rule = FaultRule(FaultAction.SHORT, value=4096 + 100, writes=False)
    engine = make_engine(AioConfig(block_bytes=MIB), faults=Faults(rules=(rule,)))
    tensor = random((MIB,), torch.uint8)
    with TensorSwapper(tmp_path, host_memory_bytes=16 * MIB, backend=engine) as swapper:
        swapper.swap_out("a", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)
        assert engine.stats().short_transfers == 1


def test_a_cap_on_one_kernel_transfer_does_not_show(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Longer ones are split and continued."""
    tensor = random((3 * MIB + 517,), torch.uint8)
    with with_faults(max_transfer_bytes=BLOCK) as swapper:
        swapper.swap_out("a", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)


def test_transient_refusals_are_retried_and_counted(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Every third operation is to be tried again, every fifth was interrupted."""
    again = FaultRule(FaultAction.ERRNO, value=errno.EAGAIN, first=3, every=3)
    interrupted = FaultRule(FaultAction.ERRNO, value=errno.EINTR, first=5, every=5)
    tensors = [random((1000 + number,), torch.int32) for number in range(64)]
    with with_faults(again, interrupted) as swapper:
        for number, tensor in enumerate(tensors):
            swapper.swap_out(f"{number}", tensor)
        reads = [swapper.swap_in(f"{number}") for number in range(64)]
        assert all(same(read.wait(), t) for read, t in zip(reads, tensors, strict=True))
        assert engine_of(swapper).stats().retries > 64


def test_an_operation_the_kernel_does_not_support_makes_it_fall_back_once(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """One warning, and every transfer ends well, those that were under way included."""
    rule = FaultRule(FaultAction.ERRNO, value=errno.EOPNOTSUPP, first=2)
    tensor = random((MIB,), torch.uint8)
    with with_faults(rule) as swapper:
        if engine_of(swapper).stats().backend != "uring":
            pytest.skip("no io_uring to fall back from")
        with pytest.warns(TieringWarning, match="threads") as told:
            backends = out_and_in(swapper, tensor)
        assert len(told) == 1
        assert backends == ["threads", "threads"]


def test_a_lost_completion_is_a_timeout_that_names_what_is_pending(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Other tensors come back meanwhile, and closing does not hang."""
    swapper = with_faults(FaultRule(FaultAction.SWALLOW, first=1, reads=False))
    lost = swapper.swap_out("lost", torch.ones(5))
    swapper.swap_out("found", torch.ones(5)).wait()
    for wait in (lost.wait, swapper.wait, swapper.swap_in("lost").wait):
        with pytest.raises(TransferTimeoutError, match=r"swapping \w+ 'lost': .* pending"):
            wait(0.01)
    assert not lost.done()
    assert swapper.swap_in("found").wait().eq(1).all()
    with pytest.raises(TransferTimeoutError, match="swapping out 'lost'"):
        swapper.close(0.01)
    assert not swapper._folders[0].path.exists()
    with pytest.raises(EngineClosedError):
        lost.wait()


def out_and_in(swapper: TensorSwapper, tensor: torch.Tensor) -> list[str]:
    """Swap out once and in twice; tells the backend in use after each way in."""
    swapper.swap_out("a", tensor)
    backends = []
    for _ in range(2):
        assert same(swapper.swap_in("a").wait(), tensor)
        backends.append(engine_of(swapper).stats().backend)
    return backends


def failing_write(number: int = errno.EIO, first: int = 1) -> FaultRule:
    """One write fails."""
    return FaultRule(FaultAction.ERRNO, value=number, first=first, reads=False)


def test_a_failed_write_is_raised_by_its_own_wait(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """It names the tensor, the file and the reason, as often as it is asked."""
    with with_faults(failing_write()) as swapper:
        out = swapper.swap_out("weight", torch.ones(5))
        for _ in range(2):
            with pytest.raises(
                TransferError, match=r"out 'weight': write of 4096 .*safetensors"
            ) as e:
                out.wait()
            assert e.value.errno == errno.EIO


def test_a_failed_write_is_raised_by_waiting_for_all(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Each of them, one a call; then there is nothing left to tell."""
    with with_faults(failing_write(first=1), failing_write(errno.ENOSPC, first=2)) as swapper:
        swapper.swap_out("a", torch.ones(5))
        swapper.swap_out("b", torch.ones(5))
        with pytest.raises(TransferError, match="'a'"):
            swapper.wait()
        with pytest.raises(SpaceError, match="'b'"):
            swapper.wait()
        assert swapper.wait() == 0


def test_a_failed_write_is_raised_by_close_at_the_latest(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Nothing is lost in silence; everything is freed all the same."""
    swapper = with_faults(failing_write())
    swapper.swap_out("a", torch.ones(5))
    with pytest.raises(TransferError, match="swapping out 'a'"):
        swapper.close()
    assert not swapper._folders[0].path.exists()
    swapper.close()


def test_an_exception_in_the_block_is_not_hidden_by_a_failed_write(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """The first failure is the one to look at."""

    def divide() -> None:
        with with_faults(failing_write()) as swapper:
            swapper.swap_out("a", torch.ones(5))
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        divide()


def test_what_was_overwritten_only_in_part_cannot_be_read(
    with_faults: Callable[..., TensorSwapper],
) -> None:
    """Neither while the write is on its way nor afterwards; writing it again mends it."""
    pieces = 3 * MIB // BLOCK
    with with_faults(failing_write(first=pieces + pieces // 2)) as swapper:
        swapper.swap_out("a", torch.zeros(3 * MIB, dtype=torch.uint8)).wait()
        torn = swapper.swap_out("a", torch.ones(3 * MIB, dtype=torch.uint8))
        with pytest.raises(RecordError, match="'a' was not written whole"):
            swapper.swap_in("a").wait()
        with pytest.raises(TransferError):
            torn.wait()
        with pytest.raises(RecordError, match=r"'a' was not written whole.*swap it out again"):
            swapper.swap_in("a")
        swapper.swap_out("a", torch.full((3 * MIB,), 2, dtype=torch.uint8))
        assert swapper.swap_in("a").wait().eq(2).all()


def run_workload(swapper: TensorSwapper) -> list[TieringError]:
    """Some swaps, one key written twice: whatever comes back is right, or an error is raised."""
    errors: list[TieringError] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except TieringError as error:
            errors.append(error)

    for key, value in (("a", 1), ("b", 2), ("c", 3), ("a", 4)):
        with noted():
            swapper.swap_out(key, torch.full((5 * BLOCK + 3,), value, dtype=torch.uint8))
    for key, value in (("a", 4), ("b", 2), ("c", 3)):
        with noted():
            assert swapper.swap_in(key).wait().eq(value).all()
    with noted():
        swapper.wait()
    return errors


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failure_of_any_operation_is_told_and_never_gives_wrong_bytes(
    number: int, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """The n-th operation fails, for every n there is; afterwards the swapper works on."""
    for n in range(1, 1000):
        rule = FaultRule(FaultAction.ERRNO, value=number, first=n)
        engine = make_engine(AioConfig(block_bytes=BLOCK), faults=Faults(rules=(rule,)))
        with TensorSwapper(tmp_path, host_memory_bytes=4 * BLOCK, backend=engine) as swapper:
            errors = run_workload(swapper)
            if not errors:
                break
            assert any(isinstance(e, TransferError) and e.errno == number for e in errors)
            assert not run_workload(swapper)
            assert swapper.stats().arena.used_bytes == 0
    assert n == 1 + 4 * 6 + 3 * 6


def test_a_tensor_that_does_not_fit_on_the_drive_is_refused_and_leaves_nothing(
    small_drive: Path,
) -> None:
    """With the bytes needed and those free; smaller ones are taken as before."""
    with TensorSwapper(small_drive, host_memory_bytes=MIB) as swapper:
        with pytest.raises(SpaceError, match=r"'a' needs a file of 209\d+ bytes, .* has \d+ free"):
            swapper.swap_out("a", torch.empty(200 * MIB, dtype=torch.uint8))
        assert swapper.keys() == []
        swapper.swap_out("a", torch.ones(MIB))
        with pytest.raises(SpaceError):
            swapper.swap_out("a", torch.empty(200 * MIB, dtype=torch.uint8))
        with pytest.raises(RecordError, match="'a' was not written whole"):
            swapper.swap_in("a")
        swapper.swap_out("a", torch.ones(MIB))
        assert swapper.swap_in("a").wait().eq(1).all()


def test_a_drive_that_fills_up_does_not_stop_tensors_that_have_their_place(
    small_drive: Path,
) -> None:
    """Their room is reserved; what needs more is refused."""
    with TensorSwapper(small_drive, host_memory_bytes=MIB) as swapper:
        swapper.swap_out("a", torch.zeros(MIB))
        descriptor = os.open(small_drive / "fill", os.O_CREAT | os.O_WRONLY)
        free_bytes = os.statvfs(small_drive).f_bavail * os.statvfs(small_drive).f_frsize
        os.posix_fallocate(descriptor, 0, free_bytes - 64 * BLOCK)
        os.close(descriptor)
        for value in range(3):
            swapper.swap_out("a", torch.full((MIB,), value, dtype=torch.float32)).wait()
            assert swapper.swap_in("a").wait().eq(value).all()
        with pytest.raises(SpaceError):
            swapper.swap_out("b", torch.zeros(MIB))


PLACES = 40  # of an interrupt, evenly spread


def old_values() -> dict[str, torch.Tensor]:
    """More than one piece each."""
    return {key: torch.full((BLOCK + 7,), number) for number, key in enumerate("abcd")}


def new_values() -> dict[str, torch.Tensor]:
    """Of the same size, of another, and of a key that was not there."""
    return {"a": torch.full((BLOCK + 7,), 10), "b": torch.full((99,), 11), "new": torch.ones(BLOCK)}


def act(swapper: TensorSwapper) -> None:
    """Write, read and delete, in an order in which the arena is full and keys are under way."""
    outs = [swapper.swap_out(key, tensor) for key, tensor in new_values().items()]
    reads = [swapper.swap_in(key) for key in ("a", "d", "new")]
    outs[0].wait()
    reads[0].wait()
    swapper.delete("c")
    swapper.wait()


def interrupted(path: Path, backend: str, nth: int) -> int:
    """Interrupt the act at its nth call and check what is there then; returns how many it made."""
    config = AioConfig(block_bytes=BLOCK, backend=backend)
    with TensorSwapper(path, host_memory_bytes=4 * BLOCK, aio=config) as swapper:
        swap_all_out(swapper, old_values())
        swapper.wait()
        with Interrupted(nth) as interrupt, contextlib.suppress(KeyboardInterrupt):
            act(swapper)
        swapper.wait()
        assert swapper.stats().pending_transfers == 0
        assert swapper.stats().arena.used_bytes == 0
        check_contents(swapper)
        swap_all_out(swapper, old_values() | new_values())
        for key, tensor in (old_values() | new_values()).items():
            assert same(swapper.swap_in(key).wait(), tensor)
        assert swapper.wait() == 5
        for key in list(swapper.keys()):
            swapper.delete(key)
    assert not list(path.iterdir())
    return interrupt.calls


def check_contents(swapper: TensorSwapper) -> None:
    """Each key holds its old value or its new one, or says why not; what was not touched is old."""
    keys = set(swapper.keys())
    assert {"a", "b", "d"} <= keys
    for key in keys:
        may_be = [values[key] for values in (old_values(), new_values()) if key in values]
        broken_off = () if key == "d" else (RecordError,)
        with contextlib.suppress(*broken_off):
            found = swapper.swap_in(key).wait()
            assert any(same(found, value) for value in may_be)


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_an_interrupt_anywhere_is_gone_on_from(backend: str, tmp_path: Path) -> None:
    """No key is stuck, no piece of the arena is lost, and closing removes everything."""
    calls = interrupted(tmp_path, backend, 0)
    for nth in range(1, calls + 1, max(1, calls // PLACES)):
        interrupted(tmp_path, backend, nth)


def test_two_swappers_on_one_path_do_not_see_each_other(tmp_path: Path) -> None:
    """Equal keys, equal sizes, other contents."""
    with (
        TensorSwapper(tmp_path, host_memory_bytes=MIB) as one,
        TensorSwapper(tmp_path, host_memory_bytes=MIB) as two,
    ):
        one.swap_out("a", torch.full((1000,), 1))
        two.swap_out("a", torch.full((1000,), 2))
        assert one.swap_in("a").wait().eq(1).all()
        assert two.swap_in("a").wait().eq(2).all()


# Swaps something out, tells the folder, and waits to be killed.
HOLDER = """
import sys, torch
from tiering import TensorSwapper
swapper = TensorSwapper(sys.argv[1], host_memory_bytes=1 << 20)
swapper.swap_out("a", torch.ones(1000)).wait()
print(swapper._folders[0].path, flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_process_left_is_removed_and_a_live_one_is_untouched(tmp_path: Path) -> None:
    """Both on one path, beside a swapper of our own."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as dead, subprocess.Popen(command, **pipes) as live:
        dead_path, live_path = (Path(p.stdout.readline().strip()) for p in (dead, live))
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert list(dead_path.glob("*.safetensors"))
        with TensorSwapper(tmp_path, host_memory_bytes=MIB):
            assert not dead_path.exists()
            assert list(live_path.glob("*.safetensors"))
        live.communicate("end\n")
    assert live.returncode == 0
    assert list(tmp_path.iterdir()) == []


def swap_all_out(swapper: TensorSwapper, tensors: dict[str, torch.Tensor]) -> None:
    """Start writing all of them."""
    for key, tensor in tensors.items():
        swapper.swap_out(key, tensor)


def test_tensors_on_several_paths_come_back_and_all_paths_are_left_empty(tmp_path: Path) -> None:
    """Measured by itself; each tensor lies on one of the paths, and every path has some."""
    roots = [tmp_path / "a", tmp_path / "b"]
    tensors = {f"{number}": random((50_000 + number,), torch.float32) for number in range(40)}
    with TensorSwapper(roots, host_memory_bytes=MIB) as swapper:
        swap_all_out(swapper, tensors)
        assert all(same(swapper.swap_in(key).wait(), tensor) for key, tensor in tensors.items())
        stats = swapper.stats()
        assert [volume.path for volume in stats.volumes] == [str(root) for root in roots]
        assert all(volume.written_bytes for volume in stats.volumes)
        assert sum(volume.written_bytes for volume in stats.volumes) == stats.written_bytes
        assert sum(volume.read_bytes for volume in stats.volumes) == stats.read_bytes
        for volume, root in zip(stats.volumes, roots, strict=True):
            files = root.rglob("*.safetensors")
            assert sum(file.stat().st_size for file in files) == volume.held_bytes
    assert [list(root.iterdir()) for root in roots] == [[], []]


def test_given_speeds_decide_and_a_key_that_changes_keeps_the_balance(tmp_path: Path) -> None:
    """Two to one, before and after each tensor was replaced by a larger one."""
    speeds = {tmp_path / "fast": 2.0, tmp_path / "slow": 1.0}
    with TensorSwapper(speeds, host_memory_bytes=MIB) as swapper:
        for numel in (1000, 5000):
            for number in range(30):
                swapper.swap_out(f"{number}", torch.full((numel,), number))
            fast, slow = (volume.held_bytes for volume in swapper.stats().volumes)
            assert fast == 2 * slow
        assert all(swapper.swap_in(f"{n}").wait().eq(n).all() for n in range(30))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no path was given"),
        (["a", "./a"], "'a' and './a' are one directory"),
        ({"a": 1.0, "b": -2.0}, r"b: gb_per_s must be a number above 0, got -2\.0"),
    ],
)
def test_paths_that_cannot_be_spread_over_are_refused(
    paths: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the value that is wrong, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        TensorSwapper(paths, host_memory_bytes=MIB)
    gc.collect()
    assert not list(tmp_path.glob("*/*"))


def test_a_second_drive_takes_what_the_first_cannot(small_drives: tuple[Path, Path]) -> None:
    """A tensor that fits on neither is refused with both; what is there stays readable."""
    large, small = small_drives
    tensors = {f"{number}": random((MIB,), torch.float32) for number in range(14)}
    with TensorSwapper({large: 1.0, small: 2.0}, host_memory_bytes=MIB) as swapper:
        with pytest.warns(TieringWarning, match=str(small)):
            swap_all_out(swapper, tensors)
        with pytest.raises(SpaceError, match=rf"{large} has \d+ free.*{small} has \d+ free"):
            swapper.swap_out("more", random((16 * MIB,), torch.float32))
        assert all(same(swapper.swap_in(key).wait(), tensor) for key, tensor in tensors.items())
    assert not [path for drive in small_drives for path in drive.glob("tiering-*")]


def test_python_goes_on_while_a_tensor_is_read(tmp_path: Path) -> None:
    """A wait for 256 MiB holds no lock that other threads need."""
    tensor = torch.ones(256 * MIB, dtype=torch.uint8)
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out("a", tensor).wait()
        reader = threading.Thread(target=lambda: swapper.swap_in("a", tensor).wait())
        reader.start()
        turns = 0
        while reader.is_alive():
            torch.ones(1000).sum()
            turns += 1
        reader.join()
    assert turns >= 10


def test_several_threads_may_use_one_swapper(swapper: TensorSwapper) -> None:
    """Each with keys of its own, all through one small arena."""
    wrong = []

    def work(name: str) -> None:
        for value in range(30):
            tensor = torch.full((40_000,), value)
            swapper.swap_out(name, tensor)
            if not same(swapper.swap_in(name).wait(), tensor):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(f"{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert swapper.stats().arena.used_bytes == 0


def test_a_forked_child_gets_an_exception_and_the_parent_is_unharmed(
    swapper: TensorSwapper,
) -> None:
    """It must open its own; ending or closing there removes nothing here."""
    out = swapper.swap_out("a", torch.ones(1000))
    child = os.fork()
    if not child:
        for call in (lambda: swapper.swap_in("a"), swapper.keys, out.wait, out.done):
            with contextlib.suppress(EngineClosedError):
                call()
                os._exit(1)
        swapper.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert swapper.swap_in("a").wait().eq(1).all()


def test_a_closed_swapper_refuses_work_and_can_be_closed_again(swapper: TensorSwapper) -> None:
    """The message says what was closed."""
    swapper.close()
    swapper.close()
    for call in (swapper.wait, swapper.stats, lambda: swapper.swap_out("a", torch.ones(1))):
        with pytest.raises(EngineClosedError, match="closed"):
            call()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """When it is opened, not at the first swap."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        TensorSwapper(tmp_path / "file")


def test_a_configuration_and_a_backend_exclude_each_other(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    """One of them would be ignored."""
    with pytest.raises(ConfigError, match="not both"):
        TensorSwapper(tmp_path, aio=AioConfig(), backend=make_engine())


def test_a_file_system_in_memory_works_with_a_warning(memory_path: Path) -> None:
    """It names the path and the kind of file system, once."""
    tensor = random((3 * MIB + 1,), torch.uint8)
    with TensorSwapper(memory_path, host_memory_bytes=MIB) as swapper:
        with pytest.warns(TieringWarning, match=f"{memory_path}: tmpfs has no direct I/O") as told:
            swapper.swap_out("a", tensor)
        assert len(told) == 1
        swapper.swap_out("b", tensor)
        assert same(swapper.swap_in("a").wait(), tensor)


def test_closing_gives_back_memory_descriptors_and_drive(
    tmp_path: Path, open_files: OpenFiles
) -> None:
    """Even while somebody still holds the closed swapper and its transfers."""
    before = len(open_files())
    kept = []
    for _ in range(10):
        with TensorSwapper(tmp_path, host_memory_bytes=32 * MIB) as swapper:
            address = swapper._arena.memory.address
            swapper.swap_out("a", torch.ones(MIB))
            kept += [swapper, swapper.swap_in("a")]
        gc.collect()
        assert not is_mapped(address)
    assert len(open_files()) == before
    assert list(tmp_path.iterdir()) == []


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return True
    return False


# Runs as an ordinary user who may lock 8 MiB, as most may.
AS_NOBODY = """
import os, resource, sys, warnings
import torch
from tiering import TensorSwapper
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
limit = min(8 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] % (1 << 64))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
tensor = torch.arange(10_000_000)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with TensorSwapper(sys.argv[1]) as swapper:
        swapper.swap_out("a", tensor)
        print(torch.equal(swapper.swap_in("a").wait(), tensor))
for warning in told:
    print(warning.message)
"""


def test_an_ordinary_user_with_little_locked_memory_can_swap(public_path: Path) -> None:
    """Without registered memory, which one warning says with the limit."""
    printed = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(public_path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert printed[0] == "True"
    assert len(printed) <= 2
    assert all("lock limit" in line for line in printed[1:])


def test_a_swap_folder_can_be_shared_with_others_on_the_path(tmp_path: Path) -> None:
    """Swappers and other users of the path leave each other alone."""
    with SwapFolder(tmp_path) as other, TensorSwapper(tmp_path, host_memory_bytes=MIB):
        assert other.path.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_tensors_go_out_from_a_gpu_and_come_back_to_one(swapper: TensorSwapper) -> None:
    """Contiguous or not; what was queued on the stream before is in the bytes."""
    source = torch.zeros(1000, 500, device="cuda")
    for _ in range(100):
        source += 1
    swapper.swap_out("a", source)
    swapper.swap_out("b", source.t()[1:])
    source.zero_()
    out = torch.empty(1000, 500, device="cuda")
    assert swapper.swap_in("a", out).wait().eq(100).all()
    assert swapper.swap_in("b").wait().eq(100).all()
