"""`bench.link`: copies between host and device, raw and ours in turns."""

from __future__ import annotations

import pytest
import torch

from bench.facts import machine_facts
from bench.link import Row, TierCopies, as_json, main, measure, table
from bench.report import show
from bench.steps.link import WAYS, Pieces, RawCopies

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert (
        capsys.readouterr().err == "link: torch finds no GPU here, so there is no link to measure\n"
    )


@pytest.mark.parametrize("arguments", [("--rounds", "0"), ("--size", "much")])
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_every_way_of_every_record_is_measured_in_each_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = {"large": 8192, "small": 5000}
    found = measure(CPU, size_bytes=10_000, rounds=3, records=records)
    assert [(row.record, row.way) for row in found.rows] == [
        (record, way) for record in records for way in WAYS
    ]
    for row in found.rows:
        assert len(row.raw) == len(row.ours) == 3
        assert min(*row.raw, *row.ours) > 0
    machine = machine_facts()
    show(table(found, machine))
    assert "large (8 KiB)" in capsys.readouterr().out
    assert as_json(found, machine)["device"] == "the processor"


def test_shares_are_taken_within_a_round() -> None:
    row = Row("x", 1, "both", (1.0, 2.0, 4.0), (2.0, 2.0, 2.0))
    assert row.ours_by_raw == (1.0, 0.5, 2.0)


def test_a_piece_that_leaves_the_device_arrives() -> None:
    pieces = Pieces(5000, 2)
    raw, ours = RawCopies(CPU, pieces), TierCopies(CPU, pieces)
    for copies in (raw, ours):
        copies._leaving[1].fill_(7)
        copies.offload(1)
        assert set(copies._brought[1].tolist()) == {7}
        assert set(copies._brought[0].tolist()) == {1}
    ours.close()
