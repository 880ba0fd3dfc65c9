"""Tables for people and JSON for programs; both say where the figures were measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.buffers import PageFacts
from bench.compare import Comparison
from bench.config_file import AioBlock
from bench.contest import Contest, Contestant, Ratio, ratio
from bench.facts import EngineFacts, MachineFacts, PathFacts
from bench.job import Job
from bench.run import PathResult, Row, RunResult
from bench.small import SmallResult, Through
from bench.sweep import Setting, SweepResult, aio_block
from bench.table import TableResult, best_fio
from bench.workload import Bandwidth, Latency
from tiering.errors import ConfigError
from tiering.sizes import format_bytes

JSON_SCHEMA: Final = 1
"""Raised when a field changes its meaning or goes away."""

Json = dict[str, object]

_COLUMNS: Final = ("GB/s", "IOPS", "CPU s/GB", "GB/s per core", "moved", "seconds")
_CONTEST_COLUMNS: Final = (
    *("who", "GB/s", "CPU s/GB", "GB/s per core"),
    *("ours / this, GB/s", "ours / this, CPU s/GB"),
)
_TEXT_COLUMNS: Final = frozenset(
    {
        *("path", "job", "who", "tensor"),
        *("operation", "backend", "memory", "pages", "best fio"),
    }
)
_WORDS: Final = frozenset({"operation", "backend", "memory", "best fio"})
_PERCENTILES: Final = ("p50 µs", "p90 µs", "p99 µs", "p99.9 µs", "max µs")


def write_json(path: Path, value: Json) -> None:
    """Write a result.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    """A result without infinities, which JSON does not have: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a file. Whoever reads it meanwhile finds what was there before, or all that is new.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal, which stays what it is
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def show(renderable: RenderableType) -> None:
    """Print on the standard output, as wide as it needs to be where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(renderable)


# JSON


def run_json(result: RunResult, machine: MachineFacts) -> Json:
    """A run."""
    job = result.job
    value = _head("run", job, machine)
    value["paths"] = [_path_json(path) for path in result.paths]
    value["together"] = result.together and {
        "total": _bandwidth_json(result.together.total),
        "parts": [_bandwidth_json(part) for part in result.together.parts],
    }
    value["aio"] = aio_block(Setting(job.block_bytes, job.queue_depth, job.threads))
    return value


def sweep_json(result: SweepResult, machine: MachineFacts) -> Json:
    """A sweep."""
    value = _head("sweep", result.job, machine)
    # What was swept stands with the cells.
    del value["job"]
    value["window"] = dataclasses.asdict(result.job.window)
    value["size_bytes"] = result.job.size_bytes
    value["seed"] = result.job.seed
    value["path"] = _facts_json(result.path, result.engine)
    value["cells"] = [
        {
            "op": cell.op,
            **cell.setting._asdict(),
            "median": _bandwidth_json(cell.median),
            "runs": [_bandwidth_json(run) for run in cell.runs],
        }
        for cell in result.cells
    ]
    value["winner"] = result.winner._asdict()
    value["aio"] = result.aio
    return value


def compare_json(result: Comparison, machine: MachineFacts) -> Json:
    """A comparison."""
    value = _head("compare", result.job, machine)
    value["fio_version"] = result.versions.get("fio", "")
    value["versions"] = result.versions
    value["passes"] = result.passes
    value["path"] = _facts_json(result.path, result.engine)
    value.update(_contest_json(result.contest))
    return value


def small_json(result: SmallResult, machine: MachineFacts) -> Json:
    """Small tensors."""
    value = _head("small", result.job, machine)
    # Sizes and operations stand with the rows.
    del value["job"]
    value["aio"] = dataclasses.asdict(result.job.config())
    value["seed"] = result.job.seed
    value["tensors"] = result.plan.tensors
    value["passes"] = result.plan.passes
    value["through"] = result.plan.through
    value["versions"] = result.versions
    value["path"] = {**result.path._asdict(), "engine": dataclasses.asdict(result.engine)}
    value["rows"] = [
        {"tensor_bytes": row.tensor_bytes, "op": row.op, **_contest_json(row.contest)}
        for row in result.rows
    ]
    return value


def table_json(result: TableResult, machine: MachineFacts) -> Json:
    """A table."""
    value = _head("table", result.job, machine)
    value["rounds"] = result.plan.rounds
    value["versions"] = result.versions
    value["unusable"] = result.unusable
    value["rows"] = [
        {
            "op": row.job.op,
            "backend": row.job.backend,
            "registration": row.job.registration if row.job.backend == "uring" else None,
            "pages": row.job.pages,
            "path": _facts_json(row.path, row.engine),
            **_contest_json(row.contest),
        }
        for row in result.rows
    ]
    return value


def _contest_json(contest: Contest) -> Json:
    return {
        "contestants": [_contestant_json(one) for one in contest.contestants],
        "unusable": contest.unusable,
        "best": contest.best,
    }


def _head(command: str, job: Job, machine: MachineFacts) -> Json:
    settings = dataclasses.asdict(job)
    settings["request_bytes"] = job.request_bytes
    settings["requests_in_flight"] = job.requests_in_flight
    return {
        "schema": JSON_SCHEMA,
        "command": command,
        "job": settings,
        "machine": machine._asdict(),
    }


def _path_json(path: PathResult) -> Json:
    return {
        **_facts_json(path.path, path.engine),
        "results": [_row_json(row) for row in path.rows],
        "verified_bytes": path.verified_bytes,
    }


def _facts_json(path: PathFacts, engine: EngineFacts) -> Json:
    return {
        **path._asdict(),
        "engine": {**engine._asdict(), "pages": engine.pages._asdict()},
    }


def _row_json(row: Row) -> Json:
    return {
        "name": row.name,
        **_bandwidth_json(row.bandwidth),
        "latency": row.latency and row.latency._asdict(),
        "page_cache": row.page_cache,
    }


def _bandwidth_json(figures: Bandwidth) -> Json:
    return {
        "gb_per_s": figures.gb_per_s,
        "iops": figures.iops,
        "cpu_s_per_gb": figures.cpu_s_per_gb,
        "gb_per_s_per_core": figures.gb_per_s_per_core,
        **dataclasses.asdict(figures),
    }


def _contestant_json(one: Contestant) -> Json:
    return {
        "name": one.name,
        "huge_bytes": one.huge_bytes,
        "mapped_bytes": one.mapped_bytes,
        "runs": [_bandwidth_json(run) for run in one.runs],
        "throughput_ratio": one.throughput and one.throughput._asdict(),
        "cpu_ratio": one.cpu and one.cpu._asdict(),
    }


# Tables


def run_table(result: RunResult, machine: MachineFacts) -> Group:
    """A run."""
    table = _table(f"aio_bench run: {result.job.describe()}", "path", "job", *_COLUMNS)
    for name in _PERCENTILES:
        table.add_column(name, justify="right")
    for path in result.paths:
        for row in path.rows:
            cells = (path.path.path, row.name, *_figures(row.bandwidth))
            table.add_row(*cells, *_percentiles(row.latency))
    if result.together:
        for path, part in zip(result.paths, result.together.parts, strict=True):
            table.add_row(path.path.path, "among all", *_figures(part, shares_cpu="shared"))
        table.add_row("all at once", result.job.op, *_figures(result.together.total))
    notes = [_path_notes(path) for path in result.paths]
    return Group(table, *notes, _machine_notes(machine, result.job))


def sweep_table(result: SweepResult, machine: MachineFacts) -> Group:
    """A sweep."""
    base = f"{format_bytes(result.job.size_bytes)}, {result.job.window.seconds:g} s a cell"
    table = _table(f"aio_bench sweep: {base}", "job", "block", "depth", "threads", *_COLUMNS)
    for cell in result.cells:
        block, depth, threads = cell.setting
        table.add_row(
            cell.op,
            format_bytes(block),
            str(depth),
            str(threads or "-"),
            *_figures(cell.median),
            style="bold" if cell.setting == result.winner else None,
        )
    facts = _notes(_facts_lines(result.path, result.engine))
    return Group(table, facts, _machine_notes(machine, result.job), _paste(result.aio))


def compare_table(result: Comparison, machine: MachineFacts) -> Group:
    """A comparison."""
    rounds = len(result.contest.contestants[0].runs)
    moved = format_bytes(result.job.size_bytes * result.passes)
    title = f"aio_bench compare: {result.job.describe()}; {rounds} rounds of {moved} each in turn"
    table = _table(title, *_CONTEST_COLUMNS)
    for cells in _contest_rows(result.contest):
        table.add_row(*cells)
    lines = _contest_lines(result.contest, result.versions)
    lines.update(_facts_lines(result.path, result.engine))
    return Group(table, _notes(lines), _machine_notes(machine, result.job))


def table_table(result: TableResult, machine: MachineFacts) -> Group:
    """A table, with its facts."""
    columns, rows = _all_ways(result)
    table = _table(f"aio_bench table: {_table_terms(result)}", *columns)
    for cells in rows:
        table.add_row(*cells)
    lines = _table_lines(result)
    return Group(table, _notes(lines), _machine_notes(machine, result.job))


def table_markdown(result: TableResult, machine: MachineFacts) -> str:
    """The same for a document."""
    columns, rows = _all_ways(result)
    aligned = ["---" if name in _TEXT_COLUMNS else "---:" for name in columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, aligned, *rows)]
    facts = {**_table_lines(result), **_machine_lines(machine, result.job)}
    notes = [f"- {name}: {text}" for name, text in facts.items()]
    return "\n".join([*lines, "", f"{_table_terms(result)}.", "", *notes, ""])


def _table_terms(result: TableResult) -> str:
    job = result.job
    return (
        f"{format_bytes(job.size_bytes)} in blocks of {format_bytes(job.block_bytes)}, queue depth "
        f"{job.queue_depth}; {result.plan.rounds} rounds in turn; median (least to greatest)"
    )


def _all_ways(result: TableResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and the cells of each row."""
    others = [name for name in result.plan.against if name.startswith("deepnvme")]
    columns = (
        *("operation", "backend", "memory", "pages", "GB/s", "CPU s/GB", "GB/s per core"),
        *("ours / best fio, GB/s", "ours / best fio, CPU", "best fio"),
        *(f"ours / {name}, {what}" for name in others for what in ("GB/s", "CPU")),
    )
    return columns, [_way(row, others) for row in result.rows]


def _way(row: Comparison, others: Sequence[str]) -> tuple[str, ...]:
    by_name = {one.name: one for one in row.contest.contestants}
    ours, fio = row.contest.contestants[0], best_fio(row)
    return (
        "overwrite" if row.job.op == "write" else row.job.op,
        row.job.backend,
        _registration(row),
        _pages(row.engine.pages),
        _ratio(ratio([run.gb_per_s for run in ours.runs])),
        f"{ours.cpu_s_per_gb:.4f}",
        f"{ours.gb_per_s_per_core:.1f}",
        *_ratios(fio),
        fio.name.removeprefix("fio ") if fio else "-",
        *(cell for name in others for cell in _ratios(by_name.get(name))),
    )


def _ratios(one: Contestant | None) -> tuple[str, str]:
    return (_ratio(one.throughput), _ratio(one.cpu)) if one else ("-", "-")


def _registration(row: Comparison) -> str:
    if row.job.backend != "uring":
        return "-"
    refused = row.job.registration == "registered" and not row.engine.registered_bytes
    return "not registered (refused)" if refused else row.job.registration


def _pages(pages: PageFacts) -> str:
    if pages.asked == "huge" and pages.huge_bytes < pages.mapped_bytes:
        return f"huge for {format_bytes(pages.huge_bytes)} of {format_bytes(pages.mapped_bytes)}"
    return pages.asked


def _table_lines(result: TableResult) -> dict[str, str]:
    last = result.rows[-1]
    registered = next((row for row in result.rows if row.job.registration == "registered"), last)
    facts = _facts_lines(registered.path, registered.engine)
    kept = ("path", "O_DIRECT", "fixed files", "fixed buffers")
    huge = {
        f"huge pages, {pages}": ", ".join(f"{name} {text}" for name, text in seen.items())
        for pages, seen in _huge_pages_seen(result).items()
    }
    left_out = {
        name: f"not usable: {reason}"
        for row in result.rows
        for name, reason in row.contest.unusable.items()
    }
    backends = {name: f"not usable: {reason}" for name, reason in result.unusable.items()}
    return {
        **{name: facts[name] for name in kept},
        **result.versions,
        **huge,
        **left_out,
        **backends,
    }


def _huge_pages_seen(result: TableResult) -> dict[str, dict[str, str]]:
    seen: dict[str, dict[str, str]] = {}
    for row in result.rows:
        for one in row.contest.contestants:
            seen.setdefault(row.job.pages, {})[one.name] = _huge_pages(one)
    return seen


_THROUGH: Final[dict[Through, str]] = {
    "swapper": "through TensorSwapper, copies included",
    "engine": "through the engine alone, straight from its own memory, a file a tensor",
}


def small_table(result: SmallResult, machine: MachineFacts) -> Group:
    """Small tensors."""
    job, plan = result.job, result.plan
    title = (
        f"aio_bench small: {plan.tensors} tensors at once, {plan.passes} times; blocks of "
        f"{format_bytes(job.block_bytes)} at most, queue depth {job.queue_depth}; "
        f"{plan.rounds} rounds in turn"
    )
    table = _table(title, "tensor", "job", *_CONTEST_COLUMNS)
    for row in result.rows:
        name = "overwrite" if row.op == "write" else row.op
        for cells in _contest_rows(row.contest):
            table.add_row(format_bytes(row.tensor_bytes), name, *cells)
        table.add_section()
    lines = _contest_lines(result.rows[-1].contest, result.versions)
    lines["path"] = _path_line(result.path)
    stats = result.engine
    lines["backend"] = stats.backend + f": {stats.backend_reason}" * bool(stats.backend_reason)
    lines["fixed buffers"] = _fixed_buffers(stats.registered_bytes, stats.register_reason)
    lines["ours"] = _THROUGH[plan.through]
    return Group(table, _notes(lines), _machine_notes(machine, job))


def _contest_rows(contest: Contest) -> Iterator[tuple[str, ...]]:
    for one in contest.contestants:
        yield (
            one.name + (" (best)" if one.name == contest.best else ""),
            f"{one.gb_per_s:.3f}",
            f"{one.cpu_s_per_gb:.4f}",
            f"{one.gb_per_s_per_core:.1f}",
            _ratio(one.throughput),
            _ratio(one.cpu),
        )


def _contest_lines(contest: Contest, versions: dict[str, str]) -> dict[str, str]:
    return {
        "ratios": "median (least to greatest) of the rounds; the figures before them are medians",
        **versions,
        "huge pages": ", ".join(f"{one.name} {_huge_pages(one)}" for one in contest.contestants),
        **{name: f"not usable: {reason}" for name, reason in contest.unusable.items()},
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_text = name in _TEXT_COLUMNS
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in _WORDS)
    return table


def _figures(figures: Bandwidth, *, shares_cpu: str = "") -> tuple[str, ...]:
    return (
        f"{figures.gb_per_s:.3f}",
        f"{figures.iops:.0f}",
        shares_cpu or f"{figures.cpu_s_per_gb:.4f}",
        shares_cpu or f"{figures.gb_per_s_per_core:.1f}",
        format_bytes(figures.moved_bytes),
        f"{figures.seconds:.3f}",
    )


def _percentiles(latency: Latency | None) -> tuple[str, ...]:
    if latency is None:
        return ("-",) * len(_PERCENTILES)
    values = (latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.max_us)
    return tuple(f"{value:.0f}" for value in values)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.3f} ({ratio.least:.3f} to {ratio.greatest:.3f})"


def _huge_pages(one: Contestant) -> str:
    huge = "unknown" if one.huge_bytes is None else format_bytes(one.huge_bytes)
    return huge if one.mapped_bytes is None else f"{huge} of {format_bytes(one.mapped_bytes)}"


def _path_notes(result: PathResult) -> Table:
    lines = _facts_lines(result.path, result.engine)
    row = result.rows[-1]
    lines["page cache"] = row.page_cache
    if row.latency:
        lines["latency"] = (
            f"of {row.latency.requests} requests of one block, in a window of their own, from "
            "when the kernel got each until it had ended it"
        )
    if result.verified_bytes:
        lines["verified"] = f"{format_bytes(result.verified_bytes)}, every byte as written"
    return _notes(lines)


def _facts_lines(path: PathFacts, engine: EngineFacts) -> dict[str, str]:
    return {
        "path": _path_line(path),
        "O_DIRECT": "in effect" if engine.direct else f"off: {engine.direct_reason}",
        "backend": engine.backend + (f": {engine.backend_reason}" * bool(engine.backend_reason)),
        "fixed files": "on" if engine.fixed_files else "off",
        "fixed buffers": _fixed_buffers(engine.registered_bytes, engine.register_reason),
        "pages": engine.pages.describe(),
    }


def _path_line(path: PathFacts) -> str:
    return f"{path.path} on {path.drive}, {path.file_system or 'unknown file system'}"


def _fixed_buffers(registered_bytes: int, reason: str) -> str:
    if registered_bytes:
        return format_bytes(registered_bytes)
    return reason.removeprefix("fixed buffers: ") or "off"


def _machine_notes(machine: MachineFacts, job: Job) -> Table:
    return _notes(_machine_lines(machine, job))


def _machine_lines(machine: MachineFacts, job: Job) -> dict[str, str]:
    return {
        "run by": machine.user,
        "memlock limit": machine.memlock,
        "machine": f"{machine.kernel}, {machine.cpu_count} processors ({machine.cpu_model}), "
        f"{format_bytes(machine.memory_bytes)} of memory",
        "data": f"random, seed {job.seed}",
        "version": f"zero-infinity {machine.version}, Python {machine.python}",
    }


def _notes(lines: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), Text(text))
    return table


def _paste(block: AioBlock) -> Text:
    return Text(f'\nThe best setting, to paste:\n"aio": {json.dumps(block, indent=2)}')
