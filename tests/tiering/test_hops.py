"""Copies that a device makes late: host memory stays as it is until they have been made.

A copy here is made when somebody waits for it, or when the test says so; that is as late as a
device can be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiering.test_store import (
    Setup,
    make,
    overwritten_under_its_write,
    put,
    spec,
    until_in_time,
    value,
)
from tiering.errors import RecordError, TransferError, TransferTimeoutError
from tiering.spec import Tier
from tiering.store import Lease, State, TieredStore
from tiering.trace import Access


class LateCopy:
    """A copy that nobody has made yet."""

    def __init__(self, make_it: Callable[[], object]) -> None:
        self._make_it: Callable[[], object] | None = make_it

    def is_done(self) -> bool:
        """Whether it was made."""
        return self._make_it is None

    def wait(self) -> None:
        """Make it."""
        if self._make_it is not None:
            self._make_it()
            self._make_it = None


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """Room for two records, and five of them on a drive."""
    parts = make(tmp_path, slots=2)
    for number, key in enumerate("abcde"):
        parts.store.create(spec(key), Tier.NVME, drive=parts.drive)
        put(parts.store, key, float(number))
    parts.store.flush()
    yield parts
    parts.store.close()
    parts.close()


def read_late(setup: Setup, key: str) -> tuple[LateCopy, torch.Tensor]:
    """Lease a record, and end the lease behind a copy from it."""
    lease = setup.store.lease(key)
    source, copied = lease.whole(), torch.zeros(spec(key).nbytes, dtype=torch.uint8)
    hop = LateCopy(functools.partial(copied.copy_, source))
    lease.release_behind(hop)
    return hop, copied.view(torch.float32)


def test_a_slot_is_kept_for_a_copy_from_it(setup: Setup) -> None:
    """Others want the room: they get it when the copy has been made, and it has the old values."""
    _, copied = read_late(setup, "a")
    for key in "bcde":
        put(setup.store, key, 9.0)
    _, again = read_late(setup, "b")
    for key in "cde":
        assert value(setup.store, key) == 9
    setup.store.flush()
    assert bool((copied == 0).all())
    assert bool((again == 9).all())


def test_whoever_leases_next_sees_what_a_late_copy_brings(setup: Setup) -> None:
    """It is written to the drive with it, too."""
    lease = setup.store.lease("c", Access.UPDATE)
    told: list[str] = []
    late = LateCopy(functools.partial(lease["x"].fill_, 7))
    lease.release_behind(late, lambda: told.append("ended"))
    setup.store.write_back("c")  # it is still in use
    assert setup.store.state("c") is not State.WRITING
    assert not told
    assert value(setup.store, "c") == 7
    assert told == ["ended"]
    for key in "abde":
        value(setup.store, key)
    assert value(setup.store, "c") == 7


def test_polling_ends_the_leases_of_copies_that_are_made_and_waits_for_none(setup: Setup) -> None:
    """In the order in which they began."""
    first, _ = read_late(setup, "a")
    second, _ = read_late(setup, "b")
    setup.store.poll()
    assert not first.is_done()
    first.wait()
    setup.store.poll()
    assert not second.is_done()
    second.wait()
    setup.store.poll()
    setup.store.discard("a")


def test_a_record_is_forgotten_behind_its_copies(setup: Setup) -> None:
    """But not under a lease that somebody holds."""
    hop, copied = read_late(setup, "d")
    setup.store.discard("d")
    assert hop.is_done()
    assert bool((copied == 3).all())
    with setup.store.lease("e"), pytest.raises(RecordError, match="leased 1 times"):
        setup.store.discard("e")


def test_what_flush_writes_has_the_late_copies(setup: Setup) -> None:
    """A file never has half of a record."""
    lease = setup.store.lease("a", Access.OVERWRITE)
    lease.release_behind(LateCopy(functools.partial(lease["x"].fill_, 5)))
    setup.store.flush()
    for key in "bc":
        value(setup.store, key)
    assert setup.store.state("a") is State.COLD
    assert value(setup.store, "a") == 5


def test_an_interrupted_wait_for_a_copy_loses_nothing(setup: Setup) -> None:
    """The lease still ends behind it, and what follows follows."""
    told: list[str] = []

    class Interrupted(LateCopy):
        """Ctrl-C comes in the first wait."""

        def wait(self) -> None:
            """Be interrupted once."""
            if not told:
                told.append("interrupted")
                raise KeyboardInterrupt
            super().wait()

    lease = setup.store.lease("b", Access.UPDATE)
    hop = Interrupted(functools.partial(lease["x"].fill_, 8))
    lease.release_behind(hop, lambda: told.append("ended"))
    with pytest.raises(KeyboardInterrupt):
        setup.store.lease("b")
    assert value(setup.store, "b") == 8
    assert told == ["interrupted", "ended"]


def release_and_poll(
    store: TieredStore, lease: Lease, hop: LateCopy | None, then: Callable[[], None]
) -> None:
    """Release behind a copy, make it, and have the store look for it."""
    lease.release_behind(hop, then)
    if hop is not None:
        hop.wait()
    store.poll()


@pytest.mark.parametrize("is_late", [True, False], ids=["a late copy", "no copy"])
def test_a_release_behind_that_times_out_is_made_again_by_the_store(
    is_late: bool, tmp_path: Path
) -> None:
    """The new contents are not lost, and what follows follows, once."""
    setup, lease = overwritten_under_its_write(tmp_path)
    hop = LateCopy(functools.partial(lease["x"].fill_, 7)) if is_late else None
    told: list[str] = []
    with pytest.raises(TransferTimeoutError):
        release_and_poll(setup.store, lease, hop, lambda: told.append("ended"))
    assert not told
    until_in_time(setup.store.poll)
    assert value(setup.store, "a") == (7 if is_late else 2)
    assert told == ["ended"]
    setup.close()


def test_a_copy_that_is_done_frees_its_slot_whatever_began_before_it(setup: Setup) -> None:
    """Two ways, two streams: they end in another order than they began."""
    first, _ = read_late(setup, "a")
    second, _ = read_late(setup, "b")
    second.wait()
    setup.store.poll()
    setup.store.discard("b")
    assert not first.is_done()
    setup.store.flush()


def test_what_fails_behind_a_copy_is_told_by_whoever_flushes(setup: Setup) -> None:
    """Not by whoever happened to look whether the copy was done."""
    lease = setup.store.lease("a")

    def fail() -> None:
        raise TransferError("the drive is gone", errno=5, path="a")

    late = LateCopy(lambda: None)
    lease.release_behind(late, fail)
    late.wait()
    setup.store.poll()
    with pytest.raises(TransferError, match="gone"):
        setup.store.flush()
