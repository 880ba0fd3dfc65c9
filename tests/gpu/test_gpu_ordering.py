"""Copies, compute and the drive run beside each other; nothing is used too early or too late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import (
    Config,
    assert_equal,
    base_batches,
    base_model,
    config_for,
    train,
)
from tiering.arena import Arena
from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.device import DeviceTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

HOMES = [(p, o) for p in ("none", "cpu", "nvme") for o in ("none", "cpu", "nvme")]
MS = 2_000_000
"""Cycles of a GPU, about a millisecond."""


def on_gpu() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The base batches."""
    return [(inputs.cuda(), targets.cuda()) for inputs, targets in base_batches()]


def wide_model(blocks: int = 8, width: int = 512) -> nn.Sequential:
    """Blocks large enough that their copies take time."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
    ).cuda()


def square(run: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """A loss without targets."""
    return run(batch).square().mean()


@pytest.mark.parametrize(("param", "optimizer"), HOMES)
@pytest.mark.parametrize("memory", ["auto", "40MB"])
def test_twenty_steps_in_debug_mode_change_nothing(
    memory: str, param: str, optimizer: str, tmp_path: Path
) -> None:
    """Free memory is no number, and still every loss and weight is that of the states at home."""
    if memory != "auto" and (param, optimizer) != ("nvme", "nvme"):
        pytest.skip("memory is short only where all is on the drive")
    common = {"steps": 20, "loss_of": square}
    common["batches"] = [
        torch.randn(16, 512, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    ]
    config: dict[str, Any] = {"gradient_clipping": 1.0, "bf16": {"enabled": True}}
    near = config_for(tmp_path, param="none", optimizer="none", **config)
    losses, weights = train(wide_model().bfloat16(), near, **common)
    tiering = {"poison": True, "host_memory": memory}
    away = config_for(tmp_path, param=param, optimizer=optimizer, tiering=tiering, **config)
    poisoned_losses, poisoned = train(wide_model().bfloat16(), away, **common)
    assert poisoned_losses == losses
    assert_equal(poisoned, weights)


@contextmanager
def uploading(nbytes: int, **options: Any) -> Iterator[tuple[DeviceTier, torch.Tensor]]:
    """A device tier, and registered host memory full of ones (fp32)."""
    arena, tier = Arena(nbytes), DeviceTier(torch.device("cuda", 0), **options)
    tier.register(arena.memory.address, arena.capacity_bytes)
    slot = arena.allocate(nbytes, owner="test")
    host = slot.tensors(RecordSpec("x", (TensorSpec("x", torch.float32, (nbytes // 4,)),)))["x"]
    try:
        yield tier, host.fill_(1)
    finally:
        tier.unregister()
        arena.close()


def test_debug_mode_shows_a_use_before_arrival() -> None:
    """A stream that does not wait for the copy finds no numbers where it has not come yet."""
    with uploading(2**30, poison=True) as (tier, host):
        torch.cuda._sleep(1)  # the driver loads kernels when they are first used, and waits
        tier.upload(host)[0][-1024:].clone()
        torch.cuda.synchronize()
        here, _ = tier.upload(host)
        hasty = torch.cuda.Stream()
        with torch.cuda.stream(hasty):
            torch.cuda._sleep(2 * MS)
            early = here[-1024:].clone()
        late = here[-1024:].clone()
        torch.cuda.synchronize()
        assert bool(early.isnan().all())
        assert bool((late == 1).all())


def test_debug_mode_shows_a_use_after_release() -> None:
    """What was let go is no number once the work before that is done, and not sooner."""
    with uploading(2**20, poison=True) as (tier, host):
        here, _ = tier.upload(host)
        storage = here.untyped_storage()
        alias = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), here.device, storage.nbytes()
        )
        torch.cuda._sleep(20 * MS)
        used = here.clone()
        del here, storage
        tier.upload(host[:1024])
        torch.cuda.synchronize()
        late = torch.empty(0, device="cuda").set_(alias)
        assert bool((used == 1).all())
        assert bool(late.isnan().all())


class Delay(torch.autograd.Function):
    """Keeps the stream busy in backward."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        """The value."""
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, late."""
        torch.cuda._sleep(3 * MS)
        return gradient.clone()


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_a_stream_of_the_users_own_orders_gradients_as_the_default_one(
    home: str, tmp_path: Path
) -> None:
    """Gradients that come late on another stream are waited for, not copied as they are."""

    def steps(stream: torch.cuda.Stream | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.cuda.synchronize()
        batches = on_gpu()
        config = config_for(tmp_path, param=home, optimizer=home, bf16={"enabled": True})
        model = base_model().cuda().bfloat16()
        delayed = nn.Sequential(*model[:-1], _Delayed(), model[-1])
        with torch.cuda.stream(stream):
            found = train(delayed, config, steps=50, batches=batches)
        torch.cuda.synchronize()
        return found

    (losses, weights), (own_losses, own) = steps(None), steps(torch.cuda.Stream())
    assert losses == own_losses
    assert_equal(weights, own)
    assert all(torch.isfinite(tensor).all() for tensor in own.values())


class _Delayed(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The value, whose gradient comes late."""
        out: torch.Tensor = Delay.apply(value)
        return out


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_nothing_in_forward_or_backward_waits_for_the_device(home: str, tmp_path: Path) -> None:
    """Torch refuses every call that would: Python stays ahead, so copies run under compute."""
    config = config_for(tmp_path, param=home, optimizer=home, bf16={"enabled": True})
    batches = [torch.randn(16, 512, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    engine, *_ = infinity.initialize(model=wide_model().bfloat16(), config=config)
    with engine:
        for batch in batches:
            try:
                torch.cuda.set_sync_debug_mode("error")
                loss = square(engine, batch)
                engine.backward(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.step()


class Branches(nn.Module):
    """Two layers of one unit, each on a stream of its own, as some attention blocks are."""

    def __init__(self, *, on_streams: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(512, 512), nn.Linear(512, 512)
        self.streams = [torch.cuda.Stream() for _ in range(2)] if on_streams else []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        if not self.streams:
            return Delay.apply(self.left(value)) + self.right(value)
        outer, found = torch.cuda.current_stream(), []
        for stream, layer in zip(self.streams, (self.left, self.right), strict=True):
            stream.wait_stream(outer)
            with torch.cuda.stream(stream):
                out = layer(value)
                found.append(Delay.apply(out) if layer is self.left else out)
        for stream in self.streams:
            outer.wait_stream(stream)
        return found[0] + found[1]


@pytest.mark.parametrize(
    ("param", "optimizer"), [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")]
)
def test_a_unit_that_several_streams_work_on(param: str, optimizer: str, tmp_path: Path) -> None:
    """Its gradients come from two streams, and are whole before they are used."""
    batches = [torch.randn(64, 512, device="cuda") for _ in range(4)]
    runs = []
    for on_streams in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Branches(on_streams=on_streams) for _ in range(4))).cuda()
        config = config_for(
            tmp_path, param=param, optimizer=optimizer, tiering={"poison": on_streams}
        )
        runs.append(train(model, config, steps=20, batches=batches, loss_of=square))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])


class Buffered(nn.Module):
    """Uses buffers of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.body = base_model()
        self.register_buffer("scale", torch.full((100,), 1.5))
        self.register_buffer(
            "order", torch.randperm(100, generator=torch.Generator().manual_seed(0))
        )
        self.register_buffer("mask", torch.arange(100) % 2 == 0)
        self.seen: list[tuple[torch.device, torch.dtype]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, permuted and masked."""
        self.seen += [(b.device, b.dtype) for b in (self.scale, self.order, self.mask)]
        logits: torch.Tensor = self.body(tokens) * self.scale
        return logits[..., self.order].masked_fill(self.mask, 0.0)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_buffers_are_where_the_model_computes_and_keep_their_types(
    home: str, tmp_path: Path
) -> None:
    """Integers and masks stay what they are in a bf16 model."""
    model = Buffered()
    config = config_for(tmp_path, param=home, optimizer="cpu", bf16={"enabled": True})
    train(model, config, steps=2, batches=on_gpu())
    devices, dtypes = zip(*model.seen, strict=True)
    assert {d.type for d in devices} == {"cuda"}
    assert list(dtypes[:3]) == [torch.float32, torch.int64, torch.bool]


def test_losses_do_not_depend_on_what_else_the_device_does(tmp_path: Path) -> None:
    """Another stream that keeps the device busy moves every copy to another moment."""
    model = wide_model()
    batches = [torch.randn(16, 512, device="cuda") for _ in range(4)]
    config: Config = config_for(tmp_path, gradient_clipping=1.0, tiering={"host_memory": "60MB"})

    def run(busy: Sequence[torch.cuda.Stream]) -> tuple[list[float], dict[str, torch.Tensor]]:
        def loss_of(engine: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
            for stream in busy:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(5 * MS)
            return square(engine, batch)

        return train(copy.deepcopy(model), config, steps=8, batches=batches, loss_of=loss_of)

    (losses, weights), (busy_losses, busy) = run([]), run([torch.cuda.Stream() for _ in range(3)])
    assert losses == busy_losses
    assert_equal(weights, busy)
