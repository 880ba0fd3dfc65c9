"""The same work through DeepNVMe, DeepSpeed's I/O library, in a process of its own.

It gets the same files, block size and queue depth, and as much memory as we have, page-locked by
its own call. Its pattern is its best one: all requests of a run are started before any is waited
for, each as large as its memory, submitted in batches and overlapped. A handle does one request
after another; so for reads and writes at once there are two handles, each with the whole depth.

Note: its memory. It takes its buffers from malloc and asks for no huge pages. ``as installed``
leaves it at that; ``huge`` starts the process with the C library told to ask for them (glibc 2.35),
and is an error where they did not come. In both cases the kernel is asked what the buffer got.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, NamedTuple

from typing_extensions import Self

from bench.contest import Outcome, RivalError
from bench.fio_baseline import barred_from_huge_pages
from bench.job import Job
from bench.workload import Bandwidth
from tiering.errors import ConfigError
from tiering.sizes import format_bytes

Memory = Literal["as installed", "huge", "small"]

_CHILD: Final = Path(__file__).with_name("deepnvme_child.py")
_HUGE_TUNABLE: Final = "glibc.malloc.hugetlb=1"
_LEAST_HUGE: Final = 0.5  # the ends of a buffer are seldom at the ends of huge pages
_PART_BYTES: Final = 4096  # what each of its threads moves must be a multiple of this
_STOP_S: Final = 5.0
_LAST_WORDS: Final = 500

_Reply = dict[str, object]


class DeepNvmeError(RivalError):
    """DeepNVMe failed, or its process ended."""


@dataclass(frozen=True)
class DeepSpeed:
    """Where DeepSpeed is, and how its library is to be driven.

    Args:
        python: the interpreter that can import it.
        parallelism: threads of one handle, among which each request is divided.
    """

    python: str = sys.executable
    parallelism: int = 1


class Request(NamedTuple):
    """One request.

    Args:
        file: on which.
        offset: first byte of the file.
        at: first byte of the memory.
        nbytes: how many.
    """

    file: str
    offset: int
    at: int
    nbytes: int


class Side(NamedTuple):
    """What goes one way, through a handle and memory of its own.

    Args:
        verb: "read" or "write".
        memory_bytes: of its memory.
        requests: in order.
    """

    verb: str
    memory_bytes: int
    requests: tuple[Request, ...]

    @property
    def moved_bytes(self) -> int:
        """By all requests."""
        return sum(request.nbytes for request in self.requests)

    def blocks(self, block_bytes: int) -> int:
        """Transfers of all requests."""
        return sum(-(-request.nbytes // block_bytes) for request in self.requests)


def sides_of_file(job: Job, file: Path, passes: int) -> tuple[Side, ...]:
    """A job on one large file; for ``mixed`` one half of it is read while the other is written."""
    size_bytes = job.size_bytes
    if job.op != "mixed":
        return (_walk(job.op, file, range(size_bytes), job.memory_bytes, passes),)
    middle = size_bytes // job.block_bytes // 2 * job.block_bytes
    return (
        _walk("read", file, range(middle), job.memory_bytes, passes),
        _walk("write", file, range(middle, size_bytes), job.memory_bytes, passes),
    )


def _walk(verb: str, file: Path, extent: range, memory_bytes: int, passes: int) -> Side:
    most_bytes = min(memory_bytes, len(extent))
    once = tuple(
        Request(os.fspath(file), offset, 0, min(most_bytes, extent.stop - offset))
        for offset in range(extent.start, extent.stop, max(1, most_bytes))
    )
    return Side(verb, most_bytes, once * passes)


def side_of_tensors(verb: str, files: Sequence[Path], tensor_bytes: int) -> Side:
    """Many tensors, a file each, side by side in the memory."""
    requests = tuple(
        Request(os.fspath(file), 0, number * tensor_bytes, tensor_bytes)
        for number, file in enumerate(files)
    )
    return Side(verb, tensor_bytes * len(files), requests)


class DeepNvmeProcess:
    """A process with DeepSpeed in it; a context manager, which ends it.

    Args:
        deepspeed: where it is.
        memory: what its memory is to be.

    Raises:
        ConfigError: no such interpreter, no DeepSpeed there, or no usable ``async_io``.
        DeepNvmeError: it ended before it could say anything.
    """

    def __init__(self, deepspeed: DeepSpeed, memory: Memory) -> None:
        self._deepspeed = deepspeed
        self._memory: Memory = memory
        self._prepared: _Reply = {}
        self._pages: _Reply = {}
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        ours, its = os.pipe()
        try:
            self._process = self._start(its)
        except OSError as error:
            os.close(ours)
            self._said.close()
            raise ConfigError(
                f"cannot run {deepspeed.python}: {error.strerror}; name the interpreter where "
                "DeepSpeed is installed by --deepspeed-python"
            ) from error
        finally:
            os.close(its)
        self._replies = os.fdopen(ours, encoding="utf-8")
        try:
            self.version = str(self._reply()["version"])
        except BaseException:
            self._stop()
            raise

    def _start(self, replies: int) -> subprocess.Popen[str]:
        with barred_from_huge_pages(self._memory == "small"):
            return subprocess.Popen(  # noqa: S603 - the interpreter that the user named
                [self._deepspeed.python, os.fspath(_CHILD), str(replies)],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(replies,),
                text=True,
                env=self._environment(),
            )

    def _environment(self) -> Mapping[str, str]:
        # DeepSpeed looks for ninja on PATH, and its environment need not be the active one.
        folder = os.path.dirname(self._deepspeed.python)  # noqa: PTH120
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PATH", "")]))
        environment = {**os.environ, "PATH": path}
        if self._memory == "huge":
            tunables = [os.environ.get("GLIBC_TUNABLES", ""), _HUGE_TUNABLE]
            environment["GLIBC_TUNABLES"] = ":".join(filter(None, tunables))
        return environment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def run(
        self, job: Job, sides: Sequence[Side], *, waves: int = 1, flushes: bool = True
    ) -> Outcome:
        """Do all requests; memory and handles are made before, where they are new.

        Args:
            job: with which block size and depth.
            sides: what.
            waves: so often, each time waiting for all of them.
            flushes: whether what was written is flushed at the end of the window.

        Raises:
            DeepNvmeError: it failed, or its process ended.
        """
        self._prepare(job, sides)
        plain = [_plain(side) for side in sides]
        done = self._ask(do="run", sides=plain, waves=waves, flush=flushes)
        huge_bytes = self._pages["huge_bytes"]
        return Outcome(
            Bandwidth(
                seconds=float(str(done["seconds"])),
                read_bytes=waves * sum(one.moved_bytes for one in sides if one.verb == "read"),
                written_bytes=waves * sum(one.moved_bytes for one in sides if one.verb == "write"),
                blocks=waves * sum(one.blocks(job.block_bytes) for one in sides),
                cpu_s=float(str(done["cpu_s"])),
            ),
            None if huge_bytes is None else int(str(huge_bytes)),
            int(str(self._pages["mapped_bytes"])),
        )

    def _prepare(self, job: Job, sides: Sequence[Side]) -> None:
        wanted: _Reply = {
            "memory_bytes": [side.memory_bytes for side in sides],
            "block_bytes": job.block_bytes,
            "queue_depth": job.queue_depth,
            "parallelism": self._deepspeed.parallelism,
        }
        if wanted == self._prepared:
            return
        self._prepared = {}
        self._pages = self._ask(do="prepare", **wanted)
        huge_bytes, mapped_bytes = self._pages["huge_bytes"], int(str(self._pages["mapped_bytes"]))
        got_bytes = int(str(huge_bytes or 0))
        if self._memory == "huge" and got_bytes < _LEAST_HUGE * mapped_bytes:
            raise DeepNvmeError(
                f"its memory was to be on huge pages, and {format_bytes(got_bytes)} of "
                f"{format_bytes(mapped_bytes)} is; it takes glibc 2.35, a kernel whose "
                "transparent_hugepage/enabled is madvise or always, and contiguous free memory"
            )
        self._prepared = wanted

    def _ask(self, **command: object) -> _Reply:
        if self._process.stdin is None or self._process.poll() is not None:
            raise self._ended()
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._reply()

    def _reply(self) -> _Reply:
        line = self._replies.readline()
        if not line:
            raise self._ended()
        reply: _Reply = json.loads(line)
        if "cannot" in reply:
            raise ConfigError(f"deepnvme: {reply['cannot']}")
        if "failed" in reply:
            raise DeepNvmeError(f"DeepNVMe failed: {reply['failed']}{self._last_words()}")
        return reply

    def _ended(self) -> DeepNvmeError:
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return DeepNvmeError("DeepNVMe's process does not answer")
        said = self._last_words()
        # The line of its own that comes before it ends itself.
        hint = "; raise the limit on locked memory (ulimit -l)" if "mlock failed" in said else ""
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return DeepNvmeError(f"DeepNVMe's process was ended {how}{hint}{said}")

    def _last_words(self) -> str:
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        return f"; its last words: {text[-_LAST_WORDS:]}" if text else ""

    def _stop(self) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._said.close()


def check_division(deepspeed: DeepSpeed, sides: Sequence[Side]) -> None:
    """See that each thread of a handle gets whole pages of each request.

    Raises:
        ConfigError: it does not.
    """
    unit_bytes = deepspeed.parallelism * _PART_BYTES
    for side in sides:
        for request in side.requests:
            if request.nbytes % unit_bytes:
                raise ConfigError(
                    f"DeepNVMe cannot divide a request of {format_bytes(request.nbytes)} among "
                    f"{deepspeed.parallelism} threads in multiples of {_PART_BYTES} bytes; change "
                    "--deepspeed-parallelism, to a power of two for example"
                )


def _plain(side: Side) -> _Reply:
    return {"verb": side.verb, "requests": side.requests}
