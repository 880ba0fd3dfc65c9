"""A rank that fails ends all others, with its reason, and no process is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.infinity.conftest import drive_of
from tests.infinity.ranks import first_failure, torchrun

_ENDED = {"rank 0 ended", "rank 1 ended"}


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        pytest.param("throw", 1, "rank 1 has gone", marks=pytest.mark.slow),
        ("throw within with", 1, "rank 1 failed: ValueError: a mistake of one rank"),
        pytest.param(
            "throw with close", 1, "0: engine.step.., 1: engine.close..", marks=pytest.mark.slow
        ),
        pytest.param(
            "forward", 1, "rank 1 failed: ValueError: a mistake of one rank", marks=pytest.mark.slow
        ),
        ("backward", 1, "rank 1 failed: ValueError: a mistake of one rank"),
        pytest.param("exit", 7, "rank 1 has gone", marks=pytest.mark.slow),
        ("kill", -9, "rank 1 has gone"),
        pytest.param("interrupt", -2, "rank 1 has gone", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_ends_the_others(
    kind: str, code: int, reason: str, tmp_path: Path
) -> None:
    """The other one finds out by itself: it takes no notice of torchrun's signal."""
    status, text = torchrun(kind, tmp_path)
    assert status == 1
    assert re.search(f"RankError: .*{reason}", text), text
    failed, rank = first_failure(text)
    assert rank in (0, 1)
    assert failed == (code if rank == 1 else 1)
    assert not any(line in text for line in _ENDED)


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    """And torchrun ends it."""
    status, text = torchrun("hang", tmp_path)
    assert status == 1
    assert re.search(r"RankError: .*rank 1 did not come to it within 2 s", text), text
    assert first_failure(text) == (1, 0)


@pytest.mark.parametrize(
    "kind", ["terminate all", pytest.param("interrupt all", marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_ends_all(kind: str, tmp_path: Path) -> None:
    """Though one rank waits for another."""
    status, text = torchrun(kind, tmp_path)
    assert status != 0
    assert "SignalException" in text
    assert not any(line in text for line in _ENDED)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("configuration", "zero_optimization.stag"),
        pytest.param(
            "buffer",
            r"rank 0 has buffer 'seen' of shape \(3,\).*rank 1 has buffer 'seen' of",
            marks=pytest.mark.slow,
        ),
        (
            "optimizer",
            "rank 0 has parameter '0.weight', trained with lr .* '0.weight', not trained",
        ),
    ],
)
def test_what_one_rank_has_otherwise_is_refused_on_both(
    kind: str, reason: str, tmp_path: Path
) -> None:
    """Before anything has begun."""
    status, text = torchrun(kind, tmp_path)
    assert status == 1
    assert re.search(f"rank0.*ConfigError: (?s:.*){reason}", text), text


@pytest.mark.slow
def test_a_drive_that_is_full_on_one_rank_is_refused_on_both(tmp_path: Path) -> None:
    """Whose files have no room is said on both."""
    with drive_of("64k", tmp_path) as small:
        ours = tmp_path / "ours"
        ours.mkdir()
        status, text = torchrun("other path", ours, small)
        assert list(small.iterdir()) == []
    assert status == 1
    assert re.search(r"rank0.*SpaceError: .*the record files of rank 1 need", text), text


def test_ranks_that_never_close_end_without_harm(tmp_path: Path) -> None:
    """The interpreter's end closes the engines."""
    status, text = torchrun("never close", tmp_path)
    assert status == 0
    assert all(line in text for line in _ENDED)


@pytest.mark.slow
def test_a_close_on_one_rank_ends_when_the_other_has_gone(tmp_path: Path) -> None:
    """It waits for it until then, because it might still be asked for weights."""
    status, text = torchrun("close on one", tmp_path)
    assert status == 0
    assert all(line in text for line in _ENDED)
