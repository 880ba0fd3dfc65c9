"""Training through the tiers equals training without them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity
from tests.infinity.conftest import (
    Reference,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    train,
    without_optimizer,
)

DEVICES = ["none", "cpu", "nvme"]
BF16 = {"enabled": True}


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_equals_plain_torch_after_ten_steps(device: str, tmp_path: Path) -> None:
    """Weights and losses equal those of torch's AdamW on the whole model in memory."""
    model = base_model()
    expected_losses, expected = Reference(model).train(10)
    losses, weights = train(model, config_for(tmp_path, param=device, optimizer=device), steps=10)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(weights, expected)


def test_the_fused_kernel_equals_torchs_fused_kernel(tmp_path: Path) -> None:
    """A user's AdamW(fused=True) is taken over with its kernel."""
    model = base_model()
    _, expected = Reference(model, fused=True).train(5)
    _, weights = train(
        model,
        without_optimizer(config_for(tmp_path)),
        steps=5,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    )
    assert_close(weights, expected)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_bf16_is_within_a_rounding_of_a_reference_with_fp32_masters(
    compute: str, tmp_path: Path
) -> None:
    """The reference rounds weights and gradients to bf16 and updates fp32 masters."""
    model = base_model()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    reference = Reference(model, storage=torch.bfloat16, compute=dtype)
    expected_losses, expected = reference.train(10)
    config = config_for(tmp_path, bf16=BF16, tiering={"compute_dtype": compute})
    losses, weights = train(model, config, steps=10)
    assert losses == pytest.approx(expected_losses, rel=1e-2)
    assert_close(weights, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_tiers_never_change_a_bit(bf16: bool, tmp_path: Path) -> None:
    """Every combination of homes trains to equal losses and weights."""
    model = base_model()
    runs = {
        (param, optimizer): train(
            copy.deepcopy(model),
            config_for(
                tmp_path,
                param=param,
                optimizer=optimizer,
                bf16={"enabled": bf16},
                gradient_clipping=1.0,
            ),
            steps=6,
        )
        for param in DEVICES
        for optimizer in DEVICES
    }
    losses, weights = runs["none", "none"]
    for other_losses, other in runs.values():
        assert other_losses == losses
        assert_equal(other, weights)


@pytest.mark.parametrize("sub_group", [16, 48, 1600, 10**9])
def test_tile_size_never_changes_a_bit(sub_group: int, tmp_path: Path) -> None:
    """Cutting the optimizer state elsewhere gives equal weights."""
    model = base_model()
    _, expected = train(
        copy.deepcopy(model), config_for(tmp_path, param="none", optimizer="none"), steps=3
    )
    config = config_for(tmp_path, zero_optimization={"sub_group_size": sub_group})
    _, weights = train(model, config, steps=3)
    assert_equal(weights, expected)


def test_both_backends_train_to_equal_bits(tmp_path: Path) -> None:
    """io_uring and threads move the same bytes."""
    model = base_model()
    uring, threads = (
        train(copy.deepcopy(model), config_for(tmp_path, tiering={"aio_backend": name}), steps=4)
        for name in ("uring", "threads")
    )
    assert uring[0] == threads[0]
    assert_equal(uring[1], threads[1])


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_scales_by_the_global_norm(device: str, tmp_path: Path) -> None:
    """The update equals torch's after clip_grad_norm_."""
    model = base_model()
    reference = Reference(model, clip=0.1)
    _, expected = reference.train(5)
    _, weights = train(
        model, config_for(tmp_path, param=device, optimizer=device, gradient_clipping=0.1), steps=5
    )
    assert_close(weights, expected)


def test_accumulated_micro_batches_equal_their_mean(tmp_path: Path) -> None:
    """Four micro-batches a step equal the reference that divides each loss by four."""
    model = base_model()
    reference = Reference(model)
    for _ in range(2):
        reference.step([base_loss(reference.model, batch) for batch in base_batches()])
    config = config_for(tmp_path, gradient_accumulation_steps=4)
    _, weights = train(model, config, steps=8)
    assert_close(weights, {k: v.detach() for k, v in reference.model.state_dict().items()})


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_without_gradient_is_left_alone(device: str, tmp_path: Path) -> None:
    """Intermittent gradients: each parameter has its own step count, as in torch."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(5, 5)
            self.sometimes = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, *, use: bool) -> torch.Tensor:
            y = self.always(x)
            return (self.sometimes(y) if use else y).square().mean()

    torch.manual_seed(3)
    model = Sometimes()
    batches = [(torch.randn(4, 5), step % 2 == 0) for step in range(6)]

    def loss_of(module: nn.Module, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
        return module(batch[0], use=batch[1])

    _, expected = Reference(model).train(6, loss_of=loss_of, batches=batches)
    config = config_for(tmp_path, param=device, optimizer=device)
    _, weights = train(model, config, steps=6, loss_of=loss_of, batches=batches)
    assert_close(weights, expected)


class _Fragile(nn.Module):
    """Raises in its forward or its backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fail == "forward":
            raise ArithmeticError(self.fail)
        if self.fail == "backward":
            x.register_hook(self._raise)
        return self.second(x).square().mean()

    def _raise(self, _grad: torch.Tensor) -> None:
        raise ArithmeticError(self.fail)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(where: str, tmp_path: Path) -> None:
    """What the interrupted pass left behind is cleaned up; zero_grad drops its gradients."""
    torch.manual_seed(0)
    model, batches = _Fragile(), list(torch.randn(3, 4, 6))

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch)  # type: ignore[no-any-return]

    _, expected = Reference(model).train(3, loss_of=loss_of, batches=batches)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        for batch in batches:
            model.fail = where
            with pytest.raises(ArithmeticError):
                engine.backward(engine(batch))
            model.fail = ""
            engine.zero_grad()
            engine.backward(engine(batch))
            engine.step()
        assert_close(engine.module.state_dict(), expected)


def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    """Passes under no_grad and inference_mode, some of them cut short."""
    model = base_model()
    _, expected = train(copy.deepcopy(model), config_for(tmp_path), steps=4)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        for batch in base_batches():
            with torch.no_grad():
                base_loss(engine, batch)
            with torch.inference_mode():
                engine.module[1](torch.ones(1, 32))
                base_loss(engine, batch)
            loss = base_loss(engine, batch)
            with torch.no_grad(), pytest.raises(IndexError):
                engine(torch.full((1, 2), 100))
            engine.backward(loss)
            engine.step()
        assert_equal(engine.module.state_dict(), expected)


def test_plain_backward_and_step_without_backward(tmp_path: Path) -> None:
    """loss.backward() does as engine.backward(loss); step() without either is an error."""
    model = base_model()
    _, expected = train(copy.deepcopy(model), config_for(tmp_path), steps=1)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        with pytest.raises(RuntimeError, match=r"without engine\.backward"):
            engine.step()
        base_loss(engine, base_batches()[0]).backward()
        engine.step()
        assert_equal(engine.module.state_dict(), expected)


def test_a_parameter_unfrozen_too_late_is_named(tmp_path: Path) -> None:
    """It is not trained, and one warning says so."""
    model = base_model()
    model[4].requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        model[4].requires_grad_(True)
        for count in (2, 0):
            engine.backward(base_loss(engine, base_batches()[0]))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                engine.step()
            assert len([w for w in told if "is not trained" in str(w.message)]) == count


@pytest.mark.parametrize("way", ["for the optimizer", "function"])
def test_a_scheduler_given_to_initialize_steers_the_rate(way: str, tmp_path: Path) -> None:
    """As in plain torch: warm-up from nothing, one step of the scheduler after each update."""

    def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: step / 3)

    model = base_model()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scheduler = warm_up(reference)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, returned = infinity.initialize(
        model=model,
        config=without_optimizer(config_for(tmp_path)),
        optimizer=own,
        lr_scheduler=warm_up if way == "function" else warm_up(own),
    )
    with engine:
        for batch in base_batches():
            base_loss(plain, batch).backward()
            reference.step()
            scheduler.step()
            reference.zero_grad()
            engine.backward(base_loss(engine, batch))
            engine.step()
            assert engine.get_lr() == returned.get_last_lr() == scheduler.get_last_lr()
        assert_close(engine.module.state_dict(), plain.state_dict())


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would steer nothing, in silence."""
    model = base_model()
    stray = LambdaLR(torch.optim.SGD([torch.ones(1)], lr=1.0), lambda _: 1.0)
    with pytest.raises(infinity.ConfigError, match="steers another optimizer"):
        infinity.initialize(model=model, config=config_for(tmp_path), lr_scheduler=stray)
