"""What the ranks of a run have measured, as if they were one process.

Bytes and memory are sums. A step takes as long as it does on its slowest rank; losses, and the
times in which a caller waited, are means.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.steps.wire import Outcome, Paging, Step


def together(ranks: Sequence[Outcome]) -> Outcome:
    """The outcome of all ranks.

    Args:
        ranks: of one run, in order; one at least.
    """
    steps = zip(*(one.steps for one in ranks), strict=True)
    paging = [one.paging for one in ranks if one.paging]
    return replace(
        ranks[0],
        steps=tuple(_step(of_ranks) for of_ranks in steps),
        start_bytes=sum(one.start_bytes for one in ranks),
        peak_bytes=sum(one.peak_bytes for one in ranks),
        training_peak_bytes=sum(one.training_peak_bytes for one in ranks),
        device_peak_bytes=sum(one.device_peak_bytes for one in ranks),
        paging=_paging(paging) if paging else None,
    )


def _step(ranks: Sequence[Step]) -> Step:
    return replace(
        max(ranks, key=lambda step: step.seconds),
        loss=statistics.fmean(step.loss for step in ranks),
        kernel_read_bytes=sum(step.kernel_read_bytes for step in ranks),
        kernel_written_bytes=sum(step.kernel_written_bytes for step in ranks),
        engine_read_bytes=_sum(step.engine_read_bytes for step in ranks),
        engine_written_bytes=_sum(step.engine_written_bytes for step in ranks),
        uploaded_bytes=_sum(step.uploaded_bytes for step in ranks),
        offloaded_bytes=_sum(step.offloaded_bytes for step in ranks),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """None if nobody counts."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _paging(ranks: Sequence[Paging]) -> Paging:
    return replace(
        ranks[0],
        state_bytes=sum(one.state_bytes for one in ranks),
        arena_budget_bytes=sum(one.arena_budget_bytes for one in ranks),
        arena_peak_bytes=sum(one.arena_peak_bytes for one in ranks),
        arena_huge_bytes=sum(one.arena_huge_bytes for one in ranks),
        hits=sum(one.hits for one in ranks),
        misses=sum(one.misses for one in ranks),
        wasted=sum(one.wasted for one in ranks),
        waited_s=_means([one.waited_s for one in ranks]),
        device_waited_s=_means([one.device_waited_s for one in ranks]),
        device_plan_bytes=sum(one.device_plan_bytes for one in ranks),
        direct_io=all(one.direct_io for one in ranks),
    )


def _means(waited_s: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each hop."""
    return {hop: statistics.fmean(one[hop] for one in waited_s) for hop in waited_s[0]}
