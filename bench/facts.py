"""Where a figure was measured: machine, drive, file system, and what the engine was granted."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from bench.buffers import PageFacts
from bench.lane import Lane, Place
from tiering.sizes import format_bytes

_PACKAGE: Final = "zero-infinity"
_MAY_LOCK_ALL: Final = 14  # CAP_IPC_LOCK, a bit of the capability masks
_SYS: Final = Path("/sys/dev/block")
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class MachineFacts(NamedTuple):
    """What every path shares.

    Args:
        kernel: name, release and architecture.
        cpu_model: as the kernel names it.
        cpu_count: that this process may use.
        memory_bytes: of the machine.
        user: "root" or "an ordinary user", who may do less.
        memlock: limit on locked memory in force, in words.
        huge_pages: the kernel's policy for transparent huge pages.
        version: of this package.
        python: version.
    """

    kernel: str
    cpu_model: str
    cpu_count: int
    memory_bytes: int
    user: str
    memlock: str
    huge_pages: str
    version: str
    python: str


class PathFacts(NamedTuple):
    """What a path is.

    Args:
        path: as given.
        drive: model or kind, and name, of the drive under it.
        file_system: type; empty where the mount table does not tell.
        free_bytes: beside our file.
    """

    path: str
    drive: str
    file_system: str
    free_bytes: int


class EngineFacts(NamedTuple):
    """What the engine was granted on a path.

    Args:
        backend: the one in use.
        backend_reason: why io_uring is not, when it was wanted.
        direct: O_DIRECT is in effect.
        direct_reason: why not.
        memory_align_bytes: of addresses, for direct transfers.
        offset_align_bytes: of file offsets and lengths.
        fixed_files: files are registered with the ring.
        registered_bytes: memory registered with the ring.
        register_reason: why none is.
        buffered_blocks: blocks that went through the page cache.
        retries: operations repeated.
        short_transfers: operations that moved less than asked.
        pages: of the buffer.
    """

    backend: str
    backend_reason: str
    direct: bool
    direct_reason: str
    memory_align_bytes: int
    offset_align_bytes: int
    fixed_files: bool
    registered_bytes: int
    register_reason: str
    buffered_blocks: int
    retries: int
    short_transfers: int
    pages: PageFacts


def machine_facts() -> MachineFacts:
    """Look at the machine."""
    return MachineFacts(
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        user="an ordinary user" if os.geteuid() else "root",
        memlock=_memlock(),
        huge_pages=_chosen(_read(_THP)) or "not in this kernel",
        version=_version(),
        python=platform.python_version(),
    )


def path_facts(place: Place) -> PathFacts:
    """Look at a path."""
    return PathFacts(
        path=str(place.root),
        drive=drive_of(place.root),
        file_system=place.folder.file_system(),
        free_bytes=place.folder.free_bytes(),
    )


def engine_facts(lane: Lane) -> EngineFacts:
    """Look at an engine, after its work."""
    stats, info = lane.stats(), lane.file.info
    if lane.job.registration == "unregistered":
        register_reason = "fixed buffers: off (not asked for)"
    else:
        register_reason = stats.register_reason
    return EngineFacts(
        backend=stats.backend,
        backend_reason=stats.backend_reason,
        direct=info.direct,
        direct_reason=_why_not_direct(lane),
        memory_align_bytes=info.memory_align_bytes,
        offset_align_bytes=info.offset_align_bytes,
        fixed_files=stats.fixed_files,
        registered_bytes=stats.registered_bytes,
        register_reason=register_reason,
        buffered_blocks=stats.buffered_blocks,
        retries=stats.retries,
        short_transfers=stats.short_transfers,
        pages=lane.buffer.page_facts(),
    )


def cache_note(lane: Lane, *, read_bytes: int) -> str:
    """What the page cache had to do with a job.

    Args:
        lane: on what.
        read_bytes: by the job, from the file.
    """
    if lane.file.info.direct:
        return "bypassed"
    total_bytes = psutil.virtual_memory().total
    size_bytes = lane.place.size_bytes
    larger = "larger" if size_bytes > total_bytes else "smaller"
    note = (
        f"in use, dropped for this file before the job; the file ({format_bytes(size_bytes)}) is "
        f"{larger} than the memory of the machine ({format_bytes(total_bytes)})"
    )
    if read_bytes > size_bytes and size_bytes < total_bytes:
        note += f"; CACHED: the file was read {read_bytes / size_bytes:.1f} times, mostly from it"
    return note


def _why_not_direct(lane: Lane) -> str:
    info = lane.file.info
    if info.direct or not info.direct_errno:
        return info.why_not_direct
    kind = lane.place.folder.file_system() or "this"
    return f"{info.why_not_direct} by the {kind} file system"


def drive_of(path: Path) -> str:
    """The model or kind of the drive under a path, and its name, such as ``virtio disk (vda)``."""
    device = _block_device(path)
    if device is None:
        return "no block device"
    name = device.name
    if (device / "partition").exists():
        device = device.parent
    members = sorted(part.name for part in (device / "slaves").glob("*"))
    backing = _read(device / "loop" / "backing_file")
    if backing:
        return f"loop device ({name}) over {backing}"
    if members:
        return f"{_read(device / 'dm' / 'name') or 'array'} ({name}) of {', '.join(members)}"
    return f"{_model(device)} ({name})"


def _model(device: Path) -> str:
    words = [_read(device / "device" / part) for part in ("vendor", "model")]
    # A virtio disk has a vendor's number and no model.
    if words[1]:
        return " ".join(word for word in words if word and not word.startswith("0x"))
    try:
        driver = (device / "device" / "driver").resolve(strict=True).name
    except OSError:
        return "unknown drive"
    return "virtio disk" if driver == "virtio_blk" else f"unknown drive, driver {driver}"


def _block_device(path: Path) -> Path | None:
    """The folder in /sys of the device a path is on; None for memory and network."""
    number = path.stat().st_dev
    folder = _SYS / f"{os.major(number)}:{os.minor(number)}"
    if folder.exists():
        return folder.resolve()
    # Some file systems, such as btrfs, give out numbers of their own; the mount table has the name.
    source = Path(_mount_source(number))
    try:
        number = source.stat().st_rdev
    except OSError:
        return None
    folder = _SYS / f"{os.major(number)}:{os.minor(number)}"
    return folder.resolve() if number and folder.exists() else None


def _mount_source(number: int) -> str:
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[1]
    return ""


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "none"
    status = dict(
        line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines() if ":" in line
    )
    exempt = int(status.get("CapEff", "0"), 16) >> _MAY_LOCK_ALL & 1
    note = " (does not bind this process, which has CAP_IPC_LOCK)" if exempt else ""
    return format_bytes(soft) + note


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version() -> str:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return "not installed"


def _chosen(text: str) -> str:
    """The word in brackets, which is the one in force."""
    return text.partition("[")[2].partition("]")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
