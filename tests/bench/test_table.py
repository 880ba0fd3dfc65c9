"""`aio_bench table`: every way we have, beside fio of the like kind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from bench import table as table_module
from tests.bench.conftest import Command
from tiering.aio import Faults, open_engine
from tiering.aio.config import AioConfig


@pytest.fixture
def no_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes io_uring away from the table."""

    def refused(config: AioConfig) -> object:
        return open_engine(config, faults=Faults(refuse_uring_errno=errno.EPERM))

    monkeypatch.setattr(table_module, "open_engine", refused)


def test_every_way_is_a_row_beside_those_of_its_kind(
    bench: Command, fake_fio: Path, tmp_path: Path
) -> None:
    file = tmp_path / "table.md"
    found = bench("table", "--op", "read,write", "--rounds", "2", "--markdown", str(file))
    assert found.code == 0, found.err
    rows = found.json["rows"]
    if "uring" in found.json["unusable"]:
        pytest.skip("no io_uring here")
    ways = [(row["op"], row["backend"], row["registration"], row["pages"]) for row in rows]
    assert ways == [
        (op, *way, pages)
        for op in ("read", "write")
        for way in (("uring", "registered"), ("uring", "unregistered"), ("threads", None))
        for pages in ("huge", "small")
    ]
    for row in rows:
        names = [one["name"] for one in row["contestants"]]
        like = "io_uring" if row["backend"] == "uring" else "psync"
        assert names == ["ours", f"fio {like}"]
        assert all(len(one["runs"]) == 2 for one in row["contestants"])
        assert row["path"]["engine"]["backend"] == row["backend"]
        assert row["path"]["engine"]["pages"]["asked"] == row["pages"]
    lines = file.read_text().splitlines()
    assert lines[0].startswith("| operation | backend |")
    assert len({line.count("|") for line in lines[: 2 + len(rows)]}) == 1
    assert sum(line.startswith("| overwrite |") for line in lines) == 6
    assert any(line.startswith("- run by: ") for line in lines)
    assert "fio libaio" in file.read_text()  # which this fio cannot


def test_without_a_ring_its_rows_are_left_out(
    bench: Command, fake_fio: Path, no_uring: None
) -> None:
    found = bench("table", "--op", "read", "--rounds", "1")
    assert found.code == 0, found.err
    assert {row["backend"] for row in found.json["rows"]} == {"threads"}
    assert "EPERM" in found.json["unusable"]["uring"]
    assert "not usable" in found.out


def test_a_way_with_nobody_like_it_is_measured_alone(
    bench: Command, fake_fio: Path, no_uring: None
) -> None:
    found = bench("table", "--op", "mixed", "--rounds", "1", "--against", "io_uring")
    assert found.code == 0, found.err
    assert [len(row["contestants"]) for row in found.json["rows"]] == [1, 1]
