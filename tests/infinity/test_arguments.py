"""What scripts for DeepSpeed say on their command line and to `initialize`, and how it is met."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import infinity
from infinity.absent import INSTEAD
from tests.infinity.conftest import base_model, config_for
from tiering.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Of a script that trains."""
    mine = argparse.ArgumentParser()
    mine.add_argument("--epochs", type=int, default=1)
    assert infinity.add_config_arguments(mine) is mine
    return mine


def test_the_configuration_that_a_command_line_names_is_used(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    config = config_for(tmp_path, param="none", optimizer="none")
    file.write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": 3}))
    args = parser().parse_args(["--deepspeed", "--deepspeed_config", str(file), "--epochs", "2"])
    assert (args.deepspeed, args.epochs) == (True, 2)
    engine, *_ = infinity.initialize(args=args, model=base_model())
    with engine:
        assert engine.train_micro_batch_size_per_gpu() == 3


def test_a_command_line_without_a_configuration_leaves_it_to_the_call(tmp_path: Path) -> None:
    """One of the two must have it."""
    args = parser().parse_args([])
    assert args.deepspeed is False
    with pytest.raises(ConfigError, match="there must be one configuration, got 0"):
        infinity.initialize(args=args, model=base_model())
    config = config_for(tmp_path, param="none", optimizer="none")
    infinity.initialize(args=args, model=base_model(), config=config).engine.close()


@pytest.mark.parametrize("name", INSTEAD)
def test_what_only_deepspeed_has_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(infinity, name)
    assert str(error.value) == f"module 'infinity' has no attribute {name!r}: {INSTEAD[name]}"
    assert not hasattr(infinity, name)


def test_any_other_name_is_missing_as_usual() -> None:
    """With all that Python makes of the error."""
    with pytest.raises(AttributeError) as error:
        infinity.initialise  # noqa: B018
    assert str(error.value) == "module 'infinity' has no attribute 'initialise'"
    assert (error.value.name, error.value.obj) == ("initialise", infinity)
