"""What the benchmarks measure of a GPU."""

from __future__ import annotations

import pytest
import torch

from bench.link import measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def test_our_copies_are_of_registered_memory() -> None:
    """So they are as direct as those of memory that torch has pinned."""
    found = measure(torch.device("cuda"), size_bytes=2**20, rounds=1, records={"small": 2**18})
    assert found.registered
    assert len(found.rows) == 3


def test_our_copies_are_as_fast_as_raw_ones() -> None:
    """In turns, in one process, each way and both: 0.95 of torch's copies of pinned memory."""
    found = measure(torch.device("cuda"), size_bytes=2**28, rounds=7, records={"tile": 12 * 2**21})
    assert all(row.ours_by_raw.median >= 0.95 for row in found.rows)
