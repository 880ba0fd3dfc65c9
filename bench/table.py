"""The command ``table``: every way we have to move a large file, beside fio of the like kind.

A thin layer over ``compare``: one comparison for each operation, backend, registration and kind of
pages that makes sense. A ring is compared with fio's ``io_uring``, threads with those of fio's
engines that need no ring, and both with DeepNVMe where it is asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.compare import Comparison, Plan, compare
from bench.contest import Contestant
from bench.deepnvme import DeepSpeed
from bench.job import Job, Op, Pages, Registration
from bench.rivals import RIVALS, RivalName, open_rivals
from tiering.aio import open_engine
from tiering.aio.config import BackendName
from tiering.errors import ConfigError

_PAGES: Final[tuple[Pages, ...]] = ("huge", "small")
# Threads have nothing to register memory with.
_WAYS: Final[tuple[tuple[BackendName, Registration], ...]] = (
    ("uring", "registered"),
    ("uring", "unregistered"),
    ("threads", "unregistered"),
)
_LIKE: Final[dict[BackendName, frozenset[RivalName]]] = {
    "uring": frozenset({"io_uring"}),
    "threads": frozenset({"libaio", "psync"}),
}
_OF_ANY_KIND: Final[frozenset[RivalName]] = frozenset({"deepnvme", "deepnvme-huge"})


class TablePlan(NamedTuple):
    """What to compare.

    Args:
        ops: operations.
        against: with whom.
        rounds: of each comparison.
    """

    ops: tuple[Op, ...]
    against: tuple[RivalName, ...] = RIVALS[:3]
    rounds: int = 5


@dataclass(frozen=True)
class TableResult:
    """What the command found.

    Args:
        job: what all rows share.
        plan: what was compared.
        rows: a comparison each.
        unusable: backends that cannot be had here, and why.
    """

    job: Job
    plan: TablePlan
    rows: tuple[Comparison, ...]
    unusable: dict[str, str]

    @property
    def versions(self) -> dict[str, str]:
        """Of the programs compared with."""
        return {name: text for row in self.rows for name, text in row.versions.items()}


def best_fio(row: Comparison) -> Contestant | None:
    """Of fio's engines in a row, the one that moved most."""
    found = [one for one in row.contest.contestants if one.name.startswith("fio ")]
    return max(found, key=lambda one: one.gb_per_s, default=None)


def jobs_of(job: Job, ops: Sequence[Op]) -> list[Job]:
    """The job of each row, in order."""
    return [
        dataclasses.replace(job, op=op, backend=backend, registration=registration, pages=pages)
        for op, (backend, registration), pages in itertools.product(ops, _WAYS, _PAGES)
    ]


def table(
    job: Job,
    root: Path,
    *,
    plan: TablePlan,
    deepspeed: DeepSpeed,
    advance: Callable[[str], None],
) -> TableResult:
    """Measure all rows.

    Args:
        job: sizes, depth and data.
        root: the path.
        plan: what to compare.
        deepspeed: where it is, if it is among them.
        advance: told before each row what comes.

    Raises:
        ConfigError: nothing can be measured, or one of the others is not installed.
        TransferError: the drive failed.
        RivalError: one of the others failed in a round.
    """
    unusable = _unusable(job)
    jobs = [one for one in jobs_of(job, plan.ops) if one.backend not in unusable]
    if not jobs:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in unusable.items()))
    found: dict[Job, Comparison] = {}
    # Those that stay alive are started once for all rows with the same pages.
    for pages in _PAGES:
        names = [name for name in plan.against if (name, pages) != ("deepnvme-huge", "small")]
        with open_rivals(names, deepspeed=deepspeed, pages=pages) as rivals:
            by_name = dict(zip(dict.fromkeys(names), rivals, strict=True))
            for one in (one for one in jobs if one.pages == pages):
                advance(describe(one))
                like = _LIKE[one.backend] | _OF_ANY_KIND
                beside = [rival for name, rival in by_name.items() if name in like]
                row_plan = Plan(pairs=plan.rounds, may_be_alone=True)
                found[one] = compare(one, root, rivals=beside, plan=row_plan)
    return TableResult(job, plan, tuple(found[one] for one in jobs), unusable)


def describe(job: Job) -> str:
    """A row in words."""
    name = "overwrite" if job.op == "write" else job.op
    registration = f", {job.registration}" if job.backend == "uring" else ""
    return f"{name}, {job.backend}{registration}, {job.pages} pages"


def _unusable(job: Job) -> dict[str, str]:
    reasons = {backend: _why_not(dataclasses.replace(job, backend=backend)) for backend in _LIKE}
    return {backend: reason for backend, reason in reasons.items() if reason}


def _why_not(job: Job) -> str:
    try:
        open_engine(job.config()).close()
    except ConfigError as error:
        return str(error)
    return ""
