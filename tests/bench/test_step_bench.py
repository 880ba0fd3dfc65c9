"""`step_bench`: the command at its smallest size, and its sums."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.facts import machine_facts
from bench.report import show
from bench.step_bench import budget, main
from bench.steps import report
from bench.steps.contestants import Ours, PlainTorch
from bench.steps.device import Device
from bench.steps.ideal import Load, Speeds, Traffic, ideal, least_traffic
from bench.steps.measure import Measured, Plan, Result, Series
from bench.steps.model import SIZES
from bench.steps.wire import Outcome, Paging, Step, Training

ROOT = Path(__file__).parent.parent.parent
DEEPSPEED_VARIABLE = "ZERO_INFINITY_DEEPSPEED_PYTHON"
QUARTER = "ours 1/4 of states"
BRIEF = ("--size", "tiny", "--threads", "1", "--warmup", "1", "--steps", "2")


class Outcomes(NamedTuple):
    """Of one command: its exit code, what it wrote with ``--json``, and what it said."""

    code: int
    json: dict[str, Any]
    out: str
    err: str


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A folder to page to."""
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


@pytest.fixture
def bench(drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, the shortest way, and checks that it leaves nothing on the drive."""

    def run(*arguments: str) -> Outcomes:
        file = tmp_path / "result.json"
        file.unlink(missing_ok=True)
        common = [*BRIEF, "--nvme-path", str(drive), "--json", str(file)]
        try:
            code = main([*common, *arguments])
        except SystemExit as error:  # of the argument parser
            code = int(str(error.code))
        said = capsys.readouterr()
        assert not list(drive.iterdir())
        found = json.loads(file.read_text()) if file.exists() else {}
        return Outcomes(code, found, said.out, said.err)

    return run


def losses(contestant: dict[str, Any]) -> list[list[float]]:
    """Of every run."""
    return [[step["loss"] for step in run["steps"]] for run in contestant["runs"]]


# The command


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Our engine, in memory and from the drive, and plain torch: the JSON."""
    drive, file = tmp_path_factory.mktemp("drive"), tmp_path_factory.mktemp("out") / "result.json"
    arguments = (*BRIEF, "--compute-dtype", "fp32", "--vs", "torch")
    assert main([*arguments, "--nvme-path", str(drive), "--json", str(file)]) == 0
    assert not list(drive.iterdir())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def contestant(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The one of that name."""
    (one,) = [one for one in found["contestants"] if one["name"] == name]
    return one


def test_everybody_has_the_same_losses(in_turns: dict[str, Any]) -> None:
    names = ["ours in memory", QUARTER, "torch"]
    assert [one["name"] for one in in_turns["contestants"]] == names
    in_memory, paged, plain = (losses(contestant(in_turns, name)) for name in names)
    assert paged == in_memory
    assert in_turns["our_equal_steps"] == 3
    assert in_turns["incomplete"] is None
    assert plain[0] == pytest.approx(paged[0], rel=1e-3)


def test_ours_is_set_beside_the_other(in_turns: dict[str, Any]) -> None:
    (versus,) = in_turns["versus"]
    assert (versus["ours"], versus["other"]) == (QUARTER, "torch")
    for figure in ("time", "memory", "training_memory"):
        ratio = versus[figure]
        assert 0 < ratio["least"] <= ratio["median"] <= ratio["greatest"]


def test_every_figure_of_a_paged_step_is_reported(in_turns: dict[str, Any]) -> None:
    paged = contestant(in_turns, QUARTER)
    (run,) = paged["runs"]
    assert len(run["steps"]) == 3
    assert run["drive"]["bytes_per_s"].keys() == {"read", "write", "mixed"}
    assert run["paging"]["waited_s"].keys() == {"read", "write"}
    assert 0 < run["paging"]["arena_peak_bytes"] <= run["paging"]["arena_budget_bytes"]
    assert run["peak_bytes"] >= run["training_peak_bytes"] > 0
    whole = paged["process_peak_memory_bytes"]
    assert whole == run["start_bytes"] + run["peak_bytes"]
    assert paged["engine_bytes_per_parameter"]["written"] > 0
    assert paged["ideal"]["binds"] in {"compute", "reading", "writing", "reading and writing"}
    assert paged["share_of_ideal"]["median"] > 0
    # A budget is granted in whole pages.
    least = paged["least_bytes_per_parameter"]
    assert least == pytest.approx({"read": 10.5, "written": 10.5}, abs=0.05)
    assert in_turns["machine"]["cpu_count"] >= 1


def test_with_direct_transfers_the_kernel_counts_what_we_count(in_turns: dict[str, Any]) -> None:
    run = contestant(in_turns, QUARTER)["runs"][0]
    if not run["paging"]["direct_io"]:
        pytest.skip("this file system has no direct I/O")
    for way in ("read", "written"):
        own = sum(step[f"engine_{way}_bytes"] for step in run["steps"])
        kernel = sum(step[f"kernel_{way}_bytes"] for step in run["steps"])
        # At a boundary a transfer may have begun and not ended: the kernel has it already.
        assert kernel == pytest.approx(own, rel=0.2)


def test_budgets_are_swept_and_drawn(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    found = bench("--budgets", "1/4,1", "--plot", str(picture))
    assert found.code == 0, found.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    quarter, whole = (contestant(found.json, f"ours {part} of states") for part in ("1/4", "1"))
    read = [one["engine_bytes_per_parameter"]["read"] for one in (quarter, whole)]
    assert read[1] < read[0]
    assert losses(quarter) == losses(whole)
    assert "share of ideal" in found.out
    assert "3/3" in found.err


@pytest.mark.slow
def test_deepspeed_trains_the_same_model(bench: Any) -> None:
    python = os.environ.get(DEEPSPEED_VARIABLE) or pytest.skip(
        f"{DEEPSPEED_VARIABLE} names no interpreter with DeepSpeed"
    )
    found = bench("--vs", "deepspeed,deepspeed-cpu,deepspeed-none", "--deepspeed-python", python)
    assert found.code == 0, found.err
    ours = losses(contestant(found.json, QUARTER))[0]
    for name in ("DeepSpeed nvme", "DeepSpeed cpu", "DeepSpeed none"):
        other = contestant(found.json, name)
        assert losses(other)[0] == pytest.approx(ours, rel=1e-3)
        assert other["engine_bytes_per_parameter"] is None
        assert "DeepSpeed" in other["runs"][0]["version"]


def test_deepspeeds_settings_reach_its_configuration(bench: Any, tmp_path: Path) -> None:
    python, told = tmp_path / "python", tmp_path / "told.json"
    python.write_text(f"#!/bin/sh\ncat > {told}\nexit 3\n")
    python.chmod(0o755)
    found = bench(
        *("--device", "none", "--vs", "deepspeed", "--deepspeed-python", str(python)),
        *("--deepspeed-parameter-buffers", "6", "--deepspeed-parameter-buffer-numel", "70000"),
        *("--deepspeed-parameters-in-memory", "9", "--deepspeed-io-threads", "8"),
        *("--deepspeed-optimizer-buffers", "13", "--no-deepspeed-pipeline", "--deepspeed-overlap"),
    )
    assert found.code == 1, found.err
    config = json.loads(told.read_text())["config"]
    zero = config["zero_optimization"]
    parameters, optimizer = zero["offload_param"], zero["offload_optimizer"]
    assert (parameters["buffer_count"], parameters["buffer_size"]) == (6, 70000)
    assert parameters["max_in_cpu"] == 9
    assert (optimizer["buffer_count"], optimizer["pipeline_read"]) == (13, False)
    assert zero["overlap_comm"] is True
    assert config["aio"]["intra_op_parallelism"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vs", "deepspeed"), "--deepspeed-python"),
        (("--vs", "deepspeed-none"), "--deepspeed-python"),
        (("--vs", "deepspeed", "--deepspeed-io-threads", "0"), "1 at least"),
        (("--heads", "3"), "do not divide"),
        (("--device", "cpu", "--budgets", "1/4"), "--device nvme"),
        (("--nvme-path", "nowhere"), "not a directory"),
        (("--vs", "others"), "'others'"),
        (("--host-memory", "1/0"), "neither bytes nor a part"),
        (("--steps", "0"), "1 at least"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_work(
    bench: Any, arguments: Sequence[str], words: str
) -> None:
    found = bench(*arguments)
    assert found.code == 2
    assert words in found.err
    assert not found.json


def test_a_drive_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BRIEF]) == 2
    assert "--nvme-path" in capsys.readouterr().err


def test_an_engine_that_fails_is_an_error(bench: Any) -> None:
    found = bench("--run-limit", "0.01")
    assert found.code == 1
    assert "ours in memory did not end within 0.01 s" in found.err
    assert not found.json, "no run has ended"


# A measurement that ends early


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_in_the_second_run_leaves_the_first(
    number: signal.Signals, word: str, tmp_path: Path
) -> None:
    begun, file, python = tmp_path / "begun", tmp_path / "result.json", tmp_path / "python"
    os.mkfifo(begun)
    python.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec tail -f /dev/null\n")
    python.chmod(0o755)
    others = ("--vs", "deepspeed-none", "--deepspeed-python", str(python))
    arguments = (*BRIEF, "--device", "none", *others, "--json", str(file))
    program = "import sys; from bench import step_bench as s; sys.exit(s.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        child = int(begun.read_text())
        under_way = json.loads(file.read_text())
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number, err
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    found = json.loads(file.read_text())
    assert found["incomplete"] == {"reason": word, "ended_runs": 1, "planned_runs": 2}
    assert [one["name"] for one in found["contestants"]] == ["ours in memory"]
    assert len(losses(found["contestants"][0])[0]) == 3
    assert "1 of 2 runs have ended: " + word in out
    assert under_way == {**found, "incomplete": under_way["incomplete"]}
    assert not list(tmp_path.glob(".*")), "the JSON is replaced, and nothing stays beside it"


def test_a_contestant_that_fails_leaves_those_before_it(bench: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any package
    python.chmod(0o755)
    others = ("--vs", "torch,deepspeed-none,deepspeed-cpu", "--deepspeed-python", str(python))
    found = bench("--device", "none", *others)
    assert found.code == 1
    assert "No module named 'deepspeed'" in found.err
    assert "No module named 'deepspeed'" in found.json["incomplete"]["reason"]
    assert [one["name"] for one in found.json["contestants"]] == ["ours in memory", "torch"]
    assert [versus["other"] for versus in found.json["versus"]] == ["torch"]
    assert "2 of 4 runs have ended" in found.out


def test_a_file_that_cannot_be_written_is_told_of_before_the_work(bench: Any) -> None:
    found = bench("--json", "nowhere/result.json")
    assert found.code == 2
    assert "nowhere is not a directory" in found.err


def test_rounds_that_not_all_have_trained_in_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, plain = Ours("ours", "cpu"), PlainTorch()
    plan = Plan((ours,), (plain,), 2, None, 1.0, 2**20, 1.0)
    series = (
        Series(Ours(), (measured(1.0),)),
        Series(ours, (measured(2.0),)),
        Series(plain, (measured(1.0), measured(8.0))),
    )
    result = Result(Training(SIZES["tiny"]), plan, series, incomplete="terminated")
    assert (result.ended_runs, plan.total_runs) == (4, 6)
    assert result.versus[0].time == (2.0, 2.0, 2.0)
    assert result.share(result.paged[0]).of_measured.median == 0.5
    show(report.tables(result, machine_facts()))
    assert "4 of 6 runs have ended: terminated" in capsys.readouterr().out


# The sums


SPEEDS = Speeds(read=2.0, write=1.0, mixed=2.5)


@pytest.mark.parametrize(
    ("compute_s", "traffic", "seconds", "binds"),
    [
        (1.0, Traffic(10, 0), 5.0, "reading"),
        (1.0, Traffic(0, 10), 10.0, "writing"),
        (1.0, Traffic(10, 5), 6.0, "reading and writing"),
        (7.0, Traffic(10, 5), 7.0, "compute"),
    ],
)
def test_the_slowest_resource_makes_the_ideal(
    compute_s: float, traffic: Traffic, seconds: float, binds: str
) -> None:
    found = ideal(compute_s, Load(traffic, SPEEDS))
    assert (found.seconds, found.binds) == (seconds, binds)


@pytest.mark.parametrize(
    ("link", "seconds", "binds"),
    [
        (Traffic(14, 0), 7.0, "upload"),
        (Traffic(0, 7), 7.0, "offload"),
        (Traffic(13, 7), 8.0, "upload and offload"),
        (Traffic(1, 1), 6.0, "reading and writing"),
    ],
)
def test_the_link_to_a_gpu_is_a_resource_like_the_drive(
    link: Traffic, seconds: float, binds: str
) -> None:
    drive = Load(Traffic(10, 5), SPEEDS)
    found = ideal(1.0, drive, Load(link, Speeds(read=2.0, write=1.0, mixed=2.5)))
    assert (found.seconds, found.binds, found.drive_s) == (seconds, binds, 6.0)


def test_without_a_drive_computing_is_all() -> None:
    assert ideal(2.0, None) == (2.0, "compute", 2.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("memory_bytes", "traffic"),
    [
        (0, (18, 16)),
        (1, (15, 14)),
        (2, (12, 12)),
        (3.5, (10.5, 10.5)),
        (14, (0, 0)),
        (99, (0, 0)),
    ],
)
def test_memory_saves_weights_and_gradients_first_and_states_then(
    memory_bytes: float, traffic: tuple[float, float]
) -> None:
    assert least_traffic(memory_bytes) == traffic


def measured(*seconds: float, peak_bytes: int = 1) -> Measured:
    """A run of steps that took so long, after one that does not count."""
    first = Step(0.0, 99.0, 99.0, 99.0, 0, 0, None, None)
    steps = [Step(0.0, one / 4, one / 2, one / 4, 40, 20, None, None) for one in seconds]
    outcome = Outcome(10, "fp32", 1, "", 1, (first, *steps), 0, peak_bytes, peak_bytes, None)
    return Measured((outcome,), None)


def test_ratios_are_taken_within_a_round_and_warm_up_steps_do_not_count() -> None:
    ours, plain = Ours("ours", "cpu"), PlainTorch()
    plan = Plan((ours,), (plain,), 2, None, 1.0, 2**20, 1.0)
    result = Result(
        Training(SIZES["tiny"]),
        plan,
        (
            Series(Ours(), (measured(1.0), measured(3.0))),
            Series(ours, (measured(2.0, 2.0, peak_bytes=3), measured(9.0, 3.0, 6.0, peak_bytes=4))),
            Series(plain, (measured(1.0, peak_bytes=6), measured(2.0, peak_bytes=4))),
        ),
    )
    (versus,) = result.versus
    assert versus.time == (2.5, 2.0, 3.0)
    assert versus.memory == (0.75, 0.5, 1.0)
    (paged,) = result.paged
    assert paged.seconds() == (3.0, 2.0, 9.0)
    assert result.share(paged).of_measured == (0.5, 0.5, 0.5)
    assert paged.bytes_per_parameter(lambda run: run.kernel_traffic) == (4.0, 2.0)
    assert paged.bytes_per_parameter(lambda run: run.engine_traffic) is None


def on_gpu(seconds: float, device: Device) -> Measured:
    """A run of 2 steps on a GPU, in each of which 60 bytes go up and 30 come back."""
    run = measured(seconds, seconds)
    steps = [replace(s, uploaded_bytes=60, offloaded_bytes=30) for s in run.outcome.steps]
    paging = Paging(
        *(140, 40, 40, 0, 1, 2, 0),
        waited_s={"read": 0.0},
        device_waited_s={"upload": 0.25},
        device_plan_bytes=3_000_000,
        backend="none",
        direct_io=True,
    )
    return Measured(
        (replace(run.outcome, steps=tuple(steps), paging=paging, device_peak_bytes=4_000_000),),
        None,
        device,
    )


def test_what_a_gpu_gives_is_set_beside_what_a_step_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training = Training(SIZES["tiny"], batch=2)
    flop = SIZES["tiny"].step_flop(2)
    device = Device("a GPU", Speeds(read=20.0, write=20.0, mixed=30.0), flop_per_s=flop)
    ours = Ours("ours", "cpu")
    plan = Plan((ours,), (), 1, None, 1.0, 2**20, 1.0)
    series = (
        Series(Ours(), (on_gpu(1.0, device),)),
        Series(ours, (on_gpu(4.0, device),)),
    )
    result = Result(training, plan, series)
    share = result.share(series[1])
    assert share.ideal == (3.0, "upload", 1.0, 0.0, 3.0)
    assert share.of_measured.median == 0.75
    assert series[1].utilisation(flop) == 0.25
    machine = machine_facts()
    show(report.tables(result, machine))
    said = capsys.readouterr().out
    for text in (
        "25.0%",
        "6.00 / 3.00",
        "4 (3)",
        "upload 0.25 s",
        "upload: compute",
        "link 3.000 s",
    ):
        assert text in said
    (_, found) = report.as_json(result, machine)["contestants"]
    assert found["link_bytes_per_parameter"] == {"upload": 6.0, "offload": 3.0}
    assert found["tokens_per_s"] == 2 * SIZES["tiny"].context / 4.0
    assert found["runs"][0]["device"]["link_bytes_per_s"]["both"] == 30.0


def test_steps_are_equal_if_all_runs_of_ours_say_so() -> None:
    def run(*losses: float) -> Measured:
        one = measured(*([1.0] * len(losses)))
        steps = [replace(s, loss=x) for s, x in zip(one.outcome.measured, losses, strict=True)]
        return Measured((replace(one.outcome, steps=tuple(steps), warmup=0),), None)

    ours = Ours("ours", "cpu")
    plan = Plan((ours,), (PlainTorch(),), 2, None, 1.0, 2**20, 1.0)
    series = (
        Series(Ours(), (run(1.0, 2.0, 3.0), run(1.0, 2.0, 3.0))),
        Series(ours, (run(1.0, 2.0, 3.0), run(1.0, 2.5, 3.0))),
        Series(PlainTorch(), (run(0.0, 0.0, 0.0), run(0.0, 0.0, 0.0))),
    )
    assert Result(Training(SIZES["tiny"]), plan, series).equal_steps == 2


def test_with_everything_in_memory_the_step_is_its_own_ideal() -> None:
    plan = Plan((Ours(),), (), 2, None, 1.0, 2**20, 1.0)
    assert plan.contestants == (Ours(),)
    result = Result(
        Training(SIZES["tiny"]), plan, (Series(Ours(), (measured(1.0), measured(3.0))),)
    )
    share = result.share(result.in_memory(1))
    assert share.of_measured == (1.0, 1.0, 1.0)
    assert share.ideal.binds == "compute"


def test_a_budget_is_bytes_or_a_part_of_the_states() -> None:
    found = {text: budget(text) for text in ("1", "1/4", "100M", "4096")}
    assert found == {"1": 1, "1/4": Fraction(1, 4), "100M": 100 * 2**20, "4096": 4096}
    assert isinstance(found["1"], Fraction)
