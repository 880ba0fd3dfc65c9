"""What the whole process takes: no spike when an engine is made, no growth while it trains.

Each is measured in a process of its own, by the kernel's count of resident memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.infinity.conftest import python

MIB = 2**20

_SHARED = """
import json, os, sys, threading
from pathlib import Path
import torch
from torch import nn
import infinity

def status(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name + ":"))
    return int(line.split()[1]) * 1024

def config_for(path, **tiering):
    home = {"device": "nvme", "nvme_path": str(path)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}},
        "zero_optimization": {
            "stage": 3, "offload_param": home,
            "offload_optimizer": {**home, "pipeline_read": True, "pipeline_write": True},
            "sub_group_size": 100_000,
        },
        "tiering": tiering,
    }

def step(engine, width):
    loss = engine(torch.ones(2, width)).square().mean()
    engine.backward(loss)
    engine.step()

def warm(path):  # what torch and the package take once, whatever the model
    engine, *_ = infinity.initialize(model=nn.Linear(64, 64), config=config_for(path))
    for _ in range(3):
        step(engine, 64)
    engine.close()
"""

_PEAK = """
path = Path(sys.argv[1])
warm(path)
model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(50)))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
engine, *_ = infinity.initialize(model=model, config=config_for(path))
step(engine, 500)
engine.flush()
print(json.dumps([status("VmHWM") - before, engine.stats().arena_budget_bytes]))
engine.close()
"""

_GROWTH = """
path = Path(sys.argv[1])
warm(path)
model = nn.Sequential(*(nn.Linear(250, 250) for _ in range(12)))
engine, *_ = infinity.initialize(model=model, config=config_for(path))

def figures():
    engine.flush()
    files = [f for f in path.rglob("*") if f.is_file()]
    return {
        "resident": status("VmRSS"), "locked": status("VmLck"), "pinned": status("VmPin"),
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": status("Threads"),
        "disk": sum(f.stat().st_blocks for f in files), "files": len(files),
    }

for number in range(200):
    step(engine, 250)
    if number == 9:
        first = figures()
print(json.dumps([first, figures()]))
engine.close()
"""

_AGAIN = """
path = Path(sys.argv[1])
resource = __import__("resource")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * 2**20, 8 * 2**20))
warm(path)
seen = []
for number in range(40):
    warm(path)
    seen.append([len(os.listdir("/proc/self/fd")), threading.active_count(), status("VmRSS")])
print(json.dumps([seen[4], seen[-1], [p.name for p in path.iterdir()]]))
"""


def test_making_an_engine_takes_the_arena_and_no_copy_of_the_states(tmp_path: Path) -> None:
    """12.5 million parameters have 150 MB of states; moments are never made as a whole."""
    out, _ = python(_SHARED + _PEAK, tmp_path).communicate()
    peak_bytes, arena_bytes = json.loads(out)
    assert arena_bytes < 100e6
    assert peak_bytes < arena_bytes + 32 * MIB


def test_nothing_grows_from_step_to_step(tmp_path: Path) -> None:
    """Resident and locked memory, descriptors, threads, disk: after 10 steps as after 200."""
    out, _ = python(_SHARED + _GROWTH, tmp_path).communicate()
    first, last = json.loads(out)
    assert last.pop("resident") < first.pop("resident") + 8 * MIB
    assert last == first


@pytest.mark.parametrize("at_once", [1, 4])
def test_engines_can_be_made_and_closed_over_and_over(at_once: int, tmp_path: Path) -> None:
    """Under the small lock limit of ordinary systems, and by several processes at once."""
    running = [python(_SHARED + _AGAIN, tmp_path) for _ in range(at_once)]
    for process in running:
        out, _ = process.communicate()
        early, late, _left = json.loads(out)
        assert late[:2] == early[:2]
        assert late[2] < early[2] + 8 * MIB
    assert list(tmp_path.iterdir()) == []
