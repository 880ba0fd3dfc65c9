"""What scripts for DeepSpeed say on their command line and to `initialize`, and how it is met."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

import infinity
from infinity.absent import INSTEAD
from tests.infinity.conftest import Config, base_model, config_for, without_optimizer
from tiering.errors import ConfigError, TieringWarning


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


def in_memory(path: Path, **extra: Any) -> Config:
    """A configuration that touches no drive; it has an optimizer."""
    return config_for(path, param="none", optimizer="none", **extra)


def told(config: Config, **arguments: Any) -> list[str]:
    """What is warned of while an engine is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infinity.initialize(model=base_model(), config=config, **arguments).engine.close()
    assert all(w.category is TieringWarning for w in caught)
    return [str(w.message) for w in caught]


def test_without_an_optimizer_the_one_that_is_used_is_told(tmp_path: Path) -> None:
    """It is what an empty section means, and it trains."""
    [line] = told(without_optimizer(in_memory(tmp_path)))
    assert "it is AdamW with lr 0.001, betas (0.9, 0.999), eps 1e-08, weight_decay 0.0" in line
    assert told(in_memory(tmp_path) | {"optimizer": {}}) == []


def test_an_optimizer_that_is_given_twice_is_told_with_both() -> None:
    """The object is used; a section that waits to be filled in asks for it."""
    model = base_model()
    own = torch.optim.AdamW(model.parameters(), lr=0.5)
    section = {"type": "Adam", "params": {"lr": 1e-4}}
    with pytest.warns(TieringWarning) as caught:
        engine, *_ = infinity.initialize(model=model, config={"optimizer": section}, optimizer=own)
    with engine:
        assert engine.get_lr() == [0.5]
    [line] = [str(w.message) for w in caught]
    assert line == (
        "the optimizer given to initialize(), AdamW, takes the place of the configuration's "
        "section 'optimizer' of type Adam, which has no effect; leave one of the two out"
    )
    model, section["params"] = base_model(), {"lr": "auto"}
    own = torch.optim.AdamW(model.parameters())
    infinity.initialize(model=model, config={"optimizer": section}, optimizer=own).engine.close()


def test_a_scheduler_that_is_given_twice_is_told_with_both(tmp_path: Path) -> None:
    def constant(optimizer: torch.optim.Optimizer) -> ConstantLR:
        return ConstantLR(optimizer)

    config = in_memory(tmp_path, scheduler={"type": "WarmupLR"})
    assert told(config) == []
    [line] = told(config, lr_scheduler=constant)
    assert line == (
        "the lr_scheduler given to initialize(), function, takes the place of the configuration's "
        "section 'scheduler' of type WarmupLR, which has no effect; leave one of the two out"
    )


@pytest.mark.parametrize(
    ("model", "shown"),
    [(base_model, "<function base_model at 0x"), (nn.Linear, "<class '"), (None, "None")],
)
def test_what_is_no_model_is_refused(model: object, shown: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, got ") as error:
        infinity.initialize(model=model, config=in_memory(tmp_path))
    assert f"got {shown}" in str(error.value)
    assert "give the model itself, not what makes it" in str(error.value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda model: model, "Sequential"),
        (lambda model: model[0], "Embedding"),
        (lambda model: model[0].weight, "Parameter"),
        (lambda model: model.parameters, "method"),
    ],
)
def test_what_are_no_parameters_is_refused(
    make: Callable[[nn.Module], object], kind: str, tmp_path: Path
) -> None:
    """Though some of it can be iterated over."""
    model = base_model()
    with pytest.raises(ConfigError, match=rf"got a {kind}; give model\.parameters\(\)"):
        infinity.initialize(model=model, config=in_memory(tmp_path), model_parameters=make(model))
