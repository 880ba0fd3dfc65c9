"""`aio_bench sweep`: the grid, its winner, the picture, and the file it edits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.config_file import with_aio_block, write_aio_block
from bench.sweep import Cell, Setting, best_setting
from bench.workload import Bandwidth
from tests.bench.conftest import Command
from tiering.errors import ConfigError

GRID = ("--block-size", "128KiB,256KiB", "--queue-depth", "2,8", "--op", "read,write")
CONFIG = """{
  "train_batch_size": 8,
  "sub_group_size": 1e9,

  "aio": {"block_size": 4096, "intra_op_parallelism": 1},
  "note": "{ \\"aio\\": 1 }"
}
"""


def test_every_cell_is_measured_and_one_wins(bench: Command) -> None:
    found = bench("sweep", *GRID, "--rounds", "2")
    assert found.code == 0, found.err
    cells = found.json["cells"]
    assert len({(c["op"], c["block_bytes"], c["queue_depth"]) for c in cells}) == len(cells) == 8
    assert all(len(cell["runs"]) == 2 and cell["median"] in cell["runs"] for cell in cells)
    winner = found.json["winner"]
    assert found.json["aio"]["block_size"] == winner["block_bytes"]
    assert found.json["aio"]["queue_depth"] == winner["queue_depth"]
    assert '"block_size": ' in found.out
    assert "memlock limit" in found.out
    assert "8/8" in found.err or "16/16" in found.err


def test_the_winner_is_written_into_a_configuration_and_the_rest_kept(
    bench: Command, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(CONFIG)
    file.chmod(0o640)
    found = bench("sweep", *GRID, "--write-config", str(file))
    assert found.code == 0, found.err
    head, _, tail = CONFIG.partition('{"block_size": 4096, "intra_op_parallelism": 1}')
    text = file.read_text()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert json.loads(text)["aio"] == {**found.json["aio"], "intra_op_parallelism": 1}
    assert file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "drive", "result.json"}


@pytest.mark.parametrize("text", ["", "[1]", '{"aio": ', "{} x"])
def test_a_file_that_is_no_json_object_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="cannot be edited"):
        write_aio_block(file, {"block_size": 4096})
    assert file.read_text() == text


def test_a_missing_configuration_is_told_before_the_work(bench: Command, tmp_path: Path) -> None:
    found = bench("sweep", *GRID, "--write-config", str(tmp_path / "none.json"))
    assert found.code == 2
    assert "none.json" in found.err
    assert not found.json


@given(
    st.dictionaries(
        st.text(max_size=5) | st.just("aio"),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            ),
            max_leaves=5,
        ),
        max_size=4,
    ),
    st.sampled_from([None, 2, "\t"]),
)
def test_editing_changes_the_block_alone_whatever_the_rest(
    config: dict[str, object], indent: int | str | None
) -> None:
    block = {"block_size": 4096, "single_submit": False}
    edited = json.loads(with_aio_block(json.dumps(config, indent=indent), block))
    old = config.get("aio")
    assert edited == {**config, "aio": {**old, **block} if isinstance(old, dict) else block}
    assert list(edited)[: len(config)] == list(config)


def cell(op: str, setting: Setting, gb_per_s: float) -> Cell:
    figures = Bandwidth(1.0, int(gb_per_s * 1e9), 0, 1, 0.1)
    return Cell(op, setting, figures, (figures,))


def test_the_winner_is_good_at_everything() -> None:
    reader, writer, both = Setting(4096, 1, 0), Setting(4096, 2, 0), Setting(4096, 3, 0)
    speeds = {reader: (3.0, 1.0), writer: (1.0, 3.0), both: (2.5, 2.6)}
    cells = [
        cell(op, setting, pair[side])
        for setting, pair in speeds.items()
        for side, op in enumerate(("read", "write"))
    ]
    assert best_setting(cells) == both


def test_among_nearly_equals_the_shortest_queue_wins() -> None:
    cells = [cell("read", Setting(2**20, depth, 0), 3 + depth / 1000) for depth in (8, 16, 32)]
    assert best_setting(cells) == Setting(2**20, 8, 0)


def test_without_matplotlib_a_picture_is_refused_before_the_work(
    bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = bench("sweep", *GRID, "--plot", str(tmp_path / "map.png"))
    assert found.code == 2
    assert "pip install matplotlib" in found.err
    assert not found.json


def test_the_picture_is_drawn(bench: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "map.png"
    found = bench("sweep", *GRID, "--plot", str(file))
    assert found.code == 0, found.err
    assert file.read_bytes().startswith(b"\x89PNG")
    found = bench("sweep", *GRID, "--plot", str(tmp_path / "map.nonsense"))
    assert found.code == 2
