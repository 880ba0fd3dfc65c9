"""Runs the command in this process and gives back what it said."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from bench.aio_bench import main

SIDE = {"runtime": 0, "io_bytes": 0, "total_ios": 0}
FIO_JOB = {
    "error": 0,
    "usr_cpu": 1.0,
    "sys_cpu": 3.0,
    "job_runtime": 500,
    "read": {"runtime": 500, "io_bytes": 10**9, "total_ios": 1000},
    "write": SIDE,
}


class Outcome(NamedTuple):
    """Of one command.

    Args:
        code: exit code.
        out: standard output.
        err: standard error.
        json: what it wrote with ``--json``; empty when nothing.
    """

    code: int
    out: str
    err: str
    json: dict


class Command(Protocol):
    """The command, on a folder, with a small file and a few requests."""

    def __call__(self, *arguments: str) -> Outcome:
        """Run ``aio_bench`` with these arguments, the command's name first."""
        ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path to measure, with nothing in it."""
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


@pytest.fixture
def fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a program called fio alone on PATH; it fails when told to use libaio.

    What it was told stands in a file beside it.
    """
    text = json.dumps({"jobs": [FIO_JOB]})
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'echo "$*" >> "$0.log"\n'
        'case "$*" in\n'
        "--version) echo fio-9.9 ;;\n"
        '*libaio*) echo "fio: engine libaio not loadable" >&2; exit 1 ;;\n'
        f"*) printf 'a note\\n%s' '{text}' ;;\n"
        "esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


@pytest.fixture
def deepspeed_python() -> str:
    """An interpreter that has DeepSpeed and its async_io."""
    named = os.environ.get("ZERO_INFINITY_DEEPSPEED_PYTHON", "")
    if named or importlib.util.find_spec("deepspeed"):
        return named or sys.executable
    pytest.skip("needs deepspeed, or ZERO_INFINITY_DEEPSPEED_PYTHON, an interpreter that has it")


@pytest.fixture
def bench(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command and checks that it leaves nothing behind."""

    def run(name: str, *arguments: str) -> Outcome:
        file = tmp_path / "result.json"
        file.unlink(missing_ok=True)
        common = ["--block-size", "256KiB", "--queue-depth", "4", "--json", str(file)]
        common += [] if name == "small" else ["--size", "16MiB"]
        common += ["--requests", "4"] if name in {"run", "sweep"} else []
        try:
            code = main([name, "--path", str(folder), *common, *arguments])
        except SystemExit as error:  # of the argument parser
            code = int(str(error.code))
        captured = capsys.readouterr()
        assert not list(folder.iterdir())
        found = json.loads(file.read_text()) if file.exists() else {}
        return Outcome(code, captured.out, captured.err, found)

    return run
