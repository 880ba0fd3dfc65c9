"""Settings that cannot work are refused before anything starts, and a missing build says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiering.aio import AioConfig, FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("block_bytes", 0),
        ("block_bytes", 2048),
        ("block_bytes", 5000),
        ("queue_depth", 0),
        ("queue_depth", 4097),
        ("threads", -1),
        ("max_files", 0),
        ("max_files", 65537),
        ("backend", "aio"),
        ("direct", "on"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_value(setting: str, value: int | str) -> None:
    """And with what could."""
    with pytest.raises(ConfigError, match=rf"{setting} must be .*got {re.escape(repr(value))}"):
        AioConfig(**{setting: value})


def test_faults_are_checked_too() -> None:
    """A test should not pass because its fault was dropped."""
    with pytest.raises(ConfigError, match="at most 8"):
        Faults(rules=(FaultRule(FaultAction.SHORT),) * 9)
    with pytest.raises(ConfigError, match="power of two"):
        Faults(force_alignment_bytes=1000)
    with pytest.raises(ConfigError, match="force_memory_alignment_bytes must be a power of two"):
        Faults(force_memory_alignment_bytes=1000)


def build_settings(**environment: str) -> subprocess.CompletedProcess[str]:
    """What the build would do, said by the build script itself."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['setup.py', 'build_ext']\n"
        "made = runpy.run_path('tiering/aio/_build.py')\n"
        "print(made['ffibuilder']._assigned_source[3])\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_build_without_liburing_stops_with_one_message() -> None:
    """It names the packages and the switch."""
    ran = build_settings(CC="cc -nostdinc", ZERO_INFINITY_NO_URING="")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    for word in ("liburing-dev", "liburing-devel", "ZERO_INFINITY_NO_URING=1"):
        assert word in ran.stderr


def test_the_switch_builds_without_liburing() -> None:
    """Nothing of it is asked for or linked."""
    ran = build_settings(CC="cc -nostdinc", ZERO_INFINITY_NO_URING="1")
    assert ran.returncode == 0
    assert "AIO_NO_URING" in ran.stdout
    assert "uring.a" not in ran.stdout
