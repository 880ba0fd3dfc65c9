"""The arena is the sum of what must be in host memory at once; a budget below it is refused."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.partition import ALIGN_NUMEL
from infinity.plan import (
    ElementBytes,
    Here,
    ModelSize,
    Tiers,
    UnitSize,
    Wishes,
    device_terms,
    make_plan,
    reside,
    stays,
)
from tiering.errors import ConfigError
from tiering.sizes import parse_bytes
from tiering.spec import Tier

BF16 = ElementBytes(storage_bytes=2, gradient_bytes=2)
UNITS = [UnitSize(3 * 2**20, True, BF16)] * 8 + [UnitSize(2**20, False, BF16)]
MODEL = ModelSize(UNITS, active_bytes=6 * 2**20, storage_bytes=2)
ALL_NVME = Tiers(Tier.NVME, Tier.NVME)


def test_without_a_budget_the_arena_is_gradients_and_buffers() -> None:
    """Not the states: what passes through is counted a few times, gradients once."""
    plan = make_plan(MODEL, ALL_NVME)
    states = sum(14 * u.shard_numel for u in UNITS)
    assert plan.arena_bytes == sum(nbytes for _, nbytes in plan.terms)
    assert plan.arena_bytes < states / 3
    assert plan.gradient_home is Tier.HOST


def test_a_smaller_budget_makes_smaller_tiles_then_spills_gradients_then_is_refused() -> None:
    """In this order; the error shows the sum and the smallest budget, which is accepted."""
    whole = make_plan(MODEL, ALL_NVME)
    less = make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=whole.arena_bytes - 2**23))
    assert less.tile_numel < whole.tile_numel
    assert less.gradient_home is Tier.HOST
    spilled = make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=2**25))
    assert spilled.gradient_home is Tier.NVME
    assert spilled.tile_numel > 2**14  # what gradients leave free goes to tiles
    with pytest.raises(ConfigError, match="smallest budget that would do") as refused:
        make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=2**20))
    smallest = int(str(refused.value).splitlines()[-1].split()[0].replace(",", ""))
    make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=smallest))
    with pytest.raises(ConfigError):
        make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=smallest - 1))


@pytest.mark.parametrize(
    ("model", "unit"),
    [(MODEL, "MiB"), (ModelSize([UnitSize(64, True, BF16)], 128, storage_bytes=2), "KiB")],
)
def test_a_refused_budget_is_told_the_least_that_would_do_as_people_write_it(
    model: ModelSize, unit: str
) -> None:
    """To the unit; the words are those of the documents for users."""
    with pytest.raises(ConfigError) as refused:
        make_plan(model, ALL_NVME, Wishes(budget_bytes=4096))
    [enough] = re.findall(rf'set it to at least "(\d+{unit})"', str(refused.value))
    make_plan(model, ALL_NVME, Wishes(budget_bytes=parse_bytes(enough)))
    less = parse_bytes(enough) - parse_bytes(f"1{unit}")
    with pytest.raises(ConfigError):
        make_plan(model, ALL_NVME, Wishes(budget_bytes=less))
    assert not re.search("tile|shard|unit", str(refused.value))


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 2**26),
    st.one_of(st.none(), st.integers(16, 10**9)),
)
def test_a_plan_never_exceeds_its_budget(
    sizes: list[tuple[int, bool]], budget_bytes: int, sub_group: int | None
) -> None:
    """Accepted plans fit, tile sizes are aligned and no larger than asked."""
    units = [UnitSize(n * ALIGN_NUMEL, t, BF16) for n, t in sizes]
    model = ModelSize(units, active_bytes=2 * max(u.shard_numel for u in units), storage_bytes=2)
    try:
        plan = make_plan(
            model, ALL_NVME, Wishes(budget_bytes=budget_bytes, sub_group_numel=sub_group)
        )
    except ConfigError:
        return
    assert sum(nbytes for _, nbytes in plan.terms) <= budget_bytes
    assert plan.tile_numel % ALIGN_NUMEL == 0
    assert plan.tile_numel <= max(sub_group or 10**9, ALIGN_NUMEL)


def test_everything_at_home_in_the_host_needs_room_for_everything() -> None:
    """cpu offload: weights, states and gradients are all in the arena."""
    plan = make_plan(MODEL, Tiers(Tier.HOST, Tier.HOST), Wishes())
    assert plan.arena_bytes >= sum((16 if u.trained else 2) * u.shard_numel for u in UNITS)
    with pytest.raises(ConfigError, match="optimizer state at home in the host"):
        make_plan(MODEL, Tiers(Tier.HOST, Tier.HOST), Wishes(budget_bytes=2**24))


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
        share = Fraction(room_bytes, max(room_bytes, sum(sizes_bytes)))
        assert kept_bytes <= share * met_bytes
        assert kept_bytes > share * met_bytes - 2 * max(sizes_bytes)
    if room_bytes >= sum(sizes_bytes):
        assert all(chosen)


def test_what_a_budget_leaves_over_is_room_for_records_that_stay() -> None:
    """All of it, and never more than the records that there are."""
    needed = make_plan(MODEL, ALL_NVME)
    more = make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=needed.arena_bytes + 10**7))
    assert (needed.spare_bytes, more.spare_bytes) == (0, 10**7)
    most = make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=10**12))
    states = sum((14 if u.trained else 2) * u.shard_numel for u in UNITS)
    assert states <= most.spare_bytes < 1.2 * states


def test_buffers_that_a_config_asks_for_are_had_where_no_budget_is_given() -> None:
    """Beside what must be there, never instead of it, and never more than there is to hold."""
    least = make_plan(MODEL, ALL_NVME)
    weights_bytes = sum(2 * u.shard_numel for u in UNITS)
    few = make_plan(MODEL, ALL_NVME, Wishes(weight_numel=1000, tile_tensors=4))
    assert few == least
    more = make_plan(MODEL, ALL_NVME, Wishes(weight_numel=15 * 2**20))
    extra_bytes = more.arena_bytes - least.arena_bytes  # three shards of five must be there
    assert 2 * 6 * 2**20 - 2**17 < extra_bytes <= 2 * 6 * 2**20
    most = make_plan(MODEL, ALL_NVME, Wishes(weight_numel=5 * 10**8, tile_tensors=10**6))
    states_bytes = sum(12 * u.shard_numel for u in UNITS if u.trained)
    assert most.arena_bytes <= least.arena_bytes + weights_bytes + states_bytes
    budget = least.arena_bytes + 2**20
    given = make_plan(MODEL, ALL_NVME, Wishes(budget_bytes=budget, weight_numel=10**9))
    assert given.arena_bytes == budget
    assert all(p.arena_bytes == sum(n for _, n in p.terms) for p in (least, few, more, most))


def test_weights_that_stay_are_as_many_as_the_config_says() -> None:
    """They come on top where no budget is given, and out of what a budget leaves over else."""
    least = make_plan(MODEL, ALL_NVME)
    some = make_plan(MODEL, ALL_NVME, Wishes(resident_numel=2**20))
    assert some.arena_bytes == least.arena_bytes + 2**21
    assert (some.spare_bytes, some.spare_weight_bytes) == (2**21, 2**21)
    every = make_plan(MODEL, ALL_NVME, Wishes(resident_numel=10**9))
    assert every.spare_weight_bytes == sum(2 * u.shard_numel for u in UNITS)
    for resident_numel, weight_bytes in ((None, 2**24), (0, 0), (2**20, 2**21), (10**9, 2**24)):
        wishes = Wishes(budget_bytes=least.arena_bytes + 2**24, resident_numel=resident_numel)
        plan = make_plan(MODEL, ALL_NVME, wishes)
        assert (plan.spare_bytes, plan.spare_weight_bytes) == (2**24, weight_bytes)


def test_the_device_holds_what_stays_what_is_used_and_what_is_on_its_way() -> None:
    """All terms by hand: two units, of which one gradient stays."""
    element = ElementBytes(storage_bytes=2, gradient_bytes=2)
    units = [
        UnitSize(4096, trained=True, element_bytes=element, here=Here(gradient=True)),
        UnitSize(8192, trained=True, element_bytes=element),
    ]
    away = Tiers(Tier.NVME, Tier.NVME)
    terms = device_terms(units, away, used_bytes=999, tile_numel=4096, ahead_bytes=1000)
    assert [nbytes for _, nbytes in terms] == [
        *(0, 0, 8192),
        *(999, 0, 1000 + 4096 * 12, 2 * 16384, 4096 * 4 + 2 * 16384),
    ]
    near = Tiers(Tier.DEVICE, Tier.DEVICE)
    terms = device_terms(units, near, used_bytes=0, tile_numel=4096, ahead_bytes=1000)
    assert [nbytes for _, nbytes in terms] == [
        *(3 * 8192, 3 * 4096 * 12, 3 * 8192),
        *(0, 0, 0, 0, 4096 * 4 + 2 * 16384),
    ]


def test_gradients_used_under_backward_pass_the_device_two_at_a_time() -> None:
    """They take nothing of what may stay, no room in the host, and are counted as passing."""
    units = [UnitSize(4096, True, BF16, early=at > 1) for at in range(4)]
    here = reside(units, ALL_NVME, device_bytes=8192, early_near=True)
    assert [stay.gradient for stay in here] == [False, True, True, True]
    assert not any(stay.gradient for stay in reside(units, ALL_NVME, device_bytes=0))
    sizes = [unit._replace(here=stay) for unit, stay in zip(units, here, strict=True)]
    plan = make_plan(ModelSize(sizes, active_bytes=8192, storage_bytes=2), ALL_NVME)
    assert dict(plan.terms)["gradients"] == 8192
    terms = device_terms(sizes, ALL_NVME, used_bytes=0, tile_numel=4096, ahead_bytes=0)
    assert dict(terms)["gradients"] == 3 * 8192
