"""The trace knows what is used next, and a pass that departs from it is no error."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiering.trace import Access, Trace, TraceCursor, Use

keys = st.sampled_from("abcdef")
traces = st.lists(keys, max_size=20).map(lambda ks: Trace([Use(k, Access.READ) for k in ks]))


@given(traces, keys, st.integers(0, 20))
def test_distance_counts_the_uses_until_the_next_one_cyclically(
    trace: Trace, key: str, position: int
) -> None:
    """As counted by walking once round."""
    position = min(position, max(len(trace) - 1, 0))
    walked = [use.key for use in trace.upcoming(position)]
    expected = walked.index(key) if key in walked else math.inf
    assert trace.distance(key, position) == expected


def test_contents_are_not_needed_when_the_next_use_overwrites_them() -> None:
    """Though the record is used, what it holds now is not; from behind the overwriting on it is."""
    trace = Trace([Use("a", Access.READ), Use("a", Access.OVERWRITE), Use("b", Access.READ)])
    assert [trace.needed("a", at) for at in range(4)] == [0, math.inf, 1, 0]
    assert trace.needed("b", 0) == 2
    assert trace.needed("c", 0) is None


@given(traces)
def test_a_pass_that_repeats_its_trace_is_followed_use_by_use(trace: Trace) -> None:
    """And the recording is the very same trace."""
    cursor = TraceCursor(trace)
    for at, use in enumerate(trace.uses):
        assert cursor.position == at
        cursor.use(use)
    assert cursor.recorded() is trace


@given(traces, st.lists(keys, max_size=20))
def test_whatever_happens_is_what_is_recorded(expected: Trace, happened: list[str]) -> None:
    """A changed order is followed, and becomes the next trace."""
    cursor = TraceCursor(expected)
    for key in happened:
        cursor.use(Use(key, Access.READ))
        assert 0 <= cursor.position <= len(expected)
    assert [use.key for use in cursor.recorded().uses] == happened


def test_a_skipped_use_moves_the_cursor_behind_the_one_that_came() -> None:
    """a b c d with b left out: after c the next is d."""
    cursor = TraceCursor(Trace([Use(k, Access.READ) for k in "abcd"]))
    cursor.use(Use("a", Access.READ))
    cursor.use(Use("c", Access.READ))
    assert cursor.expected.distance("d", cursor.position) == 0


def test_a_use_that_was_not_expected_leaves_the_cursor_where_it_is() -> None:
    """a b with an x between: b is still next."""
    cursor = TraceCursor(Trace([Use(k, Access.READ) for k in "ab"]))
    cursor.use(Use("a", Access.READ))
    cursor.use(Use("x", Access.READ))
    assert cursor.expected.distance("b", cursor.position) == 0
