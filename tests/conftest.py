"""What a test may ask for: markers that skip with a reason, and the repository's root."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

NVME_VARIABLE = "ZERO_INFINITY_NVME"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Slow tests run only when asked for."""
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure() -> None:
    """Heed Ctrl-C, also where a shell has started this in the background; children do as we do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this run or this machine cannot do, and say what is missing."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA device"
    if not os.environ.get(NVME_VARIABLE):
        missing["nvme"] = f"{NVME_VARIABLE} names no folder on a drive"
    if not config.getoption("--run-slow"):
        missing["slow"] = "slow; --run-slow was not given"
    for item in items:
        for marker in item.iter_markers():
            if marker.name in missing:
                item.add_marker(pytest.mark.skip(reason=missing[marker.name]))


@pytest.fixture
def nvme_path() -> Path:
    """The folder on a real drive that tests marked nvme may use."""
    return Path(os.environ[NVME_VARIABLE])
