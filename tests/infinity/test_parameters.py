"""The parameter stays the user's: identity, metadata, access from anywhere, aliases."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.parameters import ReleasedParameter
from tests.infinity.conftest import (
    Reference,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    train,
)


@pytest.fixture(params=["none", "cpu", "nvme"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[infinity.InfinityEngine]:
    """An engine over a base model, on each tier."""
    made, *_ = infinity.initialize(
        model=base_model(),
        config=config_for(tmp_path, param=request.param, optimizer=request.param),
    )
    with made:
        yield made


def _one_step(engine: infinity.InfinityEngine) -> None:
    engine.backward(base_loss(engine, base_batches()[0]))
    engine.step()


def test_a_released_parameter_answers_metadata_without_being_fetched(
    engine: infinity.InfinityEngine,
) -> None:
    """Identity, shape, type, stride and contiguity are those of the original, and nothing moves."""
    original = dict(base_model().named_parameters())
    read_bytes = engine.stats().nvme_read_bytes
    for name, parameter in engine.module.named_parameters():
        twin = original[name]
        assert type(parameter) is not nn.Parameter
        assert isinstance(parameter, nn.Parameter)
        assert parameter.shape == twin.shape
        assert parameter.size() == twin.size()
        assert parameter.stride() == twin.stride()
        assert parameter.is_contiguous()
        assert parameter.dtype == twin.dtype
        assert parameter.device == twin.device
        assert parameter.numel() == twin.numel()
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad is None
    assert engine.stats().nvme_read_bytes == read_bytes
    assert all(isinstance(p, ReleasedParameter) for p in engine.parameters())


def test_parameters_are_the_same_objects_all_along(engine: infinity.InfinityEngine) -> None:
    """Training neither replaces a parameter nor renames it."""
    before = dict(engine.module.named_parameters())
    _one_step(engine)
    after = dict(engine.module.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_any_use_outside_forward_sees_the_weights(engine: infinity.InfinityEngine) -> None:
    """Arithmetic, functional calls, comparisons and printing fetch what they need."""
    original = dict(base_model().named_parameters())
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter * 2, original[name] * 2)
        assert torch.equal(torch.cat([parameter.reshape(-1)]), original[name].reshape(-1))
    weight = engine.module[1][0].weight
    ones = torch.ones(1, 32)
    assert torch.equal(
        functional.linear(ones, weight), functional.linear(ones, original["1.0.weight"])
    )
    assert "Parameter containing" in repr(engine.module[2][0].bias)


def test_one_operation_over_parameters_of_all_units_sees_them_all(
    engine: infinity.InfinityEngine,
) -> None:
    """A vector of all parameters is that of the plain model."""
    expected = nn.utils.parameters_to_vector(base_model().parameters())
    assert torch.equal(nn.utils.parameters_to_vector(engine.parameters()), expected)


@pytest.mark.filterwarnings("ignore:tensors that you took")
@pytest.mark.parametrize("taken_by", ["detach", "data", "state_dict", "view"])
def test_an_alias_taken_before_a_release_never_changes(
    taken_by: str, engine: infinity.InfinityEngine
) -> None:
    """Steps that overwrite the weights leave earlier aliases as they were."""
    module = engine.module
    take = {
        "detach": lambda: {n: p.detach() for n, p in module.named_parameters()},
        "data": lambda: {n: p.data for n, p in module.named_parameters()},
        "state_dict": module.state_dict,
        "view": lambda: {n: p.view(-1)[:3] for n, p in list(module.named_parameters())[:2]},
    }[taken_by]
    aliases = take()
    copies = {name: alias.detach().clone() for name, alias in aliases.items()}
    for _ in range(3):
        _one_step(engine)
    for name, alias in aliases.items():
        assert torch.equal(alias, copies[name]), name
    assert (
        not torch.equal(
            engine.module.state_dict()["1.0.weight"].reshape(-1)[:3],
            copies["1.0.weight"].reshape(-1)[:3],
        )
        or taken_by == "view"
    )


def test_state_dict_holds_the_current_weights(tmp_path: Path) -> None:
    """Full tensors, equal to plain torch's after the same steps."""
    expected = Reference(base_model()).train(3)[1]
    _, weights = train(base_model(), config_for(tmp_path), steps=3)
    assert_close(weights, expected)


def test_load_state_dict_is_kept_and_trained_on(tmp_path: Path) -> None:
    """Loaded weights replace weights and masters, though it is stubs that are loaded into."""
    other = base_model(seed=9)
    expected = Reference(other).train(3)[1]
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    with engine:
        engine.module.load_state_dict(other.state_dict())
        for batch in base_batches()[:3]:
            engine.backward(base_loss(engine, batch))
            engine.step()
        assert_close(engine.module.state_dict(), expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("way", ["in_place", "data_in_place", "new_data", "numpy", "init"])
def test_a_change_by_the_user_is_adopted(way: str, device: str, bf16: bool, tmp_path: Path) -> None:
    """A changed weight is seen by the next forward and trained on by the next step."""
    engine, *_ = infinity.initialize(
        model=base_model(),
        config=config_for(
            tmp_path,
            param=device,
            optimizer=device,
            bf16={"enabled": bf16},
            tiering={"compute_dtype": "fp32"},
        ),
    )
    with engine, torch.no_grad():
        weight = engine.module[2][0].weight
        if way == "in_place":
            weight.fill_(0.5)
        elif way == "data_in_place":
            weight.data.fill_(0.5)
        elif way == "new_data":
            weight.data = torch.full(weight.shape, 0.5)
        elif way == "numpy":
            weight.detach().numpy()[:] = 0.5
        else:
            nn.init.constant_(weight, 0.5)
        seen = engine.module.state_dict()["2.0.weight"]
        assert torch.equal(seen, torch.full_like(seen, 0.5))
        with torch.enable_grad():
            _one_step(engine)
        after = engine.module.state_dict()["2.0.weight"]
        assert bool((after != 0.5).any())
        assert torch.allclose(after, seen, atol=0.01)


def test_copying_the_model_is_refused_with_the_way_out(engine: infinity.InfinityEngine) -> None:
    """deepcopy and pickle would gather the whole model; the error names state_dict()."""
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.deepcopy(engine.module)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(engine.module)


def test_a_users_torch_optimizer_finds_no_gradients_and_changes_nothing(
    engine: infinity.InfinityEngine,
) -> None:
    """Gradients belong to the engine; a stray optimizer's step is harmless."""
    stray = torch.optim.SGD(engine.parameters(), lr=1.0)
    engine.backward(base_loss(engine, base_batches()[0]))
    before = engine.module.state_dict()
    stray.step()
    assert_equal(engine.module.state_dict(), before)


def test_weights_changed_between_forward_and_backward_are_an_error(
    engine: infinity.InfinityEngine,
) -> None:
    """As in torch: backward through weights that a step has replaced is refused."""
    late = base_loss(engine, base_batches()[1])
    _one_step(engine)
    with pytest.raises(RuntimeError, match="changed after the forward"):
        late.backward()


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(
    engine: infinity.InfinityEngine,
) -> None:
    """The child cannot use the engine or the parameters; the parent is unharmed."""
    with torch.no_grad():
        expected = base_loss(engine, base_batches()[0])
    engine.module[1][0].weight.sum()  # present in the parent at the time of the fork
    in_arena = engine.config.zero_optimization.offload_param.device != "none"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(infinity.EngineClosedError) if in_arena else nullcontext():
                engine.module[1][0].weight.sum()
            with pytest.raises(infinity.EngineClosedError):
                engine(base_batches()[0][0])
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with torch.no_grad():
        assert torch.equal(base_loss(engine, base_batches()[0]), expected)
    _one_step(engine)
