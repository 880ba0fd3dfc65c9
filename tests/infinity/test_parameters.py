"""The parameter stays the user's: identity, metadata, access from anywhere, aliases."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
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
from tiering.aio import FaultRule, Faults
from tiering.aio.config import FaultAction
from tiering.errors import TieringWarning, TransferError


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


@pytest.mark.filterwarnings("ignore:tensors taken")
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
@pytest.mark.parametrize(
    "way", ["in_place", "data_in_place", "new_data", "numpy", "init", "looked_at_first"]
)
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
        elif way == "looked_at_first":
            assert float(weight.norm()) > 0
            weight.data.fill_(0.5)
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


@pytest.mark.filterwarnings("ignore:a parameter's .grad was asked for")
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


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_weights_scaled_in_place_after_every_step_equal_plain_torch(
    device: str, tmp_path: Path
) -> None:
    """The change meets records that are still being written."""
    reference = Reference(base_model())
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(tmp_path, param=device, optimizer=device)
    )
    with engine, torch.no_grad():
        for batch in base_batches():
            with torch.enable_grad():
                reference.step([base_loss(reference.model, batch)])
                engine.backward(base_loss(engine, batch))
                engine.step()
            for weight, master in zip(reference.weights, reference.masters, strict=True):
                weight.data = master.mul_(0.99).detach()
            for parameter in engine.parameters():
                parameter.mul_(0.99)
        assert_close(engine.module.state_dict(), reference.model.state_dict())


def test_a_change_after_a_copy_of_all_weights_is_kept(engine: infinity.InfinityEngine) -> None:
    """The last of them could still be there, and looked at by nobody."""
    before = engine.module.state_dict()
    for parameter in engine.parameters():
        parameter.data.mul_(0.5)
    after = engine.module.state_dict()
    assert_close(after, {name: tensor * 0.5 for name, tensor in before.items()})
    last = list(engine.parameters())[-1]
    engine.module.state_dict()
    last.data.mul_(0.5)
    engine.flush()
    assert torch.equal(engine.get_state(last, "master"), after["4.bias"] * 0.5)


def test_operations_over_present_and_released_parameters(engine: infinity.InfinityEngine) -> None:
    """One of two operands was fetched before: both are there in the end."""
    first, last = engine.module[0].weight, engine.module[4].weight
    first.sum()
    assert (first[:1, :1] + last[:1, :1]).shape == (1, 1)
    assert len(torch._foreach_norm(list(engine.parameters()))) == 21


def test_looking_at_weights_between_forward_and_backward_is_allowed(
    engine: infinity.InfinityEngine,
) -> None:
    """Detached copies, norms and numpy views change nothing; a change in place is an error."""
    loss = base_loss(engine, base_batches()[0])
    for parameter in engine.parameters():
        parameter.detach().norm()
        assert parameter.data.abs().max() >= 0
        parameter.detach().numpy().sum()
    engine.backward(loss)
    engine.step()
    loss = base_loss(engine, base_batches()[0])
    with torch.no_grad():
        engine.module[4].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed after the forward"):
        engine.backward(loss)


def test_a_weight_renormalised_in_its_forward_does_not_disturb_its_neighbours(
    tmp_path: Path,
) -> None:
    """Embedding(max_norm) changes one weight of a unit; the others' saved views stay good."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8, max_norm=0.5)
            self.mix = nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mix.weight.clamp_(-0.2, 0.2)
            return self.mix(self.embed(tokens)).square().mean()  # type: ignore[no-any-return]

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, batches = nn.Sequential(Block()), list(torch.randint(0, 20, (3, 4)))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in batches:
        plain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    _, weights = train(model, config_for(tmp_path), steps=3, loss_of=loss_of, batches=batches)
    assert_close(weights, plain.state_dict())


def test_asking_for_gradients_says_once_whose_they_are(engine: infinity.InfinityEngine) -> None:
    """clip_grad_norm_ and zero_grad of torch would do nothing in silence."""
    engine.backward(base_loss(engine, base_batches()[0]))
    with pytest.warns(TieringWarning, match="gradients are the engine's"):
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    engine.module.zero_grad()


@pytest.mark.parametrize("fault", ["io", "interrupt"])
def test_a_failed_initialize_leaves_the_model_as_it_was(fault: str, tmp_path: Path) -> None:
    """An error of the drive while weights are written: all weights are there, and no hook."""
    model = base_model()
    before = copy.deepcopy(model.state_dict())
    number = {"io": errno.EIO, "interrupt": errno.ENOSPC}[fault]
    faults = Faults(rules=(FaultRule(FaultAction.ERRNO, value=number, first=7),))
    with pytest.raises(TransferError):
        infinity.initialize(model=model, config=config_for(tmp_path), faults=faults)
    assert_equal(model.state_dict(), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    train(model, config_for(tmp_path), steps=1)


def test_a_second_engine_for_the_same_model_is_refused(engine: infinity.InfinityEngine) -> None:
    """The first one goes on."""
    config = config_for(Path(), param="none", optimizer="none")
    with pytest.raises(infinity.ConfigError, match="another engine"):
        infinity.initialize(model=engine.module, config=config)
    _one_step(engine)


@pytest.mark.parametrize("groups", ["duplicate", "foreign"])
def test_optimizer_groups_that_do_not_fit_are_refused_before_anything_moves(
    groups: str, tmp_path: Path
) -> None:
    """A parameter twice, or one that is not the model's."""
    model = base_model()
    chosen = list(model.parameters())
    chosen.append(chosen[0] if groups == "duplicate" else nn.Parameter(torch.ones(3)))
    chosen_groups = [{"params": chosen}, {"params": chosen[-1:]}]
    with pytest.raises((ValueError, infinity.ConfigError, UserWarning)):
        infinity.initialize(
            model=model, config=config_for(tmp_path), model_parameters=chosen_groups
        )
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64])
def test_parameters_that_could_not_be_given_back_as_they_are_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Integers, complex numbers and doubles are named, not converted."""
    model = base_model()
    model.register_parameter("odd", nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    with pytest.raises(infinity.ConfigError, match=f"'odd' is of type {dtype}"):
        infinity.initialize(model=model, config=config_for(tmp_path))


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_after_close_everything_says_what_to_do(device: str, tmp_path: Path) -> None:
    """Parameters of a closed engine are no longer to be had, on any tier alike."""
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(tmp_path, param=device, optimizer=device)
    )
    model = engine.module
    engine.close()
    inputs = base_batches()[0][0]
    for use in (partial(engine, inputs), engine.step, partial(torch.sum, model[0].weight)):
        with pytest.raises(infinity.EngineClosedError):
            use()
    with pytest.raises(infinity.EngineClosedError, match="before closing"):
        model.state_dict()


def test_after_close_the_memory_is_free_though_the_model_lives_on(tmp_path: Path) -> None:
    """Nothing of the engine is kept by the user's parameters."""
    engine, optimizer, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    _one_step(engine)
    model, arena = engine.module, weakref.ref(engine._parts.arena)
    engine.close()
    del engine, optimizer
    gc.collect()
    assert arena() is None
    assert model[0].weight.shape == (100, 32)


def test_a_read_error_in_the_update_tears_it_and_the_engine_says_so(tmp_path: Path) -> None:
    """No more forward or step afterwards; the weights seen are old or new, never something else."""
    zero = {"sub_group_size": 256}  # many more tiles than the arena holds
    config = config_for(tmp_path, param="cpu", zero_optimization=zero)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        _one_step(engine)
        before = engine.module.state_dict()
        for file in tmp_path.rglob("*.safetensors"):
            os.truncate(file, 4096)
        engine.backward(base_loss(engine, base_batches()[1]))
        engine.step()
        with pytest.raises(TransferError):  # by the first use of a weight
            engine(base_batches()[0][0])
        with pytest.raises(infinity.EngineClosedError, match="different steps"):
            engine(base_batches()[0][0])
        for name, weight in engine.module.state_dict().items():
            assert torch.allclose(weight, before[name], atol=0.01)


def test_a_second_thread_is_told_that_the_engine_is_in_use(tmp_path: Path) -> None:
    """One forward is under way when another thread asks for one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    outcome: list[BaseException] = []

    def other() -> None:
        try:
            engine(torch.ones(1, 4))
        except RuntimeError as error:
            outcome.append(error)

    def inside(*_: object) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with engine, torch.no_grad():
        handle = model[0].register_forward_hook(inside)
        engine(torch.ones(1, 4))
        handle.remove()
        assert "another thread" in str(outcome[0])


def test_an_evaluation_inside_a_forward_leaves_no_unit_behind(tmp_path: Path) -> None:
    """A hook that samples from the model in the middle of its own forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))

    def sample(*_: object) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                engine(torch.ones(1, 4))

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model[1].register_forward_hook(sample)
    with engine:
        for _ in range(2):
            plain(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
            assert_close(engine.module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_trains_as_a_plain_one(when: str, tmp_path: Path) -> None:
    """The hooks are no part of what is compiled."""
    model = base_model()
    _, expected = Reference(model).train(3)
    if when == "before":
        model.compile(backend="aot_eager")
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    if when == "after":
        model.compile(backend="aot_eager")
    with engine:
        for batch in base_batches()[:3]:
            engine.backward(base_loss(engine, batch))
            engine.step()
        assert_close(engine.module.state_dict(), expected)
