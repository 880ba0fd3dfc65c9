"""The private folder of one store under the user's path, and its end, however its process ends.

Record files live in a folder whose name no other instance has, so that two models, two ranks or two
runs on one path never meet. The folder holds a lock file whose lock the kernel drops when the
process ends, however it ends. So a folder whose lock can be taken is left over from a killed
process, and the next one to come removes it.

What would break: removing a folder that is alive. A name and an owner are not proof, and neither is
a lock on a file system that does not carry it to other machines; there only folders of this
machine's name are judged at all. Between making a folder and locking it there is a moment when it
looks left over, so its maker looks whether it is still there after locking, and makes another if it
is not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import tempfile
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

from tiering.errors import ConfigError, TieringWarning, TransferError

_PREFIX: Final = "tiering"
_NAME: Final = re.compile(rf"{_PREFIX}-(?P<host>[A-Za-z0-9_.]{{0,16}})-\d+-[0-9a-f]{{8}}")
_LOCK_NAME: Final = "lock"
_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_CANNOT_RESERVE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# File systems of which all users are on this machine, so that a lock that can be taken is a proof.
_LOCAL_TYPES: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
)


class SwapFolder:
    """A folder of our own under ``root``, removed with all that is in it when closed, or at exit.

    Opening one also removes the folders that dead processes of the same user left under ``root``.

    Args:
        root: where to put it; made if missing.

    Raises:
        ConfigError: no path, not a directory, or nothing can be written there.

    Warns:
        TieringWarning: the folder around the root was missing as well.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = _usable_root(root)
        self._path, lock = _make(self._root)
        self._remove = weakref.finalize(self, _remove_own, self._path, lock, os.getpid())
        _remove_stale(self._root, keep=self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The user's path."""
        return self._root

    @property
    def path(self) -> Path:
        """The private folder."""
        return self._path

    def file_system(self) -> str:
        """The type of the file system it is on, such as ``ext4``; empty where that is unknown."""
        return _file_system_type(self._root)

    def device(self) -> int:
        """The number of the file system it is on; two folders with one number share free bytes.

        Raises:
            TransferError: the folder is gone.
        """
        try:
            return self._path.stat().st_dev
        except OSError as error:
            raise self._gone(error) from error

    def free_bytes(self) -> int:
        """What the file system still has for an ordinary user.

        Raises:
            TransferError: the folder is gone.
        """
        try:
            usage = os.statvfs(self._path)
        except OSError as error:
            raise self._gone(error) from error
        return usage.f_bavail * usage.f_frsize

    def _gone(self, error: OSError) -> TransferError:
        return TransferError(
            f"cannot look at the folder under {self._root}; is the drive still mounted there?",
            errno=error.errno or errno.EIO,
            path=str(self._path),
        )

    def make_file(self, name: str, nbytes: int, *, head: bytes = b"") -> Path:
        """Make a file of this length for our user alone, with all its room taken.

        Where the file system promises no room, only the length is set.

        Args:
            name: of a file that is not there yet.
            nbytes: its length.
            head: its first bytes; what follows them is undefined.

        Raises:
            OSError: it could not be made; nothing is left behind.
        """
        path = self._path / name
        try:
            with open(path, "xb", opener=_private) as file:
                _reserve(file.fileno(), nbytes)
                file.write(head)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def close(self) -> None:
        """Remove the folder. A second call does nothing, and so does a call in a forked child."""
        self._remove()


def _usable_root(root: str | os.PathLike[str]) -> Path:
    """The root as an absolute path, made if missing, proven to be writable by writing."""
    if not os.fspath(root):
        raise ConfigError("no path was given for the record files; name a directory on a drive")
    path = Path(root).absolute()
    try:
        is_parent_missing = not path.parent.exists()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"cannot keep record files under {path}: {error.filename or path} is not a directory"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot keep record files under {path}: {error.strerror} ({_errno_name(error)}); "
            f"name a directory that user {os.geteuid()} can write to"
        ) from error
    if is_parent_missing:
        warnings.warn(
            f"{path} has been made for the record files, and {path.parent} with it, which was "
            "missing too; if that should be a drive, look at the name, and whether it is mounted",
            TieringWarning,
            stacklevel=3,
        )
    return path


def _private(path: str, flags: int) -> int:
    """Open for one's own user alone."""
    return os.open(path, flags, mode=_FILE_MODE)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take room for the whole file; where the file system promises none, just set its length."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(descriptor, nbytes)


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown error")


def _host() -> str:
    """This machine's name, short and without characters that would need care in a path."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", platform.node())[:16]


def _make(root: Path) -> tuple[Path, int]:
    """Make the folder and take its lock. Returns it with the lock's descriptor."""
    while True:
        path = root / f"{_PREFIX}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir(mode=_MODE)
            lock = os.open(path / _LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, _FILE_MODE)
        except (FileExistsError, FileNotFoundError):
            continue  # the name was taken, or another process took the new folder for a stale one
        except OSError as error:
            raise ConfigError(f"cannot make a folder under {root}: {error.strerror}") from error
        # Where there are no locks, nobody can take ours either, and so nobody removes the folder.
        if _take(lock) is not False and _is_linked(path / _LOCK_NAME, lock):
            return path, lock
        os.close(lock)


def _take(lock: int) -> bool | None:
    """Try the lock. True: taken; False: somebody has it; None: this file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_linked(path: Path, descriptor: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_stale(root: Path, *, keep: Path) -> None:
    """Remove the folders of dead processes. What cannot be judged or removed is left alone."""
    is_local = _file_system_type(root) in _LOCAL_TYPES
    try:
        siblings = list(root.iterdir())
    except OSError:
        return
    for path in siblings:
        name = _NAME.fullmatch(path.name)
        if name and path != keep and (is_local or name["host"] == _host()):
            with contextlib.suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.geteuid() or path.is_symlink() or not path.is_dir():
        return
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        path.rmdir()  # its maker died before it made the lock; a folder with anything in it stays
        return
    try:
        if _take(lock) is True and _is_linked(path / _LOCK_NAME, lock):
            _empty(path)
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    """Remove a folder whose lock the caller has; the lock last, so that a crash leaves it stale."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != _LOCK_NAME:
            Path(entry.path).unlink()
    (path / _LOCK_NAME).unlink()
    path.rmdir()


def _remove_own(path: Path, lock: int, pid: int) -> None:
    """Remove our folder at the end of its life, in the process that made it only."""
    if os.getpid() != pid:
        return  # a forked child shares the lock, and so must not drop it either
    try:
        with contextlib.suppress(OSError):
            _empty(path)
    finally:
        os.close(lock)


def _file_system_type(path: Path) -> str:
    """The type of the file system a path is on; empty where the mount table does not tell."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        device = path.stat().st_dev
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in table.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return ""
