"""The flat layout: shards and tiles cover every element once, at aligned boundaries."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.partition import ALIGN_NUMEL, Extent, FlatLayout, tiles

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(numels, st.integers(1, 8))
def test_shards_tile_the_flat_buffer_exactly(sizes: list[int], ranks: int) -> None:
    """Every rank owns an equal aligned part, and the parts join without a gap."""
    layout = FlatLayout.of(sizes, world_size=ranks)
    shards = [layout.shard(rank) for rank in range(ranks)]
    assert shards[0].start == 0
    assert shards[-1].stop == layout.numel
    assert all(a.stop == b.start for a, b in pairwise(shards))
    assert all(s.start % ALIGN_NUMEL == 0 and s.numel == layout.shard_numel for s in shards)
    assert layout.shard_numel > 0


@given(numels, st.integers(1, 8))
def test_parameters_do_not_overlap_and_keep_their_sizes(sizes: list[int], ranks: int) -> None:
    """Each parameter starts aligned; its padded extent ends where the next one starts."""
    layout = FlatLayout.of(sizes, world_size=ranks)
    for index, (size, extent) in enumerate(zip(sizes, layout.parameters, strict=True)):
        padded = layout.padded(index)
        assert extent.numel == size
        assert extent.start % ALIGN_NUMEL == 0
        assert padded.start == extent.start
        assert extent.stop <= padded.stop
    assert layout.padded(len(sizes) - 1).stop == layout.numel


@given(st.integers(0, 10_000), st.integers(0, 64), st.integers(ALIGN_NUMEL, 3000))
def test_tiles_cover_a_shard_once(units: int, start: int, most: int) -> None:
    """Tiles are aligned, no larger than asked, nearly equal, and join without a gap."""
    shard = Extent(start * ALIGN_NUMEL, start * ALIGN_NUMEL + units // ALIGN_NUMEL * ALIGN_NUMEL)
    cut = tiles(shard, tile_numel=most)
    assert sum(t.numel for t in cut) == shard.numel
    assert all(0 < t.numel <= most and t.start % ALIGN_NUMEL == 0 for t in cut)
    assert all(a.stop == b.start for a, b in pairwise(cut))


def test_a_tile_smaller_than_the_alignment_is_refused() -> None:
    """It could only begin where numbers would change."""
    with pytest.raises(ValueError, match="at least 16, got 15"):
        tiles(Extent(0, 64), tile_numel=15)


@given(
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
)
def test_an_intersection_is_what_both_cover(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Like the intersection of the two sets of elements."""
    left, right = Extent(min(a), max(a)), Extent(min(b), max(b))
    both = left.intersect(right)
    assert set(range(*both)) == set(range(*left)) & set(range(*right))
