"""What the machine forbids, lacks or does meanwhile, for real: each in a process of its own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from tests.limits import RING_CALLS
from tiering.aio import PinnedMemory
from tiering.errors import SpaceError

if TYPE_CHECKING:
    from conftest import MakeBench, StartEngine

ROOT = Path(__file__).parents[2]
BELOW = b"below" * 100_000
MIB = 2**20
GIB = 2**30
HEAD = """
from tests import limits
limits.without_torch()
import errno, os, sys, warnings
from tiering.aio import AioConfig, AioEngine, PinnedMemory, open_engine
from tiering.errors import ConfigError, EngineClosedError, TransferError

def caught(act):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in told]

def carries(engine, name, nbytes=2**20 + 517):
    memory = PinnedMemory(4 * 2**20)
    half = 2 * 2**20
    data = os.urandom(nbytes)
    memory.buffer(0, nbytes)[:] = data
    file = engine.open(name)
    write = engine.write(file, memory, nbytes=nbytes, offset=4096)
    engine.read(file, memory, at=half, nbytes=nbytes, offset=4096, after=write).wait()
    assert bytes(memory.buffer(half, nbytes)) == data
    file.close()
"""
# What a filter may do to a ring: which call fails, and with what.
FILTERS = [
    *((call, "EPERM") for call in RING_CALLS),
    ("io_uring_setup", "ENOSYS"),
    ("io_uring_enter", "ENOSYS"),
]


def run(script: str, *arguments: str, head: str = HEAD) -> list[str]:
    """Run a script in a process of its own, with every warning an error. Returns its lines."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(script), *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty file that every user may write, in a folder that every user may enter."""
    folder = tmp_path_factory.mktemp("public")
    folder.chmod(0o755)
    path = folder / "data.bin"
    path.touch()
    path.chmod(0o666)
    return path


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    """What a test did to the machine is undone after it, the last first."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    with ExitStack() as stack:
        yield stack


def command(*words: str) -> str:
    """Run a command that this machine may not have or allow. Returns what it prints."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]}")
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{words[0]}: {done.stderr.partition(chr(10))[0].rpartition(': ')[2]}")
    return done.stdout.strip()


def mount(undo: ExitStack, folder: Path, *options: str) -> Path:
    """Mount a file system; the options are what comes before the folder."""
    folder.mkdir()
    command("mount", *options, str(folder))
    undo.callback(subprocess.run, ["umount", str(folder)], check=True)
    return folder


def mount_overlay(undo: ExitStack, base: Path, folder: Path) -> Path:
    """Mount an overlay with its layers in a new folder, and a file in the lower one."""
    layers = [base / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir(parents=True)
    undo.callback(shutil.rmtree, base)
    (layers[0] / "data.bin").write_bytes(BELOW)
    options = "lowerdir={},upperdir={},workdir={}".format(*layers)
    return mount(undo, folder, "-t", "overlay", "-o", options, "overlay")


def make_image(path: Path, nbytes: int, *options: str) -> str:
    """An ext4 file system in a file; its name."""
    with path.open("wb") as file:
        file.truncate(nbytes)
    command("mkfs.ext4", "-q", "-F", "-m", "0", *options, str(path))
    return str(path)


# What is forbidden


@pytest.mark.parametrize(("call", "error"), FILTERS)
def test_where_ring_calls_are_forbidden_threads_do_the_work(
    has_uring: bool, data_file: Path, call: str, error: str
) -> None:
    """A filter like a container's: auto works and says why, once; a named ring is an error."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine anyway")
    worked, told, refused = run(
        """
        limits.forbid(sys.argv[2], getattr(errno, sys.argv[3]))
        def work():
            with AioEngine() as engine:
                carries(engine, sys.argv[1])
                stats = engine.stats()
                print(stats.backend, stats.backend_reason)
        told = caught(work)
        print(len(told), *told)
        try:
            AioEngine(AioConfig(backend="uring"))
        except ConfigError as refusal:
            print(refusal)
        """,
        str(data_file),
        call,
        error,
    )
    assert worked.startswith(f"threads io_uring is refused ({error}")
    assert told.startswith(f"1 file I/O goes through threads: io_uring is refused ({error}")
    assert ("seccomp" if error == "EPERM" else "Linux 5.6") in told
    assert f"backend 'uring' cannot be had: io_uring is refused ({error}" in refused


@pytest.mark.parametrize("limit_kib", [64, 8192])
def test_an_ordinary_user_under_a_lock_limit_works_unregistered(
    has_uring: bool, data_file: Path, limit_kib: int
) -> None:
    """One warning with limit and wish; equal bytes; and rings come and go 200 times."""
    if os.getuid() != 0:
        pytest.skip("only root can become an ordinary user")
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    (told,) = run(
        """
        os.chdir(os.path.dirname(sys.argv[1]))
        limits.become_nobody(lock_kib=int(sys.argv[2]))
        for _ in range(200):
            AioEngine(AioConfig(backend="uring")).close()
        memory = PinnedMemory(16 * 2**20)
        with AioEngine(AioConfig(backend="uring")) as engine:
            print(*caught(lambda: engine.register(memory)), sep="\\n")
            carries(engine, "data.bin")
            stats = engine.stats()
            assert stats.registered_bytes == 0
            assert "fixed buffers: off" in stats.register_reason
        """,
        str(data_file),
        str(limit_kib),
    )
    assert f"fixed buffers: off (lock limit {limit_kib} KiB, want 16 MiB" in told


def test_processes_of_one_user_share_a_lock_limit_and_all_work(
    has_uring: bool, data_file: Path
) -> None:
    """Eight at once, each with a ring of its own or, where the limit is used up, with threads."""
    if os.getuid() != 0:
        pytest.skip("only root can become an ordinary user")
    script = HEAD + textwrap.dedent(
        """
        os.chdir(os.path.dirname(sys.argv[1]))
        limits.become_nobody(lock_kib=64)
        warnings.simplefilter("ignore")
        engine = AioEngine()
        engine.register(PinnedMemory(2**22))
        print("open", flush=True)
        sys.stdin.readline()  # all are open now
        carries(engine, sys.argv[2])
        engine.close()
        """
    )
    names = [f"data.{number}" for number in range(8)]
    for name in names:
        (data_file.parent / name).touch()
        (data_file.parent / name).chmod(0o666)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(data_file), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    opened = [process.stdout.readline() for process in started]
    for process in started:
        process.communicate("\n")
    assert opened == ["open\n"] * 8
    assert [process.returncode for process in started] == [0] * 8


# What is used up


def test_without_descriptors_opening_is_an_error_and_later_works(data_file: Path) -> None:
    """The message says what to raise; nothing else suffers."""
    (told,) = run(
        """
        with AioEngine() as engine:
            taken = limits.leave_descriptors(1)  # a file takes two
            try:
                engine.open(sys.argv[1])
            except TransferError as error:
                assert error.errno == errno.EMFILE
                print(error)
            assert engine.stats().pending_requests == 0
            for one in taken[:4]:
                os.close(one)
            carries(engine, sys.argv[1])
        """,
        str(data_file),
    )
    assert f"cannot open {data_file}: no place is left" in told
    assert "ulimit -n" in told


def test_an_engine_without_a_descriptor_for_its_ring_works_on_threads(
    has_uring: bool, data_file: Path
) -> None:
    """One warning names the limit; a ring by name is an error with the same words."""
    if not has_uring:
        pytest.skip("io_uring is refused on this machine")
    refused, told = run(
        """
        taken = limits.leave_descriptors(0)
        try:
            AioEngine(AioConfig(backend="uring"))
        except ConfigError as error:
            print(error)
        engines = []
        print(*caught(lambda: engines.append(AioEngine())))
        for one in taken[:4]:
            os.close(one)
        carries(engines[0], sys.argv[1])
        assert engines[0].stats().backend == "threads"
        """,
        str(data_file),
    )
    assert "backend 'uring' cannot be had: io_uring is refused (EMFILE" in refused
    assert told.startswith("file I/O goes through threads: io_uring is refused (EMFILE")
    assert all("ulimit -n" in text for text in (refused, told))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system_is_a_space_error_and_room_made_is_used(
    make_bench: MakeBench, backend: str, undo: ExitStack, tmp_path: Path, kind: str
) -> None:
    """The errno is named; what was there stays, and writing goes on when there is room again."""
    if kind == "tmpfs":
        options = ["-t", "tmpfs", "-o", "size=3m", "tmpfs"]
    else:
        options = ["-o", "loop", make_image(tmp_path / "image", 8 * MIB, "-O", "^has_journal")]
    folder = mount(undo, tmp_path / "mounted", *options)
    bench = make_bench(backend, folder=folder)
    undo.callback(bench.engine.close, 5.0)
    kept, ballast = 2 * 65536 + 517, folder / "ballast"
    assert bench.round_trip(0, kept, 0)
    with ballast.open("wb", buffering=0) as file:
        free = os.statvfs(folder)
        file.write(bytes(max(0, (free.f_bavail - 16) * free.f_frsize)))
    failed = [bench.write(0, 2 * MIB, 4 * MIB * (1 + number)) for number in range(4)]
    for transfer in failed:
        with pytest.raises(SpaceError, match="No space left on device") as caught:
            transfer.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, bench.file.path)
    bench.read(0, kept, 0).wait()
    assert bench.is_same(0, kept)
    ballast.unlink()
    os.truncate(bench.file.path, kept)
    assert bench.round_trip(0, 10 * 65536, 65536)


def test_a_limit_on_the_size_of_files_is_an_error_and_no_signal(data_file: Path) -> None:
    """It is told as any failure is."""
    told = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        memory = PinnedMemory(2**20)
        for backend in ("auto", "threads"):
            with AioEngine(AioConfig(backend=backend, block_bytes=65536)) as engine:
                file = engine.open(sys.argv[1])
                carries(engine, sys.argv[1], 2**19)
                try:
                    engine.write(file, memory, nbytes=2**20, offset=65536).wait()
                except TransferError as error:
                    print(errno.errorcode[error.errno])
        """,
        str(data_file),
    )
    assert told == ["EFBIG"] * 2


# Where the file is


@pytest.mark.parametrize("upper", ["drive", "memory"])
def test_on_an_overlay_bytes_are_right_however_they_go(
    make_bench: MakeBench, backend: str, undo: ExitStack, tmp_path: Path, upper: str
) -> None:
    """As in a container, with a file that lies in the lower layer."""
    base = tmp_path / "layers" if upper == "drive" else Path(f"/dev/shm/layers-{os.getpid()}")
    bench = make_bench(backend, folder=mount_overlay(undo, base, tmp_path / "mounted"))
    undo.callback(bench.engine.close, 5.0)
    bench.read(0, len(BELOW), 0).wait()
    assert bytes(bench.memory.buffer(bench.memory.nbytes // 2, len(BELOW))) == BELOW
    assert bench.round_trip(0, 3 * 65536, 65536)
    assert bench.round_trip(1, 3 * 65536 + 517, 4097)
    assert bench.info.direct or bench.info.why_not_direct.startswith("refused (")
    assert (base / "lower" / "data.bin").read_bytes() == BELOW


def test_on_an_overlay_the_tier_warns_only_of_a_detour(undo: ExitStack, tmp_path: Path) -> None:
    """One warning where there is no direct I/O, none where there is; the tensors come back."""
    folder = mount_overlay(undo, tmp_path / "layers", tmp_path / "mounted")
    is_direct, *told = run(
        """
        import sys, warnings, torch
        from tiering import TensorSwapper
        tensor = torch.arange(300_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with TensorSwapper(sys.argv[1], host_memory_bytes=2**20) as swapper:
                swapper.swap_out("a", tensor)
                assert torch.equal(swapper.swap_in("a").wait(), tensor)
                (record,) = swapper._tier._open.values()
                print(record.file.info.direct)
        for one in caught:
            if "page cache" in str(one.message):
                print(one.message)
        """,
        str(folder),
        head="",
    )
    assert len(told) == (is_direct == "False")
    assert all("overlay has no direct I/O" in text for text in told)


def test_a_drive_of_4096_byte_sectors_gets_no_smaller_transfers(
    make_bench: MakeBench, backend: str, undo: ExitStack, tmp_path: Path
) -> None:
    """It refuses direct ones; what is not a multiple goes through the page cache."""
    image = make_image(tmp_path / "image", 64 * MIB, "-b", "4096")
    device = command("losetup", "--find", "--show", "--sector-size", "4096", image)
    undo.callback(subprocess.run, ["losetup", "--detach", device], check=True)
    folder = mount(undo, tmp_path / "mounted", device)
    bench = make_bench(backend, folder=folder)
    undo.callback(bench.engine.close, 5.0)
    assert bench.info.direct
    assert bench.info.offset_align_bytes >= 4096
    assert bench.round_trip(0, 3 * 65536, 4096)
    assert bench.engine.stats().buffered_blocks == 0
    for at, nbytes, offset in [(512, 65536, 4096), (0, 65536, 512), (0, 512, 4096), (1, 5, 3)]:
        assert bench.round_trip(at, nbytes, offset)
    assert bench.engine.stats().buffered_blocks > 0


# What happens meanwhile


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "unregistered"])
def test_children_that_are_forked_under_way_change_no_byte(
    backend: str, data_file: Path, registered: bool
) -> None:
    """Thirty of them, which end at once or in order, closing all they inherited."""
    printed = run(
        """
        from tiering.aio import PureEngine
        name = sys.argv[2]
        warnings.simplefilter("ignore", DeprecationWarning)  # that we fork beside threads
        engine = PureEngine() if name == "python" else AioEngine(
            AioConfig(backend=name, block_bytes=65536)
        )
        if sys.argv[3] == "True":
            warnings.simplefilter("ignore")
        piece, count = 2**18 + 512, 16
        memory = PinnedMemory(2 * piece * count)
        if sys.argv[3] == "True":
            engine.register(memory)
        with engine:
            file = engine.open(sys.argv[1])
            for turn in range(30):
                data = os.urandom(piece * count)
                memory.buffer(0, len(data))[:] = data
                reads = []
                for at in range(0, len(data), piece):
                    write = engine.write(file, memory, at=at, nbytes=piece, offset=at)
                    back = len(data) + at
                    reads.append(
                        engine.read(file, memory, at=back, nbytes=piece, offset=at, after=write)
                    )
                child = os.fork()
                if not child and turn % 2:
                    os._exit(0)
                if not child:
                    try:
                        reads[0].wait()
                    except EngineClosedError as error:
                        sys.exit(0 if "was forked from it" in str(error) else 1)
                    sys.exit(2)
                for read in reads:
                    read.wait()
                assert bytes(memory.buffer(len(data), len(data))) == data
                assert os.waitpid(child, 0)[1] == 0
        print("exact")
        """,
        str(data_file),
        backend,
        str(registered),
    )
    assert printed == ["exact"]


def test_workers_of_a_data_loader_are_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """Their dataset closes over engine and swapper; both are used between all 20 batches."""
    printed = run(
        """
        import os, sys, warnings
        import torch
        from torch.utils.data import DataLoader, Dataset
        from tiering import TensorSwapper
        from tiering.aio import AioEngine, PinnedMemory
        from tiering.errors import EngineClosedError
        warnings.simplefilter("ignore")

        engine, memory = AioEngine(), PinnedMemory(2**21)
        engine.register(memory)
        name = sys.argv[1] + "/data.bin"
        open(name, "xb").close()
        file = engine.open(name)
        swapper = TensorSwapper(sys.argv[1], host_memory_bytes=2**20)
        tensor = torch.arange(100_000)
        swapper.swap_out("a", tensor)

        class Tokens(Dataset):
            careless = False
            def __len__(self):
                return 40
            def __getitem__(self, index):
                if self.careless:
                    return swapper.swap_in("a").wait()
                for call in (
                    engine.stats,
                    lambda: engine.write(file, memory, nbytes=4096, offset=0),
                    lambda: swapper.swap_in("a"),
                ):
                    try:
                        call()
                    except EngineClosedError as error:
                        assert f"process {os.getpid()} was forked from it" in str(error)
                    else:
                        raise AssertionError("not refused")
                return index

        def use():
            data = os.urandom(2**20)
            memory.buffer(0, len(data))[:] = data
            write = engine.write(file, memory, nbytes=len(data), offset=0)
            return data, engine.read(
                file, memory, at=2**20, nbytes=len(data), offset=0, after=write
            )

        seen = []
        data, read = use()
        for batch in DataLoader(
            Tokens(), batch_size=2, num_workers=2, multiprocessing_context="fork"
        ):
            seen += batch.tolist()
            read.wait()
            assert bytes(memory.buffer(2**20)) == data
            assert torch.equal(swapper.swap_in("a").wait(), tensor)
            data, read = use()
        print(len(seen), sorted(seen) == list(range(40)))
        Tokens.careless = True
        try:
            list(DataLoader(Tokens(), num_workers=2, multiprocessing_context="fork"))
        except EngineClosedError as error:
            print("was forked from it and must open its own" in str(error))
        assert torch.equal(swapper.swap_in("a").wait(), tensor)
        swapper.close()
        engine.close()
        print(sorted(os.listdir(sys.argv[1])))
        """,
        str(tmp_path),
        head="",
    )
    assert printed == ["40 True", "True", "['data.bin']"]


def test_a_first_import_by_many_processes_writes_nothing(tmp_path: Path) -> None:
    """Eight at once, each round from a fresh copy; only Python's own cache may appear."""
    script = textwrap.dedent(
        """
        import sys, types
        sys.stdin.readline()  # all begin together
        sys.modules["tiering"] = types.ModuleType("tiering")
        sys.modules["tiering"].__path__ = ["tiering"]
        from tiering.aio import open_engine
        import tiering.aio.engine
        assert tiering.aio.engine.__file__.startswith(sys.argv[1])
        open_engine().close()
        """
    )
    for turn in range(3):
        copy = tmp_path / f"round-{turn}"
        shutil.copytree(
            ROOT / "tiering", copy / "tiering", ignore=shutil.ignore_patterns("__pycache__")
        )
        before = contents(copy)
        started = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(copy)], cwd=copy, stdin=subprocess.PIPE
            )
            for _ in range(8)
        ]
        for process in started:
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in started:
            process.communicate()
        assert [process.returncode for process in started] == [0] * 8
        assert contents(copy) == before


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file outside of Python's caches, with its size and when it was changed."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# How much at once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nbytes", "offset", "block_bytes"),
    [
        (2 * GIB + 517, 4097, MIB),  # more than a signed 32-bit number, through the page cache
        (4 * GIB + 3 * 4096 + 517, 5 * 4096, 4 * GIB),  # more than an unsigned one, direct
    ],
)
def test_one_request_may_be_larger_than_any_transfer_of_the_kernel(
    start_engine: StartEngine,
    backend: str,
    tmp_path: Path,
    nbytes: int,
    offset: int,
    block_bytes: int,
) -> None:
    """Written, forgotten and read back equal."""
    if psutil.virtual_memory().available < nbytes + 2 * GIB:
        pytest.skip(f"less than {nbytes + 2 * GIB} bytes of memory are free")
    if shutil.disk_usage(tmp_path).free < nbytes + GIB:
        pytest.skip(f"less than {nbytes + GIB} bytes are free under {tmp_path}")
    path = tmp_path / "large.bin"
    path.touch()
    memory = PinnedMemory(nbytes)
    array = np.frombuffer(memoryview(memory.buffer()), dtype=np.uint8)
    for at, pattern in pieces(nbytes):
        array[at : at + len(pattern)] = pattern
    try:
        with start_engine(backend, block_bytes=block_bytes) as engine:
            file = engine.open(str(path))
            engine.write(file, memory, nbytes=nbytes, offset=offset).wait()
            array.fill(0)
            engine.read(file, memory, nbytes=nbytes, offset=offset).wait()
            stats = engine.stats()
        assert all((array[at : at + len(want)] == want).all() for at, want in pieces(nbytes))
        assert path.stat().st_size == offset + nbytes
        assert stats.read_bytes == stats.written_bytes == nbytes
    finally:
        path.unlink()


def pieces(nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """What a large memory holds, piece by piece: every 8 bytes have their place's number."""
    for at in range(0, nbytes, 64 * MIB):
        end = min(nbytes, at + 64 * MIB)
        numbers = np.arange(at // 8, (end + 7) // 8, dtype=np.uint64) * np.uint64(2654435761)
        yield at, numbers.view(np.uint8)[: end - at]
