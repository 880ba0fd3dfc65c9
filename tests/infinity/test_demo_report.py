"""What the demo reports, from made-up runs: figures, the live line, the table and the file."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from infinity.demo import report
from infinity.demo.options import parse
from infinity.demo.train import Step
from infinity.report import EngineStats

NUMEL = 1000
LIMITS = report.Limits(compute_s=0.5, nvme_bytes_per_s=10_000.0)


def stats(**changed: object) -> EngineStats:
    """Four steps of a model of 1000 parameters on NVMe, at the least traffic."""
    values: dict[str, object] = {
        "steps": 4,
        "parameter_numel": NUMEL,
        "state_bytes": 14 * NUMEL,
        "arena_budget_bytes": 3_500,
        "arena_used_bytes": 1_000,
        "arena_peak_bytes": 3_000,
        "arena_huge_bytes": 2_000,
        "nvme_read_bytes": 4 * 16 * NUMEL,
        "nvme_written_bytes": 4 * 14 * NUMEL,
        "prefetch_hits": 30,
        "prefetch_misses": 10,
        "prefetch_wasted": 2,
        "waited_s": {"read": 0.25, "write": 0.5},
        "backend": "threads",
        "backend_reason": "io_uring is not permitted",
        "direct_io": True,
        "compute_dtype": "float32",
    }
    names = EngineStats.__dataclass_fields__
    others = dict.fromkeys(names.keys() - values.keys(), 0)
    return EngineStats(**{**others, **values, **changed})  # type: ignore[arg-type]


def step(loss: float, seconds: float, torch_seconds: float | None = None) -> Step:
    return Step(loss, seconds, 16 * NUMEL, 14 * NUMEL, 1_000_000, torch_seconds)


def result(*steps: Step, arguments: tuple[str, ...] = ()) -> report.Result:
    return report.Result(parse(arguments), list(steps), stats(), LIMITS, 5_000_000)


def printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_ideal_is_the_longer_of_compute_and_transfers() -> None:
    ideal = LIMITS.ideal([step(1.0, 9.0)])
    assert ideal.nvme_s == pytest.approx(30 * NUMEL / 10_000)
    assert ideal.seconds == ideal.nvme_s
    assert ideal.binds == "NVMe"
    slow = report.Limits(compute_s=5.0, nvme_bytes_per_s=10_000.0).ideal([step(1.0, 9.0)])
    assert (slow.seconds, slow.binds) == (5.0, "compute")


def test_without_nvme_only_compute_binds() -> None:
    ideal = report.Limits(compute_s=0.5, nvme_bytes_per_s=0.0).ideal([step(1.0, 9.0)])
    assert (ideal.seconds, ideal.binds) == (0.5, "compute")


def test_a_plain_copy_is_the_better_measure_of_compute() -> None:
    assert LIMITS.ideal([step(1.0, 9.0, 4.0), step(1.0, 9.0, 6.0)]).compute_s == 5.0


def test_speed_is_that_of_the_steps_after_the_first() -> None:
    run = result(step(5.0, 100.0, 1.0), step(4.0, 6.0, 2.0), step(3.0, 4.0, 2.0))
    assert run.step_s == 5.0
    assert run.torch_ratios == [2.0, 3.0]
    assert run.last_loss == 4.0


def test_a_run_of_one_step_is_reported_too() -> None:
    run = result(step(5.0, 6.0))
    assert run.step_s == 6.0
    assert "5.000" in printed(report.table(run))


def test_the_table_sets_the_bytes_beside_the_least_possible() -> None:
    rows = {row.name: row for row in report.rows(result(*[step(3.0, 6.0)] * 4))}
    assert rows["read from NVMe"].value.startswith("16.00 ")
    assert rows["read from NVMe"].note.startswith("16 ")
    assert rows["written to NVMe"].value.startswith("14.00 ")
    assert rows["written to NVMe"].note.startswith("14 ")
    assert rows["prefetch"].value.startswith("75.0%")
    assert rows["waited"].note == "write 0.50 s, read 0.25 s"
    assert rows["backend"] == ("backend", "threads, direct", "io_uring is not permitted")
    assert "25.0% of the states" in rows["host arena"].note
    assert "time over plain torch" not in rows


def test_a_backend_that_was_asked_for_needs_no_reason() -> None:
    run = result(step(3.0, 6.0), arguments=("--backend", "threads"))
    assert {row.name: row for row in report.rows(run)}["backend"].note == "asked for"


def test_the_table_has_the_ratio_to_plain_torch_when_it_ran() -> None:
    rows = {row.name: row for row in report.rows(result(*[step(3.0, 6.0, 4.0)] * 3))}
    assert rows["time over plain torch"].value == "1.50 (median)"
    assert rows["time over plain torch"].note.startswith("1.50 to 1.50")


def test_the_table_says_nothing_of_nvme_when_nothing_is_there() -> None:
    run = result(step(3.0, 6.0), arguments=("--offload", "cpu"))
    assert not {row.name for row in report.rows(run)} & {"read from NVMe", "prefetch", "backend"}


def test_the_file_holds_every_loss_exactly() -> None:
    run = result(step(1 / 3, 6.0), step(0.1, 6.0))
    loaded = json.loads(json.dumps(report.as_json(run)))
    assert [float.fromhex(text) for text in loaded["losses_hex"]] == [1 / 3, 0.1]
    assert loaded["read_bytes_per_parameter"] == 32.0
    assert loaded["engine"]["backend"] == "threads"


def test_the_live_line_tells_speed_share_and_memory() -> None:
    console = Console(file=io.StringIO(), width=200)
    options = parse(["--steps", "40"])
    with report.Progress(console, options, LIMITS, budget_bytes=3_000_000) as progress:
        for number in range(1, 41):
            progress.show(number, step(3.25, 6.0))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{n}/40" for n in (1, 5, 10, 15, 20, 25, 30, 35, 40)
    ]
    assert "loss 3.250" in lines[0]
    assert "50% of ideal" in lines[0]
    assert "arena 1/3 MB" in lines[0]


def test_several_ranks_are_told_together_and_each() -> None:
    """Bytes are added up, a step is as long as the slowest has it, the loss is the mean."""
    quick = result(*[step(3.0, 4.0)] * 4)
    slow = result(*[step(4.0, 6.0)] * 4)
    both = report.Result.as_one([quick, slow])
    assert report.Result.as_one([quick]) is quick
    assert (both.step_s, both.last_loss) == (6.0, 3.5)
    assert both.tokens_per_s == 2 * slow.tokens_per_s
    assert both.stats.nvme_read_bytes == 2 * quick.stats.nvme_read_bytes
    assert both.peak_memory_bytes == 10_000_000
    # Twice the bytes at twice the speed, as both were measured at once.
    assert both.ideal == slow.ideal
    rows = {row.name: row for row in report.rows(both)}
    assert rows["read from NVMe"].value.startswith("32.00 ")
    assert rows["waited"].value == "1.50 s in all, of 2 ranks"
    assert rows["process memory"].value == "10 MB over the start at most, of 2 ranks"
    assert rows["rank 1"].value.endswith("tokens/s, 50% of ideal")
    assert "process 5 MB over the start" in rows["rank 0"].note
    assert "rank 0" not in {row.name for row in report.rows(quick)}
    loaded = json.loads(json.dumps(report.as_json(both)))
    assert [rank["step_s"] for rank in loaded["ranks"]] == [4.0, 6.0]


def test_peak_memory_counts_what_came_after_the_start() -> None:
    peak = report.PeakMemory()
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert peak.over_start_bytes() >= 60 << 20
