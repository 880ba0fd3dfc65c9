"""The demo from its command line, at its smallest size and on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.demo.__main__ import main


def losses(folder: Path, *arguments: str) -> list[str]:
    """Exact losses of a smallest run."""
    file = folder / "results.json"
    path = folder / "states"
    assert main(["--smoke", "--path", str(path), "--json", str(file), *arguments]) == 0
    assert not path.exists()
    loaded: list[str] = json.loads(file.read_text())["losses_hex"]
    return loaded


def test_the_losses_are_the_same_wherever_the_states_live(tmp_path: Path) -> None:
    on_nvme = losses(tmp_path)
    assert len(on_nvme) == 4
    assert losses(tmp_path, "--offload", "cpu") == on_nvme
    assert losses(tmp_path, "--offload", "none") == on_nvme
    assert losses(tmp_path, "--backend", "threads") == on_nvme


def test_the_comparison_with_plain_torch_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(tmp_path, "--compare-torch", "--dtype", "fp32", "--losses")
    said = capsys.readouterr().out
    assert "time over plain torch" in said
    assert said.count("0x1.") == 4


def test_a_tied_head_trains(tmp_path: Path) -> None:
    assert losses(tmp_path, "--tie-head") == losses(tmp_path, "--tie-head", "--offload", "none")


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    assert main(["--smoke", "--path", str(tmp_path)]) == 0
    assert tmp_path.exists()
    assert not list(tmp_path.iterdir())


def test_a_budget_that_cannot_work_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--smoke", "--path", str(tmp_path / "states"), "--host-memory", "10K"]) == 1
    assert "tiering.host_memory" in capsys.readouterr().err
    assert not (tmp_path / "states").exists()
