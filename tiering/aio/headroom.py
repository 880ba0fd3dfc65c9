"""How much memory the kernel would still give this process, before somebody is killed for it.

An allocation that is too large seldom fails on Linux: the memory is promised, and the process that
uses it is killed, or another one is. So who takes much at once asks first.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Headroom(NamedTuple):
    """What is left, and what says so."""

    nbytes: int
    limit: str
    pool: str
    """Of what they are left: the same text in all processes that take from the same."""


def headrooms(root: Path = Path("/")) -> list[Headroom]:
    """What the machine and each control group of this process leave.

    Page cache that can be dropped counts as free.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    machine = machine_id(root)
    return [*_machine(root, machine), *_groups(root, machine)]


def headroom(root: Path = Path("/")) -> Headroom | None:
    """The least of `headrooms`; None where the kernel does not say."""
    return min(headrooms(root), default=None)


def reserved_huge_bytes(root: Path = Path("/")) -> int:
    """Bytes of huge pages that the system keeps in reserve and nobody uses."""
    facts = _table(root / "proc/meminfo")
    return facts.get("HugePages_Free", 0) * facts.get("Hugepagesize", 0) * 1024


def machine_id(root: Path = Path("/")) -> str:
    """What names this machine among others, as long as it runs; in its containers as well."""
    with contextlib.suppress(OSError):
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return platform.node()


def _machine(root: Path, machine: str) -> Iterator[Headroom]:
    """Source: man 5 proc_meminfo. Swap is no help: what is pinned stays."""
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield Headroom(available * 1024, "available on this machine", f"memory of {machine}")


def _groups(root: Path, machine: str) -> Iterator[Headroom]:
    """Source: the kernel's admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst."""
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                top = "sys/fs/cgroup/memory"
                names = (
                    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                )  # fmt: skip
            else:
                continue
            folder = root / top
            for part in ("", *Path(path).parts[1:]):
                folder /= part
                yield from _group(folder, *names, machine)


def _group(folder: Path, limit: str, usage: str, cache: str, machine: str) -> Iterator[Headroom]:
    """Of one group; a limit that is a word is none. Its path may differ between containers."""
    with contextlib.suppress(OSError, ValueError):
        most_bytes = int((folder / limit).read_text(encoding="utf-8"))
        used_bytes = int((folder / usage).read_text(encoding="utf-8"))
        droppable_bytes = _table(folder / "memory.stat").get(cache, 0)
        left_bytes = most_bytes - used_bytes + droppable_bytes
        yield Headroom(
            max(left_bytes, 0),
            f"left of the {most_bytes} bytes of control group {folder}",
            f"group {folder.stat().st_ino} of {machine}",
        )


def _table(file: Path) -> dict[str, int]:
    """Names and numbers, line by line."""
    with contextlib.suppress(OSError):
        parts = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return {part[0].rstrip(":"): int(part[1]) for part in parts if len(part) > 1}
    return {}
