"""``torchrun -m bench.collectives``: what our collective hops get out of torch's collectives.

Ours are those of `infinity.comm`, bare are torch.distributed's on the process group of torchrun:
the same sizes, in turns, on a GPU each through NCCL, else through gloo. Speeds are those of whole
buffers, by the time of the slowest rank. Beside them stands the time of an exchange, in which ranks
tell each other a few numbers.

Exit codes: 0, measured; 1, it failed; 2, it cannot be measured here, or not as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench.contest import Ratio, in_turns, ratio, speed_cells
from bench.facts import MachineFacts, machine_facts
from bench.report import Json, show, write_json
from bench.steps.link import finish
from infinity.comm import Communicator, init_distributed
from tiering.errors import ConfigError, TieringError
from tiering.sizes import format_bytes, parse_bytes

JSON_SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes away."""

# Newer releases of torch have other names for the same two collectives.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_CANNOT: Final = 2
_FAILED: Final = 1
_SIZES: Final = (10**7, 10**8)  # bytes: weights of a small unit, and of a large one
_PASSES: Final = 5  # of each in a round
_EXCHANGES: Final = 100
_NUMBERS: Final = (0.0,) * 4  # in an exchange
_TIMEOUT_S: Final = 300.0
_DTYPE: Final = torch.bfloat16

Collective = Callable[[torch.Tensor, torch.Tensor], object]
"""Of a whole buffer and this rank's shard of it; complete for later work when it returns."""


class Row(NamedTuple):
    """One collective of one size; speeds are bytes of the whole buffer a second, one a round.

    Args:
        name: of the collective.
        nbytes: of the whole buffer.
        bare: torch's speeds.
        ours: ours.
    """

    name: str
    nbytes: int
    bare: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def ours_by_bare(self) -> Ratio:
        """Within rounds; below 1, ours are slower."""
        return in_turns(self.ours, self.bare)


@dataclass(frozen=True)
class Found:
    """What the command found.

    Args:
        ranks: how many took part.
        device: rank 0's.
        rows: by size and collective.
        exchange_s: of one exchange.
    """

    ranks: int
    device: str
    rows: tuple[Row, ...]
    exchange_s: Ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, on every rank; the first tells what there is to say.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        init_distributed()
        comm = Communicator()
        on_gpu = torch.cuda.is_available()
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        comm.open(device, timeout_s=_TIMEOUT_S)
        with contextlib.closing(comm):
            found = measure(comm, device, sizes_bytes=options.sizes, rounds=options.rounds)
        if comm.rank == 0:
            _tell(found, options.json)
    except ConfigError as error:
        return _say(str(error), _CANNOT)
    except (TieringError, OSError, RuntimeError) as error:  # the last: torch's
        return _say(str(error), _FAILED)
    return 0


def _say(message: str, code: int) -> int:
    Console(stderr=True).print(f"collectives: {message}", markup=False, soft_wrap=True)
    return code


def _tell(found: Found, file: Path | None) -> None:
    machine = machine_facts()
    show(table(found, machine))
    if file:
        write_json(file, as_json(found, machine))


def measure(
    comm: Communicator, device: torch.device, *, sizes_bytes: Sequence[int], rounds: int
) -> Found:
    """Measure, bare and ours in turns; all ranks together.

    Args:
        comm: open.
        device: of the buffers.
        sizes_bytes: of whole buffers, rounded down to equal shards.
        rounds: how often; one more goes before them and does not count.

    Raises:
        ConfigError: there is one rank only.
        RankError: another rank has gone.
    """
    if comm.size == 1:
        raise ConfigError("one rank has nobody to talk to; start several by torchrun")
    rows = []
    for nbytes in sizes_bytes:
        numel = max(1, nbytes // _DTYPE.itemsize // comm.size)
        shard = torch.ones(numel, dtype=_DTYPE, device=device)
        whole = torch.ones(numel * comm.size, dtype=_DTYPE, device=device)
        for name, (bare, ours) in _collectives(comm).items():
            pairs = [
                [_bytes_per_s(comm, each, whole, shard) for each in (bare, ours)]
                for _ in range(rounds + 1)
            ]
            bare_speeds, our_speeds = zip(*pairs[1:], strict=True)
            rows.append(Row(name, whole.nbytes, bare_speeds, our_speeds))
    exchanges = [
        _seconds(comm, device, lambda: comm.exchange(_NUMBERS), passes=_EXCHANGES)
        for _ in range(rounds + 1)
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    return Found(comm.size, name, tuple(rows), ratio(exchanges[1:]))


def _collectives(comm: Communicator) -> dict[str, tuple[Collective, Collective]]:
    """By name, bare and ours."""
    return {
        "all-gather": (
            _ALL_GATHER,
            lambda whole, shard: comm.all_gather(shard, whole),
        ),
        "all-gather, begun": (
            lambda whole, shard: _ALL_GATHER(whole, shard, async_op=True).wait(),
            lambda whole, shard: comm.begin_all_gather(shard, whole)(),
        ),
        "reduce-scatter": (
            lambda whole, shard: _REDUCE_SCATTER(shard, whole),
            comm.reduce_scatter,
        ),
    }


def _bytes_per_s(
    comm: Communicator, collective: Collective, whole: torch.Tensor, shard: torch.Tensor
) -> float:
    whole.fill_(1)  # or sums of sums would grow without end
    seconds = _seconds(comm, whole.device, lambda: collective(whole, shard), passes=_PASSES)
    return whole.nbytes / seconds


def _seconds(
    comm: Communicator, device: torch.device, work: Callable[[], object], *, passes: int
) -> float:
    """Of one pass, on the slowest rank: from when all are there until the device is done."""
    finish(device)
    comm.exchange(_NUMBERS)
    begin = time.perf_counter()
    for _ in range(passes):
        work()
    finish(device)
    own = (time.perf_counter() - begin) / passes
    return max(seconds for (seconds,) in comm.exchange([own]))


def as_json(found: Found, machine: MachineFacts) -> Json:
    """Everything."""
    return {
        "schema": JSON_SCHEMA,
        "command": "collectives",
        "ranks": found.ranks,
        "device": found.device,
        "machine": machine._asdict(),
        "rows": [
            {**row._asdict(), "ours_by_bare": row.ours_by_bare._asdict()} for row in found.rows
        ],
        "exchange_s": found.exchange_s._asdict(),
    }


def table(found: Found, machine: MachineFacts) -> Table:
    """The speeds, in units of 10**9 bytes a second."""
    microseconds = [f"{seconds * 1e6:.0f}" for seconds in found.exchange_s]
    title = (
        f"collectives of {found.ranks} ranks on {found.device}, bytes of the whole buffer; an "
        f"exchange takes {microseconds[0]} us ({microseconds[1]} to {microseconds[2]}); "
        f"{machine.cpu_count} processors ({machine.cpu_model}), {machine.kernel}, zero-infinity "
        f"{machine.version}, torch {torch.__version__}"
    )
    shown = Table(title=title, title_justify="left")
    for name in ("size", "collective"):
        shown.add_column(name)
    for name in ("bare, GB/s", "ours, GB/s", "ours / bare, median (least to greatest)"):
        shown.add_column(name, justify="right")
    for row in found.rows:
        shown.add_row(
            format_bytes(row.nbytes),
            row.name,
            *speed_cells(row.ours, row.bare),
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun -m bench.collectives",
        description="Measure collectives: torch's bare ones, and our hops.",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_SIZES,
        metavar="LIST",
        help="of whole buffers (default: 10 and 100 million bytes)",
    )
    parser.add_argument(
        "--rounds", type=_count, default=7, help="bare and ours in turns so often (default: 7)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(parse_bytes(part) for part in text.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
