"""What a script gives: on its command line, and to `initialize`.

What is in the configuration and in an argument is the argument's. Nobody should have to find that
out, nor what is used where neither has it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from infinity.config import Config, Optimizer
from tiering.errors import ConfigError, TieringWarning


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser.

    Args:
        parser: what it parses is for `initialize`, as ``args``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "as scripts for DeepSpeed have them")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script itself; changes nothing here"
    )
    group.add_argument(
        "--deepspeed_config", metavar="PATH", help="JSON file with the configuration"
    )
    return parser


def check_arguments(
    config: Config,
    *,
    model: object,
    model_parameters: object,
    optimizer: object,
    lr_scheduler: object,
) -> None:
    """Check what `initialize` is given, by itself and beside the configuration.

    Args:
        config: checked.
        model: as given; the others likewise.
        model_parameters: None: all.
        optimizer: None: the configuration's.
        lr_scheduler: None: the configuration's.

    Raises:
        ConfigError: the model is none, or the parameters are none.

    Warns:
        TieringWarning: something is given twice, or there is no optimizer.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {model!r:.100}; give the model itself, not what "
            "makes it"
        )
    if model_parameters is not None and not _may_be_parameters(model_parameters):
        raise ConfigError(
            "model_parameters must be parameters, or groups of them, got a "
            f"{type(model_parameters).__name__}; give model.parameters(), or leave it out to train "
            "all"
        )
    for remark in _remarks(config, optimizer, lr_scheduler):
        warnings.warn(remark, TieringWarning, stacklevel=3)  # of whoever calls initialize


def _may_be_parameters(value: object) -> bool:
    """A module or a tensor may be iterable as well, but not over parameters."""
    return isinstance(value, Iterable) and not isinstance(value, (nn.Module, torch.Tensor))


def _remarks(config: Config, optimizer: object, lr_scheduler: object) -> Iterator[str]:
    """Which optimizer and scheduler are used, where that is not plain to see."""
    if optimizer is None and config.optimizer is None:
        section = Optimizer()
        settings = ", ".join(
            f"{key} {value}" for key, value in section.settings()._asdict().items()
        )
        yield (
            "there is no optimizer, neither in the configuration nor given to initialize(), so it "
            f"is {section.type} with {settings}; to choose, write a section such as "
            '"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, or give initialize() a '
            "torch.optim.AdamW"
        )
    for name, given, key, own in (
        ("optimizer", optimizer, "optimizer", config.optimizer),
        ("lr_scheduler", lr_scheduler, "scheduler", config.scheduler),
    ):
        # A section with "auto" in it is meant to be filled in by somebody else.
        if given is not None and own is not None and "auto" not in dict(own.params).values():
            yield (
                f"the {name} given to initialize(), {type(given).__name__}, takes the place of "
                f"the configuration's section {key!r} of type {own.type}, which has no effect; "
                "leave one of the two out"
            )
