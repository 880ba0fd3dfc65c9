"""What can go wrong on a GPU, and in the processes around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.infinity.conftest import assert_equal, base_batches, base_loss, base_model, config_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def wide_engine(path: Path, *, param: str, optimizer: str) -> infinity.InfinityEngine:
    """A model of 8 blocks of 64 MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    engine, *_ = infinity.initialize(
        model=model, config=config_for(path, param=param, optimizer=optimizer)
    )
    return engine


def _is_out_of_memory(engine: infinity.InfinityEngine, batch: torch.Tensor, left: int) -> bool:
    """Whether a forward fails when there are so many bytes to be had."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left) / total)
    try:
        engine(batch)
    except torch.OutOfMemoryError:
        return True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return False


SHORT = [mib << 20 for mib in (16, 48, 80, 112, 144, 176, 208, 240, 272, 304)]


@pytest.mark.parametrize(
    ("param", "optimizer"), [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")]
)
def test_an_update_without_memory_is_made_when_there_is_some(
    param: str, optimizer: str, tmp_path: Path
) -> None:
    """A batch too large for the device fails in the forward; a smaller one goes on, exactly."""

    def weights(*, short: bool) -> dict[str, torch.Tensor]:
        batch = torch.ones(16, 4096, device="cuda")
        with wide_engine(tmp_path, param=param, optimizer=optimizer) as engine:
            for step in range(3):
                engine.backward(engine(batch).square().mean())
                engine.step()
                if short and step == 1:
                    failures = sum(_is_out_of_memory(engine, batch, left) for left in SHORT)
                    assert failures
            return engine.module.state_dict()

    assert_equal(weights(short=True), weights(short=False))


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_a_forked_child_lets_go_of_weights_that_are_present(home: str, tmp_path: Path) -> None:
    """A worker of a data loader starts when a weight is being looked at; it ends well."""
    config = config_for(tmp_path, param=home, optimizer=home)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        engine.backward(base_loss(engine, [t.cuda() for t in base_batches()[0]]))
        engine.step()
        assert float(engine.module[2][0].weight.detach().norm()) > 0
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        engine.backward(base_loss(engine, [t.cuda() for t in base_batches()[1]]))
        engine.step()


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("how", ["detach", "data"])
def test_what_was_taken_of_a_weight_never_changes(how: str, home: str, tmp_path: Path) -> None:
    """A later update goes to other memory."""
    config = config_for(tmp_path, param=home, optimizer=home)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        weight = engine.module[2][0].weight
        taken = weight.detach() if how == "detach" else weight.data
        values = taken.clone()
        for step in range(3):
            engine.backward(base_loss(engine, [t.cuda() for t in base_batches()[step]]))
            engine.step()
        assert torch.equal(taken, values)
        assert not torch.equal(engine.module[2][0].weight, values)


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_a_weight_changed_in_inference_mode_trains_on(home: str, tmp_path: Path) -> None:
    """As an average of weights that is put into the model for evaluation."""
    config = config_for(tmp_path, param=home, optimizer=home)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for step in range(3):
            with torch.inference_mode():
                engine.module[2][0].weight.mul_(0.5)
            engine.backward(base_loss(engine, [t.cuda() for t in base_batches()[step]]))
            engine.step()


@pytest.mark.parametrize("on_host", [False, True])
def test_a_default_device_of_the_users_changes_nothing(on_host: bool, tmp_path: Path) -> None:
    """The engine says for each of its tensors where it is."""
    config = config_for(tmp_path, activation_checkpointing={"cpu_checkpointing": on_host})
    weights, batches = [], [tuple(t.cuda() for t in batch) for batch in base_batches()]
    for device in (None, "cuda"):
        model = base_model()
        torch.set_default_device(device)
        try:
            engine, *_ = infinity.initialize(model=model, config=config)
            with engine:
                for batch in batches:
                    engine.backward(base_loss(engine, batch))
                    engine.step()
                weights.append(engine.module.state_dict())
        finally:
            torch.set_default_device(None)
    assert_equal(*weights)
