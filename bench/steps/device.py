"""What a GPU and the link to it give right now, looked at from a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from bench.steps.ideal import Speeds
from tiering.errors import TieringError

_CHILD: Final = "bench.steps.child_device"
_LIMIT_S: Final = 300.0
_ROOT: Final = Path(__file__).resolve().parent.parent.parent


class DeviceError(TieringError):
    """The GPU could not be measured."""


class Device(NamedTuple):
    """One probe.

    Args:
        name: of the GPU.
        link: speeds between it and host memory: upload, offload, and both at once.
        flop_per_s: floating-point operations a second in products of large bf16 matrices.
        gpu_count: of GPUs that torch sees; the first one was measured.
    """

    name: str
    link: Speeds
    flop_per_s: float
    gpu_count: int = 1


def look() -> Device | None:
    """Measure the GPU that torch would use; None where there is none.

    Raises:
        DeviceError: it failed; has the last that was said.
    """
    environment = dict(os.environ)
    seen = [str(_ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, seen))
    try:
        child = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", _CHILD],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"the GPU could not be measured within {_LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().rpartition("\n")[2]
        raise DeviceError(f"the GPU could not be measured: {last}") from error
    found = json.loads(child.stdout)
    if found is None:
        return None
    way = found["link_bytes_per_s"]
    link = Speeds(way["upload"], way["offload"], way["both"])
    return Device(found["name"], link, found["flop_per_s"], found["gpu_count"])
