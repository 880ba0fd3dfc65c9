"""What memory is left is asked before it is taken, of the machine and of its control groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.control_group import memory_group
from tiering.aio import PinnedMemory
from tiering.aio.headroom import headroom, headrooms, reserved_huge_bytes
from tiering.errors import ConfigError

MEMINFO = "MemTotal: 900 kB\nMemAvailable: 500 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """These files under a root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_says_what_is_available(tmp_path: Path) -> None:
    """Reserved huge pages are apart from that."""
    left = headroom(tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert left is not None
    assert left.nbytes == 500 * 1024
    assert reserved_huge_bytes(tmp_path) == 3 * 2048 * 1024


def test_nothing_is_known_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert headroom(tmp_path) is None
    assert reserved_huge_bytes(tmp_path) == 0


SECOND, FIRST = "sys/fs/cgroup/jobs", "sys/fs/cgroup/memory/mine"
GROUPS = {
    "a limit of a parent, and the word max": (
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            f"{SECOND}/memory.max": "300000\n",
            f"{SECOND}/memory.current": "200000\n",
            f"{SECOND}/memory.stat": "anon 5\ninactive_file 50000\n",
            f"{SECOND}/mine/memory.max": "max\n",
            f"{SECOND}/mine/memory.current": "100\n",
        },
        150_000,
        "300000 bytes of control group",
    ),
    "the first version, over its limit": (
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory:/mine\n0::/\n",
            f"{FIRST}/memory.limit_in_bytes": "1000",
            f"{FIRST}/memory.usage_in_bytes": "1500",
            f"{FIRST}/memory.stat": "total_inactive_file 100",
        },
        0,
        "1000 bytes of control group",
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_tightest_group_of_the_process_counts(name: str, tmp_path: Path) -> None:
    """Cache that can be dropped is free; a group that is over its limit leaves nothing."""
    files, nbytes, said = GROUPS[name]
    left = headroom(tree(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert left is not None
    assert left.nbytes == nbytes
    assert said in left.limit


def test_what_processes_share_has_one_name_in_all_of_them(tmp_path: Path) -> None:
    """The machine has, and a control group has, wherever its folder is seen."""
    files, *_ = GROUPS["a limit of a parent, and the word max"]
    boot = {"proc/sys/kernel/random/boot_id": "this-boot\n"}
    root = tree(tmp_path / "host", {"proc/meminfo": MEMINFO, **files, **boot})
    seen_elsewhere = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **boot}
    container = tree(tmp_path / "container", seen_elsewhere)
    (container / "sys/fs").mkdir(parents=True)
    (container / "sys/fs/cgroup").symlink_to(root / SECOND)
    pools = [left.pool for left in headrooms(root)]
    assert pools[0] == "memory of this-boot"
    assert len(set(pools)) == 2
    assert [left.pool for left in headrooms(container)] == pools
    other = tree(tmp_path / "other", {"proc/meminfo": MEMINFO})
    assert headrooms(other)[0].pool != pools[0]


def test_more_than_the_machine_has_is_refused_with_what_it_has() -> None:
    """Before anything is taken: Linux would promise it and kill somebody."""
    left = headroom()
    assert left is not None
    with pytest.raises(ConfigError, match=r"cannot have .* bytes are .*; ask for less"):
        PinnedMemory(left.nbytes + 2**30)


def test_a_process_in_a_small_control_group_is_refused_and_lives_on() -> None:
    """Really: 128 MiB, of which 512 are asked."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tiering.aio import PinnedMemory\n"
        "from tiering.errors import ConfigError\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text('0')\n"
        "try:\n"
        "    PinnedMemory(2**29)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "print(len(PinnedMemory(2**20).buffer()))\n"
    )
    with memory_group(2**27) as group:
        ran = subprocess.run(
            [sys.executable, "-c", script, str(group.folder)],
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        )
    refusal, lived_on = ran.stdout.splitlines()
    assert f"of the {2**27} bytes of control group" in refusal
    assert lived_on == str(2**20)
