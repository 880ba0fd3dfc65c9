"""Moves bytes through DeepNVMe, for a parent that measures it beside us.

Run by its path, by the interpreter where DeepSpeed is installed, which need not be ours: so it
imports nothing of ours, and torch and DeepSpeed by name. It stays alive over all rounds, so that
neither imports nor memory are part of a measurement.

Commands come as lines of JSON on the standard input; each is answered by one line on the
descriptor named by the only argument, since DeepSpeed writes on the standard output. ``prepare``
makes handles and page-locked memory; ``run`` starts all requests, and only then waits for them.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

_LOOK_BYTES = 512  # at the end of what a read fills
_UNLIKE_BYTES = 64 * 2**20


class CannotError(Exception):
    """The user must change something before this can work."""


class DeepNvme:
    """DeepSpeed's I/O library, with the handles and the memory of the present work."""

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self.version = str(importlib.import_module("deepspeed").__version__)
            builders: Any = importlib.import_module("deepspeed.ops.op_builder")
        except ImportError as error:
            raise CannotError(
                f"{sys.executable} cannot import {error.name} ({error}); name the interpreter of "
                "an environment with deepspeed by --deepspeed-python, or install deepspeed there"
            ) from error
        try:
            self._op: Any = builders.AsyncIOBuilder().load(verbose=False)
        except Exception as error:
            raise CannotError(
                f"DeepSpeed {self.version} cannot load its async_io op: {error}; it needs "
                "libaio-dev, ninja and a compiler (its own ds_report says what is missing)"
            ) from error
        self._handles: list[Any] = []
        self._memories: list[Any] = []

    def prepare(
        self, *, memory_bytes: list[int], block_bytes: int, queue_depth: int, parallelism: int
    ) -> dict[str, object]:
        """Make a handle and page-locked memory for each side, in place of earlier ones."""
        for handle, memory in zip(self._handles, self._memories, strict=True):
            handle.free_cpu_locked_tensor(memory)
        self._handles, self._memories = [], []
        for nbytes in memory_bytes:
            handle = self._op.aio_handle(
                block_size=block_bytes,
                queue_depth=queue_depth,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=parallelism,
            )
            self._memories.append(self._locked(handle, nbytes))
            self._handles.append(handle)
        huge = [huge_bytes(memory.data_ptr(), memory.numel()) for memory in self._memories]
        return {
            "huge_bytes": None if None in huge else sum(part or 0 for part in huge),
            "mapped_bytes": sum(memory_bytes),
        }

    def _locked(self, handle: Any, nbytes: int) -> Any:  # noqa: ANN401 - has no types
        memory = handle.new_cpu_locked_tensor(nbytes, self._torch.empty(0, dtype=self._torch.uint8))
        if memory.data_ptr() == 0:
            raise RuntimeError(f"no {nbytes} bytes of page-locked memory")
        unlike = memory[:_UNLIKE_BYTES]
        unlike.random_(0, 256)
        for at in range(_UNLIKE_BYTES, nbytes, _UNLIKE_BYTES):
            piece = memory[at : at + _UNLIKE_BYTES]
            piece.copy_(unlike[: piece.numel()])
        return memory

    def run(self, *, sides: list[dict[str, Any]], waves: int, flush: bool) -> dict[str, object]:
        """Do all requests of all sides.

        Args:
            sides: for each a verb, and requests: file, its offset, place in the memory, bytes.
            waves: so often, each time waiting for all of them.
            flush: have what was written on the drive, as part of the window.
        """
        calls = [
            [
                (getattr(handle, f"async_p{side['verb']}"), memory[at : at + n], file, offset)
                for file, offset, at, n in side["requests"]
            ]
            for handle, memory, side in zip(self._handles, self._memories, sides, strict=True)
        ]
        read = {n: side for n, side in enumerate(sides) if side["verb"] == "read"}
        ends = [call[1][-_LOOK_BYTES:] for n in read for call in calls[n]]
        for end in ends:
            end.zero_()
        written = {call[2] for n, part in enumerate(calls) if n not in read for call in part}
        start_s, start_cpu_s = time.perf_counter(), cpu_s()
        for _ in range(waves):
            self._move(calls)
        if flush:
            for file in written:
                sync(file)
        seconds, used_cpu_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
        if not all(bool(end.any()) for end in ends):
            raise RuntimeError("a read that was reported as done brought no data")
        return {"seconds": seconds, "cpu_s": used_cpu_s}

    def _move(self, calls: list[list[tuple[Any, Any, str, int]]]) -> None:
        counts = [0] * len(calls)
        refused = ""
        for side, part in enumerate(calls):
            for call, memory, file, offset in part:
                if call(memory, file, offset) != 0:
                    refused = file
                    break
                counts[side] += 1
        for handle, count in zip(self._handles, counts, strict=True):
            # With nothing under way, waiting would end the process.
            if count and handle.wait() != count:
                raise RuntimeError("fewer requests came back than were started")
        if refused:
            raise RuntimeError(f"it refused a request on {refused}")


def cpu_s() -> float:
    """Processor time of this process with all its threads, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def sync(file: str) -> None:
    """Have a file's data on the drive."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def huge_bytes(address: int, nbytes: int) -> int | None:
    """Of a piece of memory on huge pages, as the kernel says; None where it does not."""
    found, overlaps = 0, False
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
            for line in lines:
                head = line.split(maxsplit=1)[0]
                if not head.endswith(":"):
                    first, last = (int(part, 16) for part in head.split("-"))
                    overlaps = first < address + nbytes and address < last
                elif overlaps and head == "AnonHugePages:":
                    found += int(line.split()[1]) * 1024
    except OSError:
        return None
    return min(found, nbytes)


def main(replies: int) -> None:
    """Answer commands until there are no more."""
    # Else our own modules could be taken for somebody else's of the same name.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [part for part in sys.path if os.path.abspath(part or ".") != here]  # noqa: PTH100
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file each stays open till the end
    with os.fdopen(replies, "w", encoding="utf-8", buffering=1) as out:

        def answer(**values: object) -> None:
            out.write(json.dumps(values) + "\n")

        try:
            library = DeepNvme()
        except CannotError as error:
            answer(cannot=str(error))
            return
        answer(version=library.version)
        commands: dict[str, Callable[..., dict[str, object]]]
        commands = {"prepare": library.prepare, "run": library.run}
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            try:
                answer(**commands[command.pop("do")](**command))
            except Exception as error:  # noqa: BLE001 - the parent says it
                answer(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
