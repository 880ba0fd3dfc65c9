"""States and gradients of single parameters can be read and changed, wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.comm import Communicator
from tests.infinity.conftest import (
    Config,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
)
from tests.infinity.ranks import RankPool
from tiering.errors import ConfigError

STATES = ("master", "exp_avg", "exp_avg_sq", "step")
FIELDS = (*STATES, "gradient")


def look_and_change(config: Config) -> list[dict[str, torch.Tensor]]:
    """Three steps, a look at everything, some changes, one more step; what was seen."""
    model = base_model()
    engine, *_ = infinity.initialize(model=model, config=config)
    rank, size = Communicator().rank, Communicator().size
    seen = []
    with engine:
        for inputs, targets in base_batches(4):
            part = slice(rank * 2 // size, (rank + 1) * 2 // size)
            engine.backward(base_loss(engine, (inputs[part], targets[part])))
            fields = {
                f"{name} {field}": engine.get_state(parameter, field)
                for name, parameter in model.named_parameters()
                for field in FIELDS
            }
            seen.append({k: v for k, v in fields.items() if v is not None})
            if len(seen) == 3:
                weight = model[1][0].weight
                engine.set_state(weight, "exp_avg", torch.zeros(weight.shape))
                engine.set_state(weight, "master", torch.full(weight.shape, 2.0))
                assert bool((weight.detach() == 2).all())
                engine.set_state(weight, "gradient", torch.ones(weight.shape))
            engine.step()
            assert engine.get_state(model[4].weight, "gradient") is None
        seen.append(engine.module.state_dict())
    return seen


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_what_is_read_and_set_does_not_depend_on_where_it_lives(home: str, tmp_path: Path) -> None:
    """Bit for bit; a state that was set is used in the next step, and the weight follows."""
    here = look_and_change(config_for(tmp_path, param="none", optimizer="none"))
    there = look_and_change(config_for(tmp_path, param=home, optimizer=home))
    for ours, theirs in zip(here, there, strict=True):
        assert_equal(ours, theirs)
    # One step of AdamW, decay 0.01, from the weight 2 with the gradient 1 and no first moment.
    moment = 0.1 / (1 - 0.9**3)
    second = here[2]["1.0.weight exp_avg_sq"] * 0.999 + 0.001
    expected = 2 * (1 - 1e-3 * 0.01) - 1e-3 * moment / ((second / (1 - 0.999**3)).sqrt() + 1e-8)
    assert_close({"w": here[3]["1.0.weight master"]}, {"w": expected}, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_read_and_set_the_same(stage: int, on_ranks: RankPool, tmp_path: Path) -> None:
    """The mean of all ranks' gradients, and every other state, as one rank has them."""
    config = config_for(
        tmp_path, param="none", optimizer="none", zero_optimization={"stage": stage}
    )
    config["train_micro_batch_size_per_gpu"] = "auto"
    alone = look_and_change(config)
    first, second = on_ranks(2, look_and_change, config)
    for ours, theirs, expected in zip(first, second, alone, strict=True):
        assert_equal(ours, theirs)
        assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0, 1024])
def test_a_gradient_that_is_set_is_clipped_and_applied(scale: int, tmp_path: Path) -> None:
    """Its norm is reported as it is; a loss scale is nobody's business."""
    model = nn.Linear(2, 1, bias=False)
    config = config_for(tmp_path, gradient_clipping=1.0)
    if scale:
        config["fp16"] = {"enabled": True, "loss_scale": scale}
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.backward(engine(torch.tensor([[3.0, 4.0]])).sum())
        assert engine.get_state(model.weight, "gradient").tolist() == [[3, 4]]
        engine.set_state(model.weight, "gradient", torch.tensor([[0.3, 0.4]]))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(0.5, rel=1e-3)
        moment = engine.get_state(model.weight, "exp_avg")
        torch.testing.assert_close(moment, torch.tensor([[0.03, 0.04]]), rtol=1e-3, atol=0)


def test_what_cannot_be_read_or_set_is_refused(tmp_path: Path) -> None:
    """A frozen or foreign parameter, an unknown field, another shape."""
    model = base_model()
    model[0].weight.requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        for parameter in (model[0].weight, nn.Parameter(torch.ones(2))):
            with pytest.raises(ConfigError, match="not trained"):
                engine.get_state(parameter, "master")
        with pytest.raises(ConfigError, match="there are master, exp_avg"):
            engine.get_state(model[4].weight, "momentum")
        with pytest.raises(ConfigError, match=r"shape \(100, 32\), got \(3,\)"):
            engine.set_state(model[4].weight, "master", torch.ones(3))
        for step in (torch.tensor(-1.0), torch.tensor(0.5), torch.ones(2)):
            with pytest.raises(ConfigError, match="must be one whole number from 0"):
                engine.set_state(model[4].weight, "step", step)
        with pytest.raises(ConfigError, match=r"must be real, got torch\.complex64"):
            engine.set_state(model[4].weight, "master", torch.ones(100, 32).to(torch.complex64))


@pytest.mark.parametrize("bf16", [False, True])
def test_another_engine_goes_on_where_the_states_were_read(bf16: bool, tmp_path: Path) -> None:
    """To the last bit: nothing else of the optimizer's is needed."""
    config = config_for(tmp_path, bf16={"enabled": bf16})

    def train(engine: infinity.InfinityEngine, numbers: range) -> None:
        for number in numbers:
            engine.backward(base_loss(engine, base_batches()[number % 4]))
            engine.step()

    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        train(engine, range(3))
        states = [
            {field: engine.get_state(parameter, field) for field in STATES}
            for parameter in engine.parameters()
        ]
        train(engine, range(3, 6))
        expected = engine.module.state_dict()
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for parameter, fields in zip(engine.parameters(), states, strict=True):
            for field, value in fields.items():
                engine.set_state(parameter, field, value)
        train(engine, range(3, 6))
        assert_equal(engine.module.state_dict(), expected)
