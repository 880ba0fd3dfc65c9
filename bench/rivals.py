"""Who can be measured beside us: fio, by each of its engines, and DeepSpeed's DeepNVMe.

A command says what everybody is to do (a `Task`), and each rival makes of it something that can be
run in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from bench.contest import Runner
from bench.deepnvme import (
    DeepNvmeProcess,
    DeepSpeed,
    Memory,
    Side,
    check_division,
    side_of_tensors,
    sides_of_file,
)
from bench.fio_baseline import FIO_ENGINES, Fio, FioEngine, find_fio
from bench.job import Job, Pages
from tiering.errors import ConfigError

RivalName = Literal["io_uring", "libaio", "psync", "deepnvme", "deepnvme-huge"]
RIVALS: Final[tuple[RivalName, ...]] = (*FIO_ENGINES, "deepnvme", "deepnvme-huge")


@dataclass(frozen=True)
class Task:
    """What everybody does in one run.

    Args:
        job: operation, block size, depth, page cache and pages; its size is what a pass moves.
        file: of that size.
        passes: so many times.
        tensors: files with equal parts of it, for those who keep each tensor in a file of its own;
            none where the work is one large file.
        flushes: whether what was written is flushed at the end.
    """

    job: Job
    file: Path
    passes: int = 1
    tensors: tuple[Path, ...] = ()
    flushes: bool = True


class Rival(Protocol):
    """Another program that does the same."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    @property
    def version(self) -> tuple[str, str]:
        """Of what, and which."""
        ...

    def runner(self, task: Task) -> Runner:
        """What does the task once.

        Raises:
            ConfigError: it never could.
        """
        ...


@dataclass(frozen=True)
class FioRival:
    """fio.

    Args:
        fio: the program.
        engine: by which of its ways.
    """

    fio: Fio
    engine: FioEngine

    @property
    def name(self) -> str:
        """In tables."""
        return f"fio {self.engine}"

    @property
    def version(self) -> tuple[str, str]:
        """Of fio."""
        return "fio", self.fio.version

    def runner(self, task: Task) -> Runner:
        """Run fio on the one file; a tensor is a block to it."""
        job = task.job
        if task.tensors:
            tensor_bytes = job.size_bytes // len(task.tensors)
            job = dataclasses.replace(job, block_bytes=tensor_bytes)
        return lambda: self.fio.run(
            job,
            task.file,
            engine=self.engine,
            passes=task.passes,
            flushes=task.flushes,
        )


@dataclass(frozen=True)
class DeepNvmeRival:
    """DeepNVMe.

    Args:
        name: in tables; it says which memory.
        process: where it runs.
        deepspeed: how it is driven.
    """

    name: str
    process: DeepNvmeProcess
    deepspeed: DeepSpeed

    @property
    def version(self) -> tuple[str, str]:
        """Of DeepSpeed."""
        return "DeepSpeed", self.process.version

    def runner(self, task: Task) -> Runner:
        """Have its process do the requests that the task is for it.

        Raises:
            ConfigError: it cannot go through the page cache, or not divide the requests.
        """
        if task.job.cache == "buffered":
            raise ConfigError(
                "deepnvme always bypasses the page cache, so there is nothing to compare with "
                "--buffered; leave one of them out"
            )
        sides = _sides(task)
        check_division(self.deepspeed, sides)
        # A large file is walked without a pause; tensors are all back before they go out again.
        waves = task.passes if task.tensors else 1
        return lambda: self.process.run(task.job, sides, waves=waves, flushes=task.flushes)


def _sides(task: Task) -> tuple[Side, ...]:
    if not task.tensors:
        return sides_of_file(task.job, task.file, task.passes)
    tensor_bytes = task.job.size_bytes // len(task.tensors)
    return (side_of_tensors(task.job.op, task.tensors, tensor_bytes),)


@contextlib.contextmanager
def open_rivals(
    names: Sequence[RivalName], *, deepspeed: DeepSpeed, pages: Pages
) -> Iterator[tuple[Rival, ...]]:
    """Find them, and start those that stay alive over the rounds.

    Args:
        names: who.
        deepspeed: where it is, if it is among them.
        pages: of our memory; with small ones nobody gets huge ones.

    Raises:
        ConfigError: one is not installed, or cannot have such pages.
    """
    with contextlib.ExitStack() as closing:
        yield tuple(_open(name, deepspeed, pages, closing) for name in dict.fromkeys(names))


def _open(
    name: RivalName, deepspeed: DeepSpeed, pages: Pages, closing: contextlib.ExitStack
) -> Rival:
    if name not in {"deepnvme", "deepnvme-huge"}:
        return FioRival(find_fio(), next(engine for engine in FIO_ENGINES if engine == name))
    if name == "deepnvme-huge" and pages == "small":
        raise ConfigError(
            "deepnvme-huge has its memory on huge pages, and --pages small wants none of them; "
            "compare with deepnvme, or with --pages huge"
        )
    plain: Memory = "small" if pages == "small" else "as installed"
    memory: Memory = "huge" if name == "deepnvme-huge" else plain
    process = closing.enter_context(DeepNvmeProcess(deepspeed, memory))
    return DeepNvmeRival(name, process, deepspeed)
