"""Every moment is charged to one phase, and what the drive blocks to none."""

from __future__ import annotations

import time
from contextlib import suppress

from infinity.phases import OUTSIDE, Phases

ROUNDING_S = 1e-9


def test_phases_that_nest_add_up_to_the_time_that_has_passed() -> None:
    """An inner one's time is not the outer one's; an exception ends a phase as well."""
    before_s = time.perf_counter()
    phases = Phases(dict)
    behind_s = time.perf_counter()
    with phases.of("outer"):
        inner_before_s = time.perf_counter()
        with phases.of("inner"):
            inner_behind_s = time.perf_counter()
            with suppress(ArithmeticError), phases.of("failing"):
                raise ArithmeticError
            inner_end_s = time.perf_counter()
        inner_ended_s = time.perf_counter()
    end_s = time.perf_counter()
    spent_s = phases.spent_s()
    ended_s = time.perf_counter()
    assert set(spent_s) == {"outer", "inner", "failing", OUTSIDE}
    assert end_s - behind_s - ROUNDING_S <= sum(spent_s.values())
    assert sum(spent_s.values()) <= ended_s - before_s + ROUNDING_S
    within_s = spent_s["inner"] + spent_s["failing"]
    assert inner_end_s - inner_behind_s - ROUNDING_S <= within_s
    assert within_s <= inner_ended_s - inner_before_s + ROUNDING_S


def test_what_the_drive_blocked_is_taken_off_the_phase_it_fell_in() -> None:
    """As the store tells it, hop by hop."""
    waited_s = {"read": 1.0, "write": 0.0}
    before_s = time.perf_counter()
    phases = Phases(lambda: waited_s)
    phases.spent_s()
    with phases.of("forward"):
        waited_s["read"] += 20.0
        with phases.of("gather"):
            waited_s["write"] += 300.0
    spent_s = phases.spent_s()
    passed_s = time.perf_counter() - before_s
    assert (spent_s["wait for read"], spent_s["wait for write"]) == (21.0, 300.0)
    # What was waited for is more than all there was, so it can be seen where it was taken off.
    for phase, blocked_s in (("forward", 20.0), ("gather", 300.0)):
        assert -ROUNDING_S <= spent_s[phase] + blocked_s <= passed_s + ROUNDING_S


def test_a_device_is_waited_for_where_a_phase_begins_and_ends_and_nowhere_else() -> None:
    finished: list[str] = []
    phases = Phases(dict, lambda: finished.append(""))
    with phases.of("forward"):
        assert len(finished) == 1
    assert len(finished) == 2
    phases.spent_s()
    assert len(finished) == 3
