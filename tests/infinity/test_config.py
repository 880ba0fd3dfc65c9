"""Configuration: DeepSpeed's keys in, one clear report of everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import load_config
from tests.infinity.conftest import (
    Config,
    base_model,
    config_for,
    train,
    without_optimizer,
)
from tiering.errors import ConfigError


def test_unknown_keys_name_the_nearest_one_and_are_reported_together() -> None:
    """One error for all problems of a file, with full keys."""
    with pytest.raises(ConfigError) as error:
        load_config(
            {
                "zero_optimization": {"offload_params": {}, "stage3_max_live_paramaters": 1},
                "aio": {"blocksize": 1},
                "comment": "mine",
            }
        )
    text = str(error.value)
    zero = "zero_optimization"
    for key, near in {
        f"{zero}.offload_params": f"{zero}.offload_param",
        f"{zero}.stage3_max_live_paramaters": f"{zero}.stage3_max_live_parameters",
        "aio.blocksize": "aio.block_size",
    }.items():
        assert f"{key}: unknown key; did you mean {near!r}?" in text
    assert "comment: unknown key" in text
    assert "4 problem(s)" in text


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"offload_param": {"device": "nvme"}}, r"offload_param\.nvme_path must name"),
        (
            {"offload_param": {"device": "nvme", "nvme_path": None}},
            r"offload_param\.nvme_path must",
        ),
        (
            {
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/there"},
            },
            r"offload_param\.nvme_path must name a folder .* \(its sibling has '/there'\)",
        ),
    ],
)
def test_nvme_without_a_path_names_the_key(section: dict[str, Any], message: str) -> None:
    """There is no default path; a sibling's is suggested."""
    with pytest.raises(ConfigError, match=message):
        load_config({"zero_optimization": {"stage": 3, **section}})


def spread(*paths: object, **own: str) -> Config:
    """A configuration with these paths for everything, and a path of a section's own."""
    zero = {name: {"device": "nvme", "nvme_path": path} for name, path in own.items()}
    return {"zero_optimization": {"stage": 3, **zero}, "tiering": {"nvme_paths": list(paths)}}


def test_several_paths_take_the_place_of_each_sections_own(tmp_path: Path) -> None:
    """As text or with a speed; a section may still name one of them, by whatever name."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    config = load_config(spread(f"{tmp_path}/a", f"{tmp_path}/b", offload_param=f"{tmp_path}/link"))
    for section in (config.zero_optimization.offload_param, infinity.config.OffloadOptimizer()):
        assert config.nvme_paths(section) == {f"{tmp_path}/a": None, f"{tmp_path}/b": None}
    config = load_config(spread({"path": "/a", "gb_per_s": 6}, {"path": "/b", "gb_per_s": 2.5}))
    assert config.nvme_paths(config.zero_optimization.offload_param) == {"/a": 6.0, "/b": 2.5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (spread(), r"tiering\.nvme_paths: is empty; name a folder on each drive"),
        (spread("/a", "/b", "/a/"), r"tiering\.nvme_paths: '/a' and '/a/' are one directory"),
        (spread("/a", "/a"), r"tiering\.nvme_paths: '/a' and '/a' are one directory"),
        (spread("/a", ""), r"tiering\.nvme_paths\.1\.path: is empty"),
        (spread("/a", 5), r"tiering\.nvme_paths\.1: must be a path, or .*, got 5"),
        (spread("/a", "/dev/null"), r"nvme_paths\.1\.path: '/dev/null' is not a directory; name"),
        (
            spread({"path": "/a", "gb_per_s": -1}, "/b"),
            r"tiering\.nvme_paths\.0\.gb_per_s: .* greater than 0, got -1",
        ),
        (
            spread({"path": "/a", "gb_per_s": 1}, "/b", "/c"),
            r"'/b', '/c' have no gb_per_s; give it for all paths, or for none",
        ),
        (
            spread({"path": "/a", "gb_per_sec": 1}),
            r"nvme_paths\.0\.gb_per_sec: .* did you mean 'tiering\.nvme_paths\.gb_per_s'\?",
        ),
        (
            spread("/a", "/b", offload_param="/c", offload_optimizer="/b"),
            r"offload_param\.nvme_path '/c' must be among tiering\.nvme_paths \('/a', '/b'\)",
        ),
    ],
)
def test_paths_that_cannot_be_spread_over_are_refused(config: Config, message: str) -> None:
    """With the key, the value, and what to do."""
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_what_is_wrong_with_each_path_is_told_at_once() -> None:
    """One problem a path."""
    paths = ("/dev/null", {"path": "/a", "gb_per_s": 0}, {"path": "/b", "gb_per_s": "fast"})
    with pytest.raises(ConfigError, match=r"3 problem\(s\)") as error:
        load_config(spread(*paths))
    for place in ("0.path", "1.gb_per_s", "2.gb_per_s"):
        assert f"tiering.nvme_paths.{place}: " in str(error.value)


@pytest.mark.parametrize(
    ("aio", "word"), [({"queue_depth": 0}, "queue_depth"), ({"block_size": 5000}, "power of two")]
)
def test_io_settings_that_cannot_work_are_refused(aio: dict[str, int], word: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=word):
        load_config({"aio": aio})


def test_a_path_that_cannot_be_used_is_refused_before_anything_moves(tmp_path: Path) -> None:
    """A file in its place is an error and the model is as it was; a missing folder is made."""
    blocked = tmp_path / "file"
    blocked.write_text("x")
    model = base_model()
    with pytest.raises(ConfigError, match="file"):
        infinity.initialize(model=model, config=config_for(blocked))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    train(model, config_for(tmp_path / "folder"), steps=1)


def test_a_budget_that_cannot_do_is_refused_with_the_sum(tmp_path: Path) -> None:
    """And the model is as it was."""
    model = base_model()
    with pytest.raises(ConfigError, match="smallest budget"):
        infinity.initialize(model=model, config=config_for(tmp_path, tiering={"host_memory": 4096}))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_an_optimizer_that_is_not_adam_is_refused(tmp_path: Path) -> None:
    """With its name."""
    model = base_model()
    with pytest.raises(ConfigError, match="SGD"):
        infinity.initialize(
            model=model,
            config=without_optimizer(config_for(tmp_path)),
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        )


def test_all_auto_on_a_tiny_model_takes_little_memory(tmp_path: Path) -> None:
    """Hidden size 1, two parameters: the arena is what the model can use."""
    model = nn.Linear(1, 1)
    zero = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    engine, *_ = infinity.initialize(
        model=model, config=config_for(tmp_path, zero_optimization=zero)
    )
    with engine:
        for _ in range(5):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
        assert engine.stats().arena_budget_bytes < 2**20


@pytest.mark.parametrize("size", ["8GG", "-1", "infGiB", -1, [3]])
def test_a_size_that_is_none_is_one_problem_in_plain_words(size: object) -> None:
    """The key, the value, and no word of the machinery that checks it."""
    with pytest.raises(ConfigError, match=r"1 problem\(s\)") as error:
        load_config({"tiering": {"host_memory": size}})
    text = str(error.value)
    assert "tiering.host_memory: " in text
    assert "function" not in text


@pytest.mark.parametrize(
    ("size", "nbytes"), [("8G", 8 << 30), ("100M", 100 << 20), ("1TB", 10**12)]
)
def test_sizes_are_read_as_everywhere_in_the_package(size: str, nbytes: int) -> None:
    """With and without the i, large and small letters."""
    assert load_config({"tiering": {"host_memory": size}}).tiering.host_memory == nbytes
