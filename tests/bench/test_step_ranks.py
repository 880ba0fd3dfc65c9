"""`step_bench` with several ranks, and `bench.collectives`: real processes, talking by gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import collectives
from bench.step_bench import main
from bench.steps.contestants import DeepSpeed, Ours, PlainTorch, run_ranks
from bench.steps.device import Device
from bench.steps.drive import Drive
from bench.steps.ideal import Speeds
from bench.steps.launch import ContestantError
from bench.steps.measure import Measured, Plan, Result, Series
from bench.steps.model import SIZES
from bench.steps.ranks import together
from bench.steps.wire import Outcome, Paging, Step, Training

DEEPSPEED_VARIABLE = "ZERO_INFINITY_DEEPSPEED_PYTHON"
TINY = SIZES["tiny"]
BRIEF = ("--size", "tiny", "--warmup", "1", "--steps", "2", "--host-memory", "1/2")
HOPS = {"read", "write", "exchange", "gather", "reduce"}

few_gpus = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="ranks need a GPU each")


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command; returns what it wrote with ``--json``."""
    drive, file = folder / "drive", folder / "result.json"
    drive.mkdir()
    assert main([*BRIEF, "--nvme-path", str(drive), "--json", str(file), *arguments]) == 0
    assert not list(drive.iterdir())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Our engine on one rank and on two: the JSON."""
    return run(tmp_path_factory.mktemp("ranks"), "--ranks", "1,2", "--compute-dtype", "fp32")


def contestant(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The one of that name."""
    (one,) = [one for one in found["contestants"] if one["name"] == name]
    return one


def losses(outcome: dict[str, Any]) -> list[float]:
    """Of every step."""
    return [step["loss"] for step in outcome["steps"]]


@few_gpus
def test_each_number_of_ranks_has_its_turn(in_turns: dict[str, Any]) -> None:
    assert [(one["name"], one["ranks"]) for one in in_turns["contestants"]] == [
        ("ours in memory", 1),
        ("ours in memory, 2 ranks", 2),
        ("ours 1/2 of states", 1),
        ("ours 1/2 of states, 2 ranks", 2),
    ]
    assert in_turns["our_equal_steps"] == 3
    scaling = {one["label"]: one for one in in_turns["scaling"]}
    assert scaling.keys() == {"ours in memory", "ours 1/2 of states"}
    one, two = (contestant(in_turns, f"ours 1/2 of states{e}") for e in ("", ", 2 ranks"))
    ratio = scaling["ours 1/2 of states"]
    assert (ratio["ranks"], ratio["base_ranks"]) == (2, 1)
    assert ratio["tokens_per_s"]["median"] == pytest.approx(
        two["tokens_per_s"] / one["tokens_per_s"]
    )


@few_gpus
def test_ranks_train_on_windows_of_their_own_and_their_mean_loss_is_told(
    in_turns: dict[str, Any],
) -> None:
    (alone,) = contestant(in_turns, "ours in memory")["runs"]
    (pair,) = contestant(in_turns, "ours in memory, 2 ranks")["runs"]
    first, second = map(losses, pair["ranks"])
    assert first[0] == losses(alone)[0], "rank 0 has the batches of one rank"
    assert first[0] != second[0]
    assert losses(pair) == [(a + b) / 2 for a, b in zip(first, second, strict=True)]


@few_gpus
def test_a_rank_has_its_part_of_states_and_bytes(in_turns: dict[str, Any]) -> None:
    one, two = (contestant(in_turns, f"ours 1/2 of states{e}") for e in ("", ", 2 ranks"))
    (alone,), (pair,) = one["runs"], two["runs"]
    budget = alone["paging"]["arena_budget_bytes"]
    for rank in pair["ranks"]:
        paging = rank["paging"]
        assert paging["arena_budget_bytes"] == pytest.approx(budget / 2, abs=4096)
        assert paging["waited_s"].keys() == HOPS
        assert rank["peak_bytes"] > 0
    assert pair["paging"]["state_bytes"] == pytest.approx(alone["paging"]["state_bytes"], rel=0.05)
    for way in ("read", "written"):
        each = [rank["engine_bytes_per_parameter"][way] for rank in two["each_rank"]]
        assert sum(each) == pytest.approx(two["engine_bytes_per_parameter"][way])
        assert min(each) > 0
    assert two["least_bytes_per_parameter"]["read"] == pytest.approx(7, abs=0.1)


@few_gpus
def test_a_budget_that_cannot_work_is_told_by_a_rank(tmp_path: Path) -> None:
    words = r"rank [01] ended with code 1(.|\n)*tiering\.host_memory is 10,240 bytes"
    training = Training(TINY, warmup=0, steps=1)
    with pytest.raises(ContestantError, match=words):
        run_ranks(Ours("small", "nvme", 10240, ranks=2), training, root=tmp_path, limit_s=120)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    begun, python = tmp_path / "begun", tmp_path / "python"
    os.mkfifo(begun)
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$RANK" = 0 ]; then echo $$ > {begun}; exec tail -f /dev/null; fi\n'
        f"read pid < {begun}\n"
        "echo rank 0 of $WORLD_SIZE is process $pid, and mine is $LOCAL_RANK; exit 3\n"
    )
    python.chmod(0o755)
    with pytest.raises(ContestantError, match=r"2 ranks: rank 1 ended with code 3") as failed:
        run_ranks(DeepSpeed(python, "cpu", ranks=2), Training(TINY), root=None, limit_s=120)
    said = re.search(r"rank 0 of 2 is process (\d+), and mine is 1", str(failed.value))
    assert said
    with pytest.raises(ProcessLookupError):
        os.kill(int(said[1]), 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vs", "torch", "--ranks", "1,2"), "--vs torch trains on one rank"),
        (("--plot", "x.png", "--ranks", "1,2"), "--plot draws one number of ranks"),
        (("--ranks", "0"), "1 at least"),
    ],
)
def test_ranks_that_cannot_be_are_told_of_before_the_work(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    try:
        code = main([*BRIEF, "--nvme-path", str(tmp_path), *arguments])
    except SystemExit as error:  # of the argument parser
        code = int(str(error.code))
    assert code == 2
    assert words in capsys.readouterr().err


@few_gpus
@pytest.mark.slow
def test_deepspeed_trains_the_same_model_on_two_ranks(tmp_path: Path) -> None:
    python = os.environ.get(DEEPSPEED_VARIABLE) or pytest.skip(
        f"{DEEPSPEED_VARIABLE} names no interpreter with DeepSpeed"
    )
    others = ("--vs", "deepspeed,deepspeed-cpu", "--deepspeed-python", python)
    found = run(tmp_path, "--ranks", "2", *others)
    ours = losses(contestant(found, "ours 1/2 of states, 2 ranks")["runs"][0])
    for name in ("DeepSpeed nvme, 2 ranks", "DeepSpeed cpu, 2 ranks"):
        (other,) = contestant(found, name)["runs"]
        assert losses(other) == pytest.approx(ours, rel=1e-3)
        assert len(other["ranks"]) == 2
    assert {(one["ours"], one["other"]) for one in found["versus"]} == {
        ("ours 1/2 of states, 2 ranks", name)
        for name in ("DeepSpeed nvme, 2 ranks", "DeepSpeed cpu, 2 ranks")
    }


# The sums


def outcome(seconds: float, *, loss: float, read_bytes: int, uploaded_bytes: int) -> Outcome:
    """A rank's, of one step, which took so long."""
    step = Step(loss, seconds, 0.0, 0.0, 5, 6, read_bytes, 8, uploaded_bytes, 1)
    paging = Paging(70, 20, 20, 0, 1, 2, 3, {"gather": seconds}, {"upload": 1.0}, 9, "uring", True)
    return Outcome(10, "fp32", 1, "", 0, (step,), 100, 30, 20, paging, device_peak_bytes=7)


RANKS = (
    outcome(1.0, loss=2.0, read_bytes=10, uploaded_bytes=40),
    outcome(3.0, loss=4.0, read_bytes=30, uploaded_bytes=20),
)


def test_ranks_are_as_slow_as_the_slowest_and_move_what_all_move() -> None:
    whole = together(RANKS)
    (step,) = whole.steps
    assert (step.loss, step.seconds) == (3.0, 3.0)
    assert (step.engine_read_bytes, step.engine_written_bytes) == (40, 16)
    assert (step.kernel_read_bytes, step.kernel_written_bytes) == (10, 12)
    assert (step.uploaded_bytes, step.offloaded_bytes) == (60, 2)
    assert (whole.start_bytes, whole.peak_bytes, whole.training_peak_bytes) == (200, 60, 40)
    assert whole.device_peak_bytes == 14
    assert whole.paging
    assert (whole.paging.arena_budget_bytes, whole.paging.hits) == (40, 2)
    assert whole.paging.waited_s == {"gather": 2.0}


def test_one_rank_is_what_it_has_measured() -> None:
    assert together(RANKS[:1]) == RANKS[0]


def test_a_rank_without_counters_has_none_together() -> None:
    steps = (replace(RANKS[0].steps[0], engine_read_bytes=None),)
    whole = together([replace(one, steps=steps, paging=None) for one in RANKS])
    assert whole.steps[0].engine_read_bytes is None
    assert whole.paging is None


def test_ranks_share_a_drive_and_each_has_a_link_of_its_own() -> None:
    speeds = Speeds(2.0, 2.0, 4.0)
    drive = Drive(speeds, path=None, engine=None)  # type: ignore[arg-type] - only its speeds count
    found = Measured(RANKS, drive, Device("a GPU", speeds, flop_per_s=1.0, gpu_count=2))
    assert found.drive_load
    assert found.drive_load.traffic == (40, 16)
    assert found.link_load
    assert found.link_load.traffic == (40, 1), "of the GPU that has most"


def test_tokens_of_more_ranks_are_compared_within_a_round() -> None:
    ours = [Ours("ours", "cpu", ranks=ranks) for ranks in (1, 2)]
    plan = Plan((*ours,), (PlainTorch(),), 2, None, 1.0, 2**20, 1.0, ranks=(1, 2))
    in_memory = [Ours(), Ours(ranks=2)]
    assert plan.contestants == (*in_memory, *ours, PlainTorch())
    alone = Measured(RANKS[:1], None)
    slow = Measured(RANKS[1:], None)
    pair = Measured(RANKS, None)
    series = (
        *(Series(one, (pair, pair)) for one in in_memory),
        Series(ours[0], (alone, slow)),
        Series(ours[1], (pair, pair)),
        Series(PlainTorch(), (alone, alone)),
    )
    result = Result(Training(TINY), plan, series)
    label, ranks, base_ranks, ratio = vars(result.scaling[-1]).values()
    assert (label, ranks, base_ranks) == ("ours", 2, 1)
    # Twice the tokens in three times the time, and in the same time.
    assert ratio == pytest.approx((4 / 3, 2 / 3, 2.0))
    assert [(one.ours, one.other) for one in result.versus] == [("ours", "torch")]


# Collectives


@few_gpus
def test_collectives_are_measured_beside_bare_ones(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    command = (*launcher, "2", "-m", "bench.collectives", "--sizes", "64KiB,100000")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [*command, "--rounds", "2", "--json", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reduce-scatter") == 2, "one rank tells"
    found = json.loads(file.read_text())
    assert found["ranks"] == 2
    assert [(row["nbytes"], row["name"]) for row in found["rows"]] == [
        (nbytes, name)
        for nbytes in (2**16, 100_000)
        for name in ("all-gather", "all-gather, begun", "reduce-scatter")
    ]
    for row in found["rows"]:
        assert len(row["bare"]) == len(row["ours"]) == 2
        shares = row["ours_by_bare"]
        assert 0 < shares["least"] <= shares["median"] <= shares["greatest"]
    assert found["exchange_s"]["least"] > 0


def test_collectives_need_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.main([]) == 2
    assert "start several by torchrun" in capsys.readouterr().err
