"""The model, the data and the reference that the engine's tests share."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.comm import Communicator
from tests.infinity.ranks import RankPool, rank_pool

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


def base_model(seed: int = 0) -> nn.Module:
    """Embedding, three blocks, a head: shapes that are no multiples of anything in the engine."""
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(100, 32), *blocks, nn.Linear(32, 100))


def base_batches(count: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fixed batches of two sequences of tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100, (count, 2, 2, 9), generator=generator)
    return [(inputs, targets) for inputs, targets in tokens]


def base_loss(model: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the model's logits."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def config_for(path: Path, *, param: str = "nvme", optimizer: str = "nvme", **extra: Any) -> Config:
    """The base configuration: stage 3, torch's AdamW with rate 1e-3, no clipping."""
    zero: Config = {
        "stage": 3,
        "offload_param": {"device": param},
        "offload_optimizer": {"device": optimizer},
        "stage3_param_persistence_threshold": 0,
    }
    for section in ("offload_param", "offload_optimizer"):
        if zero[section]["device"] == "nvme":
            zero[section]["nvme_path"] = str(path)
    zero.update(extra.pop("zero_optimization", {}))
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": zero,
        **extra,
    }


def without_optimizer(config: Config) -> Config:
    """The configuration for a test that gives `initialize` an optimizer of its own."""
    return {key: value for key, value in config.items() if key != "optimizer"}


def train(
    model: nn.Module,
    config: Config,
    *,
    steps: int,
    loss_of: Callable[..., torch.Tensor] = base_loss,
    batches: Sequence[Any] | None = None,
    **arguments: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the engine; returns the losses and the final weights."""
    batches = base_batches() if batches is None else batches
    losses = []
    engine, *_ = infinity.initialize(model=model, config=config, **arguments)
    with engine:
        for step in range(steps):
            loss = loss_of(engine, batches[step % len(batches)])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        weights = engine.module.state_dict()
    return losses, weights


def samples(step: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of sequences of tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 100, (2, batch, 9), generator=generator)
    return tokens[0], tokens[1]


def train_part(
    config: Config, steps: int, accumulation: int, batch: int = 8
) -> tuple[list[float], Weights]:
    """This rank's share of every global batch; returns the gradient norms and the weights."""
    comm = Communicator()
    config = {**config, "train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    config.pop("train_micro_batch_size_per_gpu")
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    norms = []
    with engine:
        micro = engine.train_micro_batch_size_per_gpu()
        assert micro == batch // accumulation // comm.size
        for step in range(steps):
            inputs, targets = samples(step, batch)
            for number in range(accumulation):
                start = (number * comm.size + comm.rank) * micro
                part = slice(start, start + micro)
                engine.backward(base_loss(engine, (inputs[part], targets[part])))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms, engine.module.state_dict()


class Reference:
    """Plain torch on a copy of the model: fp32 masters, weights and gradients rounded."""

    def __init__(
        self,
        model: nn.Module,
        *,
        storage: torch.dtype = torch.float32,
        compute: torch.dtype = torch.float32,
        clip: float = 0.0,
        **adam: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.storage, self.compute, self.clip = storage, compute, clip
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, **{"lr": 1e-3, **adam})
        self.model.to(compute)
        self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.data = master.detach().to(self.storage).to(self.compute)

    def step(self, losses: Sequence[torch.Tensor]) -> None:
        """One update from the micro-batches' losses."""
        for loss in losses:
            (loss / len(losses)).backward()
        rounding = self.storage if len(losses) == 1 else torch.float32
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(rounding).float()
            weight.grad = None
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self._publish()

    def train(
        self,
        steps: int,
        *,
        loss_of: Callable[..., torch.Tensor] = base_loss,
        batches: Sequence[Any] | None = None,
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The same loop as the engine's."""
        batches = base_batches() if batches is None else batches
        losses = []
        for step in range(steps):
            loss = loss_of(self.model, batches[step % len(batches)])
            self.step([loss])
            losses.append(float(loss.detach()))
        return losses, {k: v.detach().clone() for k, v in self.model.state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """No difference at all."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def assert_close(
    left: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    *,
    rtol: float = 1e-6,
    atol: float = 1e-7,
) -> None:
    """Equal up to the rounding of the arithmetic."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def model() -> nn.Module:
    """A fresh base model."""
    return base_model()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test starts from the same random state."""
    torch.manual_seed(1234)


@contextmanager
def drive_of(size: str, folder: Path) -> Iterator[Path]:
    """A file system of this size."""
    small = folder / "small"
    small.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield small
    finally:
        subprocess.run(["umount", str(small)], check=True)


def python(code: str, path: Path) -> subprocess.Popen[str]:
    """Run a program with the path as its argument; it can import what the tests can."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: ``on_ranks(2, function, *arguments)``."""
    with rank_pool() as pool:
        yield pool
