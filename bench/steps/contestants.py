"""Who trains: how each engine is configured, and how its child processes are started.

A run gets a private folder on the drive, which is removed when it has ended, however it ended. A
child of ours runs in this interpreter. DeepSpeed's runs in its own, and what that one could import
of ours is a folder with a link to `bench` in it: our interpreter's packages would hide its torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench.steps.launch import ContestantError, Work, launch
from bench.steps.model import Shape
from bench.steps.wire import Json, Outcome, Run, Training
from tiering.errors import ConfigError

OffloadDevice = Literal["none", "cpu", "nvme"]

IN_MEMORY: Final = "ours in memory"
STATE_BYTES: Final = 14
"""Of a parameter: weight as stored, master weight and moments."""

_PARTS: Final = 6  # of a model, at least, that DeepSpeed handles one after another
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_ADAM: Final[Json] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Ours:
    """Our engine.

    Args:
        label: in tables, whatever the number of ranks.
        device: home of weights and states.
        host_memory_bytes: budget of a rank's arena; None: the engine's choice.
        device_memory_bytes: of a rank's device, for what stays there; None: nothing.
        updates_in_backward: whether half of the model is updated there.
        ranks: that train together.
        module: that the child runs.
        python: that runs it; None: the one we are in.
    """

    label: str = IN_MEMORY
    device: OffloadDevice = "none"
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    updates_in_backward: bool = False
    ranks: int = 1
    module: str = "bench.steps.child_ours"
    python: Path | None = None

    @property
    def name(self) -> str:
        """In tables."""
        return self.label + _with(self.ranks)

    @property
    def uses_drive(self) -> bool:
        """Whether states are on it."""
        return self.device == "nvme"

    def config(self, training: Training, folder: Path) -> Json:
        """For `infinity.initialize`."""
        home: Json = {"device": self.device}
        if self.uses_drive:
            home["nvme_path"] = str(folder)
        tiering: Json = {"compute_dtype": training.compute_dtype}
        if self.host_memory_bytes is not None:
            tiering["host_memory"] = self.host_memory_bytes
        if self.device_memory_bytes is not None:
            tiering["device_memory"] = self.device_memory_bytes
        if self.updates_in_backward:
            tiering["update_in_backward"] = True
        return {
            **_common(training),
            "optimizer": {"type": "AdamW", "params": {**_ADAM, "fused": training.fused}},
            "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home},
            "tiering": tiering,
        }


@dataclass(frozen=True)
class PlainTorch:
    """Everything in memory, in plain torch.

    Args:
        label: in tables.
        uses_drive: never.
        ranks: always one.
        module: that the child runs.
        python: that runs it; None: the one we are in.
    """

    label: str = "torch"
    uses_drive: bool = False
    ranks: Literal[1] = 1
    module: str = "bench.steps.child_torch"
    python: Path | None = None

    @property
    def name(self) -> str:
        """In tables."""
        return self.label

    def config(self, training: Training, folder: Path) -> Json:
        """AdamW's settings."""
        del folder
        return {
            "gradient_clipping": training.clipping,
            "optimizer": {**_ADAM, "fused": training.fused, "foreach": False},
        }


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Of DeepSpeed; the defaults are ones with which it trains with everything on NVMe.

    Args:
        parameter_buffers: of ``parameter_buffer_numel`` each.
        parameter_buffer_numel: elements, never fewer than a rank has of the largest parameter.
        parameters_in_memory: elements that stay there, though their home is NVMe.
        optimizer_buffers: of the largest sub-group each; pipelining takes more of them.
        sub_group_numel: elements of the optimizer state moved at once, at most.
        reduce_bucket_numel: elements of gradients reduced at once, at most.
        max_reuse_distance: parameters used again within so many elements stay in memory.
        prefetch_bucket_numel: elements fetched ahead.
        io_threads: each transfer is split among.
        pipelines: reads and writes the optimizer state behind the update.
        overlaps_reduction: reduces gradients behind backward, in a second bucket.
    """

    parameter_buffers: int = 5
    parameter_buffer_numel: int = 0
    parameters_in_memory: int = 0
    optimizer_buffers: int = 12
    sub_group_numel: int = 20_000_000
    reduce_bucket_numel: int = 30_000_000
    max_reuse_distance: int = 0
    prefetch_bucket_numel: int = 1
    io_threads: int = 1
    pipelines: bool = True
    overlaps_reduction: bool = False


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeed's ZeRO-3.

    Args:
        python: an interpreter with torch and DeepSpeed.
        device: home of weights and states; none: where the model computes.
        settings: those for NVMe have no effect elsewhere.
        ranks: that train together.
        module: that the child runs.
    """

    python: Path | None
    device: OffloadDevice = "nvme"
    settings: DeepSpeedSettings = DeepSpeedSettings()
    ranks: int = 1
    module: str = "bench.steps.child_deepspeed"

    @property
    def label(self) -> str:
        """In tables, whatever the number of ranks."""
        return f"DeepSpeed {self.device}"

    @property
    def name(self) -> str:
        """In tables."""
        return self.label + _with(self.ranks)

    @property
    def uses_drive(self) -> bool:
        """Whether states are on it."""
        return self.device == "nvme"

    def config(self, training: Training, folder: Path) -> Json:
        """For `deepspeed.initialize`."""
        settings, shape = self.settings, training.shape
        zero: Json = {
            "stage": 3,
            "overlap_comm": settings.overlaps_reduction,
            "sub_group_size": _part(settings.sub_group_numel, shape, ranks=self.ranks),
            "reduce_bucket_size": _part(settings.reduce_bucket_numel, shape, ranks=1),
            "stage3_prefetch_bucket_size": settings.prefetch_bucket_numel,
            "stage3_max_reuse_distance": settings.max_reuse_distance,
        }
        if self.device != "none":
            home: Json = {"device": self.device, "pin_memory": True}
            zero |= {"offload_param": dict(home), "offload_optimizer": dict(home)}
        if self.uses_drive:
            zero["offload_param"] |= {
                "nvme_path": str(folder),
                "buffer_count": settings.parameter_buffers,
                "buffer_size": max(
                    settings.parameter_buffer_numel, -(-shape.largest_numel // self.ranks)
                ),
                "max_in_cpu": settings.parameters_in_memory,
            }
            zero["offload_optimizer"] |= {
                "nvme_path": str(folder),
                "buffer_count": settings.optimizer_buffers,
                "pipeline_read": settings.pipelines,
                "pipeline_write": settings.pipelines,
            }
        return {
            **_common(training),
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": _ADAM},
            "zero_optimization": zero,
            # Those our engine has by default; threads are DeepSpeed's alone.
            "aio": {
                "block_size": 2**20,
                "queue_depth": 32,
                "overlap_events": True,
                "intra_op_parallelism": settings.io_threads,
            },
        }


def _part(numel: int, shape: Shape, *, ranks: int) -> int:
    """At most a part of a small model: buffers for a large one would be most of its memory.

    Args:
        numel: of a large model.
        shape: of the model.
        ranks: among which its elements are divided.
    """
    whole = max(min(numel * ranks, shape.parameter_numel // _PARTS), shape.largest_numel)
    return -(-whole // ranks)


def _with(ranks: int) -> str:
    """Behind a name in tables."""
    return "" if ranks == 1 else f", {ranks} ranks"


Contestant = Ours | PlainTorch | DeepSpeed


def _common(training: Training) -> Json:
    return {
        "train_micro_batch_size_per_gpu": training.batch,
        "gradient_clipping": training.clipping,
        "bf16": {"enabled": True},
    }


def run_ranks(
    contestant: Contestant,
    training: Training,
    *,
    root: Path | None,
    limit_s: float,
    timeline: Path | None = None,
) -> tuple[Outcome, ...]:
    """Train, each rank in a process of its own.

    Args:
        contestant: who.
        training: what.
        root: a folder on the drive; None for those that need none.
        limit_s: a run that takes longer is killed.
        timeline: for the trace of one more step of rank 0, if that is wanted.

    Returns:
        Of each rank.

    Raises:
        ConfigError: there is no such interpreter, or a drive is needed and no folder was named.
        ContestantError: a rank failed; has the last that it said.
    """
    if contestant.uses_drive and root is None:
        raise ConfigError(f"{contestant.name} works on a drive; name a folder by --nvme-path")
    with tempfile.TemporaryDirectory(prefix="step-bench-") as private:
        place = Path(private)
        outcomes = [place / f"outcome-{rank}.json" for rank in range(contestant.ranks)]
        # All ranks must make the step that one of them records.
        traces = [place / f"trace-{rank}" for rank in range(contestant.ranks)]
        traces[0] = timeline.absolute() if timeline else traces[0]
        python = str((contestant.python or Path(sys.executable)).absolute())
        with tempfile.TemporaryDirectory(prefix="step-bench-", dir=root) as folder:
            config = contestant.config(training, Path(folder).resolve())
            runs = [Run(training, config, str(trace) if timeline else "") for trace in traces]
            launch(
                contestant.name,
                [
                    Work(
                        [python, "-m", contestant.module, str(file)],
                        json.dumps(dataclasses.asdict(run)),
                    )
                    for file, run in zip(outcomes, runs, strict=True)
                ],
                environment=_environment(contestant, training, place),
                place=place,
                limit_s=limit_s,
            )
        return tuple(_outcome(contestant, file) for file in outcomes)


def _environment(contestant: Contestant, training: Training, place: Path) -> dict[str, str]:
    environment = dict(os.environ)
    if contestant.python is None:
        seen = [str(_PACKAGE.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, seen))
    else:
        (place / "bench").symlink_to(_PACKAGE)
        environment["PYTHONPATH"] = str(place)
        # Extensions are built by tools that stand beside the interpreter.
        beside = str(contestant.python.absolute().parent)
        environment["PATH"] = os.pathsep.join([beside, environment.get("PATH", "")])
    if training.deterministic:
        # Without it cuBLAS takes whichever workspace is free, and may add up in another order.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return environment


def _outcome(contestant: Contestant, file: Path) -> Outcome:
    try:
        return Outcome.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContestantError(f"{contestant.name} left no outcome: {error}") from error
