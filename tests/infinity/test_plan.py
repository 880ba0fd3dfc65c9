"""The arena is the sum of what must be in host memory at once; a budget below it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.partition import ALIGN_NUMEL
from infinity.plan import ElementBytes, ModelSize, Tiers, UnitSize, make_plan, stays
from tiering.errors import ConfigError
from tiering.spec import Tier

BF16 = ElementBytes(storage_bytes=2, gradient_bytes=2)
UNITS = [UnitSize(3 * 2**20, trained=True)] * 8 + [UnitSize(2**20, trained=False)]
MODEL = ModelSize(UNITS, active_numel=3 * 2**20)
ALL_NVME = Tiers(Tier.NVME, Tier.NVME)


def test_without_a_budget_the_arena_is_gradients_and_buffers() -> None:
    """Not the states: what passes through is counted a few times, gradients once."""
    plan = make_plan(MODEL, ALL_NVME, BF16, budget_bytes=None, sub_group_numel=None)
    states = sum(14 * u.shard_numel for u in UNITS)
    assert plan.arena_bytes == sum(nbytes for _, nbytes in plan.terms)
    assert plan.arena_bytes < states / 3
    assert plan.gradient_home is Tier.HOST


def test_a_smaller_budget_makes_smaller_tiles_then_spills_gradients_then_is_refused() -> None:
    """In this order; the error shows the sum and the smallest budget, which is accepted."""
    whole = make_plan(MODEL, ALL_NVME, BF16, budget_bytes=None, sub_group_numel=None)
    less = make_plan(
        MODEL, ALL_NVME, BF16, budget_bytes=whole.arena_bytes - 2**23, sub_group_numel=None
    )
    assert less.tile_numel < whole.tile_numel
    assert less.gradient_home is Tier.HOST
    spilled = make_plan(MODEL, ALL_NVME, BF16, budget_bytes=2**25, sub_group_numel=None)
    assert spilled.gradient_home is Tier.NVME
    assert spilled.tile_numel > 2**14  # what gradients leave free goes to tiles
    with pytest.raises(ConfigError, match="smallest budget that would do") as refused:
        make_plan(MODEL, ALL_NVME, BF16, budget_bytes=2**20, sub_group_numel=None)
    smallest = int(str(refused.value).splitlines()[-1].split()[0].replace(",", ""))
    make_plan(MODEL, ALL_NVME, BF16, budget_bytes=smallest, sub_group_numel=None)
    with pytest.raises(ConfigError):
        make_plan(MODEL, ALL_NVME, BF16, budget_bytes=smallest - 1, sub_group_numel=None)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 2**26),
    st.one_of(st.none(), st.integers(16, 10**9)),
)
def test_a_plan_never_exceeds_its_budget(
    sizes: list[tuple[int, bool]], budget_bytes: int, sub_group: int | None
) -> None:
    """Accepted plans fit, tile sizes are aligned and no larger than asked."""
    units = [UnitSize(n * ALIGN_NUMEL, trained=t) for n, t in sizes]
    model = ModelSize(units, active_numel=max(u.shard_numel for u in units))
    try:
        plan = make_plan(
            model, ALL_NVME, BF16, budget_bytes=budget_bytes, sub_group_numel=sub_group
        )
    except ConfigError:
        return
    assert sum(nbytes for _, nbytes in plan.terms) <= budget_bytes
    assert plan.tile_numel % ALIGN_NUMEL == 0
    assert plan.tile_numel <= max(sub_group or 10**9, ALIGN_NUMEL)


def test_everything_at_home_in_the_host_needs_room_for_everything() -> None:
    """cpu offload: weights, states and gradients are all in the arena."""
    plan = make_plan(
        MODEL, Tiers(Tier.HOST, Tier.HOST), BF16, budget_bytes=None, sub_group_numel=None
    )
    assert plan.arena_bytes >= sum((16 if u.trained else 2) * u.shard_numel for u in UNITS)
    with pytest.raises(ConfigError, match="optimizer state at home in the host"):
        make_plan(
            MODEL, Tiers(Tier.HOST, Tier.HOST), BF16, budget_bytes=2**24, sub_group_numel=None
        )


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60),
    st.integers(0, 4000),
)
def test_records_that_stay_fit_their_room_and_are_spread_evenly(
    sizes_bytes: list[int], room_bytes: int
) -> None:
    """In every stretch from the start there is their share, less than two records short of it."""
    chosen = stays(sizes_bytes, room_bytes=room_bytes)
    kept_bytes = met_bytes = 0
    for nbytes, stayed in zip(sizes_bytes, chosen, strict=True):
        met_bytes += nbytes
        kept_bytes += nbytes * stayed
        share = min(1.0, room_bytes / sum(sizes_bytes))
        assert kept_bytes <= share * met_bytes
        assert kept_bytes > share * met_bytes - 2 * max(sizes_bytes)
    if room_bytes >= sum(sizes_bytes):
        assert all(chosen)


def test_what_a_budget_leaves_over_is_room_for_records_that_stay() -> None:
    """All of it, and never more than the records that there are."""
    needed = make_plan(MODEL, ALL_NVME, BF16, budget_bytes=None, sub_group_numel=None)
    more = make_plan(
        MODEL, ALL_NVME, BF16, budget_bytes=needed.arena_bytes + 10**7, sub_group_numel=None
    )
    assert (needed.spare_bytes, more.spare_bytes) == (0, 10**7)
    most = make_plan(MODEL, ALL_NVME, BF16, budget_bytes=10**12, sub_group_numel=None)
    states = sum((14 if u.trained else 2) * u.shard_numel for u in UNITS)
    assert states <= most.spare_bytes < 1.2 * states
