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
from bench.steps.device import Device
from bench.steps.drive import Drive
from bench.steps.ideal import Ideal, Load, Speeds, Traffic, ideal, least_traffic
from bench.steps.measure import Measured, Result, Series, Share, middle_speeds
from bench.steps.wire import Paging
from tiering.sizes import format_bytes

JSON_SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes away."""

_MB: Final = 1e6
_GB: Final = 1e9


def least_ideal(result: Result, series: Series) -> tuple[Traffic, Ideal]:
    """What a perfect engine with this memory would move, bytes a parameter, and its step.

    All ranks together do, to and from one drive.

    Over the link to a GPU it moves what ours does.
    """
    numel = series.last.parameter_numel
    paging = series.last.paging
    traffic = least_traffic(paging.arena_budget_bytes / numel if paging else 0.0)
    whole = Traffic(traffic.read * numel, traffic.written * numel)
    compute_s = result.in_memory(series.ranks).seconds().median
    speeds = _drive_speeds(series)
    drive = Load(whole, speeds) if speeds else None
    return traffic, ideal(compute_s, drive, series.runs[-1].link_load)


def _drive_speeds(series: Series) -> Speeds | None:
    return middle_speeds([run.drive.speeds for run in series.runs if run.drive])


def _link_speeds(series: Series) -> Speeds | None:
    return middle_speeds([run.device.link for run in series.runs if run.device])


def _utilisation(result: Result, series: Series) -> float | None:
    return series.utilisation(result.training.shape.step_flop(result.training.batch))


def _tokens_per_s(result: Result, series: Series) -> float:
    """Of all ranks together."""
    windows = result.training.batch * series.ranks
    return windows * result.training.shape.context / series.seconds().median


# JSON


def as_json(result: Result, machine: MachineFacts) -> Json:
    """Everything."""
    return {
        "schema": JSON_SCHEMA,
        "command": "step",
        "training": dataclasses.asdict(result.training),
        "machine": machine._asdict(),
        "rounds": result.plan.rounds,
        "incomplete": _incomplete_json(result) if result.incomplete else None,
        "contestants": [_series_json(result, one) for one in result.series],
        "our_equal_steps": result.equal_steps,
        "versus": [
            {
                **dataclasses.asdict(one),
                "time": one.time._asdict(),
                "memory": one.memory._asdict(),
                "training_memory": one.training_memory._asdict(),
            }
            for one in result.versus
        ],
        "scaling": [
            {**dataclasses.asdict(one), "tokens_per_s": one.tokens_per_s._asdict()}
            for one in result.scaling
        ],
    }


def _incomplete_json(result: Result) -> Json:
    return {
        "reason": result.incomplete,
        "ended_runs": result.ended_runs,
        "planned_runs": result.plan.total_runs,
    }


def _series_json(result: Result, series: Series) -> Json:
    value: Json = {
        "name": series.name,
        "ranks": series.ranks,
        "settings": _settings(series.contestant),
        "step_s": series.seconds()._asdict(),
        "forward_s": series.seconds(lambda step: step.forward_s)._asdict(),
        "backward_s": series.seconds(lambda step: step.backward_s)._asdict(),
        "update_s": series.seconds(lambda step: step.update_s)._asdict(),
        "tokens_per_s": _tokens_per_s(result, series),
        "model_flop_utilisation": _utilisation(result, series),
        **_use_json(series),
        "each_rank": [_use_json(one) for one in series.each_rank],
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


def _use_json(series: Series) -> Json:
    """Bytes moved and memory taken."""
    return {
        "kernel_bytes_per_parameter": _traffic_json(
            series.bytes_per_parameter(lambda run: run.kernel_traffic)
        ),
        "engine_bytes_per_parameter": _traffic_json(
            series.bytes_per_parameter(lambda run: run.engine_traffic)
        ),
        "link_bytes_per_parameter": _link_json(
            series.bytes_per_parameter(lambda run: run.link_traffic)
        ),
        "peak_memory_bytes": series.peak_bytes,
        "process_peak_memory_bytes": series.process_peak_bytes,
        "training_peak_memory_bytes": series.training_peak_bytes,
        "device_peak_memory_bytes": series.device_peak_bytes,
    }


def _settings(contestant: Contestant) -> Json:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(contestant).items()
    }


def _traffic_json(traffic: Traffic | None) -> Json | None:
    return traffic._asdict() if traffic else None


def _link_json(moved: Traffic | Speeds | None) -> Json | None:
    """Named as a link's ways are."""
    return dict(zip(("upload", "offload", "both"), moved, strict=False)) if moved else None


def _run_json(run: Measured) -> Json:
    return {
        **dataclasses.asdict(run.outcome),
        "ranks": [dataclasses.asdict(one) for one in run.ranks],
        "drive": _drive_json(run.drive) if run.drive else None,
        "device": _device_json(run.device) if run.device else None,
    }


def _device_json(device: Device) -> Json:
    return {
        "name": device.name,
        "link_bytes_per_s": _link_json(device.link),
        "flop_per_s": device.flop_per_s,
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
    if result.scaling:
        parts.append(_scaling_table(result))
    return Group(*parts, _loss_table(result), _notes(dict(_facts(result, machine))))


def _speed_table(result: Result) -> Table:
    training = result.training
    title = (
        f"step_bench: {training.shape.parameter_numel / 1e6:.1f} million parameters, batch "
        f"{training.batch} x {training.shape.context}{_of_each(result)}, computing in "
        f"{training.compute_dtype}; "
        f"{result.plan.rounds} x {training.steps} steps"
    )
    table = _table(
        title,
        *("who", "s a step", "forward", "backward", "update", "tokens/s", "MFU"),
        *("share of ideal", "binds"),
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
            f"{_tokens_per_s(result, series):,.0f}",
            "-" if (mfu := _utilisation(result, series)) is None else f"{mfu:.1%}",
            *_share(share),
        )
    return table


def _of_each(result: Result) -> str:
    return "" if result.plan.ranks == (1,) else " on each rank"


def _share(share: Share | None) -> tuple[str, str]:
    if share is None:
        return "-", "-"
    low, high = share.of_measured.least, share.of_measured.greatest
    binds, compute_s, drive_s, link_s = share.ideal[1:]
    link = f", link {link_s:.3f} s" if link_s else ""
    return (
        f"{share.of_measured.median:.0%} ({low:.0%} to {high:.0%})",
        f"{binds}: compute {compute_s:.3f} s, drive {drive_s:.3f} s{link}",
    )


def _traffic_table(result: Result) -> Table:
    table = _table(
        "bytes a parameter a step, read / written; process memory over its start, at most",
        *("who", "engine's count", "kernel's count", "a perfect engine", "link, up / down"),
        *("memory, MB", "in training, MB", "bytes a parameter", "process, MB", "GPU, MB (planned)"),
    )
    for series in result.series:
        least = "-"
        if series in result.paged and series.contestant.uses_drive:
            least = _traffic(least_ideal(result, series)[0])
        table.add_row(series.name, *_use(series, least))
        for rank, one in enumerate(_ranks_beneath(series)):
            table.add_row(_rank_name(rank), *_use(one, "-"))
    return table


def _ranks_beneath(series: Series) -> list[Series]:
    """Each rank where there are several."""
    return series.each_rank if series.ranks > 1 else []


def _rank_name(rank: int) -> str:
    return f"  rank {rank}"


def _use(series: Series, least: str) -> tuple[str, ...]:
    return (
        _traffic(series.bytes_per_parameter(lambda run: run.engine_traffic)),
        _traffic(series.bytes_per_parameter(lambda run: run.kernel_traffic)),
        least,
        _traffic(series.bytes_per_parameter(lambda run: run.link_traffic)),
        f"{series.peak_bytes / _MB:.0f}",
        f"{series.training_peak_bytes / _MB:.0f}",
        f"{series.training_peak_bytes / series.last.parameter_numel:.1f}",
        f"{series.process_peak_bytes / _MB:.0f}",
        _device_memory(series),
    )


def _device_memory(series: Series) -> str:
    if not series.device_peak_bytes:
        return "-"
    paging = series.last.paging
    planned = f" ({paging.device_plan_bytes / _MB:.0f})" if paging else ""
    return f"{series.device_peak_bytes / _MB:.0f}{planned}"


def _paging_table(result: Result) -> Table:
    table = _table(
        "our engine in the last run's measured steps",
        *("who", "arena, MB of budget", "huge pages", "hits", "misses", "wasted"),
        *("caller waited", "GPU waited", "by"),
    )
    for series in result.paged:
        on_gpu = series.runs[-1].device is not None
        if series.last.paging:
            table.add_row(series.name, *_paging(series.last.paging, on_gpu=on_gpu))
        for rank, one in enumerate(_ranks_beneath(series)):
            if one.last.paging:
                table.add_row(_rank_name(rank), *_paging(one.last.paging, on_gpu=on_gpu))
    return table


def _paging(paging: Paging, *, on_gpu: bool) -> tuple[str, ...]:
    by_caller, by_gpu = (
        ", ".join(f"{hop} {seconds:.2f} s" for hop, seconds in waited.items())
        for waited in (paging.waited_s, paging.device_waited_s)
    )
    return (
        f"{paging.arena_peak_bytes / _MB:.1f} of {paging.arena_budget_bytes / _MB:.1f}",
        format_bytes(paging.arena_huge_bytes),
        str(paging.hits),
        str(paging.misses),
        str(paging.wasted),
        by_caller,
        by_gpu if on_gpu else "-",
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


def _scaling_table(result: Result) -> Table:
    table = _table(
        "tokens/s of more ranks / of fewer, median (least to greatest) of the rounds",
        *("who", "ranks", "of", "tokens/s"),
    )
    for one in result.scaling:
        table.add_row(one.label, str(one.ranks), str(one.base_ranks), _ratio(one.tokens_per_s))
    return table


def _loss_table(result: Result) -> Table:
    total = len(result.series[0].last.steps)
    on_as_many = "" if len(result.plan.ranks) == 1 else " on as many ranks"
    title = (
        f"loss of every step, first round; in all runs of ours{on_as_many} {result.equal_steps} of "
        f"{total} steps have losses equal to the last bit"
    )
    table = _table(title, "step", *(one.name for one in result.series))
    losses = [[step.loss for step in one.runs[0].outcome.steps] for one in result.series]
    for number, row in enumerate(zip(*losses, strict=True), start=1):
        table.add_row(str(number), *(f"{loss:.6f}" for loss in row))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_text = name in {"who", "binds", "caller waited", "GPU waited", "by", "ours", "other"}
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.least:.3f} to {ratio.greatest:.3f})"


def _traffic(traffic: Traffic | None) -> str:
    return f"{traffic.read:.2f} / {traffic.written:.2f}" if traffic else "-"


def _facts(result: Result, machine: MachineFacts) -> Iterator[tuple[str, str]]:
    if result.incomplete:
        ended = f"{result.ended_runs} of {result.plan.total_runs} runs have ended"
        yield "INCOMPLETE", f"{ended}: {result.incomplete}"
    for series in result.paged:
        speeds = _drive_speeds(series)
        if speeds:
            read, write, mixed = (speed / _GB for speed in speeds)
            found = f"{read:.2f} GB/s reading, {write:.2f} writing, {mixed:.2f} both at once"
            yield f"drive before {series.name}", found
        speeds = _link_speeds(series)
        if speeds:
            up, down, both = (speed / _GB for speed in speeds)
            found = f"{up:.1f} GB/s upload, {down:.1f} offload, {both:.1f} both at once"
            yield f"link before {series.name}", found
    gpus = [run.device for run in chain(*(one.runs for one in result.series)) if run.device]
    if gpus:
        tera = [gpu.flop_per_s / 1e12 for gpu in gpus]
        found = f"{min(tera):.0f} to {max(tera):.0f} TFLOP/s in products of bf16 matrices"
        yield "GPU", f"{gpus[-1].name}, {found}"
    drives = [run.drive for run in chain(*(one.runs for one in result.series)) if run.drive]
    if drives:
        path, engine = drives[-1].path, drives[-1].engine
        yield "path", f"{path.path} on {path.drive}, {path.file_system or 'unknown file system'}"
        yield "O_DIRECT", "in effect" if engine.direct else f"off: {engine.direct_reason}"
        reason = f": {engine.backend_reason}" if engine.backend_reason else ""
        yield "backend", engine.backend + reason
    versions = dict.fromkeys(one.last.version for one in result.series)
    yield "torch", "; ".join(versions)
    yield "threads", "; ".join(f"{one.name}: {one.last.threads}" for one in result.series)
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
