"""What is got ready ahead fits the room and never costs a record that is used earlier."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiering.planner import plan_ahead
from tiering.trace import Access, Holding, Use

keys = st.sampled_from("abcdefgh")
uses = st.lists(st.builds(Use, keys, st.sampled_from(Access)), max_size=16)
holdings = st.dictionaries(
    keys,
    st.one_of(
        st.builds(Holding, st.integers(1, 9), st.just(0), st.just(3)),
        st.builds(Holding, st.just(0), st.integers(0, 9), st.just(3)),
    ),
)


@given(uses, holdings, st.integers(0, 40))
def test_the_chosen_fit_beside_everything_used_up_to_the_last_of_them(
    upcoming: list[Use], held: dict[str, Holding], room_bytes: int
) -> None:
    """Room for the chosen, and for all that is overwritten or kept because it is used earlier."""
    nothing = Holding(0, 0)
    chosen = plan_ahead(
        enumerate(upcoming),
        holding=lambda use: held.get(use.key, nothing),
        room_bytes=room_bytes,
        near_bytes=10**6,
    )
    if not chosen:
        return
    order = list(dict.fromkeys(use.key for use in upcoming))
    keys = [use.key for use, _ in chosen]
    needed = order[: order.index(keys[-1]) + 1]
    assert sum(sum(held.get(key, nothing)[:2]) for key in needed) <= room_bytes
    assert len(set(keys)) == len(keys)
    assert [key for key in order if key in keys] == keys
    assert all(upcoming[away] == use for use, away in chosen)


@given(uses, holdings)
def test_with_room_for_all_everything_that_lacks_room_is_chosen(
    upcoming: list[Use], held: dict[str, Holding]
) -> None:
    """Once, for its first use: to be read, or overwritten."""
    nothing = Holding(0, 0)
    chosen = plan_ahead(
        enumerate(upcoming),
        holding=lambda use: held.get(use.key, nothing),
        room_bytes=10**6,
        near_bytes=10**6,
    )
    first = {use.key: use for use in reversed(upcoming)}
    expected = {use for key, use in first.items() if held.get(key, nothing).missing_bytes}
    assert {use for use, _ in chosen} == expected
    assert len(chosen) == len(expected)


@given(uses, st.integers(0, 40))
def test_only_the_next_bytes_to_be_used_may_cost_something_that_is_needed(
    upcoming: list[Use], near_bytes: int
) -> None:
    """Those behind them are infinitely far away."""
    chosen = plan_ahead(
        enumerate(upcoming),
        holding=lambda _: Holding(0, 3, 3),
        room_bytes=10**6,
        near_bytes=near_bytes,
    )
    near = [away for _, away in chosen if away < math.inf]
    assert len(near) == min(len(chosen), -(-near_bytes // 3))
    assert near == sorted(near)
