"""The measured steps: the same loop for every engine, in a process of its own.

Needs torch and Linux, nothing else: see the head of the package.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import record_function

from bench.steps import timeline
from bench.steps.model import SIZES, batches, build
from bench.steps.wire import Outcome, Paging, Run, Step, Training

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Moved(NamedTuple):
    """Bytes so far: of drives, and of the link to a GPU."""

    read_bytes: int
    written_bytes: int
    uploaded_bytes: int = 0
    offloaded_bytes: int = 0

    def since(self, before: Moved) -> Moved:
        """What has been moved since then."""
        return Moved(*(now - then for now, then in zip(self, before, strict=True)))


class Trainer(abc.ABC):
    """An engine with its model."""

    device: torch.device = torch.device("cpu")
    compute_dtype: str
    version: str = torch.__version__
    is_strict: bool = True
    """All its kernels have a form that always adds up in one order, if that is asked for."""

    @abc.abstractmethod
    def __init__(self, run: Run) -> None:
        """Build the model and the engine, as the run has them."""

    @abc.abstractmethod
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, int64 of shape (batch, context + 1)."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients."""

    @abc.abstractmethod
    def update(self) -> None:
        """Clip the gradients, update the weights, forget the gradients."""

    def moved(self) -> Moved | None:
        """By the engine's own counters; None when it has none."""
        return None

    def begin_measuring(self) -> None:  # noqa: B027 - most have nothing to do
        """The warm-up is over."""

    def watch_drive(self) -> Callable[[], Iterable[timeline.Transfer]]:
        """Note transfers from now on.

        Returns:
            What waits for all that have begun, and returns them; an engine that tells of none has
            none.
        """
        return tuple

    def paging(self) -> Paging | None:
        """Of the measured steps; ours alone has it."""
        return None

    def close(self) -> None:  # noqa: B027 - likewise
        """Let go of everything."""


class PeakMemory:
    """The resident memory of this process, and the most of it since a moment."""

    def __init__(self) -> None:
        self.start_bytes = 0
        self.restart()
        self.start_bytes = _status_bytes("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far. Where the kernel does not allow that, the old one stays."""
        # 5 sets the high-water mark back to what is resident now: man 5 proc_pid_clear_refs.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """The most since the last restart, over the start."""
        return max(0, _status_bytes("VmHWM") - self.start_bytes)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def kernel_moved() -> Moved:
    """What the kernel counts for this process: transfers of drives, not of the page cache.

    Bytes are counted when a transfer starts; those of a container without the file are 0.
    """
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return Moved(0, 0)
    counts = dict(line.split(": ") for line in text.splitlines())
    return Moved(int(counts["read_bytes"]), int(counts["write_bytes"]))


def serve(make: type[Trainer]) -> None:
    """Do the run that stands in the standard input; write its outcome to the first argument.

    Args:
        make: makes the engine.
    """
    run = Run.of(json.load(sys.stdin))
    if torch.cuda.is_available():
        torch.cuda.set_device(_place("LOCAL_RANK"))
    if run.training.threads:
        torch.set_num_threads(run.training.threads)
    if run.training.deterministic:
        # Where it may only warn, flash attention's backward keeps adding up in any order.
        torch.use_deterministic_algorithms(True, warn_only=not make.is_strict)  # noqa: FBT003
        # A guard against reading what was never written, which costs a pass over all memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _awaken_torch()
    memory = PeakMemory()
    outcome = measure(run, make, memory)
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")


def _place(variable: str) -> int:
    """Of this process among the ranks; 0 if there are no others."""
    return int(os.environ.get(variable, "0"))


def _awaken_torch() -> None:
    """Let torch's libraries and threads take the memory they take once, whatever is trained."""
    shape = SIZES["tiny"]
    for dtype in DTYPES.values():
        model = build(shape, seed=0, compute_dtype=dtype)
        model(next(batches(shape, batch=1, seed=0))).backward()


def measure(run: Run, make: Callable[[Run], Trainer], memory: PeakMemory) -> Outcome:
    """Build the engine, train, and tell.

    Args:
        run: the work.
        make: makes the engine.
        memory: started before anything was built.
    """
    training = run.training
    torch.manual_seed(training.seed)
    with contextlib.closing(make(run)) as trainer:
        drawn = (ids.to(trainer.device) for ids in _drawn(training))
        steps = (_step(trainer, ids) for ids in itertools.islice(drawn, training.steps_in_all))
        first = list(itertools.islice(steps, training.warmup))
        peak_bytes = memory.peak_bytes()
        memory.restart()
        on_gpu = trainer.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.begin_measuring()
        measured = list(steps)
        training_peak_bytes = memory.peak_bytes()
        outcome = Outcome(
            parameter_numel=training.shape.parameter_numel,
            compute_dtype=trainer.compute_dtype,
            threads=torch.get_num_threads(),
            version=trainer.version,
            warmup=training.warmup,
            steps=(*first, *measured),
            start_bytes=memory.start_bytes,
            peak_bytes=max(peak_bytes, training_peak_bytes),
            training_peak_bytes=training_peak_bytes,
            paging=trainer.paging(),
            device_peak_bytes=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else 0,
        )
        if run.timeline:
            _record(trainer, drawn, Path(run.timeline))
        return outcome


def _drawn(training: Training) -> Iterator[torch.Tensor]:
    """Each rank has its own windows."""
    seed = training.seed + _place("RANK")
    return batches(training.shape, batch=training.batch, seed=seed)


def _record(trainer: Trainer, drawn: Iterator[torch.Tensor], path: Path) -> None:
    """Record a step in full flow: nothing in it waits for the device but the engine itself."""
    steps = [functools.partial(_flow, trainer, next(drawn)) for _ in range(2)]
    timeline.record(steps, trainer.watch_drive(), device=trainer.device, path=path)


def _flow(trainer: Trainer, ids: torch.Tensor) -> None:
    forward, backward, update = timeline.PASSES
    with record_function(forward):
        loss = trainer.forward(ids)
    with record_function(backward):
        trainer.backward(loss)
    with record_function(update):
        trainer.update()


def _step(trainer: Trainer, ids: torch.Tensor) -> Step:
    own, kernel = trainer.moved(), kernel_moved()
    times = [_now(trainer)]
    loss = trainer.forward(ids)
    times.append(_now(trainer))
    trainer.backward(loss)
    times.append(_now(trainer))
    trainer.update()
    times.append(_now(trainer))
    after, of_kernel = trainer.moved(), kernel_moved().since(kernel)
    moved = after.since(own) if own and after else None
    forward_s, backward_s, update_s = (b - a for a, b in itertools.pairwise(times))
    return Step(
        loss=loss.item(),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        kernel_read_bytes=of_kernel.read_bytes,
        kernel_written_bytes=of_kernel.written_bytes,
        engine_read_bytes=moved and moved.read_bytes,
        engine_written_bytes=moved and moved.written_bytes,
        uploaded_bytes=moved and moved.uploaded_bytes,
        offloaded_bytes=moved and moved.offloaded_bytes,
    )


def _now(trainer: Trainer) -> float:
    """The clock, when all that was asked of the device is done."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter()
