"""What a training loop asks of the engine: sizes, data, schedule, figures, and lines to read."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

import infinity
from infinity import InfinityEngine
from infinity.lr_schedules import WarmupDecayLR
from tests.infinity.conftest import (
    Config,
    Reference,
    Weights,
    assert_close,
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    samples,
    without_optimizer,
)
from tests.infinity.ranks import RankPool
from tiering.errors import ConfigError


def cycle(engine: InfinityEngine, number: int = 0, factor: float = 1.0) -> None:
    """One step."""
    engine.backward(base_loss(engine, base_batches()[number % 4]) * factor)
    engine.step()


# -- sizes


def sizes_of(config: Config) -> tuple[int | None, int | None, int]:
    """Of a global batch, of a micro-batch, and how many of them make a step."""
    loaded = infinity.load_config(config)  # before the number of ranks is known
    engine, *_ = infinity.initialize(model=base_model(), config=loaded)
    with engine:
        return (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((16, 2, None), (16, 2, 2)),
        ((None, 2, 3), (24, 2, 3)),
        ((16, None, None), (16, 4, 1)),
        ((None, None, 3), (None, None, 3)),
    ],
)
def test_batch_sizes_follow_the_number_of_ranks_that_are_there(
    given: tuple[int | None, ...], expected: tuple[int | None, ...], on_ranks: RankPool
) -> None:
    """Of four, whose configuration was read before."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {k: v for k, v in zip(keys, given, strict=True) if v is not None}
    assert on_ranks(4, sizes_of, config) == [expected] * 4


# -- training data


def train_on_loader(config: Config, epochs: int) -> tuple[list[list[list[int]]], Weights]:
    """Train on what the engine's loader deals; returns the numbers of the samples, by batch."""
    dataset = TensorDataset(torch.arange(12), *samples(0, 12))

    def collate(chosen: list[Any]) -> tuple[list[int], Any]:
        numbers, *rest = zip(*chosen, strict=True)
        return [int(n) for n in numbers], default_collate(list(zip(*rest, strict=True)))

    engine, _, loader, _ = infinity.initialize(
        model=base_model(), config=config, training_data=dataset, collate_fn=collate
    )
    seen: list[list[list[int]]] = []
    with engine:
        assert loader is engine.training_dataloader
        assert loader is not None
        for _ in range(epochs):
            seen.append([])
            for numbers, batch in loader:
                seen[-1].append(numbers)
                engine.backward(base_loss(engine, batch))
                engine.step()
        return seen, engine.module.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_training_data_is_dealt_to_the_ranks_and_trained_on(
    size: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Each epoch has every sample once, in an order of its own, as the user's function puts it."""
    config = config_for(tmp_path)
    outcomes = on_ranks(size, train_on_loader, config, 2)
    epochs = list(zip(*(seen for seen, _ in outcomes), strict=True))
    assert len(epochs) == 2
    assert epochs[0] != epochs[1]
    plain = Reference(base_model())
    inputs, targets = samples(0, 12)
    for by_rank in epochs:
        batches = [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]
        assert [len(batch) for batch in batches] == [2 * size] * (6 // size)
        assert sorted(chain(*batches)) == list(range(12))
        for batch in batches:
            plain.step([base_loss(plain.model, (inputs[batch], targets[batch]))])
    for _, weights in outcomes:
        assert_close(weights, dict(plain.model.state_dict()), rtol=1e-5, atol=1e-6)


def test_without_training_data_there_is_no_loader(tmp_path: Path) -> None:
    engine, _, loader, scheduler = infinity.initialize(
        model=base_model(), config=config_for(tmp_path)
    )
    with engine:
        assert loader is engine.training_dataloader is scheduler is engine.lr_scheduler is None


# -- the schedule of the configuration


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_the_configurations_schedule_steers_the_rate(
    warmup: int, kind: str, tmp_path: Path
) -> None:
    """Without a warm-up, with the shortest, and with both kinds; as with torch's AdamW."""
    params = {"total_num_steps": 10, "warmup_num_steps": warmup, "warmup_type": kind}
    config = config_for(tmp_path, scheduler={"type": "WarmupDecayLR", "params": params})
    plain = Reference(base_model())
    beside = WarmupDecayLR(plain.optimizer, **params)
    engine, _, _, scheduler = infinity.initialize(model=base_model(), config=config)
    with engine:
        assert scheduler is engine.lr_scheduler
        assert warmup or engine.get_lr() == [1e-3]
        for number in range(4):
            assert engine.get_lr() == beside.get_last_lr()
            plain.step([base_loss(plain.model, base_batches()[number])])
            beside.step()
            cycle(engine, number)
        assert_close(engine.module.state_dict(), dict(plain.model.state_dict()))


def test_a_schedule_does_not_go_on_when_a_step_is_skipped(tmp_path: Path) -> None:
    """Ten steps of which two overflow: eight updates, and the rate behind eight."""
    params = {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": 1e-3}
    config = config_for(
        tmp_path,
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        scheduler={"type": "WarmupDecayLR", "params": params},
    )
    engine, _, _, scheduler = infinity.initialize(model=base_model(), config=config)
    overflowing = (3, 6)
    with engine:
        assert isinstance(scheduler, WarmupDecayLR)
        for number in range(10):
            updates = scheduler.last_epoch
            assert engine.get_lr() == scheduler.rates_after(updates)
            cycle(engine, number, math.inf if number in overflowing else 1.0)
            assert engine.was_step_applied() == (number not in overflowing)
            assert scheduler.last_epoch == updates + engine.was_step_applied()
        assert (scheduler.last_epoch, engine.skipped_steps, engine.global_steps) == (8, 2, 10)
        assert engine.scalars()["skipped_steps"] == 2


# -- figures


def test_every_step_is_told_to_whoever_asked_for_it(tmp_path: Path) -> None:
    """With its number and the figures behind it, which are numbers under names with a slash."""
    told: list[tuple[int, Mapping[str, float]]] = []
    config = config_for(tmp_path, gradient_accumulation_steps=2)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        assert engine.get_global_grad_norm() is None
        assert math.isnan(engine.scalars()["grad_norm"])
        engine.on_step(lambda step, scalars: told.append((step, scalars)))
        for number in range(4):
            cycle(engine, number)
        assert [step for step, _ in told] == [1, 2]
        last = told[-1][1]
        assert last["grad_norm"] == engine.get_global_grad_norm()
        assert last["steps"] == engine.stats().steps == 2
        assert (last["lr/0"], last["loss_scale"], last["skipped_steps"]) == (1e-3, 1, 0)
        assert {"spent_s/forward", "waited_s/read", "nvme_read_bytes"} < last.keys()
        assert all(type(value) is float for value in last.values())


def test_the_phases_of_a_step_add_up_to_the_time_between_two_looks(tmp_path: Path) -> None:
    """Whatever is waited for or computed is in one of them, and only in one."""
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(tmp_path, wall_clock_breakdown=True)
    )
    with engine:
        cycle(engine)
        looks = []
        for number in range(2):
            before_s = time.perf_counter()
            spent_s = engine.stats().spent_s
            looks.append((before_s, spent_s, time.perf_counter()))
            if not number:
                for other in range(3):
                    cycle(engine, other)
        (first_s, first, second_s), (third_s, last, fourth_s) = looks
        passed_s = sum(last.values()) - sum(first.values())
        assert third_s - second_s - 1e-6 <= passed_s <= fourth_s - first_s + 1e-6
        assert all(last[phase] >= first[phase] - 1e-9 for phase in first)
        assert {"forward", "backward", "step", "gather", "reduce", "update", "outside"} < set(last)
        assert all(last[phase] > first.get(phase, 0) for phase in ("forward", "backward", "update"))


def test_phases_are_ranges_of_the_profiler(tmp_path: Path) -> None:
    """With the first parameter of what they were for."""
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    with engine, torch.profiler.profile() as profile:
        cycle(engine)
        cycle(engine)
    names = {event.name for event in profile.events()}
    phases = {"forward", "backward", "step", "gather 4.weight", "update 1.0.weight"}
    assert {f"infinity.{phase}" for phase in phases} <= names


# -- lines to read


def lines_of(config: Config, steps: int) -> list[str]:
    """What is printed in so many steps."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine, *_ = infinity.initialize(model=base_model(), config=config)
        with engine:
            for number in range(steps):
                cycle(engine, number)
    return told.getvalue().splitlines()


LINE = r"step {}: \d+\.\d{{3}} s, lr 1\.000e-03, gradient norm \d+\.\d+"


@pytest.mark.parametrize("size", [1, 2])
def test_a_line_is_printed_as_often_as_asked_for_by_the_first_rank(
    size: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    first, *others = on_ranks(size, lines_of, config_for(tmp_path, steps_per_print=2), 5)
    for step, line in zip((2, 4), first, strict=True):
        assert re.fullmatch(LINE.format(step), line)
    assert others == [[]] * (size - 1)


def test_nothing_is_printed_unasked(tmp_path: Path) -> None:
    assert lines_of(config_for(tmp_path), 12) == []


def test_a_breakdown_is_a_second_line_with_every_phase(tmp_path: Path) -> None:
    """Every ten steps, if nothing else was asked for; what is outside of the engine comes last."""
    config = config_for(tmp_path, wall_clock_breakdown=True)
    line, breakdown = lines_of(config, 12)
    assert re.fullmatch(LINE.format(10), line)
    parts = dict(re.findall(r"([a-z ]+) (\d+\.\d{3}) s", breakdown.removeprefix("step 10:")))
    names = [name.strip() for name in parts]
    assert {"forward", "backward", "gather", "reduce", "update", "wait for read"} < set(names)
    assert names[-1] == "outside"


def test_a_line_tells_of_the_loss_scale_and_of_skipped_steps(tmp_path: Path) -> None:
    """Where there are any."""
    config = config_for(
        tmp_path,
        steps_per_print=1,
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    )
    with contextlib.redirect_stdout(io.StringIO()) as told:
        engine, *_ = infinity.initialize(model=base_model(), config=config)
        with engine:
            cycle(engine)
            cycle(engine, 1, math.inf)
    first, second = told.getvalue().splitlines()
    assert first.endswith(", loss scale 256")
    assert second.endswith(", loss scale 128, 1 skipped")


def test_a_call_written_for_deepspeed_works(tmp_path: Path) -> None:
    """With its keywords, and the configuration's file in ``args``."""
    file = tmp_path / "ds_config.json"
    config = config_for(tmp_path, param="none", optimizer="none")
    file.write_text(json.dumps(config))
    model = base_model()
    engine, *_ = infinity.initialize(
        args=argparse.Namespace(deepspeed_config=str(file), local_rank=0),
        model=model,
        model_parameters=model.parameters(),
        dist_init_required=True,
        distributed_port=29500,
        mesh_param=None,
    )
    with engine:
        assert engine.compute_dtype is torch.float32
        with pytest.raises(NotImplementedError, match="no checkpoints yet"):
            engine.save_checkpoint(str(tmp_path), tag="last")
    with pytest.raises(ConfigError, match="there must be one configuration, got 2"):
        infinity.initialize(model=base_model(), config=config, config_params=config)
    with pytest.raises(ConfigError, match="there must be one configuration, got 0"):
        infinity.initialize(model=base_model())
    for name in ("mpu", "mesh_param"):
        with pytest.raises(ConfigError, match=f"{name} is for model parallelism"):
            infinity.initialize(model=base_model(), config=config, **{name: object()})


@pytest.mark.parametrize("given", [None, "all", "groups"])
def test_a_function_makes_the_optimizer_of_the_parameters_given(
    given: str | None, tmp_path: Path
) -> None:
    """A class is one too."""
    model = base_model()
    all_of_them = list(model.parameters())
    parameters = {None: None, "all": all_of_them, "groups": [{"params": all_of_them[:3]}]}[given]
    engine, optimizer, *_ = infinity.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=lambda made_of: torch.optim.AdamW(made_of, lr=0.25),
        config=without_optimizer(config_for(tmp_path)),
    )
    with engine:
        assert engine.get_lr() == [0.25]
        assert len(optimizer.param_groups[0]["params"]) == (3 if given == "groups" else 21)


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    """JSON itself would take the last."""
    file = tmp_path / "twice.json"
    file.write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ConfigError, match="'train_batch_size' stands there more than once"):
        infinity.load_config(file)


# -- what counts as a backward


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_inputs_are_no_backward(accumulation: int, tmp_path: Path) -> None:
    """As an attack or a penalty asks autograd for: no micro-batch of the step."""
    config = config_for(tmp_path, gradient_accumulation_steps=accumulation)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        embedded: list[torch.Tensor] = []
        handle = engine.module[0].register_forward_hook(lambda *seen: embedded.append(seen[2]))
        torch.autograd.grad(base_loss(engine, base_batches()[0]), embedded)
        handle.remove()
        with pytest.raises(RuntimeError, match="without engine"):
            engine.step()
        cycle(engine)
        assert engine.micro_steps == 1
        assert engine.was_step_applied() == (accumulation == 1)


def test_each_step_needs_a_backward_since_the_last(tmp_path: Path) -> None:
    """Else a step would be made of half of its micro-batches."""
    config = config_for(tmp_path, gradient_accumulation_steps=2)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        cycle(engine, 0)
        with pytest.raises(RuntimeError, match="without engine"):
            engine.step()
        cycle(engine, 1)
        assert engine.was_step_applied()


def test_a_step_that_was_interrupted_before_its_decision_can_be_made_again(tmp_path: Path) -> None:
    """By Ctrl-C in a hook of the user's, say."""
    config = config_for(tmp_path, gradient_accumulation_steps=2)
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    interrupts = [KeyboardInterrupt]

    def interrupt(*_: object) -> None:
        if interrupts:
            raise interrupts.pop()

    engine.optimizer.register_step_pre_hook(interrupt)
    with engine:
        cycle(engine, 0)
        with pytest.raises(KeyboardInterrupt):
            cycle(engine, 1)
        engine.step()
        assert engine.was_step_applied()


def test_hooks_before_a_step_may_look_at_weights(tmp_path: Path) -> None:
    """As those that log norms do."""
    norms = []
    engine, *_ = infinity.initialize(model=base_model(), config=config_for(tmp_path))
    engine.optimizer.register_step_pre_hook(
        lambda *_: norms.append([float(p.detach().norm()) for p in engine.parameters()])
    )
    with engine:
        for number in range(3):
            cycle(engine, number)
    assert norms[0] != norms[1] != norms[2]


# -- what is refused when an engine is made


@pytest.mark.parametrize(
    "wrong",
    [
        {"training_data": TensorDataset(torch.zeros(3))},
        {"lr_scheduler": lambda _: 1 / 0},
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
    ],
    ids=["a loader without a batch size", "a schedule that fails", "a schedule without a size"],
)
def test_a_refusal_leaves_the_model_as_it_was(wrong: dict[str, Any], tmp_path: Path) -> None:
    """It can be given again, rightly."""
    config = config_for(tmp_path)
    del config["train_micro_batch_size_per_gpu"]
    model, expected = base_model(), base_model().state_dict()
    with pytest.raises((ConfigError, TypeError, ZeroDivisionError)):
        infinity.initialize(model=model, config=config, **wrong)
    assert_equal(model.state_dict(), expected)
    engine, *_ = infinity.initialize(model=model, config=config)
    engine.close()


# -- what an engine has


def test_what_is_not_the_engines_is_the_models(tmp_path: Path) -> None:
    """As with DeepSpeed's engine; but not what would have no effect and return the bare model."""
    model = base_model()
    model.vocabulary = 100
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    with engine:
        assert engine.vocabulary == 100
        assert [name for name, _ in engine.named_parameters()] == list(engine.state_dict())
        assert engine.training
        for name in ("to", "half", "cuda"):
            with pytest.raises(AttributeError, match=f"no '{name}'; where weights live"):
                getattr(engine, name)
        with pytest.raises(AttributeError, match="neither the engine nor its model has 'generate'"):
            engine.generate()
