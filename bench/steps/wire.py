"""What a child is told and what it tells: JSON on its standard input, JSON in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.steps.model import Shape

Json = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """What is trained, whoever does it.

    Args:
        shape: of the model.
        batch: windows a step, on each rank.
        warmup: steps before those that count.
        steps: that count.
        seed: of weights and of rank 0's batches; that of a rank's is larger by its number.
        fused: torch's fused AdamW kernel, where an engine has the choice.
        compute_dtype: ``auto``, ``fp32`` or ``bf16``; weights are stored in bf16 always.
        threads: torch computes with; 0: its own choice.
        clipping: largest norm of the gradients; 0: they are not clipped.
        checkpointing: whether blocks are recomputed in backward.
        deterministic: whether torch takes those kernels that always add up in one order.
    """

    shape: Shape
    batch: int = 1
    warmup: int = 3
    steps: int = 7
    seed: int = 0
    fused: bool = True
    compute_dtype: str = "auto"
    threads: int = 0
    clipping: float = 1.0
    checkpointing: bool = False
    deterministic: bool = False

    @property
    def steps_in_all(self) -> int:
        """With those before the ones that count."""
        return self.warmup + self.steps


@dataclass(frozen=True)
class Run:
    """A child's work: that of one rank.

    Args:
        training: what.
        config: of the engine, in the format of DeepSpeed's files; for plain torch its optimizer's
            settings.
        timeline: a file for the trace of one more step; empty: no such step.
    """

    training: Training
    config: Json
    timeline: str = ""

    @staticmethod
    def of(value: Json) -> Run:
        """The run that `dataclasses.asdict` made ``value`` from."""
        training = dict(value["training"])
        shape = Shape(**training.pop("shape"))
        return Run(Training(shape=shape, **training), value["config"], value["timeline"])


@dataclass(frozen=True)
class Step:
    """One step, from boundary to boundary. Bytes are those ended when the boundary was reached.

    Args:
        loss: before the update, in nats.
        forward_s: seconds of the forward.
        backward_s: of the backward.
        update_s: of clipping and AdamW.
        kernel_read_bytes: by this process from drives, as the kernel counts them.
        kernel_written_bytes: to drives, likewise.
        engine_read_bytes: as the engine counts them; None when it does not.
        engine_written_bytes: likewise.
        uploaded_bytes: to a GPU, as the engine counts them; None when it does not.
        offloaded_bytes: from it, likewise.
    """

    loss: float
    forward_s: float
    backward_s: float
    update_s: float
    kernel_read_bytes: int
    kernel_written_bytes: int
    engine_read_bytes: int | None
    engine_written_bytes: int | None
    uploaded_bytes: int | None = None
    offloaded_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class Paging:
    """What our engine says of itself.

    Args:
        state_bytes: weights as stored, master weights and moments.
        arena_budget_bytes: of the host arena.
        arena_peak_bytes: in use at most, ever.
        arena_huge_bytes: of it on huge pages.
        hits: uses in the measured steps that found their record in the arena or on its way.
        misses: that did not.
        wasted: records fetched ahead in these steps and evicted unused.
        waited_s: seconds the caller was blocked in these steps, by hop.
        device_waited_s: seconds a GPU had nothing to do but wait in these steps, by hop.
        device_plan_bytes: that the engine means to have on a GPU at most, activations apart.
        backend: that moved the bytes.
        direct_io: no block went through the page cache.
    """

    state_bytes: int
    arena_budget_bytes: int
    arena_peak_bytes: int
    arena_huge_bytes: int
    hits: int
    misses: int
    wasted: int
    waited_s: dict[str, float]
    device_waited_s: dict[str, float]
    device_plan_bytes: int
    backend: str
    direct_io: bool


@dataclass(frozen=True)
class Outcome:
    """What one child measured.

    Args:
        parameter_numel: elements of the model's parameters.
        compute_dtype: ``fp32`` or ``bf16``.
        threads: torch computes with.
        version: of torch, and of the engine where it is another.
        warmup: so many of the steps do not count.
        steps: all, in order.
        start_bytes: of memory, resident after the imports.
        peak_bytes: of memory over the start, at most, from the building of the model on.
        training_peak_bytes: likewise, from the first measured step on.
        paging: of our engine, else None.
        device_peak_bytes: of a GPU's memory, allocated at most in the steps that count.
    """

    parameter_numel: int
    compute_dtype: str
    threads: int
    version: str
    warmup: int
    steps: tuple[Step, ...]
    start_bytes: int
    peak_bytes: int
    training_peak_bytes: int
    paging: Paging | None
    device_peak_bytes: int = 0

    @property
    def process_peak_bytes(self) -> int:
        """Of memory, resident at most, with all that was there at the start."""
        return self.start_bytes + self.peak_bytes

    @property
    def measured(self) -> tuple[Step, ...]:
        """The steps that count."""
        return self.steps[self.warmup :]

    @staticmethod
    def of(value: Json) -> Outcome:
        """The outcome that `dataclasses.asdict` made ``value`` from."""
        steps = tuple(Step(**step) for step in value["steps"])
        paging = Paging(**value["paging"]) if value["paging"] else None
        return Outcome(**{**value, "steps": steps, "paging": paging})
