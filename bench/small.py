"""The command ``small``: many small tensors go out to a drive together and come back.

Each does it in its own way. We through `tiering.TensorSwapper`, as a user would: tensors in
ordinary memory, copied through the swapper's arena; or through the engine alone, straight from its
own memory, each tensor in a file of its own. The latter is how DeepNVMe does it, from page-locked
memory. fio on one file, with a tensor as its block. In each run everything is started
before anything is waited for. Nobody flushes, since swapped tensors need not outlive the process;
nobody goes through the page cache.

Tensors are swapped out once before anything is measured, so that what is measured is overwriting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch

from bench.contest import OURS, Contest, Outcome, Runner, hold
from bench.facts import PathFacts, path_facts
from bench.fio_baseline import huge_bytes_of
from bench.job import Job, Op
from bench.lane import Place, open_places
from bench.rivals import Rival, Task
from bench.verification import VerifyError
from bench.workload import Bandwidth
from tiering import TensorSwapper
from tiering.aio import AioStats, PinnedMemory, open_engine
from tiering.aio.backend import Transfer
from tiering.errors import ConfigError
from tiering.sizes import format_bytes

Through = Literal["swapper", "engine"]

_OPS: Final[tuple[Op, ...]] = ("write", "read")  # in this order: what is read was written before
_ALIGN_BYTES: Final = 4096


class SmallPlan(NamedTuple):
    """What goes out and comes back.

    Args:
        tensor_bytes: sizes of a tensor, one after another.
        tensors: so many at once.
        passes: so often in each run.
        rounds: of each.
        through: which entrance of ours.
    """

    tensor_bytes: tuple[int, ...]
    tensors: int
    passes: int
    rounds: int
    through: Through = "swapper"


class SmallRow(NamedTuple):
    """One size, one way.

    Args:
        tensor_bytes: of a tensor.
        op: "write", which overwrites, or "read".
        contest: how it went.
    """

    tensor_bytes: int
    op: Op
    contest: Contest


@dataclass(frozen=True)
class SmallResult:
    """What the command found.

    Args:
        job: block size, depth, backend and data of all.
        plan: what went out and came back.
        versions: of the programs compared with.
        path: where.
        engine: counters of our engine at the end, with what it was granted.
        rows: of each size, both ways.
    """

    job: Job
    plan: SmallPlan
    versions: dict[str, str]
    path: PathFacts
    engine: AioStats
    rows: tuple[SmallRow, ...]


def small(job: Job, root: Path, *, rivals: Sequence[Rival], plan: SmallPlan) -> SmallResult:
    """Compare.

    Args:
        job: block size, depth, backend and seed; the rest comes from the plan.
        root: the path.
        rivals: beside whom.
        plan: what goes out and comes back.

    Raises:
        ConfigError: it cannot be done.
        SpaceError: the drive has no room.
        TransferError: the drive failed.
        RivalError: none of the others works here.
        VerifyError: a tensor came back changed.
    """
    jobs = [_job_of(job, plan.tensors, tensor_bytes) for tensor_bytes in plan.tensor_bytes]
    rows: list[SmallRow] = []
    with contextlib.ExitStack() as closing:
        largest_bytes = max(one.size_bytes for one in jobs)
        (place,) = closing.enter_context(open_places([root], largest_bytes))
        facts = path_facts(place)
        for one, tensor_bytes in zip(jobs, plan.tensor_bytes, strict=True):
            with contextlib.ExitStack() as one_size:
                files = one_size.enter_context(_files(place, "rival", plan.tensors, tensor_bytes))
                own = one_size.enter_context(_files(place, "own", plan.tensors, tensor_bytes))
                ours: _Swapper | _EngineAlone
                if plan.through == "swapper":
                    ours = one_size.enter_context(_Swapper(root, one, plan))
                else:
                    ours = one_size.enter_context(_EngineAlone(own, one, plan))
                for op in _OPS:
                    task = Task(
                        job=dataclasses.replace(one, op=op),
                        file=place.file,
                        passes=plan.passes,
                        tensors=files,
                        flushes=False,
                    )
                    runners: dict[str, Runner] = {OURS: ours.runner(op, tensor_bytes)}
                    runners.update({rival.name: rival.runner(task) for rival in rivals})
                    rows.append(SmallRow(tensor_bytes, op, hold(runners, plan.rounds)))
                engine = ours.stats()
        versions = dict(rival.version for rival in rivals)
        return SmallResult(job, plan, versions, facts, engine, tuple(rows))


def _job_of(job: Job, count: int, tensor_bytes: int) -> Job:
    if tensor_bytes % _ALIGN_BYTES:
        raise ConfigError(
            f"a tensor of {tensor_bytes} bytes is no multiple of {_ALIGN_BYTES}, and not everybody "
            "here can move such a one past the page cache; change --tensor-bytes"
        )
    block_bytes = min(job.block_bytes, tensor_bytes)
    return dataclasses.replace(job, size_bytes=count * tensor_bytes, block_bytes=block_bytes)


@contextlib.contextmanager
def _files(place: Place, name: str, count: int, tensor_bytes: int) -> Iterator[tuple[Path, ...]]:
    """A file with its room taken for each tensor: not everybody notices a full drive."""
    files = tuple(place.folder.path / f"{name}{number}" for number in range(count))
    try:
        for file in files:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, tensor_bytes)
            finally:
                os.close(descriptor)
        yield files
    finally:
        for file in files:
            file.unlink(missing_ok=True)


class _Swapper:
    """Tensors and a swapper for them; a context manager, which closes it."""

    def __init__(self, root: Path, job: Job, plan: SmallPlan) -> None:
        random = torch.Generator().manual_seed(job.seed)
        shape = (plan.tensors, job.size_bytes // plan.tensors)
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        self._tensors = {f"tensor{number}": row.clone() for number, row in enumerate(data)}
        self._passes = plan.passes
        self._back = {key: torch.zeros_like(tensor) for key, tensor in self._tensors.items()}
        config = dataclasses.replace(job.config(), max_files=max(64, plan.tensors))
        before_bytes = huge_bytes_of(os.getpid())
        self._engine = open_engine(config)
        self._swapper = TensorSwapper(root, backend=self._engine)
        self._memory_bytes = self._swapper.stats().arena.capacity_bytes
        after_bytes = huge_bytes_of(os.getpid())
        self._huge_bytes = (
            None
            if before_bytes is None or after_bytes is None
            else max(0, min(after_bytes - before_bytes, self._memory_bytes))
        )

    def __enter__(self) -> _Swapper:
        return self

    def __exit__(self, *_: object) -> None:
        self._swapper.close()

    def stats(self) -> AioStats:
        """The engine's counters."""
        return self._engine.stats()

    def runner(self, op: Op, tensor_bytes: int) -> Runner:
        """All of them out, or in."""
        work = self._in if op == "read" else self._out

        def run() -> Outcome:
            for tensor in self._back.values():
                tensor.zero_()
            timed = _timed(work, self._passes)
            if op == "read":
                self._compare()
            moved = len(self._tensors) * self._passes
            figures = _bandwidth(op, tensor_bytes, moved, timed)
            return Outcome(figures, self._huge_bytes, self._memory_bytes)

        return run

    def _out(self) -> None:
        for key, tensor in self._tensors.items():
            self._swapper.swap_out(key, tensor)
        self._swapper.wait()

    def _in(self) -> None:
        for key, tensor in self._back.items():
            self._swapper.swap_in(key, tensor)
        self._swapper.wait()

    def _compare(self) -> None:
        for key, tensor in self._tensors.items():
            if not torch.equal(tensor, self._back[key]):
                raise VerifyError(
                    f"{key} of {format_bytes(tensor.nbytes)} did not come back as it went out; "
                    "memory, drive or engine changed it"
                )


class _EngineAlone:
    """The engine, memory for all tensors in it, and a file for each; a context manager."""

    def __init__(self, files: Sequence[Path], job: Job, plan: SmallPlan) -> None:
        self._tensor_bytes = job.size_bytes // plan.tensors
        self._passes = plan.passes
        self._memory = PinnedMemory(2 * job.size_bytes)  # what goes out, and what comes back
        self._array = np.frombuffer(memoryview(self._memory.buffer()), dtype=np.uint8)
        self._data, self._back = np.split(self._array, 2)
        self._data[:] = np.random.default_rng(job.seed).integers(
            0, 256, job.size_bytes, dtype=np.uint8
        )
        self._engine = open_engine(dataclasses.replace(job.config(), max_files=len(files)))
        self._engine.register(self._memory)
        self._files = [self._engine.open(os.fspath(file)) for file in files]

    def __enter__(self) -> _EngineAlone:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def stats(self) -> AioStats:
        """The engine's counters."""
        return self._engine.stats()

    def runner(self, op: Op, tensor_bytes: int) -> Runner:
        """All of them out, or in."""
        work = self._in if op == "read" else self._out

        def run() -> Outcome:
            self._back[:] = 0
            timed = _timed(work, self._passes)
            if op == "read" and not np.array_equal(self._data, self._back):
                raise VerifyError("the engine did not bring back what it was given")
            moved = len(self._files) * self._passes
            figures = _bandwidth(op, tensor_bytes, moved, timed)
            return Outcome(figures, self._memory.page_report().huge_bytes, self._memory.nbytes)

        return run

    def _out(self) -> None:
        self._finish(
            [
                self._engine.write(file, self._memory, at=at, nbytes=self._tensor_bytes, offset=0)
                for file, at in zip(self._files, self._places(0), strict=True)
            ]
        )

    def _in(self) -> None:
        self._finish(
            [
                self._engine.read(file, self._memory, at=at, nbytes=self._tensor_bytes, offset=0)
                for file, at in zip(self._files, self._places(len(self._data)), strict=True)
            ]
        )

    def _places(self, start: int) -> range:
        return range(start, start + len(self._data), self._tensor_bytes)

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.wait()


class _Timed(NamedTuple):
    """Seconds, and processor seconds of the process."""

    seconds: float
    cpu_s: float


def _bandwidth(op: Op, tensor_bytes: int, moved: int, timed: _Timed) -> Bandwidth:
    moved_bytes = tensor_bytes * moved
    return Bandwidth(
        seconds=timed.seconds,
        read_bytes=moved_bytes if op == "read" else 0,
        written_bytes=0 if op == "read" else moved_bytes,
        blocks=moved,
        cpu_s=timed.cpu_s,
    )


def _timed(work: Callable[[], None], times: int) -> _Timed:
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    for _ in range(times):
        work()
    return _Timed(time.perf_counter() - start_s, _cpu_s() - start_cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
