"""The command line of ``step_bench``: what a whole training step costs, and what it could.

Exit codes: 0, measured; 1, an engine or the drive failed; 2, it cannot be measured as asked; 130
and 143, interrupted or terminated, with everything cleaned up. However it ends, the runs that ended
before are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.facts import MachineFacts, machine_facts
from bench.plot import check_plotting
from bench.report import show, write_json
from bench.steps import plot, report, timeline, timeline_plot
from bench.steps.contestants import (
    STATE_BYTES,
    Contestant,
    DeepSpeed,
    DeepSpeedSettings,
    OffloadDevice,
    Ours,
    PlainTorch,
)
from bench.steps.measure import Plan, Result, measure
from bench.steps.model import SIZES, Shape
from bench.steps.wire import Training
from tiering.errors import ConfigError, SpaceError, TieringError, TieringWarning
from tiering.sizes import format_bytes, parse_bytes

_CANNOT: Final = 2
_FAILED: Final = 1
_SIGNALLED: Final = 128  # plus the signal's number, as shells say it
_DEEPSPEED: Final[dict[str, OffloadDevice]] = {
    "deepspeed": "nvme",
    "deepspeed-cpu": "cpu",
    "deepspeed-none": "none",
}
_OTHERS: Final = ("torch", *_DEEPSPEED)
_TINY: Final = "tiny"
_PROBE_BYTES: Final = 2**28
_TINY_PROBE_BYTES: Final = 2**25
_PROBE_S: Final = 1.0
_TINY_PROBE_S: Final = 0.05
_BUDGET: Final = "1/4"

Budget = int | Fraction
"""Bytes, or a part of the states."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with warnings.catch_warnings():
            # The report says all that the engine would warn of.
            warnings.simplefilter("ignore", TieringWarning)
            _run(options)
    except KeyboardInterrupt:
        return _say("interrupted; the files are removed", _SIGNALLED + signal.SIGINT)
    except _TerminatedError:
        return _say("terminated; the files are removed", _SIGNALLED + signal.SIGTERM)
    except (ConfigError, SpaceError) as error:
        return _say(str(error), _CANNOT)
    except (TieringError, OSError) as error:
        return _say(str(error), _FAILED)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class _TerminatedError(BaseException):
    """SIGTERM came."""


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that the child is ended and its folder removed."""
    raise _TerminatedError


def _say(message: str, code: int) -> int:
    Console(stderr=True).print(f"step_bench: {message}", markup=False, soft_wrap=True)
    return code


def _run(options: argparse.Namespace) -> None:
    if options.plot or options.timeline_plot:
        check_plotting()
    training, plan = _training(options), _plan(options)
    machine = machine_facts()
    result: Result | None = None
    try:
        with _progress(plan) as advance:
            for result in measure(training, plan, advance=advance):
                _write(options.json, result, machine)
    except BaseException as error:
        if result is not None:
            _tell(options, replace(result, incomplete=_reason(error)), machine)
        raise
    if result is not None:
        _tell(options, result, machine)
        _draw(options, result, machine)


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[str], None]]:
    """What is told before each run who comes, and shows it."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=plan.total_runs)
        done = iter(range(plan.total_runs))
        yield lambda text: progress.update(task, completed=next(done), description=text)
        progress.update(task, completed=plan.total_runs, description="")


def _reason(error: BaseException) -> str:
    """Why the measurement has ended early."""
    words = {KeyboardInterrupt: "interrupted", _TerminatedError: "terminated"}
    return words.get(type(error)) or str(error) or type(error).__name__


def _write(path: Path | None, result: Result, machine: MachineFacts) -> None:
    if path:
        write_json(path, report.as_json(result, machine))


def _tell(options: argparse.Namespace, result: Result, machine: MachineFacts) -> None:
    """Print and write; that the one fails does not keep the other."""
    try:
        show(report.tables(result, machine))
    finally:
        _write(options.json, result, machine)


def _draw(options: argparse.Namespace, result: Result, machine: MachineFacts) -> None:
    if options.plot:
        plot.draw(result, machine, path=options.plot)
    if options.timeline:
        timeline.entitle(options.timeline, timeline_plot.title_of(result, machine))
    if options.timeline_plot:
        timeline_plot.draw(options.timeline, path=options.timeline_plot)


# From arguments to work


def _training(options: argparse.Namespace) -> Training:
    return Training(
        shape=_shape(options),
        batch=options.batch,
        warmup=options.warmup,
        steps=options.steps,
        seed=options.seed,
        fused=options.fused,
        compute_dtype=options.compute_dtype,
        threads=options.threads,
        clipping=options.clipping,
        checkpointing=options.checkpointing,
        deterministic=options.deterministic,
    )


def _shape(options: argparse.Namespace) -> Shape:
    named = SIZES[options.size]
    try:
        return Shape(
            layers=options.layers or named.layers,
            width=options.width or named.width,
            heads=options.heads or named.heads,
            vocabulary=options.vocab or named.vocabulary,
            context=options.seq or named.context,
        )
    except ValueError as error:
        raise ConfigError(f"{error}; change --width or --heads") from error


def _plan(options: argparse.Namespace) -> Plan:
    if options.plot and len(options.ranks) > 1:
        raise ConfigError("--plot draws one number of ranks; give --ranks one")
    tiny = options.size == _TINY
    root: Path | None = options.nvme_path
    if root is not None and not root.is_dir():
        raise ConfigError(f"{root} is not a directory; name one on the drive to measure")
    if options.timeline_plot and not options.timeline:
        raise ConfigError("--timeline-plot draws what --timeline records; give both")
    for file in (options.json, options.plot, options.timeline, options.timeline_plot):
        if file and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file.parent} is not a directory; name one for {file.name}")
    plan = Plan(
        ours=_ours(options),
        others=tuple(_other(name, options, n) for name in options.vs for n in options.ranks),
        rounds=options.rounds,
        root=root,
        probe_s=options.probe_seconds or (_TINY_PROBE_S if tiny else _PROBE_S),
        probe_bytes=_TINY_PROBE_BYTES if tiny else _PROBE_BYTES,
        limit_s=options.run_limit,
        timeline=options.timeline,
        ranks=options.ranks,
    )
    needing = [one.name for one in plan.contestants if one.uses_drive]
    if needing and root is None:
        raise ConfigError(f"{needing[0]} works on a drive; name a folder on it by --nvme-path")
    return plan


def _ours(options: argparse.Namespace) -> tuple[Ours, ...]:
    """Our engine, once for each budget and each number of ranks."""
    early: bool = options.update_in_backward
    if early and options.clipping:
        raise ConfigError("--update-in-backward needs --clipping 0: a norm is of all gradients")
    if options.device != "nvme":
        if options.budgets or options.plot:
            raise ConfigError("--budgets and --plot need --device nvme: only there budgets differ")
        if options.device == "none":
            return tuple(Ours(ranks=ranks) for ranks in options.ranks)
        budgets = {"ours cpu": options.host_memory}
    else:
        asked = options.budgets or (options.host_memory or Fraction(_BUDGET),)
        budgets = {f"ours {_budget_name(one)}": one for one in asked}
    shape = _shape(options)
    return tuple(
        Ours(
            label,
            options.device,
            _budget_bytes(host, shape, ranks=ranks),
            _budget_bytes(options.device_memory, shape, ranks=ranks),
            updates_in_backward=early,
            ranks=ranks,
        )
        for label, host in budgets.items()
        for ranks in options.ranks
    )


def _budget_bytes(budget: Budget | None, shape: Shape, *, ranks: int) -> int | None:
    """Of one rank, which has its own part of the states."""
    if budget is None or isinstance(budget, int):
        return budget
    return int(budget * shape.parameter_numel * STATE_BYTES / ranks)


def _budget_name(budget: Budget) -> str:
    return format_bytes(budget) if isinstance(budget, int) else f"{budget} of states"


def _other(name: str, options: argparse.Namespace, ranks: int) -> Contestant:
    if name == "torch":
        if ranks > 1:
            raise ConfigError("--vs torch trains on one rank alone; leave it out, or --ranks")
        return PlainTorch()
    if options.deepspeed_python is None:
        raise ConfigError(
            f"--vs {name} needs --deepspeed-python: an interpreter with torch and DeepSpeed"
        )
    settings = DeepSpeedSettings(
        parameter_buffers=options.deepspeed_parameter_buffers,
        parameter_buffer_numel=options.deepspeed_parameter_buffer_numel,
        parameters_in_memory=options.deepspeed_parameters_in_memory,
        optimizer_buffers=options.deepspeed_optimizer_buffers,
        sub_group_numel=options.deepspeed_sub_group,
        reduce_bucket_numel=options.deepspeed_reduce_bucket,
        max_reuse_distance=options.deepspeed_max_reuse_distance,
        prefetch_bucket_numel=options.deepspeed_prefetch_bucket,
        io_threads=options.deepspeed_io_threads,
        pipelines=options.deepspeed_pipeline,
        overlaps_reduction=options.deepspeed_overlap,
    )
    return DeepSpeed(options.deepspeed_python, _DEEPSPEED[name], settings, ranks)


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="step_bench",
        description="Measure a whole training step: time, bytes, memory, and the share of what "
        "this machine could do; beside plain torch and DeepSpeed if wanted.",
    )
    _add_training(parser.add_argument_group("what is trained"))
    _add_ours(parser.add_argument_group("our engine"))
    _add_others(parser.add_argument_group("others"))
    _add_reports(parser.add_argument_group("how it is measured, and where that goes"))
    return parser


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--size", choices=tuple(SIZES), default="30m", help="of the GPT (default: 30m)"
    )
    for name, what in (
        ("layers", "blocks"),
        ("width", "of the residual stream"),
        ("heads", "of attention"),
        ("vocab", "different tokens"),
        ("seq", "tokens of a window"),
    ):
        group.add_argument(f"--{name}", type=_count, help=f"{what}, instead of the size's")
    group.add_argument(
        "--batch", type=_count, default=1, help="windows a step, on each rank (default: 1)"
    )
    group.add_argument(
        "--ranks",
        type=_ranks,
        default=(1,),
        metavar="LIST",
        help="processes that train together, a GPU each where there are GPUs; 1,2: one and two in "
        "turns (default: 1)",
    )
    group.add_argument(
        "--checkpointing", action="store_true", help="recompute each block in backward"
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="have torch add up in one order always, so that losses can be compared to the last "
        "bit; slower on a GPU",
    )
    group.add_argument(
        "--clipping",
        type=_norm,
        default=1.0,
        help="largest norm of the gradients; 0: not clipped (default: 1.0)",
    )
    group.add_argument("--seed", type=_whole, default=0, help="of weights and data (default: 0)")
    group.add_argument(
        "--threads", type=_whole, default=0, help="torch computes with (default: its own choice)"
    )
    group.add_argument(
        "--compute-dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="for every engine; auto is bf16 where the machine is fast at it, else fp32 "
        "(default: auto; weights are stored in bf16)",
    )
    group.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch's fused AdamW kernel, in plain torch and in our engine (default: yes)",
    )


def _add_ours(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        choices=("none", "cpu", "nvme"),
        default="nvme",
        help="home of weights and states (default: nvme)",
    )
    group.add_argument("--nvme-path", type=Path, metavar="FOLDER", help="a folder on the drive")
    group.add_argument(
        "--host-memory",
        type=budget,
        metavar="BUDGET",
        help="of a rank's arena: bytes, 100M, or a part of the rank's own part of the states "
        f"(default: {_BUDGET})",
    )
    group.add_argument(
        "--device-memory",
        type=budget,
        metavar="BUDGET",
        help="of the device, for what would be offloaded and stays: likewise (default: none)",
    )
    group.add_argument(
        "--budgets",
        type=_budgets,
        metavar="LIST",
        help="several of them, separated by commas, to sweep: 1/8,1/4,1/2,1",
    )
    group.add_argument(
        "--update-in-backward",
        action="store_true",
        help="update half of the model under backward; needs --clipping 0",
    )


def _add_others(group: argparse._ArgumentGroup) -> None:
    settings = DeepSpeedSettings()
    group.add_argument(
        "--vs",
        type=_others,
        default=(),
        metavar="LIST",
        help=f"compare with these, in alternating runs: {','.join(_OTHERS)}",
    )
    group.add_argument(
        "--deepspeed-python", type=Path, metavar="FILE", help="an interpreter that has DeepSpeed"
    )
    for name, value, what in (
        ("parameter-buffers", settings.parameter_buffers, "buffers that hold a parameter each"),
        ("parameter-buffer-numel", settings.parameter_buffer_numel, "elements of each"),
        ("parameters-in-memory", settings.parameters_in_memory, "elements that stay there"),
        ("optimizer-buffers", settings.optimizer_buffers, "buffers of the largest sub-group"),
        ("sub-group", settings.sub_group_numel, "most elements of state moved at once"),
        ("reduce-bucket", settings.reduce_bucket_numel, "most gradients reduced at once"),
        ("max-reuse-distance", settings.max_reuse_distance, "elements"),
        ("prefetch-bucket", settings.prefetch_bucket_numel, "elements"),
    ):
        group.add_argument(
            f"--deepspeed-{name}", type=_whole, default=value, help=f"{what} (default: {value})"
        )
    group.add_argument(
        "--deepspeed-io-threads",
        type=_count,
        default=settings.io_threads,
        help=f"each transfer is split among (default: {settings.io_threads})",
    )
    group.add_argument(
        "--deepspeed-pipeline",
        action=argparse.BooleanOptionalAction,
        default=settings.pipelines,
        help="read and write optimizer state behind the update (default: yes)",
    )
    group.add_argument(
        "--deepspeed-overlap",
        action=argparse.BooleanOptionalAction,
        default=settings.overlaps_reduction,
        help="reduce gradients behind backward, in a second bucket (default: no)",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_count, default=7, help="that count (default: 7)")
    group.add_argument("--warmup", type=_whole, default=3, help="before them (default: 3)")
    group.add_argument(
        "--rounds", type=_count, default=1, help="each runs so often, in turns (default: 1)"
    )
    group.add_argument(
        "--probe-seconds",
        type=float,
        metavar="S",
        help=f"of each of the drive's three windows (default: {_PROBE_S:g}; tiny: {_TINY_PROBE_S})",
    )
    group.add_argument(
        "--run-limit",
        type=float,
        default=1800.0,
        metavar="S",
        help="a run that takes longer is killed (default: 1800)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the budgets' times and bytes (matplotlib)"
    )
    group.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="record one more step of our engine's last run: a trace for Perfetto, x.json.gz",
    )
    group.add_argument(
        "--timeline-plot", type=Path, metavar="FILE", help="draw that step (matplotlib)"
    )


def _norm(text: str) -> float:
    """A number of 0 or more."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r}")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _count(text: str) -> int:
    value = _whole(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be 1 at least")
    return value


def budget(text: str) -> Budget:
    """Read a budget: bytes, such as 100M; or a part of the states, such as 1/4 or 1.

    Raises:
        ArgumentTypeError: it is neither.
    """
    try:
        if "/" in text or text == "1":
            part = Fraction(text)
            if part > 0:
                return part
        return parse_bytes(text)
    except (ConfigError, ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither bytes nor a part") from error


def _budgets(text: str) -> tuple[Budget, ...]:
    return tuple(dict.fromkeys(budget(part) for part in text.split(",")))


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_count(part) for part in text.split(",")))


def _others(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in _OTHERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: there are {', '.join(_OTHERS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
