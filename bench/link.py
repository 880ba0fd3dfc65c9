"""The command ``python -m bench.link``: what the link to a GPU gives, and what our copies get.

Raw copies are torch's, of pinned memory. Ours are the engine's: `DeviceTier`, with memory of an
arena that is registered for it. They take turns in one process, in pieces as large as real records.

Exit codes: 0, measured; 1, it failed; 2, it cannot be measured here, or not as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench.contest import Ratio, in_turns, speed_cells
from bench.facts import MachineFacts, machine_facts
from bench.report import Json, show, write_json
from bench.steps.link import WAYS, Pieces, RawCopies, Way, bytes_per_s, finish
from tiering.arena import Arena
from tiering.errors import ConfigError, TieringError
from tiering.records import aligned_bytes
from tiering.sizes import format_bytes, parse_bytes
from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.device import DeviceTier
from tiering.tiers.link import Hop

RECORDS: Final = {"shard of 100 MB": 10**8, "tile of 4 Mi elements": 12 * 2**22}
"""Bytes of pieces, by what is as large: a unit's weights, and optimizer states."""

JSON_SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes away."""

_CANNOT: Final = 2
_FAILED: Final = 1
_PASSES: Final = 4  # over the memory in each round


class Row(NamedTuple):
    """One way of one kind of record; speeds are bytes a second, one a round.

    Args:
        record: what is copied.
        nbytes: of it.
        way: where to.
        raw: torch's speeds.
        ours: ours.
    """

    record: str
    nbytes: int
    way: Way
    raw: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def ours_by_raw(self) -> Ratio:
        """Within rounds; below 1, ours are slower."""
        return in_turns(self.ours, self.raw)


@dataclass(frozen=True)
class Found:
    """What the command found.

    Args:
        device: its name.
        registered: whether the driver took the arena's memory as pinned.
        rows: by record and way.
    """

    device: str
    registered: bool
    rows: tuple[Row, ...]


class TierCopies:
    """The engine's copies.

    Args:
        device: the other end.
        pieces: what is copied.
    """

    def __init__(self, device: torch.device, pieces: Pieces) -> None:
        spec = RecordSpec("piece", (TensorSpec("bytes", torch.uint8, (pieces.nbytes,)),))
        self._arena = Arena(2 * pieces.count * aligned_bytes(pieces.nbytes))
        self._tier = DeviceTier(device)
        self._tier.register(self._arena.memory.address, self._arena.capacity_bytes)
        self._sent, self._brought = (
            [
                self._arena.allocate(pieces.nbytes, owner=way).tensors(spec)["bytes"].fill_(1)
                for _ in range(pieces.count)
            ]
            for way in ("upload", "offload")
        )
        self._leaving = [torch.ones_like(one, device=device) for one in self._brought]
        self._hops: list[Hop | None] = []

    @property
    def registered(self) -> bool:
        """Whether the driver knows the memory as pinned."""
        return self._sent[0].is_pinned()

    def upload(self, number: int) -> None:
        """Begin to bring a piece to the device."""
        self._hops.append(self._tier.upload(self._sent[number])[1])

    def offload(self, number: int) -> None:
        """Begin to bring a piece to the host."""
        self._hops.append(self._tier.offload(self._leaving[number], self._brought[number]))

    def close(self) -> None:
        """Wait for all copies, and give the memory back."""
        self._hops.clear()
        self._tier.unregister()
        self._sent, self._brought = [], []
        self._arena.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        return _say("torch finds no GPU here, so there is no link to measure", _CANNOT)
    try:
        found = measure(torch.device("cuda"), size_bytes=options.size, rounds=options.rounds)
        machine = machine_facts()
        if options.json:
            write_json(options.json, as_json(found, machine))
        show(table(found, machine))
    except ConfigError as error:
        return _say(str(error), _CANNOT)
    except (TieringError, OSError, RuntimeError) as error:  # the last: torch's, of a GPU
        return _say(str(error), _FAILED)
    return 0


def _say(message: str, code: int) -> int:
    Console(stderr=True).print(f"link: {message}", markup=False, soft_wrap=True)
    return code


def measure(
    device: torch.device,
    *,
    size_bytes: int,
    rounds: int,
    records: Mapping[str, int] = RECORDS,
) -> Found:
    """Copy, raw and ours in turns.

    Args:
        device: the other end.
        size_bytes: of host memory each way, rounded up to whole records.
        rounds: how often; one more goes before them and does not count.
        records: bytes of each kind.
    """
    rows: list[Row] = []
    registered = True
    for record, nbytes in records.items():
        pieces = Pieces(nbytes, -(-size_bytes // nbytes))
        raw = RawCopies(device, pieces)
        with contextlib.closing(TierCopies(device, pieces)) as ours:
            registered &= ours.registered
            rows += _rows(record, pieces, raw, ours, device=device, rounds=rounds)
            finish(device)
        del raw
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    return Found(name, registered, tuple(rows))


def _rows(  # noqa: PLR0913
    record: str,
    pieces: Pieces,
    raw: RawCopies,
    ours: TierCopies,
    *,
    device: torch.device,
    rounds: int,
) -> Iterator[Row]:
    for way in WAYS:
        pairs = [
            tuple(
                bytes_per_s(copies, way, pieces, device=device, passes=_PASSES)
                for copies in (raw, ours)
            )
            for _ in range(rounds + 1)
        ]
        raw_speeds, our_speeds = zip(*pairs[1:], strict=True)
        yield Row(record, pieces.nbytes, way, raw_speeds, our_speeds)


def as_json(found: Found, machine: MachineFacts) -> Json:
    """Everything."""
    return {
        "schema": JSON_SCHEMA,
        "command": "link",
        "device": found.device,
        "registered": found.registered,
        "machine": machine._asdict(),
        "rows": [{**row._asdict(), "ours_by_raw": row.ours_by_raw._asdict()} for row in found.rows],
    }


def table(found: Found, machine: MachineFacts) -> Table:
    """The speeds, in units of 10**9 bytes a second."""
    pinned = "registered" if found.registered else "not registered, so through the driver's buffer"
    title = (
        f"link between host and {found.device}, both ways together where both are at once; our "
        f"memory is {pinned}; {machine.cpu_count} processors ({machine.cpu_model}), "
        f"{machine.kernel}, zero-infinity {machine.version}, torch {torch.__version__}"
    )
    shown = Table(title=title, title_justify="left")
    for name in ("record", "way"):
        shown.add_column(name)
    for name in ("raw, GB/s", "ours, GB/s", "ours / raw, median (least to greatest)"):
        shown.add_column(name, justify="right")
    for row in found.rows:
        shown.add_row(
            f"{row.record} ({format_bytes(row.nbytes)})",
            row.way,
            *speed_cells(row.ours, row.raw),
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.link",
        description="Measure the link between host memory and a GPU: torch's copies, and ours.",
    )
    parser.add_argument(
        "--size",
        type=_size,
        default=2**28,
        help="host memory each way, in whole records (default: 256MiB)",
    )
    parser.add_argument(
        "--rounds", type=_count, default=7, help="raw and ours in turns so often (default: 7)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as well")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
