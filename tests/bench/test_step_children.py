"""A child of `step_bench`: the model all engines share, and how a run of its own is started."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.steps import device
from bench.steps.child_device import flop_per_s, link_bytes_per_s
from bench.steps.contestants import (
    Contestant,
    DeepSpeed,
    DeepSpeedSettings,
    OffloadDevice,
    Ours,
    PlainTorch,
    run_ranks,
)
from bench.steps.launch import ContestantError
from bench.steps.link import Pieces
from bench.steps.loop import PeakMemory, kernel_moved
from bench.steps.model import SIZES, Shape, batches, build
from bench.steps.wire import Training
from tiering.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


def brief(**changes: Any) -> Training:
    return Training(**{"shape": SIZES["tiny"], "warmup": 0, "steps": 1, **changes})


def test_a_child_that_takes_too_long_is_ended_and_its_folder_removed(tmp_path: Path) -> None:
    with pytest.raises(ContestantError, match="--run-limit"):
        run_ranks(Ours(), brief(), root=tmp_path, limit_s=0.01)
    assert not list(tmp_path.iterdir())


def test_a_budget_that_cannot_work_is_told_in_the_engines_words(tmp_path: Path) -> None:
    with pytest.raises(ContestantError, match=r"tiering\.host_memory is 10,240 bytes"):
        run_ranks(Ours("small", "nvme", 10240), brief(), root=tmp_path, limit_s=60)
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_deepspeed_is_told_of(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named deepspeed >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ContestantError, match=r"code 3(.|\n)*No module named deepspeed"):
        run_ranks(DeepSpeed(python), brief(), root=tmp_path, limit_s=60)


def test_a_deterministic_child_is_told_before_it_starts(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho it has $CUBLAS_WORKSPACE_CONFIG\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ContestantError, match="it has :4096:8"):
        run_ranks(DeepSpeed(python), brief(deterministic=True), root=tmp_path, limit_s=60)


@pytest.mark.parametrize("contestant", [Ours(), PlainTorch()])
def test_all_kernels_have_a_deterministic_form(contestant: Contestant) -> None:
    """Of the GPU's if there is one: a kernel that has none is an error."""
    training = brief(steps=3, deterministic=True, compute_dtype="fp32")
    runs = [run_ranks(contestant, training, root=None, limit_s=300)[0] for _ in range(2)]
    one, other = ([step.loss for step in run.steps] for run in runs)
    assert one == other


def test_an_interpreter_that_is_none_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        run_ranks(DeepSpeed(tmp_path / "none"), brief(), root=tmp_path, limit_s=60)


def test_a_child_that_leaves_nothing_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ContestantError, match="left no outcome"):
        run_ranks(DeepSpeed(Path("/bin/true")), brief(), root=tmp_path, limit_s=60)


@pytest.mark.parametrize(("device", "homes"), [("none", 0), ("cpu", 2), ("nvme", 2)])
def test_deepspeed_offloads_where_it_is_asked_to(
    device: OffloadDevice, homes: int, tmp_path: Path
) -> None:
    contestant = DeepSpeed(None, device)
    zero = contestant.config(brief(), tmp_path)["zero_optimization"]
    offloads = [value for key, value in zero.items() if key.startswith("offload_")]
    assert [home["device"] for home in offloads] == [device] * homes
    assert contestant.name == f"DeepSpeed {device}"
    assert contestant.uses_drive == (device == "nvme")


@pytest.mark.parametrize("asked_numel", [0, 1, 10**6])
def test_deepspeeds_buffers_hold_the_largest_parameter(asked_numel: int, tmp_path: Path) -> None:
    settings = DeepSpeedSettings(parameter_buffer_numel=asked_numel)
    config = DeepSpeed(None, "nvme", settings).config(brief(), tmp_path)
    found = config["zero_optimization"]["offload_param"]["buffer_size"]
    assert found == max(asked_numel, SIZES["tiny"].largest_numel)


def test_deepspeeds_child_needs_nothing_but_torch_deepspeed_and_the_standard_library() -> None:
    assert set(roots("bench.steps.child_deepspeed")) == {"torch", "deepspeed"}
    for package in ("bench", "bench.steps"):
        assert not set(roots(f"{package}.__init__"))


def roots(module: str) -> Iterator[str]:
    """What a module of ours imports from others, directly or through modules of ours."""
    standard = {
        *("__future__", "abc", "collections", "contextlib", "dataclasses", "functools", "gzip"),
        *("itertools", "json", "os", "pathlib", "sys", "tempfile", "time", "typing"),
    }
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            is_package = (ROOT / Path(*node.module.split("."))).is_dir()
            names = [f"{node.module}.{a.name}" for a in node.names] if is_package else [node.module]
        for name in names:
            if name.startswith("bench."):
                yield from roots(name)
            elif (root := name.split(".")[0]) not in standard:
                yield root


# The model


@pytest.mark.parametrize("name", ["tiny", "30m"])
def test_a_shape_knows_its_parameters(name: str) -> None:
    model = build(SIZES[name], seed=0, compute_dtype=None)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) == SIZES[name].parameter_numel
    assert max(sizes) == SIZES[name].largest_numel


@pytest.mark.parametrize(("name", "millions"), [("30m", 30), ("120m", 120), ("134m", 134)])
def test_a_size_has_the_parameters_it_is_named_for(name: str, millions: int) -> None:
    assert SIZES[name].parameter_numel / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_models_operations_are_those_of_its_products() -> None:
    shape = Shape(layers=2, width=16, heads=2, vocabulary=11, context=5)
    products = 2 * 12 * 16**2 + 11 * 16  # parameters in matrices that are multiplied with
    vectors = 2 * 13 * 16 + 2 * 16
    attention = 2 * 12 * 16 * 5
    assert shape.step_flop(3) == (6 * (products + vectors) + attention) * 15


def test_a_gpu_is_looked_for_in_a_process_of_its_own() -> None:
    found = device.look()
    assert (found is not None) == torch.cuda.is_available()
    assert found is None or min(*found.link, found.flop_per_s) > 0


def test_a_gpu_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CHILD", "bench.steps.nowhere")
    with pytest.raises(device.DeviceError, match="No module named bench"):
        device.look()


def test_the_probes_of_a_gpu_count_what_they_do() -> None:
    cpu = torch.device("cpu")
    speeds = link_bytes_per_s(cpu, Pieces(4096, 2))
    assert speeds.keys() == {"upload", "offload", "both"}
    assert min(*speeds.values(), flop_per_s(cpu, 16)) > 0


def test_widening_in_the_layers_equals_widening_the_weights() -> None:
    shape = Shape(layers=2, width=16, heads=2, vocabulary=11, context=5)
    stored = build(shape, seed=0, compute_dtype=torch.float32)
    wide = build(shape, seed=0, compute_dtype=None).float()
    ids = next(batches(shape, batch=3, seed=0))
    stored_loss, wide_loss = stored(ids), wide(ids)
    assert torch.equal(stored_loss, wide_loss)
    stored_loss.backward()
    wide_loss.backward()
    for one, two in zip(stored.parameters(), wide.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert one.grad.dtype is torch.bfloat16
        # An embedding adds up the gradients of a token's places in bf16.
        torch.testing.assert_close(one.grad.float(), two.grad, rtol=2**-6, atol=5e-4)


def test_weights_and_batches_repeat_with_their_seed() -> None:
    shape = SIZES["tiny"]
    one, two, other = (build(shape, seed=seed, compute_dtype=None) for seed in (1, 1, 2))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.dtype is torch.bfloat16
        assert torch.equal(a, b)
    assert not torch.equal(one.head.weight, other.head.weight)
    first = list(itertools.islice(batches(shape, batch=2, seed=3), 3))
    again = list(itertools.islice(batches(shape, batch=2, seed=3), 3))
    assert all(map(torch.equal, first, again))
    assert first[0].shape == (2, shape.context + 1)


def test_the_peak_of_memory_is_what_was_held_over_the_start() -> None:
    memory = PeakMemory()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert memory.peak_bytes() >= 60 * 2**20
    assert held[0] == 1


def test_the_kernel_counts_what_is_written_to_a_file(tmp_path: Path) -> None:
    before = kernel_moved()
    (tmp_path / "file").write_bytes(bytes(2**20))
    after = kernel_moved()
    assert after.written_bytes >= before.written_bytes
    assert after.read_bytes >= before.read_bytes
