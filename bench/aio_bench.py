"""The command line of ``aio_bench``: what a drive gives through the I/O engine.

Exit codes: 0, measured; 1, the drive failed or its data is wrong; 2, it cannot be measured as
asked; 130 and 143, interrupted or terminated, with everything cleaned up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import plot, report
from bench.compare import Plan, compare
from bench.config_file import write_aio_block
from bench.deepnvme import DeepSpeed
from bench.facts import machine_facts
from bench.fio_baseline import FIO_ENGINES
from bench.job import OPS, Job, Op, Window
from bench.rivals import RIVALS, RivalName, open_rivals
from bench.run import run
from bench.small import SmallPlan, small
from bench.sweep import Grid, jobs_of, sweep
from bench.table import TablePlan, table
from bench.table import jobs_of as jobs_of_table
from tiering.aio import AioConfig
from tiering.aio.config import BACKENDS
from tiering.errors import ConfigError, SpaceError, TieringError, TieringWarning
from tiering.sizes import parse_bytes

_CANNOT: Final = 2
_FAILED: Final = 1
_BACKENDS: Final = (*BACKENDS, "io_uring")
_SIGNALLED: Final = 128  # plus the signal's number, as shells say it

_Item = TypeVar("_Item")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        with _terminable(), warnings.catch_warnings():
            # The report says all that the engine would warn of.
            warnings.simplefilter("ignore", TieringWarning)
            options.command(options)
    except KeyboardInterrupt:
        return _say("interrupted; the files are removed", _SIGNALLED + signal.SIGINT)
    except _TerminatedError:
        return _say("terminated; the files are removed", _SIGNALLED + signal.SIGTERM)
    except (ConfigError, SpaceError) as error:
        return _say(str(error), _CANNOT)
    except (TieringError, OSError) as error:
        return _say(str(error), _FAILED)
    return 0


class _TerminatedError(BaseException):
    """SIGTERM came."""


def _say(message: str, code: int) -> int:
    Console(stderr=True).print(f"aio_bench: {message}", markup=False, soft_wrap=True)
    return code


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that everything is cleaned up."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise _TerminatedError

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Commands


def _run(options: argparse.Namespace) -> None:
    job = _job(options, op=options.op, block_bytes=options.block_size, depth=options.queue_depth)
    machine = machine_facts()
    result = run(job, options.path, verifies=options.verify)
    if options.json:
        report.write_json(options.json, report.run_json(result, machine))
    report.show(report.run_table(result, machine))


def _compare(options: argparse.Namespace) -> None:
    job = _job(options, op=options.op, block_bytes=options.block_size, depth=options.queue_depth)
    plan = Plan(pairs=options.pairs, passes=options.passes)
    machine = machine_facts()
    with open_rivals(_against(options), deepspeed=_deepspeed(options), pages=job.pages) as rivals:
        result = compare(job, options.path, rivals=rivals, plan=plan)
    if options.json:
        report.write_json(options.json, report.compare_json(result, machine))
    report.show(report.compare_table(result, machine))


def _small(options: argparse.Namespace) -> None:
    options.size = options.count * max(*options.tensor_bytes, options.block_size)
    job = _job(options, op="write", block_bytes=options.block_size, depth=options.queue_depth)
    plan = SmallPlan(
        options.tensor_bytes, options.count, options.passes, options.rounds, options.through
    )
    machine = machine_facts()
    with open_rivals(_against(options), deepspeed=_deepspeed(options), pages=job.pages) as rivals:
        result = small(job, options.path, rivals=rivals, plan=plan)
    if options.json:
        report.write_json(options.json, report.small_json(result, machine))
    report.show(report.small_table(result, machine))


def _sweep(options: argparse.Namespace) -> None:
    if options.plot:
        plot.check_plotting()
    blocks, depths = options.block_size, options.queue_depth
    job = _job(options, op=options.op[0], block_bytes=blocks[0], depth=depths[0])
    grid = Grid(options.op, blocks, depths, options.threads, options.rounds)
    jobs_of(job, grid)  # says now what a later cell could not do
    if options.write_config:
        write_aio_block(options.write_config, {})  # likewise for the file
    machine = machine_facts()
    steps = len(grid.ops) * len(grid.settings()) * grid.rounds
    with _shown(steps, uncounted=1) as advance:  # the first write
        result = sweep(job, options.path, grid=grid, advance=advance)
    if options.json:
        report.write_json(options.json, report.sweep_json(result, machine))
    if options.plot:
        plot.draw(result, machine, path=options.plot)
    if options.write_config:
        write_aio_block(options.write_config, result.aio)
    report.show(report.sweep_table(result, machine))


def _table(options: argparse.Namespace) -> None:
    job = _job(options, op=options.op[0], block_bytes=options.block_size, depth=options.queue_depth)
    against = tuple(dict.fromkeys(options.against or FIO_ENGINES))
    plan = TablePlan(options.op, against, options.rounds)
    machine = machine_facts()
    with _shown(len(jobs_of_table(job, plan.ops))) as advance:
        result = table(job, options.path, plan=plan, deepspeed=_deepspeed(options), advance=advance)
    if options.json:
        report.write_json(options.json, report.table_json(result, machine))
    if options.markdown:
        report.write_text(options.markdown, report.table_markdown(result, machine))
    report.show(report.table_table(result, machine))


@contextlib.contextmanager
def _shown(steps: int, *, uncounted: int = 0) -> Iterator[Callable[[str], None]]:
    """A bar; what it yields is called before each step, and before some that are not counted.

    It is drawn then, and not in between: drawing takes processor time, which is measured.
    """
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("", total=steps)
        done = itertools.count(-uncounted)

        def advance(text: str) -> None:
            progress.update(task, completed=max(0, next(done)), description=text, refresh=True)

        yield advance
        progress.update(task, completed=steps, refresh=True)


def _job(options: argparse.Namespace, *, op: Op, block_bytes: int, depth: int) -> Job:
    threads = options.threads
    return Job(
        op=op,
        size_bytes=options.size,
        block_bytes=block_bytes,
        queue_depth=depth,
        threads=threads if isinstance(threads, int) else threads[0],
        backend="uring" if options.backend == "io_uring" else options.backend,
        cache="buffered" if options.buffered else "direct",
        registration="unregistered" if options.unregistered else "registered",
        pages=options.pages,
        asked_request_bytes=options.request_size,
        window=Window(options.seconds, options.warmup, options.requests),
        seed=options.seed,
    )


def _deepspeed(options: argparse.Namespace) -> DeepSpeed:
    return DeepSpeed(options.deepspeed_python, options.deepspeed_parallelism)


def _against(options: argparse.Namespace) -> tuple[RivalName, ...]:
    """What to compare with: what was named, or what works like our backend."""
    if options.against:
        return tuple(dict.fromkeys(options.against))
    return ("libaio", "psync") if options.backend == "threads" else ("io_uring", "libaio")


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aio_bench", description="Measure what a drive gives through the I/O engine."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_run(commands.add_parser("run", help="measure one job on one or several paths"))
    _add_sweep(commands.add_parser("sweep", help="find the best block size and queue depth"))
    _add_compare(
        commands.add_parser("compare", help="measure a job beside fio or DeepNVMe, in turn")
    )
    _add_table(commands.add_parser("table", help="compare every way we have, for a document"))
    _add_small(commands.add_parser("small", help="swap many small tensors beside them, in turn"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument(
        *("--path", "-p"),
        action="append",
        type=Path,
        required=True,
        help="folder on the drive; given several times, each is measured alone and then all at "
        "once",
    )
    _add_one_job(parser)
    _add_window(parser, seconds=5.0, warmup_s=1.0)
    parser.add_argument(
        "--verify",
        action="store_const",
        const=("file",),
        default=(),
        help="read the file back afterwards and compare every byte",
    )
    _add_common(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_compare, seconds=1.0, warmup=0.0, requests=0)
    parser.add_argument("--path", "-p", type=Path, required=True, help="folder on the drive")
    _add_one_job(parser)
    parser.add_argument(
        *("--pairs", "--rounds"), type=_count, default=7, help="rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--passes",
        type=_count,
        default=1,
        help="how often a run moves the size of the file (default: %(default)s)",
    )
    _add_rivals(parser)
    _add_common(parser)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_table, seconds=1.0, warmup=0.0, requests=0, request_size=0)
    parser.set_defaults(backend="auto", buffered=False, unregistered=False, pages="huge")
    parser.add_argument("--path", "-p", type=Path, required=True, help="folder on the drive")
    _add_ops(parser)
    parser.add_argument("--size", type=_size, default=2**32, help="of the file (default: 4GiB)")
    parser.add_argument(
        "--rounds", type=_count, default=5, help="of each comparison (default: %(default)s)"
    )
    _add_blocks(parser)
    _add_rivals(parser)
    _add_seed_and_json(parser)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table here, for a document"
    )


def _add_small(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_small, seconds=1.0, warmup=0.0, requests=0, request_size=0)
    parser.set_defaults(buffered=False, unregistered=False, pages="huge")
    parser.add_argument("--path", "-p", type=Path, required=True, help="folder on the drive")
    parser.add_argument(
        "--tensor-bytes",
        type=_sizes,
        default=(2**16, 2**18, 2**20),
        help="sizes of a tensor, separated by commas (default: 64KiB,256KiB,1MiB)",
    )
    parser.add_argument(
        "--count", type=_count, default=512, help="tensors at once (default: %(default)s)"
    )
    parser.add_argument(
        "--passes",
        type=_count,
        default=8,
        help="how often a run moves all of them (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=_count, default=5, help="of each size, each way (default: %(default)s)"
    )
    parser.add_argument(
        "--through",
        choices=("swapper", "engine"),
        default="swapper",
        help="our entrance: TensorSwapper, which copies, or the engine alone, from memory of its "
        "own (default: %(default)s)",
    )
    _add_blocks(parser)
    _add_rivals(parser)
    _add_engine(parser)


def _add_rivals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        action="append",
        choices=RIVALS,
        help="fio's engine, or DeepSpeed's DeepNVMe with its memory as installed or on huge pages; "
        "may be repeated (default: io_uring and libaio; for the thread backend libaio and psync)",
    )
    parser.add_argument(
        "--deepspeed-python",
        metavar="PROGRAM",
        default=sys.executable,
        help="interpreter where DeepSpeed is installed (default: this one)",
    )
    parser.add_argument(
        "--deepspeed-parallelism",
        type=_count,
        default=1,
        help="DeepNVMe's threads, which share each request (default: %(default)s)",
    )


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_sweep)
    parser.add_argument("--path", "-p", type=Path, required=True, help="folder on the drive")
    _add_ops(parser)
    parser.add_argument(
        "--block-size",
        type=_block_sizes,
        default=(2**18, 2**20, 2**22),
        help="sizes, separated by commas (default: 256KiB,1MiB,4MiB)",
    )
    parser.add_argument(
        "--queue-depth",
        type=_counts,
        default=(8, 16, 32, 64),
        help="depths, separated by commas (default: 8,16,32,64)",
    )
    parser.add_argument(
        "--threads",
        type=_counts_or_none,
        default=(0,),
        help="threads of the thread backend, separated by commas (default: its own choice)",
    )
    parser.add_argument(
        "--rounds",
        type=_count,
        default=1,
        help="rounds through all cells, of which the median counts (default: %(default)s)",
    )
    _add_window(parser, seconds=1.0, warmup_s=0.25)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a heat map (matplotlib)")
    parser.add_argument(
        "--write-config",
        type=Path,
        metavar="FILE",
        help="put the best setting into the aio block of this JSON file; the rest stays as it is",
    )
    _add_common(parser)


def _add_ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", type=_ops, default=OPS, help="operations, separated by commas (default: all)"
    )


def _add_one_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", choices=OPS, default="read", help="mixed is one read for one write (default: read)"
    )
    _add_blocks(parser)


def _add_blocks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-size", type=_block_size, default=2**20, help="of one transfer (default: 1MiB)"
    )
    parser.add_argument(
        "--queue-depth",
        type=_count,
        default=32,
        help="blocks at the drive at once (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=_whole,
        default=0,
        help="of the thread backend; a ring needs none (default: its own choice)",
    )


def _add_window(parser: argparse.ArgumentParser, *, seconds: float, warmup_s: float) -> None:
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="length of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=float,
        default=warmup_s,
        help="seconds before it (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=_whole,
        default=0,
        help="end each window after so many requests instead, without a warm-up",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=_size, default=2**32, help="of the file (default: 4GiB)")
    parser.add_argument(
        "--request-size",
        type=_size,
        default=0,
        help="bytes asked of the engine at once in the bandwidth window, which it cuts into "
        "blocks (default: enough for Python to cost little)",
    )
    parser.add_argument(
        "--pages", choices=("huge", "small"), default="huge", help="of the memory (default: huge)"
    )
    parser.add_argument("--buffered", action="store_true", help="go through the page cache")
    parser.add_argument("--unregistered", action="store_true", help="do not register the memory")
    _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=_BACKENDS, default="auto", help="a named one must be usable"
    )
    _add_seed_and_json(parser)


def _add_seed_and_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_whole, default=0, help="of the data (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _count(text: str) -> int:
    value = _whole(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be 1 at least")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return _unique([_size(part) for part in text.split(",")])


def _block_size(text: str) -> int:
    """One that the engine takes; what is wrong with another is said under the option's name."""
    nbytes = _size(text)
    try:
        return AioConfig(block_bytes=nbytes).block_bytes
    except ConfigError as error:
        message = str(error).removeprefix("block_bytes ")
        raise argparse.ArgumentTypeError(message) from error


def _block_sizes(text: str) -> tuple[int, ...]:
    return _unique([_block_size(part) for part in text.split(",")])


def _counts(text: str) -> tuple[int, ...]:
    return _unique([_count(part) for part in text.split(",")])


def _counts_or_none(text: str) -> tuple[int, ...]:
    return _unique([_whole(part) for part in text.split(",")])


def _ops(text: str) -> tuple[Op, ...]:
    found = [op for part in text.split(",") for op in OPS if op == part.strip()]
    if len(found) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: operations are {', '.join(OPS)}")
    return _unique(found)


def _unique(items: Sequence[_Item]) -> tuple[_Item, ...]:
    return tuple(dict.fromkeys(items))


if __name__ == "__main__":
    sys.exit(main())
