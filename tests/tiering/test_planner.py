"""What is fetched ahead fits the room and never costs a record that is used earlier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiering.planner import fetch_ahead
from tiering.trace import Access, Holding, Use

keys = st.sampled_from("abcdefgh")
uses = st.lists(st.builds(Use, keys, st.sampled_from(Access)), max_size=16)
holdings = st.dictionaries(
    keys,
    st.one_of(
        st.builds(Holding, st.integers(1, 9), st.just(0)),
        st.builds(Holding, st.just(0), st.integers(0, 9)),
    ),
)


@given(uses, holdings, st.integers(0, 40))
def test_the_chosen_fit_beside_everything_used_up_to_the_last_of_them(
    upcoming: list[Use], held: dict[str, Holding], room_bytes: int
) -> None:
    """Room for the chosen, and for all that is overwritten or kept because it is used earlier."""
    nothing = Holding(0, 0)
    chosen = fetch_ahead(
        upcoming, holding=lambda use: held.get(use.key, nothing), room_bytes=room_bytes
    )
    if not chosen:
        return
    order = list(dict.fromkeys(use.key for use in upcoming))
    needed = order[: order.index(chosen[-1]) + 1]
    assert sum(sum(held.get(key, nothing)) for key in needed) <= room_bytes
    assert len(set(chosen)) == len(chosen)
    assert [key for key in order if key in chosen] == chosen


@given(uses, holdings)
def test_with_room_for_all_everything_that_must_be_read_is_chosen(
    upcoming: list[Use], held: dict[str, Holding]
) -> None:
    """What is missing and first used by reading; what is first overwritten needs no read."""
    nothing = Holding(0, 0)
    chosen = fetch_ahead(upcoming, holding=lambda use: held.get(use.key, nothing), room_bytes=10**6)
    first = {use.key: use for use in reversed(upcoming)}
    expected = {
        key
        for key, use in first.items()
        if held.get(key, nothing).missing_bytes and use.access is not Access.OVERWRITE
    }
    assert set(chosen) == expected
