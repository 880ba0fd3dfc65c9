"""The demo from its command line, at its smallest size and on the real engine."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.demo.__main__ import main
from tests.infinity.ranks import RankPool

_LIMIT_S = 120.0  # of one program; one that hangs fails


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


def run(*arguments: str) -> tuple[int, str, str]:
    """The demo's exit status, and what this rank printed and complained of."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()


def torchrun(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module on two ranks."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return subprocess.run(
        [*launcher, "2", "--module", module, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_on_shares_of_what_one_trains_on_and_only_the_first_tells_of_it(
    size: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """The same losses but for rounding; no folder is left."""
    shape = ("--layers", "3", "--width", "64", "--context", "32", "--steps", "3")
    shape += ("--host-memory", "3M")
    exact = ("--dtype", "fp32", "--compute-dtype", "fp32", "--path", str(tmp_path / "states"))
    files = [tmp_path / "one.json", tmp_path / "several.json"]
    assert main([*shape, *exact, "--batch", str(2 * size), "--json", str(files[0])]) == 0
    first, *others = on_ranks(size, run, *shape, *exact, "--batch", "2", "--json", str(files[1]))
    assert others == [(0, "", "")] * (size - 1)
    status, said, complained = first
    assert (status, complained) == (0, "")
    assert said.count("How it went") == 1
    assert f"{size} ranks train it" in " ".join(said.split())
    one, several = (json.loads(file.read_text()) for file in files)
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["ranks"] == []
    ranks = several["ranks"]
    assert len(ranks) == size
    for name in ("nvme_read_bytes", "nvme_written_bytes", "arena_peak_bytes", "state_bytes"):
        assert several["engine"][name] == sum(rank["engine"][name] for rank in ranks)
    assert all(rank["peak_memory_bytes"] > 0 for rank in ranks)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("--host-memory", "10K"), "tiering.host_memory", 1),
        (("--compare-torch",), "--compare-torch is for one rank", 1),
        (("--steps", "none"), "--steps", 2),
    ],
)
def test_what_cannot_work_on_any_rank_is_said_once(
    arguments: tuple[str, ...], said: str, status: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """By the first."""
    path = tmp_path / "states"
    first, second = on_ranks(2, run, "--smoke", "--path", str(path), *arguments)
    assert first[:2] == (status, "")
    assert said in first[2]
    assert second == (status, "", "")
    assert not path.exists()


def test_torchrun_runs_the_demo(tmp_path: Path) -> None:
    """From its command line, with everything of the kind there."""
    done = torchrun("infinity.demo", "--smoke", "--losses", "--path", str(tmp_path / "states"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("How it went") == 1
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("loss ")] == [
        *"1234"
    ]
    assert "rank 1" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_in_training_ends_the_others_and_leaves_no_folder(
    tmp_path: Path,
) -> None:
    """Its own words are told, whoever gets to tell them."""
    done = torchrun("tests.infinity.failing_demo", "--smoke", "--path", str(tmp_path / "states"))
    assert done.returncode == 1
    assert "error on rank 1: a read failed" in done.stderr
    assert "step 1/4" in done.stdout
    assert "How it went" not in done.stdout
    assert list(tmp_path.iterdir()) == []
