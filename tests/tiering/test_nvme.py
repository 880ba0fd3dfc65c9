from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiering import records
from tiering.aio import AioConfig, AioEngine, FaultRule, Faults
from tiering.aio.backend import Transfer
from tiering.aio.config import FaultAction
from tiering.arena import Arena
from tiering.errors import (
    ConfigError,
    RecordError,
    SpaceError,
    TieringWarning,
    TransferError,
    TransferTimeoutError,
)
from tiering.folder import SwapFolder
from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.nvme import NvmeTier, Part

MakeEngine = Callable[..., AioEngine]
OpenFiles = Callable[[], list[str]]
PAGE = records.ALIGNMENT_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SwapFolder]:
    """A folder of its own for each test."""
    with SwapFolder(tmp_path / "swap") as made:
        yield made


@pytest.fixture
def tier(folder: SwapFolder, make_engine: MakeEngine) -> NvmeTier:
    """A tier on a drive without faults."""
    return NvmeTier(folder, make_engine())


@pytest.fixture
def arena() -> Arena:
    """Some memory."""
    return Arena(4 << 20)


def tile(key: str, numel: int) -> RecordSpec:
    """Optimizer state as it is stored: three tensors that follow each other."""
    names = ("master", "exp_avg", "exp_avg_sq")
    return RecordSpec(key, tuple(TensorSpec(name, torch.float32, (numel,)) for name in names))


def flat(key: str, nbytes: int) -> RecordSpec:
    """A record of plain bytes."""
    return RecordSpec(key, (TensorSpec("bytes", torch.uint8, (nbytes,)),))


def store(tier: NvmeTier, arena: Arena, spec: RecordSpec, value: int) -> None:
    """Create a record and write it full of a value."""
    tier.create(spec)
    slot = arena.allocate(spec.nbytes, owner=spec.key)
    for tensor in slot.tensors(spec).values():
        tensor.fill_(value)
    tier.write(spec.key, slot).wait()
    slot.free()


def store_all(tier: NvmeTier, arena: Arena, specs: list[RecordSpec]) -> None:
    """Store records with a value of their own each: 0, 1, 2, ..."""
    for number, spec in enumerate(specs):
        store(tier, arena, spec, number % 251)


def store_without_waiting(tier: NvmeTier, arena: Arena, specs: list[RecordSpec]) -> None:
    """Create records and start writing them."""
    for spec in specs:
        tier.create(spec)
        tier.write(spec.key, arena.allocate(spec.nbytes, owner=spec.key))


def fill(drive: Path) -> None:
    """Take all room there is."""
    descriptor = os.open(drive / "fill", os.O_CREAT | os.O_WRONLY)
    try:
        for nbytes in (1 << 20, PAGE):
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(nbytes)):
                    pass
    finally:
        os.close(descriptor)


def load(tier: NvmeTier, arena: Arena, spec: RecordSpec) -> dict[str, torch.Tensor]:
    """Read a record into fresh memory."""
    slot = arena.allocate(spec.nbytes, owner=spec.key)
    tier.read(spec.key, slot).wait()
    tensors = slot.tensors(spec)
    slot.free()
    return tensors


@pytest.mark.parametrize("numel", [1, 341, 342, 1024, 100_003])
def test_a_record_comes_back_as_it_was_written(
    numel: int, each_backend: str, folder: SwapFolder, arena: Arena, make_engine: MakeEngine
) -> None:
    """Whatever its size is against the alignment and the block, and on either backend."""
    tier = NvmeTier(folder, make_engine(AioConfig(block_bytes=PAGE, backend=each_backend)))
    spec = tile("layer.0", numel)
    tier.create(spec)
    slot = arena.allocate(spec.nbytes, owner="a")
    written = {name: torch.randn(numel) for name in ("master", "exp_avg", "exp_avg_sq")}
    for name, tensor in slot.tensors(spec).items():
        tensor.copy_(written[name])
    tier.write("layer.0", slot).wait()
    read = load(tier, arena, spec)
    assert all(torch.equal(read[name], written[name]) for name in written)
    tier.sync("layer.0")
    assert torch.equal(load_file(tier.path("layer.0"))["exp_avg"], written["exp_avg"])
    tier.close()


def test_files_are_private_with_short_names_of_one_length(tier: NvmeTier) -> None:
    """A key may be anything, and long; it is not in the name."""
    keys = ["a", "b/../c", "k" * 3000]
    for key in keys:
        tier.create(flat(key, 1))
    names = {tier.path(key).name for key in keys}
    assert tier.keys() == keys
    assert len(names) == 3
    assert {len(name) for name in names} == {len("00000000.safetensors")}
    assert all(stat.S_IMODE(tier.path(key).stat().st_mode) == 0o600 for key in keys)


def test_equal_records_make_equal_files_apart_from_their_key(tier: NvmeTier) -> None:
    """What stood in the memory before does not get into the padding."""
    arena = Arena(PAGE)
    store(tier, arena, flat("full", PAGE), 255)
    store(tier, arena, flat("a", 5), 1)
    store(tier, arena, flat("full2", PAGE), 7)
    store(tier, arena, flat("b", 5), 1)
    a, b = (tier.path(key).read_bytes()[PAGE:] for key in "ab")
    assert a == b == bytes([1] * 5) + bytes(PAGE - 5)


def test_an_unknown_key_is_refused_with_the_nearest_one(tier: NvmeTier) -> None:
    """A misspelt key is found at once."""
    tier.create(flat("blocks.10.weight", 1))
    tier.create(flat("norm", 1))
    with pytest.raises(
        RecordError, match=r"'blocks\.10\.wieght' among the 2.*'blocks\.10\.weight'"
    ):
        tier.path("blocks.10.wieght")


def test_a_key_cannot_be_created_twice(tier: NvmeTier) -> None:
    """Nothing is overwritten by accident."""
    tier.create(flat("a", 1))
    with pytest.raises(RecordError, match="'a' exists"):
        tier.create(flat("a", 1))


def test_a_slot_that_is_too_small_is_refused_with_both_sizes(tier: NvmeTier, arena: Arena) -> None:
    """Nothing is cut off in silence; a larger slot does."""
    tier.create(flat("a", 2 * PAGE + 1))
    small = arena.allocate(2 * PAGE, owner="a")
    for move in (tier.read, tier.write):
        with pytest.raises(RecordError, match=r"8193 bytes.*a slot of 12288 bytes.*has 8192"):
            move("a", small)
    large = arena.allocate(10 * PAGE, owner="a")
    tier.write("a", large).wait()


@pytest.mark.parametrize("part", [Part(1, PAGE), Part(0, 10), Part(PAGE, 2 * PAGE), Part(-PAGE, 1)])
def test_a_part_that_is_none_is_refused(tier: NvmeTier, arena: Arena, part: Part) -> None:
    """Off the alignment, short of the end, or past it."""
    tier.create(flat("a", 2 * PAGE + 100))
    with pytest.raises(RecordError, match="'a'"):
        tier.read("a", arena.allocate(4 * PAGE, owner="a"), part=part)


def test_a_record_can_be_moved_in_parts(tier: NvmeTier, arena: Arena) -> None:
    """Each goes to its own place in the payload; the last may be short."""
    spec = flat("a", 2 * PAGE + 100)
    tier.create(spec)
    parts = [Part(0, PAGE), Part(PAGE, PAGE), Part(2 * PAGE, 100)]
    for value, part in enumerate(parts, start=1):
        slot = arena.allocate(part.nbytes, owner="a")
        slot.tensors(flat("", part.nbytes))["bytes"].fill_(value)
        tier.write("a", slot, part=part).wait()
    whole = load(tier, arena, spec)["bytes"]
    for value, part in enumerate(parts, start=1):
        assert whole[part.start_bytes : part.start_bytes + part.nbytes].eq(value).all()


def test_a_record_without_bytes_moves_nothing(tier: NvmeTier, arena: Arena) -> None:
    """Zero is an ordinary size."""
    spec = RecordSpec("a", (TensorSpec("empty", torch.float32, (0, 3)),))
    store(tier, arena, spec, 0)
    assert load(tier, arena, spec)["empty"].shape == (0, 3)
    assert (tier.read_bytes, tier.written_bytes) == (0, 0)


def test_bytes_moved_are_counted_with_their_padding(tier: NvmeTier, arena: Arena) -> None:
    """A plan can be held against what really went over the wire."""
    store(tier, arena, flat("a", PAGE + 1), 0)
    load(tier, arena, flat("a", PAGE + 1))
    load(tier, arena, flat("a", PAGE + 1))
    assert tier.written_bytes == 2 * PAGE
    assert tier.read_bytes == 4 * PAGE


def test_a_dtype_that_files_cannot_hold_leaves_nothing_behind(
    tier: NvmeTier, folder: SwapFolder
) -> None:
    """The refusal comes before the file."""
    with pytest.raises(ConfigError, match="complex128"):
        tier.create(RecordSpec("a", (TensorSpec("x", torch.complex128, (1,)),)))
    assert tier.keys() == []
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_a_read_can_follow_a_write_without_anybody_waiting(tier: NvmeTier, arena: Arena) -> None:
    """Both are queued at once, and the read sees what was written."""
    spec = flat("a", 1 << 20)
    tier.create(spec)
    out, back = (arena.allocate(spec.nbytes, owner="a") for _ in range(2))
    out.tensors(spec)["bytes"].fill_(3)
    tier.read("a", back, after=tier.write("a", out)).wait()
    assert back.tensors(spec)["bytes"].eq(3).all()


def test_a_failed_write_fails_what_follows_it(
    folder: SwapFolder, arena: Arena, make_engine: MakeEngine
) -> None:
    """A read must not bring what an earlier write left there."""
    rule = FaultRule(FaultAction.ERRNO, errno.EIO, every=1, reads=False)
    tier = NvmeTier(folder, make_engine(faults=Faults(rules=(rule,))))
    tier.create(flat("a", PAGE))
    slot = arena.allocate(PAGE, owner="a")
    write = tier.write("a", slot)
    read = tier.read("a", slot, after=write)
    with pytest.raises(TransferError) as failed:
        write.wait()
    with pytest.raises(TransferError) as cancelled:
        read.wait()
    assert (failed.value.errno, cancelled.value.errno) == (errno.EIO, errno.ECANCELED)


def test_deleting_waits_for_transfers_and_leaves_no_descriptor(
    tier: NvmeTier, arena: Arena, open_files: OpenFiles
) -> None:
    """The drive's room comes back at once, and the key can be used again."""
    spec = flat("a", 1 << 20)
    tier.create(spec)
    path = tier.path("a")
    write = tier.write("a", arena.allocate(spec.nbytes, owner="a"))
    tier.delete("a")
    assert write.done()
    assert not path.exists()
    assert not [name for name in open_files() if name.startswith(str(path))]
    store(tier, arena, flat("a", 5), 4)
    assert load(tier, arena, flat("a", 5))["bytes"].eq(4).all()


def test_closing_closes_every_file_and_leaves_them_in_place(
    tier: NvmeTier, arena: Arena, folder: SwapFolder, open_files: OpenFiles
) -> None:
    """Twice is as good as once."""
    store_all(tier, arena, [flat(f"{number}", 5) for number in range(5)])
    tier.close()
    tier.close()
    assert not [name for name in open_files() if name.endswith(".safetensors")]
    assert len(list(folder.path.glob("*.safetensors"))) == 5


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """This process may open only some more files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_may_be_more_records_than_files_can_be_open(
    few_descriptors: int,
    folder: SwapFolder,
    arena: Arena,
    make_engine: MakeEngine,
    open_files: OpenFiles,
) -> None:
    """Those unused for longest are closed and opened again; most descriptors stay the user's."""
    tier = NvmeTier(folder, make_engine())
    specs = [flat(f"layer.{number}", 100) for number in range(3 * few_descriptors)]
    store_all(tier, arena, specs)
    for value, spec in enumerate(specs):
        assert load(tier, arena, spec)["bytes"].eq(value % 251).all()
    opened = [name for name in open_files() if name.endswith(".safetensors")]
    assert 0 < len(opened) <= few_descriptors // 2


def test_a_backend_with_few_places_for_files_serves_many_records(
    folder: SwapFolder, arena: Arena, make_engine: MakeEngine
) -> None:
    """Its own bound is respected as well, with transfers on all of its files."""
    tier = NvmeTier(folder, make_engine(AioConfig(max_files=3)))
    specs = [flat(f"layer.{number}", 100) for number in range(20)]
    store_all(tier, arena, specs)
    slots = [arena.allocate(100, owner="a") for _ in specs]
    reads = [tier.read(spec.key, slot) for spec, slot in zip(specs, slots, strict=True)]
    for value, (read, slot) in enumerate(zip(reads, slots, strict=True)):
        read.wait()
        assert slot.tensors(flat("", 100))["bytes"].eq(value).all()


def test_going_through_the_page_cache_by_choice_warns_of_nothing(
    folder: SwapFolder, arena: Arena, make_engine: MakeEngine
) -> None:
    """A warning is for what was wished and cannot be had."""
    tier = NvmeTier(folder, make_engine(AioConfig(direct="off")))
    spec = flat("layer", 100)
    store_all(tier, arena, [spec])  # a warning would be an error here
    assert load(tier, arena, spec)["bytes"].eq(0).all()
    assert not tier._records["layer"].file.info.direct


def test_a_file_with_a_transfer_in_flight_is_not_the_one_that_is_closed(
    few_descriptors: int, folder: SwapFolder, arena: Arena, make_engine: MakeEngine
) -> None:
    """However long ago it was used, while idle ones are there."""
    late = FaultRule(FaultAction.DELAY, value=300_000, first=1)
    tier = NvmeTier(folder, make_engine(faults=Faults(rules=(late,))))
    slow = flat("slow", 100)
    tier.create(slow)
    write = tier.write("slow", arena.allocate(100, owner="a"))
    file = tier._records["slow"].file
    for number in range(few_descriptors):
        tier.create(flat(f"{number}", 0))
        tier.read(f"{number}", arena.allocate(0, owner="a")).wait()
        if write.done():
            break
        assert tier._records["slow"].file is file
    write.wait()


LOST_WRITES = Faults(rules=(FaultRule(FaultAction.SWALLOW, every=1, reads=False),))


@pytest.mark.parametrize(
    "config",
    [AioConfig(queue_depth=64), AioConfig(max_files=3)],
    ids=["most open files of the tier", "of the backend"],
)
def test_a_lost_completion_where_no_more_files_may_be_open_is_a_timeout_that_names_its_record(
    config: AioConfig,
    few_descriptors: int,
    folder: SwapFolder,
    arena: Arena,
    make_engine: MakeEngine,
) -> None:
    """Nothing is closed under its transfer, and the records that are open can be used."""
    engine = make_engine(config, faults=LOST_WRITES)
    tier = NvmeTier(folder, engine, patience_s=0.01)
    specs = [flat(f"layer.{number}", 100) for number in range(few_descriptors)]
    with pytest.raises(TransferTimeoutError, match=r"record 'layer\.0' .*pending after 0\.01 s"):
        store_without_waiting(tier, arena, specs)
    tier.read("layer.0", arena.allocate(100, owner="a")).wait(10)
    engine.close(0.01)
    tier.close()


def test_a_lost_completion_does_not_hold_up_a_deletion_or_the_end(
    folder: SwapFolder, arena: Arena, make_engine: MakeEngine, open_files: OpenFiles
) -> None:
    """Both say which record they waited for, and have done nothing to it."""
    engine = make_engine(faults=LOST_WRITES)
    tier = NvmeTier(folder, engine, patience_s=0.01)
    for key in ("idle", "lost"):
        tier.create(flat(key, 100))
    tier.read("idle", arena.allocate(100, owner="a")).wait()
    tier.write("lost", arena.allocate(100, owner="a"))
    for end in (functools.partial(tier.delete, "lost"), tier.close):
        with pytest.raises(TransferTimeoutError, match="record 'lost'"):
            end()
    assert set(filter(None, map(record_file, open_files()))) == {tier.path("lost").name}
    tier.read("lost", arena.allocate(100, owner="a")).wait(10)
    engine.close(0.01)
    tier.delete("lost")
    tier.close()
    assert tier.keys() == ["idle"]
    assert not any(map(record_file, open_files()))


def record_file(name: str) -> str:
    """The record file a descriptor leads to, if it does."""
    return Path(name).name if name.endswith(".safetensors") else ""


def test_a_record_that_does_not_fit_leaves_nothing_behind(
    small_drive: Path, make_engine: MakeEngine
) -> None:
    """The room is reserved when the record is created, so a full drive shows then."""
    with SwapFolder(small_drive) as folder:
        tier = NvmeTier(folder, make_engine())
        free_bytes = folder.free_bytes()
        spec = flat("layer.0", 200 << 20)
        with pytest.raises(SpaceError) as caught:
            tier.create(spec)
        assert f"'layer.0' needs a file of {records.file_bytes(spec)} bytes" in str(caught.value)
        assert f"has {free_bytes} free" in str(caught.value)
        assert tier.keys() == []
        assert folder.free_bytes() == free_bytes
        tier.create(flat("layer.0", 1 << 20))


def test_a_drive_that_fills_up_later_does_not_stop_records_that_are_there(
    small_drive: Path, arena: Arena, make_engine: MakeEngine
) -> None:
    """What was reserved can be written, even for the first time."""
    with SwapFolder(small_drive) as folder:
        tier = NvmeTier(folder, make_engine())
        spec = flat("layer.0", 3 << 20)
        tier.create(spec)
        fill(small_drive)
        slot = arena.allocate(spec.nbytes, owner="a")
        slot.tensors(spec)["bytes"].fill_(6)
        tier.write("layer.0", slot).wait()
        tier.sync("layer.0")
        slot.free()
        assert load(tier, arena, spec)["bytes"].eq(6).all()
        tier.close()


def test_where_there_is_no_direct_io_one_warning_says_so_and_everything_works(
    memory_path: Path, arena: Arena, make_engine: MakeEngine
) -> None:
    """It names the path and the type of its file system."""
    with SwapFolder(memory_path) as folder:
        tier = NvmeTier(folder, make_engine())
        specs = [flat(f"{number}", 5000) for number in range(3)]
        with pytest.warns(TieringWarning) as told:
            store_all(tier, arena, specs)
        assert len(told) == 1
        assert f"{memory_path}: tmpfs has no direct I/O" in str(told[0].message)
        for value, spec in enumerate(specs):
            assert load(tier, arena, spec)["bytes"].eq(value).all()
        tier.close()


def test_an_observer_sees_each_transfer_begin(tier: NvmeTier, arena: Arena) -> None:
    """With what it needs to say how long it took."""
    seen: list[tuple[str, str, int, Transfer]] = []
    spec = flat("layer.0", 5000)
    store_all(tier, arena, [spec])
    tier.observe_by(lambda *told: seen.append(told))
    slot = arena.allocate(spec.nbytes, owner="a")
    for begin in (tier.write, tier.read):
        begin("layer.0", slot).wait()
    slot.free()
    nbytes = records.aligned_bytes(5000)
    assert [told[:3] for told in seen] == [
        ("write", "layer.0", nbytes),
        ("read", "layer.0", nbytes),
    ]
    for _, _, _, transfer in seen:
        assert transfer.done()
        assert transfer.device_s > 0


def test_an_observer_that_fails_is_told_of_and_the_transfer_goes_on(
    tier: NvmeTier, arena: Arena
) -> None:
    """The caller has its transfer, so nobody gives away the memory under it."""
    spec = flat("layer.0", 5000)
    store_all(tier, arena, [spec])

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    tier.observe_by(fail)
    slot = arena.allocate(spec.nbytes, owner="a")
    for begin in (tier.write, tier.read):
        with pytest.warns(TieringWarning, match="observer of transfers failed at the"):
            transfer = begin("layer.0", slot)
        transfer.wait()
    slot.free()
