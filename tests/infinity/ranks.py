"""Several ranks for tests.

Processes that are started once, and run one function after another; or a program that fails on one
of two, under torchrun.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tiering.folder import SwapFolder

_LIMIT_S = 120.0  # of one function or program; one that hangs fails


def _serve(rank: int, size: int, rendezvous: str, jobs: Connection, backend: str) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = jobs.recv()
        except EOFError:
            break
        torch.manual_seed(1234)
        try:
            jobs.send((function(*arguments), None))
        except BaseException:  # noqa: BLE001 - the test's process raises it
            jobs.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """So many processes in one group.

    Args:
        size: how many.
        backend: of the group; with nccl each process has a GPU of its own.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._jobs: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, rendezvous, theirs, backend), daemon=True
            )
            process.start()
            theirs.close()
            self._jobs.append(ours)
            self._processes.append(process)
        self.is_broken = False

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of a module on every rank; returns what it returned, by rank.

        Raises:
            AssertionError: it failed on a rank; has that one's traceback.
        """
        for jobs in self._jobs:
            jobs.send((function, arguments))
        outcomes = []
        for rank, jobs in enumerate(self._jobs):
            if not jobs.poll(_LIMIT_S):
                self.is_broken = True
                raise AssertionError(f"rank {rank} did not come back")
            outcomes.append(jobs.recv())
        failed = [(r, text) for r, (_, text) in enumerate(outcomes) if text]
        if failed:
            self.is_broken = True
            raise AssertionError("\n".join(f"rank {r}: {text}" for r, text in failed))
        return [value for value, _ in outcomes]

    def close(self) -> None:
        """End the processes."""
        for jobs in self._jobs:
            jobs.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


class RankPool:
    """The groups of a test session, by size; a broken one is replaced."""

    def __init__(self) -> None:
        self._groups: dict[int, Ranks] = {}

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on this many ranks, on one right here; see `Ranks.run`."""
        if size == 1:
            return [function(*arguments)]
        group = self._groups.get(size)
        if group is None or group.is_broken:
            if group is not None:
                group.close()
            group = self._groups[size] = Ranks(size)
        return group.run(function, *arguments)

    def close(self) -> None:
        """End all of them."""
        for group in self._groups.values():
            group.close()


@contextmanager
def rank_pool() -> Iterator[RankPool]:
    """A pool that ends with the context."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


def torchrun(kind: str, path: Path, own_path: Path | None = None) -> tuple[int, str]:
    """Run the failing program on two ranks; returns the exit status and what was printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--module", "tests.infinity.failing_rank", kind, str(path), str(own_path)),
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        check=False,
    )
    assert "terminate called" not in done.stdout
    with SwapFolder(path):  # removes what the dead have left, and only that
        pass
    assert list(path.iterdir()) == []
    return done.returncode, done.stdout


def first_failure(text: str) -> tuple[int, int]:
    """Exit code and rank of the first that failed, as torchrun has seen it."""
    found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d)", text)
    assert found, text
    return int(found[1]), int(found[2])
