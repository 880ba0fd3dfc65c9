"""Several paths under one tier: who gets a record, what fits, and what happens when one fails."""

from __future__ import annotations

import errno
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tiering import records
from tiering.aio import AioEngine
from tiering.arena import Arena
from tiering.errors import ConfigError, SpaceError, TieringWarning, TransferError
from tiering.folder import SwapFolder
from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.nvme import NvmeTier
from tiering.volumes import Dealer, Volume, open_folders, rooms

MakeEngine = Callable[..., AioEngine]
MIB = 1 << 20
SLACK = 1 + 1e-9  # for the rounding of divisions


def record(nbytes: int, *, kind: str = "bytes", key: str = "") -> RecordSpec:
    """A record of plain bytes; its tensor's name is its kind."""
    return RecordSpec(key, (TensorSpec(kind, torch.uint8, (nbytes,)),))


def dealt(dealer: Dealer, sizes: Sequence[int], *, kind: str = "bytes") -> list[int]:
    """The path of each record, when nothing is ever full."""
    paths = []
    for nbytes in sizes:
        spec = record(nbytes, kind=kind)
        path = dealer.turns(spec, nbytes)[0]
        dealer.give(spec, path, nbytes)
        paths.append(path)
    return paths


def windows(count: int) -> Iterator[tuple[int, int]]:
    """Every stretch of so many records."""
    return itertools.combinations(range(count + 1), 2)


@pytest.mark.parametrize(
    ("speeds", "counts"),
    [((1, 1), [300, 300]), ((2, 1), [400, 200]), ((3, 2, 1), [300, 200, 100]), ((7.1,), [600])],
)
def test_records_are_dealt_in_proportion_to_speed(
    speeds: tuple[float, ...], counts: list[int]
) -> None:
    """Exactly so for equal records, when their number allows it."""
    paths = dealt(Dealer(speeds), [MIB] * 600)
    assert [paths.count(number) for number in range(len(speeds))] == counts


@given(
    speeds=st.sampled_from([(2, 1), (3, 2, 1), (1, 1, 1, 1), (100, 1, 1)])
    | st.lists(st.floats(0.1, 20), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
)
def test_any_stretch_of_records_is_balanced_within_one_record(
    speeds: Sequence[float], sizes: list[int]
) -> None:
    """Without its last record, no path is done later than any other is with one more."""
    paths = dealt(Dealer(speeds), sizes)
    most = max(sizes)
    for start, stop in windows(len(sizes)):
        got = [
            sum(sizes[at] for at in range(start, stop) if paths[at] == path)
            for path in range(len(speeds))
        ]
        latest = max((own - most) / speed for own, speed in zip(got, speeds, strict=True))
        earliest = min((own + most) / speed for own, speed in zip(got, speeds, strict=True))
        assert latest <= earliest * SLACK


@given(speeds=st.tuples(st.floats(0.1, 20), st.floats(0.1, 20)), count=st.integers(1, 60))
def test_of_two_paths_each_has_its_share_of_any_stretch_but_for_one_record(
    speeds: tuple[float, float], count: int
) -> None:
    """Equal records: the number a path got is within one of its part of them."""
    paths = dealt(Dealer(speeds), [MIB] * count)
    share = speeds[0] / sum(speeds)
    for start, stop in windows(count):
        assert abs(paths[start:stop].count(0) - share * (stop - start)) <= SLACK


@given(
    kinds=st.lists(st.sampled_from(["shard", "tile", "gradient"]), max_size=40),
    speeds=st.sampled_from([(1, 1), (2, 1), (3, 2, 1)]),
)
def test_each_kind_is_dealt_as_if_it_were_alone(kinds: list[str], speeds: tuple[int, ...]) -> None:
    """However records of different kinds and sizes follow each other."""
    nbytes = {"shard": 3, "tile": 18, "gradient": 5}
    together = Dealer(speeds)
    paths = [dealt(together, [nbytes[kind]], kind=kind)[0] for kind in kinds]
    for kind, size in nbytes.items():
        own = [path for path, other in zip(paths, kinds, strict=True) if other == kind]
        assert own == dealt(Dealer(speeds), [size] * len(own))


def test_what_is_deleted_counts_no_more() -> None:
    """A path that lost records gets the next ones."""
    dealer = Dealer((1, 1))
    dealt(dealer, [10] * 4)
    for _ in range(2):
        dealer.take_back(record(10), 1, 10)
    assert dealt(dealer, [10] * 2) == [1, 1]
    assert [dealer.held_bytes(path) for path in (0, 1)] == [20, 20]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused_with_its_path(speed: float, tmp_path: Path) -> None:
    """Before anything is dealt by it."""
    with SwapFolder(tmp_path) as folder, pytest.raises(ConfigError, match=f"{tmp_path}.*{speed}"):
        Volume(folder, speed)


def test_folders_are_opened_all_or_none(tmp_path: Path) -> None:
    """What was made before the one that cannot be is removed."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file is not a directory"):
        open_folders([tmp_path / "a", tmp_path / "file"])
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(ConfigError, match="no path was given"):
        open_folders([])


def test_one_directory_by_two_names_is_refused_with_both(tmp_path: Path) -> None:
    """It would get twice its share."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=rf"'{tmp_path}' and '{tmp_path}/link' are one"):
        open_folders([tmp_path, tmp_path / "link"])


@pytest.fixture
def make_tier(make_engine: MakeEngine) -> Iterator[Callable[..., NvmeTier]]:
    """Makes tiers as ``make_tier({path: gb_per_s})`` and takes them down after the test."""
    with ExitStack() as closing:

        def make(speeds: dict[Path, float]) -> NvmeTier:
            volumes = [Volume(SwapFolder(path), speed) for path, speed in speeds.items()]
            tier = NvmeTier(volumes, make_engine())
            for volume in volumes:
                closing.callback(volume.folder.close)
            closing.callback(tier.close)
            return tier

        yield make


MakeTier = Callable[..., NvmeTier]


def store(tier: NvmeTier, spec: RecordSpec, value: int) -> None:
    """Create a record and write it full of a value."""
    arena = Arena(records.aligned_bytes(spec.nbytes))
    tier.create(spec)
    slot = arena.allocate(spec.nbytes, owner=spec.key)
    slot.tensors(spec)["bytes"].fill_(value)
    tier.write(spec.key, slot).wait()
    tier.read(spec.key, slot).wait()


def store_all(tier: NvmeTier, specs: Sequence[RecordSpec]) -> None:
    """Store records with a value of their own each: 0, 1, 2, ..."""
    for value, spec in enumerate(specs):
        store(tier, spec, value)


def test_each_record_is_one_whole_file_on_one_path(tmp_path: Path, make_tier: MakeTier) -> None:
    """Any tool reads it; the statistics say what went where."""
    tier = make_tier({tmp_path / "fast": 2.0, tmp_path / "slow": 1.0})
    for value in range(6):
        store(tier, record(8192, key=f"{value}"), value)
    for value in range(6):
        path = tier.path(f"{value}")
        assert load_file(path)["bytes"].eq(value).all()
    keys = tier.keys()
    on_fast = [key for key in keys if (tmp_path / "fast") in tier.path(key).parents]
    assert len(on_fast) == 4
    fast, slow = tier.volumes()
    assert (fast.path, slow.path) == (f"{tmp_path}/fast", f"{tmp_path}/slow")
    assert (fast.share, slow.share) == pytest.approx((2 / 3, 1 / 3))
    assert (fast.read_bytes, fast.written_bytes) == (4 * 8192, 4 * 8192)
    assert (slow.read_bytes, slow.written_bytes) == (2 * 8192, 2 * 8192)
    assert fast.held_bytes == 4 * (8192 + 4096)
    assert (tier.read_bytes, tier.written_bytes) == (6 * 8192, 6 * 8192)
    tier.delete(on_fast[0])
    assert tier.volumes()[0].held_bytes == 3 * (8192 + 4096)


def test_a_path_without_room_is_passed_over_with_one_warning(
    small_drives: tuple[Path, Path], make_tier: MakeTier
) -> None:
    """Equal shares of drives of 64 and 32 MiB: the small one is filled, the large one has more."""
    large, small = small_drives
    tier = make_tier({large: 1.0, small: 1.0})
    specs = [record(4 * MIB, key=f"{number}") for number in range(18)]
    with pytest.warns(TieringWarning, match=rf"{small} has \d+ bytes free") as told:
        store_all(tier, specs)
    assert len(told) == 1
    held = [volume.held_bytes for volume in tier.volumes()]
    assert held[0] > held[1] > 20 * MIB
    for number in range(18):
        assert load_file(tier.path(f"{number}"))["bytes"].eq(number).all()


def test_when_no_path_has_room_each_is_named_and_nothing_is_left(
    small_drives: tuple[Path, Path], make_tier: MakeTier
) -> None:
    """With needed and free bytes; what fits is still taken."""
    large, small = small_drives
    tier = make_tier({large: 1.0, small: 1.0})
    free = [room.free_bytes for room in rooms(tier._folders)]
    spec = record(100 * MIB, key="a")
    with pytest.raises(SpaceError) as caught:
        tier.create(spec)
    assert caught.value.errno == errno.ENOSPC
    for words in (
        f"'a' needs a file of {records.file_bytes(spec)} bytes",
        f"under {large} has {free[0]} free",
        f"under {small} has {free[1]} free",
    ):
        assert words in str(caught.value)
    assert [room.free_bytes for room in rooms(tier._folders)] == free
    assert [volume.held_bytes for volume in tier.volumes()] == [0, 0]
    store(tier, record(MIB, key="a"), 1)


def test_the_room_of_all_paths_counts_and_that_of_one_file_system_once(
    small_drives: tuple[Path, Path], make_tier: MakeTier
) -> None:
    """Two folders on the small drive add nothing to it."""
    large, small = small_drives
    found = make_tier({large: 1.0, small / "a": 1.0, small / "b": 1.0}).rooms()
    assert [room.device for room in found] == [large.stat().st_dev, small.stat().st_dev]
    assert str(found[0]) == f"the drive under {large} has {found[0].free_bytes} free"
    free_bytes = found[1].free_bytes
    assert str(found[1]) == f"the drive under {small}/a and {small}/b has {free_bytes} free"


def test_a_path_that_vanishes_is_named(tmp_path: Path, make_tier: MakeTier) -> None:
    """Nothing goes elsewhere in silence, and what is on the others can be read."""
    tier = make_tier({tmp_path / "stays": 1.0, tmp_path / "goes": 1.0})
    store(tier, record(100, key="a"), 1)
    shutil.rmtree(tmp_path / "goes")
    with pytest.raises(TransferError, match=f"{tmp_path}/goes") as caught:
        tier.create(record(100, key="b"))
    assert caught.value.errno == errno.ENOENT
    assert tier.keys() == ["a"]
    assert load_file(tier.path("a"))["bytes"].eq(1).all()


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Until the end nothing can be made under the path, which has room."""
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_path_that_takes_no_files_any_more_is_named(
    small_drives: tuple[Path, Path], make_tier: MakeTier
) -> None:
    """It has room, and its turn: an error, and no reason to fill the other drive."""
    large, small = small_drives
    tier = make_tier({large: 1.0, small: 1.0})
    tier.create(record(100, key="a"))
    with (
        read_only(small),
        pytest.raises(TransferError, match=f"'b' needs a file .* under {small}") as caught,
    ):
        tier.create(record(100, key="b"))
    assert caught.value.errno == errno.EROFS
    tier.create(record(100, key="b"))
    assert small in tier.path("b").parents


# Opens folders on both paths with files in them, says so, and waits to be killed.
HOLDER = """
import sys
from tiering.volumes import open_folders
folders = open_folders(sys.argv[1:])
for folder in folders:
    folder.make_file("00000000.safetensors", 5000)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_process_left_on_every_path_is_removed_by_the_next(tmp_path: Path) -> None:
    """Each path has a folder of its own, with a lock of its own."""
    roots = [tmp_path / "a", tmp_path / "b"]
    command = [sys.executable, "-c", HOLDER, *map(str, roots)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert [len(list(root.iterdir())) for root in roots] == [1, 1]
    for folder in open_folders(roots):
        folder.close()
    assert [list(root.iterdir()) for root in roots] == [[], []]
