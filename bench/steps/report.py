"""Tables for people and JSON for programs; both say where the figures were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.contest import Ratio
from bench.facts import MachineFacts
from bench.report import Json
from bench.steps.contestants import Contestant
from bench.steps.drive import Drive
from bench.steps.ideal import Ideal, Traffic, ideal, least_traffic
from bench.steps.measure import Measured, Result, Series, Share
from bench.steps.wire import Paging
from tiering.sizes import format_bytes

JSON_SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes away."""

_MB: Final = 1e6
_GB: Final = 1e9


def least_ideal(result: Result, series: Series) -> tuple[Traffic, Ideal]:
    """What a perfect engine with this memory would move, bytes a parameter, and its step."""
    numel = series.last.parameter_numel
    paging = series.last.paging
    traffic = least_traffic(paging.arena_budget_bytes / numel if paging else 0.0)
    whole = Traffic(traffic.read * numel, traffic.written * numel)
    compute_s = result.in_memory.seconds().median
    return traffic, ideal(compute_s, whole, result.speeds(series))


# JSON


def as_json(result: Result, machine: MachineFacts) -> Json:
    """Everything."""
    return {
        "schema": JSON_SCHEMA,
        "command": "step",
        "training": dataclasses.asdict(result.training),
        "machine": machine._asdict(),
        "rounds": result.plan.rounds,
        "contestants": [_series_json(result, one) for one in result.series],
        "versus": [
            {
                **dataclasses.asdict(one),
                "time": one.time._asdict(),
                "memory": one.memory._asdict(),
                "training_memory": one.training_memory._asdict(),
            }
            for one in result.versus
        ],
    }


def _series_json(result: Result, series: Series) -> Json:
    value: Json = {
        "name": series.name,
        "settings": _settings(series.contestant),
        "step_s": series.seconds()._asdict(),
        "forward_s": series.seconds(lambda step: step.forward_s)._asdict(),
        "backward_s": series.seconds(lambda step: step.backward_s)._asdict(),
        "update_s": series.seconds(lambda step: step.update_s)._asdict(),
        "kernel_bytes_per_parameter": _traffic_json(
            series.bytes_per_parameter(lambda run: run.kernel_traffic)
        ),
        "engine_bytes_per_parameter": _traffic_json(
            series.bytes_per_parameter(lambda run: run.engine_traffic)
        ),
        "peak_memory_bytes": series.peak_bytes,
        "training_peak_memory_bytes": series.training_peak_bytes,
        "device_peak_memory_bytes": series.device_peak_bytes,
        "runs": [_run_json(run) for run in series.runs],
    }
    if series in result.paged:
        share = result.share(series)
        value["ideal"] = share.ideal._asdict()
        value["share_of_ideal"] = share.of_measured._asdict()
        if series.contestant.uses_drive:
            traffic, least = least_ideal(result, series)
            value["least_bytes_per_parameter"] = traffic._asdict()
            value["least_ideal"] = least._asdict()
    return value


def _settings(contestant: Contestant) -> Json:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(contestant).items()
    }


def _traffic_json(traffic: Traffic | None) -> Json | None:
    return traffic._asdict() if traffic else None


def _run_json(run: Measured) -> Json:
    return {
        **dataclasses.asdict(run.outcome),
        "drive": _drive_json(run.drive) if run.drive else None,
    }


def _drive_json(drive: Drive) -> Json:
    return {
        **drive.path._asdict(),
        "bytes_per_s": drive.speeds._asdict(),
        "engine": {**drive.engine._asdict(), "pages": drive.engine.pages._asdict()},
    }


# Tables


def tables(result: Result, machine: MachineFacts) -> Group:
    """Everything that a reader asks for first."""
    parts = [_speed_table(result), _traffic_table(result), _paging_table(result)]
    if result.versus:
        parts.append(_versus_table(result))
    return Group(*parts, _loss_table(result), _notes(dict(_facts(result, machine))))


def _speed_table(result: Result) -> Table:
    training = result.training
    title = (
        f"step_bench: {training.shape.parameter_numel / 1e6:.1f} million parameters, batch "
        f"{training.batch} x {training.shape.context}, computing in {training.compute_dtype}; "
        f"{result.plan.rounds} x {training.steps} steps"
    )
    table = _table(
        title, "who", "s a step", "forward", "backward", "update", "share of ideal", "binds"
    )
    for series in result.series:
        parts = (
            series.seconds(lambda step: step.forward_s),
            series.seconds(lambda step: step.backward_s),
            series.seconds(lambda step: step.update_s),
        )
        share = result.share(series) if series in result.paged else None
        table.add_row(
            series.name,
            _ratio(series.seconds()),
            *(f"{part.median:.3f}" for part in parts),
            *_share(share),
        )
    return table


def _share(share: Share | None) -> tuple[str, str]:
    if share is None:
        return "-", "-"
    low, high = share.of_measured.least, share.of_measured.greatest
    binds, compute_s, drive_s = share.ideal[1:]
    return (
        f"{share.of_measured.median:.0%} ({low:.0%} to {high:.0%})",
        f"{binds}: compute {compute_s:.3f} s, drive {drive_s:.3f} s",
    )


def _traffic_table(result: Result) -> Table:
    table = _table(
        "bytes a parameter a step, read / written; process memory over its start, at most",
        *("who", "engine's count", "kernel's count", "a perfect engine"),
        *("memory, MB", "in training, MB", "bytes a parameter", "GPU, MB"),
    )
    for series in result.series:
        least = "-"
        if series in result.paged and series.contestant.uses_drive:
            least = _traffic(least_ideal(result, series)[0])
        table.add_row(
            series.name,
            _traffic(series.bytes_per_parameter(lambda run: run.engine_traffic)),
            _traffic(series.bytes_per_parameter(lambda run: run.kernel_traffic)),
            least,
            f"{series.peak_bytes / _MB:.0f}",
            f"{series.training_peak_bytes / _MB:.0f}",
            f"{series.training_peak_bytes / series.last.parameter_numel:.1f}",
            f"{series.device_peak_bytes / _MB:.0f}" if series.device_peak_bytes else "-",
        )
    return table


def _paging_table(result: Result) -> Table:
    table = _table(
        "our engine in the last run's measured steps",
        *("who", "arena, MB of budget", "huge pages", "hits", "misses", "wasted", "waited", "by"),
    )
    for series in result.paged:
        if series.last.paging:
            table.add_row(series.name, *_paging(series.last.paging))
    return table


def _paging(paging: Paging) -> tuple[str, ...]:
    waited = ", ".join(f"{hop} {seconds:.2f} s" for hop, seconds in paging.waited_s.items())
    return (
        f"{paging.arena_peak_bytes / _MB:.1f} of {paging.arena_budget_bytes / _MB:.1f}",
        format_bytes(paging.arena_huge_bytes),
        str(paging.hits),
        str(paging.misses),
        str(paging.wasted),
        waited,
        paging.backend + ("" if paging.direct_io else ", page cache"),
    )


def _versus_table(result: Result) -> Table:
    table = _table(
        "ours / other, median (least to greatest) of the rounds; below 1 is better",
        *("ours", "other", "time", "memory", "memory in training"),
    )
    for one in result.versus:
        ratios = (_ratio(each) for each in (one.time, one.memory, one.training_memory))
        table.add_row(one.ours, one.other, *ratios)
    return table


def _loss_table(result: Result) -> Table:
    table = _table("loss of every step, first round", "step", *(one.name for one in result.series))
    losses = [[step.loss for step in one.runs[0].outcome.steps] for one in result.series]
    for number, row in enumerate(zip(*losses, strict=True), start=1):
        table.add_row(str(number), *(f"{loss:.6f}" for loss in row))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_text = name in {"who", "binds", "waited", "by", "ours", "other"}
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.least:.3f} to {ratio.greatest:.3f})"


def _traffic(traffic: Traffic | None) -> str:
    return f"{traffic.read:.2f} / {traffic.written:.2f}" if traffic else "-"


def _facts(result: Result, machine: MachineFacts) -> Iterator[tuple[str, str]]:
    for series in result.paged:
        speeds = result.speeds(series)
        if speeds:
            read, write, mixed = (speed / _GB for speed in speeds)
            found = f"{read:.2f} GB/s reading, {write:.2f} writing, {mixed:.2f} both at once"
            yield f"drive before {series.name}", found
    drives = [run.drive for run in chain(*(one.runs for one in result.series)) if run.drive]
    if drives:
        path, engine = drives[-1].path, drives[-1].engine
        yield "path", f"{path.path} on {path.drive}, {path.file_system or 'unknown file system'}"
        yield "O_DIRECT", "in effect" if engine.direct else f"off: {engine.direct_reason}"
        reason = f": {engine.backend_reason}" if engine.backend_reason else ""
        yield "backend", engine.backend + reason
    versions = dict.fromkeys(one.last.version for one in result.series)
    yield "torch", "; ".join(versions)
    yield "threads", ", ".join(f"{one.name} {one.last.threads}" for one in result.series)
    yield "memlock limit", machine.memlock
    processors = f"{machine.cpu_count} processors ({machine.cpu_model})"
    memory = f"{format_bytes(machine.memory_bytes)} of memory"
    yield "machine", f"{machine.kernel}, {processors}, {memory}"
    yield "version", f"zero-infinity {machine.version}, Python {machine.python}"


def _notes(lines: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), Text(text))
    return table
