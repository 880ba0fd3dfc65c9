"""The same job through fio, so that there is something to be compared with.

fio gets the same file, size, block size, depth, page cache setting and kind of memory. It is not
asked for per-transfer latency (``gtod_reduce``), nor to change its random data before each write
(``scramble_buffers``), since our bandwidth window does neither. Its processor time is that of its
jobs between their start and their end, as it reports it.

Note: fio's memory. fio takes its buffers from malloc. Where the C library can (glibc 2.35), it is
told to ask for huge pages when our buffer does; when ours must not, the child process is barred
from them. What it really got is looked up while it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from bench.contest import Outcome, RivalError
from bench.job import Job, Pages
from bench.workload import Bandwidth
from tiering.errors import ConfigError

FioEngine = Literal["io_uring", "libaio", "psync"]
FIO_ENGINES: Final[tuple[FioEngine, ...]] = ("io_uring", "libaio", "psync")

_RW: Final = {"read": "read", "write": "write", "mixed": "rw"}
_LOOK_S: Final = 0.2
_STOP_S: Final = 5.0
_PR_SET_THP_DISABLE: Final = 41  # man 2 prctl; children inherit it, also through exec
# Small buffers come from the heap then, which is made of huge pages too.
_HUGE_TUNABLES: Final = ("glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=16777216")


class FioError(RivalError):
    """fio ran and failed, or cannot do what it was asked on this machine."""


@dataclass(frozen=True)
class Fio:
    """A usable fio.

    Args:
        program: its path.
        version: as it says.
    """

    program: str
    version: str

    def run(
        self, job: Job, file: Path, *, engine: FioEngine, passes: int, flushes: bool = True
    ) -> Outcome:
        """Run a job.

        Args:
            job: what.
            file: on which existing file.
            engine: by which of fio's ways.
            passes: so many times the file's size is moved.
            flushes: whether what was written is flushed at the end.

        Returns:
            What it moved, and its bytes on huge pages, all of its processes together; None when it
            was over before anybody could look.

        Raises:
            FioError: it failed.
        """
        options = arguments(job, file, engine=engine, passes=passes, flushes=flushes)
        command = [self.program, *options]
        text, huge_bytes = _run(command, job.pages)
        return Outcome(parse(text), huge_bytes)


def find_fio() -> Fio:
    """Find fio.

    Raises:
        ConfigError: it is not installed.
    """
    program = shutil.which("fio")
    if program is None:
        raise ConfigError(
            "fio is not installed (no such program on PATH), and it is what this compares with; "
            "install it, for example by: apt-get install fio"
        )
    ran = subprocess.run(  # noqa: S603 - the fio of the user's own PATH
        [program, "--version"], capture_output=True, text=True, check=False
    )
    return Fio(program, ran.stdout.strip() or "unknown version")


def arguments(
    job: Job, file: Path, *, engine: FioEngine, passes: int, flushes: bool = True
) -> list[str]:
    """The arguments of fio for a job."""
    options: dict[str, object] = {
        "name": "job",
        "filename": file,
        "rw": _RW[job.op],
        "bs": job.block_bytes,
        "size": job.size_bytes,
        "loops": passes,
        "ioengine": engine,
        "direct": int(job.cache == "direct"),
        "randseed": job.seed + 1,
        "gtod_reduce": 1,
        "scramble_buffers": 0,
        "invalidate": 1,
        "allow_file_create": 0,
        "overwrite": 1,
        "fallocate": "none",
        "output-format": "json",
    }
    if job.op != "read" and flushes:
        options["end_fsync"] = 1
    options.update(_parallelism(job, engine))
    return [f"--{name}={value}" for name, value in options.items()]


def _parallelism(job: Job, engine: FioEngine) -> dict[str, object]:
    if engine != "psync":
        fixed = int(engine == "io_uring" and job.registration == "registered")
        ring: dict[str, object] = {"registerfiles": 1, "fixedbufs": fixed}
        return {"iodepth": job.queue_depth, **(ring if engine == "io_uring" else {})}
    # One transfer a process, each in a part of the file of its own.
    blocks = job.size_bytes // job.block_bytes
    processes = min(job.threads or min(job.queue_depth, 16), blocks)
    part_bytes = blocks // processes * job.block_bytes
    return {"numjobs": processes, "size": part_bytes, "offset_increment": part_bytes}


def parse(text: str) -> Bandwidth:
    """The figures of fio's JSON output.

    Raises:
        FioError: it reports an error, or there is no such output.
    """
    try:
        jobs = json.loads(text[text.index("{") :])["jobs"]
        failed = next((job["error"] for job in jobs if job["error"]), 0)
        if failed:
            raise FioError(f"fio failed: {os.strerror(failed)}")
        sides = [job[side] for job in jobs for side in ("read", "write")]
        return Bandwidth(
            seconds=max(side["runtime"] for side in sides) / 1e3,
            read_bytes=sum(job["read"]["io_bytes"] for job in jobs),
            written_bytes=sum(job["write"]["io_bytes"] for job in jobs),
            blocks=sum(side["total_ios"] for side in sides),
            # Per cent of each job's own time.
            cpu_s=sum(
                (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FioError(f"fio's output cannot be read: {error!r}") from error


def _run(command: Sequence[str], pages: Pages) -> tuple[str, int | None]:
    """Run fio to its end. Returns its output and its bytes on huge pages."""
    huge_bytes = None
    with (
        barred_from_huge_pages(pages == "small"),
        _started(command, _environment(pages)) as process,
    ):
        while (ended := _ended(process)) is None:
            huge_bytes = max(huge_bytes or 0, huge_bytes_of(process.pid) or 0)
        output, errors = ended
    if process.returncode:
        words = errors.strip() or output.partition("{")[0].strip() or f"exit {process.returncode}"
        raise FioError(f"fio failed: {words}")
    return output, huge_bytes


def _ended(process: subprocess.Popen[str]) -> tuple[str, str] | None:
    """Standard output and error of a process that ends within a moment."""
    try:
        return process.communicate(timeout=_LOOK_S)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """fio, which is stopped when the block is left early."""
    process = subprocess.Popen(  # noqa: S603 - the fio of the user's own PATH
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def _environment(pages: Pages) -> dict[str, str]:
    tunables = [os.environ.get("GLIBC_TUNABLES", "")]
    if pages == "huge":
        tunables += _HUGE_TUNABLES
    return {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, tunables))}


@contextlib.contextmanager
def barred_from_huge_pages(wanted: bool) -> Iterator[None]:  # noqa: FBT001 - it is the question
    """Bar processes started meanwhile from huge pages where that is wanted."""
    if not wanted:
        yield
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def huge_bytes_of(pid: int) -> int | None:
    """Bytes of a process and its children on huge pages; None where the kernel does not say."""
    found = None
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text(encoding="ascii")
            line = next(part for part in text.splitlines() if part.startswith("AnonHugePages:"))
            found = (found or 0) + int(line.split()[1]) * 1024
    return found
