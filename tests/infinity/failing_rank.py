"""A program for torchrun of which rank 1 fails in one of many ways, while rank 0 trains on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

import infinity
from tests.infinity.conftest import (
    base_loss,
    base_model,
    config_for,
    samples,
    without_optimizer,
)

RANK = int(os.environ["RANK"])


def throw() -> NoReturn:
    """As a mistake of the user's does."""
    raise ValueError("a mistake of one rank")


def loop() -> None:
    """Never come back."""
    while True:
        pass


def leave(code: int) -> Callable[[], None]:
    """End at once."""
    return lambda: os._exit(code)


def send(number: signal.Signals, *, to_launcher: bool) -> Callable[[], None]:
    """A signal to this process, or to torchrun, which passes it on."""

    def act() -> None:
        os.kill(os.getppid() if to_launcher else os.getpid(), number)
        loop()

    return act


BETWEEN: dict[str, Callable[[], None]] = {
    "throw": throw,
    "throw within with": throw,
    "throw with close": throw,
    "exit": leave(7),
    "kill": send(signal.SIGKILL, to_launcher=False),
    "interrupt": send(signal.SIGINT, to_launcher=False),
    "terminate all": send(signal.SIGTERM, to_launcher=True),
    "interrupt all": send(signal.SIGINT, to_launcher=True),
    "hang": loop,
}


class Failing(torch.autograd.Function):
    """Does nothing until its backward."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> NoReturn:
        """Fail."""
        del gradient
        throw()


class Model(nn.Sequential):
    """The base model, with a place in its middle where something may happen."""

    middle: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As a sequence."""
        for number, module in enumerate(self):
            x = module(x)
            if number == 1 and self.middle is not None:
                x = self.middle(x)
        return x


def main(kind: str, path: str, own_path: str) -> None:
    """Train three steps; in the second rank 1 fails."""
    if not kind.endswith(" all") and RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it shall find out by itself
    model = Model(*base_model())
    config = config_for(path, tiering={"collective_timeout_s": 2 if kind == "hang" else 60})
    if RANK == 1 and kind == "other path":
        config = config_for(own_path, tiering=config["tiering"])
    if RANK == 1 and kind == "configuration":
        config["zero_optimization"]["stag"] = 3
    if kind == "buffer":
        model.register_buffer("seen", torch.zeros(3 + RANK))
    optimizer = None
    if kind == "optimizer":
        optimizer = torch.optim.AdamW(list(model.parameters())[RANK:])
        config = without_optimizer(config)
    engine, *_ = infinity.initialize(model=model, config=config, optimizer=optimizer)
    try:
        with engine if kind == "throw within with" else nullcontext():
            train(engine, model, kind)
        if kind != "never close" and (kind, RANK) != ("close on one", 1):
            engine.close()
    finally:
        if kind == "throw with close":
            engine.close()
    sys.stdout.write(f"rank {RANK} ended\n")


def train(engine: infinity.InfinityEngine, model: Model, kind: str) -> None:
    """The steps."""
    for step in range(3):
        if RANK == 1 and step == 1:
            BETWEEN.get(kind, lambda: None)()
            model.middle = {"forward": lambda _: throw(), "backward": Failing.apply}.get(kind)
        inputs, targets = (t.to(engine.device) for t in samples(step))
        part = slice(4 * RANK, 4 * RANK + 4)
        engine.backward(base_loss(engine, (inputs[part], targets[part])))
        engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
