"""What the commands are made of."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.aio_bench import main
from bench.buffers import Buffer
from bench.facts import drive_of, machine_facts
from bench.job import Job, Op
from bench.report import write_json
from bench.workload import Bandwidth, rank, walk
from tiering.errors import ConfigError
from tiering.sizes import (
    format_bytes,
    parse_bytes,
    power_of_two_above,
    power_of_two_below,
    write_bytes,
)

JOBS = st.builds(
    Job,
    st.sampled_from(["read", "write", "mixed"]),
    st.integers(1, 200).map(lambda blocks: blocks * 2**16),
    block_bytes=st.sampled_from([2**12, 2**14, 2**16]),
    queue_depth=st.integers(1, 300),
    asked_request_bytes=st.sampled_from([0, 2**16, 2**18]),
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 2**32), ("64k", 2**16), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2TiB", 2**41)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "4XiB", "-1", "0", "1.5", "4 GiB more"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.one_of(st.integers(1, 2**50), st.integers(1, 2**10).map(lambda n: n * 2**20)))
def test_a_size_that_is_written_is_read_back(nbytes: int) -> None:
    assert parse_bytes(write_bytes(nbytes)) == nbytes


def test_sizes_are_written_in_the_largest_unit_that_divides_them() -> None:
    sizes = (5, 2**12, 39 * 2**20, 3 * 2**30, 2**41)
    assert [write_bytes(n) for n in sizes] == ["5", "4KiB", "39MiB", "3GiB", "2TiB"]


@given(st.integers(1, 2**50))
def test_powers_of_two_enclose_a_number(value: int) -> None:
    below, above = power_of_two_below(value), power_of_two_above(value)
    assert below <= value <= above
    assert above in {below, 2 * below}


def test_sizes_are_told_in_fitting_units() -> None:
    assert [format_bytes(n) for n in (5, 2**10, 3 * 2**19, 2**32)] == [
        "5 bytes",
        "1 KiB",
        "1.5 MiB",
        "4 GiB",
    ]


@given(JOBS)
def test_requests_keep_the_queue_full_and_fit_the_memory(job: Job) -> None:
    assert job.request_bytes >= job.block_bytes
    assert job.requests_each_way * job.request_bytes >= 4 * job.queue_bytes
    assert job.memory_bytes >= max(job.request_bytes, 2 * job.queue_bytes)
    assert job.memory_bytes % job.request_bytes == 0


@given(JOBS)
def test_a_pass_covers_the_file_once(job: Job) -> None:
    orders = list(itertools.islice(walk(job, "read", job.request_bytes), job.requests_a_pass))
    ends = [0, *(order.offset + order.nbytes for order in orders)]
    assert [order.offset for order in orders] == ends[:-1]
    assert ends[-1] == job.size_bytes


@given(JOBS)
def test_a_mixed_job_reads_and_writes_in_turn(job: Job) -> None:
    count = 2 * job.requests_a_pass
    orders = list(itertools.islice(walk(job, "mixed", job.request_bytes), count))
    assert [order.verb for order in orders] == ["read", "write"] * job.requests_a_pass
    assert {o[1:] for o in orders[::2]} == {o[1:] for o in orders[1::2]}


@pytest.mark.parametrize("pages", ["huge", "small"])
def test_data_is_that_of_its_seed_and_differences_are_found(pages: str) -> None:
    buffer = Buffer(2**21, 2, pages=pages, seed=3)
    same = Buffer(2**21, 2, pages="small", seed=3)
    other = Buffer(2**21, 2, pages="small", seed=4)
    data = [bytes(one._array[: 2**21]) for one in (buffer, same, other)]
    assert data[0] == data[1] != data[2]
    offset = 5 * 2**21 + 4096
    assert buffer.first_difference(offset, 4096) == offset  # nothing was read yet
    buffer._array[2**21 :] = buffer._array[: 2**21]
    assert buffer.first_difference(offset, 4096) is None
    facts = buffer.page_facts()
    assert facts.mapped_bytes == 2**22
    assert facts.runs_per_mib is None or 1 <= facts.runs_per_mib <= 256
    if pages == "small":
        assert facts.huge_bytes == 0


@pytest.mark.parametrize("seed", [0, 3, 2**70])
def test_stamped_data_differs_in_every_sector(seed: int) -> None:
    buffer = Buffer(2**16, 2, pages="small", seed=seed)
    sectors = []
    for offset in range(0, 2**18, 2**16):
        buffer.stamp(offset, 2**16)
        sectors += [row.tobytes() for row in buffer._array[: 2**16].reshape(-1, 512)]
    assert len(set(sectors)) == 2**18 // 512
    buffer._array[2**16 :] = buffer._array[: 2**16]  # the last part of the file
    assert buffer.first_difference(2**18 - 2**16, 2**16) is None
    assert buffer.stamped_for(2**18 - 512) is None
    assert buffer.stamped_for(512) == 2**18 - 2**16 + 512


def test_random_data_does_not_repeat_soon() -> None:
    buffer = Buffer(2**22, 1, pages="small", seed=0)
    array = buffer._array.reshape(-1, 4096)
    assert len({row.tobytes() for row in array}) == len(array)


def test_ranks_are_values_that_occur() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [rank(values, part) for part in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert rank([], 0.5) == 0.0


def test_the_machine_can_be_described(tmp_path: Path) -> None:
    facts = machine_facts()
    assert facts.cpu_count >= 1
    assert facts.memlock
    assert drive_of(tmp_path)


@pytest.mark.parametrize("op", ["read", "write", "mixed"])
def test_a_job_describes_itself(op: Op) -> None:
    assert Job(op, 2**32).describe() == f"{op}, 4 GiB in blocks of 1 MiB, queue depth 32"


def test_a_result_without_processor_time_is_still_json(tmp_path: Path) -> None:
    figures = Bandwidth(seconds=1.0, read_bytes=1, written_bytes=0, blocks=1, cpu_s=0.0)
    write_json(tmp_path / "a.json", {"runs": [{"per_core": figures.gb_per_s_per_core}, (1, 2.5)]})
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert found == {"runs": [{"per_core": None}, [1, 2.5]]}


def test_every_option_in_the_document_exists(capsys: pytest.CaptureFixture[str]) -> None:
    usage = ""
    for command in ("run", "sweep", "compare", "small", "table"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage += capsys.readouterr().out
    text = (Path(__file__).parents[2] / "docs" / "aio_bench.md").read_text()
    assert set(re.findall(r"--[a-z][a-z-]*", text)) == set(re.findall(r"--[a-z][a-z-]*", usage)) - {
        "--help"
    }
