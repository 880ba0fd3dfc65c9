"""The command line of the demo, and the configuration it stands for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.demo.model import GPTConfig
from tiering.aio.config import BACKENDS, BackendName
from tiering.errors import ConfigError
from tiering.sizes import parse_bytes

# Bytes of fp32 master weight and two moments, a parameter.
_OPTIMIZER_BYTES = 12
# The smallest tiles and some weights; a part of many of a small model has no need of more.
_LEAST_BUDGET_BYTES = 2 << 20
_WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
# Many small blocks: a quarter of their states still holds a few of them at once.
_SMOKE = {"layers": 12, "width": 64, "context": 32, "batch": 2, "steps": 4}


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Args:
        path: folder for the states when they are on NVMe.
        offload: home of parameters and optimizer states: none, cpu or nvme.
        host_memory_bytes: budget of each rank's host arena; None leaves it to `budget_bytes`.
        backend: auto, uring or threads.
        dtype: type the weights are stored in: bf16 or fp32.
        compute_dtype: type the model computes in: auto, bf16 or fp32.
        steps: most steps to train.
        seconds: no step starts later than this after the first.
        batch: windows a step, of each rank.
        lr: of AdamW, after the first steps have led up to it.
        seed: of weights and batches.
        model: the shape of the GPT.
        smoke: the smallest run that shows that everything works.
        json: file for the results, or None.
        losses: print every loss, exactly.
        compare_torch: train a plain torch copy beside it, in turns.
    """

    path: Path
    offload: str
    host_memory_bytes: int | None
    backend: BackendName
    dtype: str
    compute_dtype: str
    steps: int
    seconds: float
    batch: int
    lr: float
    seed: int
    model: GPTConfig
    smoke: bool
    json: Path | None
    losses: bool
    compare_torch: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of one stored weight."""
        return _WEIGHT_BYTES[self.dtype]

    @property
    def least_read_bytes(self) -> int:
        """Bytes a parameter a step that must be read when nothing stays in memory between uses.

        The weight for forward and again for backward, and the optimizer state.
        """
        return 2 * self.weight_bytes + _OPTIMIZER_BYTES

    @property
    def least_written_bytes(self) -> int:
        """Bytes a parameter a step that must be written: the new weight and optimizer state."""
        return self.weight_bytes + _OPTIMIZER_BYTES

    def budget_bytes(self, numel: int) -> int | None:
        """Bytes of the host arena to ask for, or None to let the engine choose.

        Args:
            numel: parameters of which this rank has the states.

        Returns:
            What the user gave; else with NVMe a quarter of these states, and 2 MiB at least; else
            None.
        """
        if self.host_memory_bytes is None and self.offload == "nvme":
            state_bytes = numel * (self.weight_bytes + _OPTIMIZER_BYTES)
            return max(state_bytes // 4, _LEAST_BUDGET_BYTES)
        return self.host_memory_bytes


def engine_config(options: Options, numel: int) -> dict[str, object]:
    """Return the configuration for `infinity.initialize`, as it could stand in a JSON file.

    Args:
        options: the user's.
        numel: parameters of which one rank has the states.
    """
    home: dict[str, object] = {"device": options.offload}
    if options.offload == "nvme":
        home["nvme_path"] = str(options.path)
    tiering: dict[str, object] = {
        "compute_dtype": options.compute_dtype,
        "aio_backend": options.backend,
    }
    if budget_bytes := options.budget_bytes(numel):
        tiering["host_memory"] = budget_bytes
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": options.lr,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": home,
            "offload_optimizer": home,
        },
        "tiering": tiering,
    }


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; the process's own by default. Ends the process on a mistake."""
    given = _parser().parse_args(arguments)
    if given.smoke:
        for name, value in _SMOKE.items():
            setattr(given, name, value)
    return Options(
        path=given.path,
        offload=given.offload,
        host_memory_bytes=given.host_memory,
        backend=given.backend,
        dtype=given.dtype,
        compute_dtype=given.compute_dtype,
        steps=given.steps,
        seconds=given.seconds,
        batch=given.batch,
        lr=given.lr,
        seed=given.seed,
        model=GPTConfig(
            layers=given.layers,
            width=given.width,
            context=given.context,
            tie_head=given.tie_head,
        ),
        smoke=given.smoke,
        json=given.json,
        losses=given.losses,
        compare_torch=given.compare_torch,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infinity.demo",
        description="Train a GPT on the sources of Python's standard library, with its weights "
        "and optimizer states on the drive and a memory budget that could not hold them. "
        "Under torchrun several ranks train together, each on batches of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_memory(parser.add_argument_group("where the states are"))
    _add_training(parser.add_argument_group("what is trained"))
    _add_reports(parser.add_argument_group("what is reported"))
    return parser


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--path",
        type=Path,
        default=Path("zero-infinity-demo"),
        help="folder on the drive; the run's own folder in it is removed at the end",
    )
    group.add_argument(
        "--offload",
        choices=("none", "cpu", "nvme"),
        default="nvme",
        help="home of weights and optimizer states: beside the model, in one host arena, or "
        "on the drive; the losses are the same to the last bit",
    )
    group.add_argument(
        "--host-memory",
        type=_byte_count,
        metavar="BYTES",
        help="budget of the host arena of each rank, for example 100M; with nvme a quarter of its "
        "states unless given",
    )
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="auto",
        help="what moves the bytes; auto takes io_uring where it is allowed",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    model = GPTConfig()
    group.add_argument("--steps", type=_positive, default=80, help="most steps")
    group.add_argument("--seconds", type=float, default=170.0, help="start no step later than this")
    group.add_argument(
        "--batch", type=_positive, default=4, help="windows of text a step, of each rank"
    )
    group.add_argument("--context", type=_positive, default=model.context, help="bytes of a window")
    group.add_argument("--layers", type=_positive, default=model.layers, help="blocks")
    group.add_argument(
        "--width", type=_positive, default=model.width, help="of the residual stream"
    )
    group.add_argument(
        "--tie-head", action="store_true", help="predict with the token embedding itself"
    )
    group.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    group.add_argument("--seed", type=int, default=0, help="of weights and batches")
    group.add_argument(
        "--dtype", choices=tuple(_WEIGHT_BYTES), default="bf16", help="type of the stored weights"
    )
    group.add_argument(
        "--compute-dtype",
        choices=("auto", *_WEIGHT_BYTES),
        default="auto",
        help="type the model computes in; auto takes fp32 where the processor is slow at bf16",
    )
    group.add_argument(
        "--smoke", action="store_true", help="the smallest run: sets the size and the steps"
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    group.add_argument(
        "--losses", action="store_true", help="print every loss exactly, to compare bit for bit"
    )
    group.add_argument(
        "--compare-torch",
        action="store_true",
        help="also train a plain torch copy with everything in memory, in turns with the engine, "
        "and report the ratio of the times",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _byte_count(text: str) -> int:
    """Read a count of bytes such as 100M or 1.5GB."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
