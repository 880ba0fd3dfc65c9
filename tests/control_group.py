"""A memory control group of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest


class MemoryGroup(NamedTuple):
    """Its files. A process that writes 0 to ``cgroup.procs`` in the folder goes there."""

    folder: Path
    limit: Path
    usage: Path


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A fresh control group with this limit; its processes must end before the context does."""
    group = _make(f"zero-infinity-{os.getpid()}")
    if group is None:
        pytest.skip("needs a memory control group of its own, which takes root")
    try:
        group.limit.write_text(str(limit_bytes))
        yield group
    finally:
        group.folder.rmdir()


def _make(name: str) -> MemoryGroup | None:
    """None where we may have none."""
    for top, limit, usage in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ):
        folder = Path(top) / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            return MemoryGroup(folder, folder / limit, folder / usage)
        folder.rmdir()
    return None
