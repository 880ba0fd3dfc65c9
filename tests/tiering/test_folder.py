from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiering import folder
from tiering.errors import ConfigError, TieringWarning
from tiering.folder import SwapFolder

NOBODY = 65534

# Opens a folder, tells its name, and waits to be killed or to be told to go on.
HOLDER = """
import sys
from tiering.folder import SwapFolder
held = SwapFolder(sys.argv[1])
(held.path / "00000000.safetensors").write_bytes(b"x" * 100)
print(held.path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder under the test's path until it is written a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def held_by(process: subprocess.Popen[str]) -> Path:
    """The folder the process has made."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_the_folder_is_private_and_its_name_short(tmp_path: Path) -> None:
    """Nobody else can read the weights, and no path grows long."""
    with SwapFolder(tmp_path) as held:
        assert held.path.parent == held.root == tmp_path
        assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
        assert len(held.path.name) < 64
        assert held.free_bytes() > 0
    assert list(tmp_path.iterdir()) == []


def test_two_folders_on_one_path_never_meet(tmp_path: Path) -> None:
    """Opening one does not touch the other, in one process or in two."""
    with SwapFolder(tmp_path) as one, SwapFolder(tmp_path) as two:
        assert one.path != two.path
        assert one.path.is_dir()
        assert two.path.is_dir()


def test_closing_removes_all_that_is_in_it_and_a_second_time_does_nothing(tmp_path: Path) -> None:
    """The user's path is left as it was, down to the files that lay there before."""
    (tmp_path / "precious").write_text("mine")
    held = SwapFolder(tmp_path)
    (held.path / "00000000.safetensors").write_bytes(b"x")
    (held.path / "deeper").mkdir()
    (held.path / "deeper" / "file").write_bytes(b"x")
    held.close()
    held.close()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_forgotten_folder_goes_when_it_is_collected(tmp_path: Path) -> None:
    """No call is needed."""
    held = SwapFolder(tmp_path)
    path = held.path
    del held
    assert not path.exists()


def test_a_folder_goes_when_its_process_ends(holder: subprocess.Popen[str]) -> None:
    """Ending without closing is ordinary."""
    path = held_by(holder)
    assert path.is_dir()
    holder.communicate("go on\n")
    assert holder.returncode == 0
    assert not path.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """SIGKILL leaves the folder; whoever comes next on this path clears it away."""
    path = held_by(holder)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (path / "00000000.safetensors").exists()
    with SwapFolder(tmp_path):
        assert not path.exists()


def test_the_folder_of_a_live_process_is_left_alone(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """However many others come and go."""
    path = held_by(holder)
    for _ in range(3):
        SwapFolder(tmp_path).close()
    assert (path / "00000000.safetensors").read_bytes() == b"x" * 100


def test_a_forked_child_neither_removes_nor_unlocks_the_folder(tmp_path: Path) -> None:
    """Data loader workers end all the time."""
    with SwapFolder(tmp_path) as held:
        child = os.fork()
        if not child:
            held.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        SwapFolder(tmp_path).close()
        assert held.path.is_dir()


def stale_folder(root: Path, name: str = "tiering-elsewhere-1-00c0ffee") -> Path:
    """What a process that was killed leaves behind."""
    path = root / name
    path.mkdir(mode=0o700)
    (path / "lock").touch(mode=0o600)
    (path / "00000000.safetensors").write_bytes(b"x")
    return path


def test_only_folders_of_our_kind_are_ever_removed(tmp_path: Path) -> None:
    """Not others' folders, not files, not links, not what merely begins alike."""
    target = tmp_path.parent / f"{tmp_path.name}-target"
    (tmp_path / "tiering-elsewhere-1-00000001").symlink_to(
        stale_folder(tmp_path.parent, target.name)
    )
    (tmp_path / "tiering-elsewhere-1-00000002").write_text("a file")
    stale_folder(tmp_path, "tiering-notes")
    stale_folder(tmp_path, "tiering-elsewhere-1-00000003-kept")
    before = sorted(tmp_path.rglob("*"))
    SwapFolder(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == before
    assert sorted(path.name for path in target.iterdir()) == ["00000000.safetensors", "lock"]


def test_a_folder_whose_maker_died_before_locking_it_goes_only_if_empty(tmp_path: Path) -> None:
    """Without a lock file nothing proves that it is ours."""
    empty = tmp_path / "tiering-elsewhere-1-00000001"
    empty.mkdir()
    filled = stale_folder(tmp_path)
    (filled / "lock").unlink()
    SwapFolder(tmp_path).close()
    assert not empty.exists()
    assert filled.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    """Even where we could remove it."""
    path = stale_folder(tmp_path)
    os.chown(path, NOBODY, NOBODY)
    SwapFolder(tmp_path).close()
    assert path.is_dir()


def test_where_locks_may_be_local_only_this_machines_folders_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system another machine's lock may be invisible here."""
    monkeypatch.setattr(folder, "_file_system_type", lambda _: "nfs4")
    elsewhere = stale_folder(tmp_path)
    here = stale_folder(tmp_path, f"tiering-{folder._host()}-1-00c0ffee")
    SwapFolder(tmp_path).close()
    assert elsewhere.is_dir()
    assert not here.exists()


def test_where_there_are_no_locks_every_folder_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder too many costs space; one too few costs a run."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = stale_folder(tmp_path)
    with SwapFolder(tmp_path) as held:
        assert held.path.is_dir()
    assert path.is_dir()


def test_many_openers_at_once_never_remove_each_others_folder(tmp_path: Path) -> None:
    """The moment between making a folder and locking it does not let anybody take it for stale."""

    def open_and_close(_: int) -> bool:
        with SwapFolder(tmp_path) as held:
            return (held.path / "lock").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(open_and_close, range(200)))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    """The message says which part of the path is none."""
    file = tmp_path / "file"
    file.touch()
    for root in (file, file / "below"):
        with pytest.raises(ConfigError, match=rf"under {root}: .*file.* is not a directory"):
            SwapFolder(root)


def test_no_path_at_all_is_refused() -> None:
    """There is no default: nobody wants terabytes in the working directory."""
    with pytest.raises(ConfigError, match="no path was given"):
        SwapFolder("")


AS_NOBODY = """
import os, sys
from tiering.errors import ConfigError
from tiering.folder import SwapFolder
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for root in sys.argv[1:]:
    try:
        SwapFolder(root)
    except ConfigError as error:
        print(error)
"""


def test_a_path_that_cannot_be_written_is_refused_with_the_reason(public_path: Path) -> None:
    """Both an existing directory and a missing one under it; tried, not guessed from mode bits."""
    public_path.chmod(0o555)
    try:
        printed = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(public_path), str(public_path / "below")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    finally:
        public_path.chmod(0o777)
    for root, line in zip((public_path, public_path / "below"), printed, strict=True):
        assert f"under {root}: Permission denied (EACCES)" in line
        assert "can write to" in line


def test_a_missing_folder_is_made_and_one_missing_around_it_is_told(tmp_path: Path) -> None:
    """The first is a new folder on a drive, the second more likely a drive misspelt."""
    with SwapFolder(tmp_path / "new") as held:
        assert held.root == tmp_path / "new"
    message = f"{tmp_path}/drvie/states has been made .*, and {tmp_path}/drvie with it"
    with pytest.warns(TieringWarning, match=message):
        SwapFolder(tmp_path / "drvie" / "states").close()
    SwapFolder(tmp_path / "drvie" / "states").close()
