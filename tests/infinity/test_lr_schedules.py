"""DeepSpeed's schedules: its rates, closed forms, and what becomes of a bad setting."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.lr_schedules import (
    SCHEDULERS,
    ClosedFormLR,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    scheduler_of,
)
from tests.infinity.conftest import (
    assert_equal,
    base_batches,
    base_loss,
    base_model,
    config_for,
    without_optimizer,
)
from tiering.errors import ConfigError, TieringWarning

Params = dict[str, Any]


def adamw(*rates: float) -> torch.optim.AdamW:
    """One parameter group for each rate."""
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))], "lr": r} for r in rates])


def used(scheduler: ClosedFormLR, count: int) -> tuple[list[list[float]], list[list[float]]]:
    """The rates and momenta of the updates to come, by update and group."""
    groups = scheduler.optimizer.param_groups
    rates, momenta = [], []
    for _ in range(count):
        rates.append([float(group["lr"]) for group in groups])
        momenta.append([group["betas"][0] for group in groups])
        scheduler.optimizer.step()
        scheduler.step()
    return rates, momenta


# What the optimizer, whose own rate is 2e-3, had in each of the first ten updates with DeepSpeed.
WARMUP: Params = {"warmup_num_steps": 3, "total_num_steps": 7}
CYCLE: Params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
RANGE: Params = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 4}
EXPECTED: list[tuple[str, Params, list[float]]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
        [1e-4, 1e-4, 5.5e-4, 8.132331253e-4, *[1e-3] * 6],
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_num_steps": 4, "warmup_type": "linear"},
        [1e-4, 1e-4, 5.75e-4, 1.05e-3, 1.525e-3, *[2e-3] * 5],
    ),
    ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, *[2e-3] * 8]),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, [0, 0, 1e-3, *[2e-3] * 7]),
    (
        "WarmupDecayLR",
        {**WARMUP, "warmup_max_lr": 1e-3},
        [0, 0, 6.309297536e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0],
    ),
    (
        "WarmupDecayLR",
        {**WARMUP, "warmup_min_lr": 1e-4, "warmup_type": "linear"},
        [1e-4, 1e-4, 4e-4, 7e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4],
    ),
    (
        "WarmupCosineLR",
        WARMUP,
        [0, 0, 1.261859507e-3, 2e-3, 1.707136071e-3, 1.0001e-3, 2.930639295e-4, *[2e-7] * 3],
    ),
    (
        "WarmupCosineLR",
        {**WARMUP, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"},
        [0, 2e-4, 8e-4, 1.4e-3, 1.765685425e-3, 1.2e-3, 6.343145751e-4, *[4e-4] * 3],
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        [1e-4, 4e-4, 7e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 8e-5, 6.666666667e-5],
    ),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [1e-4, 1e-4, 5.5e-4, 5.5e-4, 1e-3, 5.5e-4, 5.5e-4, 1e-4, 1e-4, 1e-4],
    ),
    ("LRRangeTest", RANGE, [1e-4 + 0.25e-4 * update for update in range(10)]),
    (
        "LRRangeTest",
        {**RANGE, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True},
        [*[1e-4] * 4, *[3e-4] * 4, 5e-4, 5e-4],
    ),
]


@pytest.mark.parametrize(("kind", "params", "expected"), EXPECTED)
def test_the_rates_are_those_of_deepspeed(kind: str, params: Params, expected: list[float]) -> None:
    """From the first update on, which uses the rate that the constructor has set."""
    rates, _ = used(scheduler_of(kind, adamw(2e-3), **params), 10)
    assert [rate for (rate,) in rates] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"cycle_first_step_size": 3, "cycle_second_step_size": 4},
            [0.8, 0.8666666667, 0.8333333333, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9],
        ),
        (
            {"cycle_first_step_size": 4, "cycle_first_stair_count": 2},
            [0.8, 0.9, 0.85, 0.85, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9],
        ),
    ],
)
def test_a_cycle_has_the_momenta_of_deepspeed(sizes: Params, expected: list[float]) -> None:
    """They go against the rate, but begin at the lowest; the other beta is replaced."""
    scheduler = OneCycle(adamw(2e-3), **CYCLE, **sizes)
    _, momenta = used(scheduler, 10)
    assert [momentum for (momentum,) in momenta] == pytest.approx(expected, rel=1e-9)
    assert scheduler.optimizer.param_groups[0]["betas"][1] == 0.99


@pytest.mark.parametrize(("rate", "limit"), [(10.0, 0.999), (-10.0, 0.0)])
def test_a_momentum_that_decays_stays_within_what_adam_can_use(rate: float, limit: float) -> None:
    """At 1 the bias correction would divide by zero."""
    scheduler = OneCycle(
        adamw(1e-3), **CYCLE, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=rate
    )
    assert scheduler.momenta_after(5) == scheduler.momenta_after(10**6) == [limit]


def test_a_cycle_leaves_the_momentum_alone_when_told_to() -> None:
    """The optimizer's betas are as they were."""
    optimizer = adamw(1e-3)
    used(OneCycle(optimizer, **CYCLE, cycle_first_step_size=2, cycle_momentum=False), 5)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_cycle_of_an_optimizer_without_betas_is_one_of_the_rate_and_says_so() -> None:
    """There is no momentum of Adam's to change."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-3, momentum=0.5)
    with pytest.warns(TieringWarning, match="SGD has no betas") as caught:
        scheduler = OneCycle(optimizer, **CYCLE, cycle_first_step_size=2)
    assert "betas" not in scheduler.optimizer.param_groups[0]
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert caught[0].filename == __file__


# -- any settings


def lists_or_numbers(low: float, high: float) -> st.SearchStrategy[Any]:
    """One number for both groups, or one each."""
    number = st.floats(low, high)
    return number | st.lists(number, min_size=2, max_size=2)


WARMUPS = st.fixed_dictionaries(
    {"warmup_num_steps": st.integers(0, 60), "warmup_type": st.sampled_from(["log", "linear"])}
)
WARMUP_RATES = st.fixed_dictionaries(
    {"warmup_min_lr": lists_or_numbers(0, 1e-3), "warmup_max_lr": lists_or_numbers(1e-3, 1.0)}
)
TOTALS = st.fixed_dictionaries({"total_num_steps": st.integers(1, 200)})
RATIOS = st.fixed_dictionaries(
    {"warmup_min_ratio": st.floats(0, 1), "cos_min_ratio": st.floats(0, 1)}
)
CYCLES = st.fixed_dictionaries(
    {
        "cycle_min_lr": lists_or_numbers(0, 1e-3),
        "cycle_max_lr": lists_or_numbers(1e-3, 1.0),
        "cycle_first_step_size": st.integers(1, 60),
        "cycle_second_step_size": st.none() | st.integers(0, 60),
        "cycle_first_stair_count": st.integers(0, 9),
        "cycle_second_stair_count": st.none() | st.integers(0, 9),
        "decay_step_size": st.integers(0, 9),
        "decay_lr_rate": st.floats(0, 2),
        "decay_mom_rate": st.floats(-1, 1),
        "cycle_min_mom": lists_or_numbers(0, 0.85),
        "cycle_max_mom": lists_or_numbers(0.85, 0.99),
    }
)
RANGES = st.fixed_dictionaries(
    {
        "lr_range_test_min_lr": lists_or_numbers(0, 1e-2),
        "lr_range_test_step_size": st.integers(1, 60),
        "lr_range_test_step_rate": st.floats(0, 5),
        "lr_range_test_staircase": st.booleans(),
    }
)


def merged(*parts: st.SearchStrategy[Params]) -> st.SearchStrategy[Params]:
    """All keys of several dictionaries."""
    return st.tuples(*parts).map(lambda each: {k: v for part in each for k, v in part.items()})


ANY = st.one_of(
    st.tuples(st.just("WarmupLR"), merged(WARMUPS, WARMUP_RATES)),
    st.tuples(st.just("WarmupDecayLR"), merged(WARMUPS, WARMUP_RATES, TOTALS)),
    st.tuples(st.just("WarmupCosineLR"), merged(WARMUPS, TOTALS, RATIOS)),
    st.tuples(st.just("OneCycle"), CYCLES),
    st.tuples(st.just("LRRangeTest"), RANGES),
)


def made(case: tuple[str, Params], **more: Any) -> ClosedFormLR:
    """A scheduler of two groups; a total below the warmup is told elsewhere."""
    kind, params = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TieringWarning)
        return scheduler_of(kind, adamw(2e-3, 3e-3), **params, **more)


def steered(scheduler: ClosedFormLR) -> list[tuple[float, tuple[float, float]]]:
    """What the optimizer has."""
    return [(group["lr"], group["betas"]) for group in scheduler.optimizer.param_groups]


@given(ANY, st.integers(0, 300))
def test_rates_are_finite_and_never_negative(case: tuple[str, Params], updates: int) -> None:
    """Whatever the settings are that were accepted."""
    scheduler = made(case)
    assert all(0 <= rate < math.inf for rate in scheduler.rates_after(updates))
    if isinstance(scheduler, OneCycle):
        assert all(0 <= momentum < 1 for momentum in scheduler.momenta_after(updates))


@given(ANY)
def test_a_scheduler_that_steps_gives_its_closed_form(case: tuple[str, Params]) -> None:
    """Stepping adds nothing of its own, and get_last_lr is what the optimizer has."""
    scheduler = made(case)
    for updates in range(12):
        assert [rate for rate, _ in steered(scheduler)] == scheduler.rates_after(updates)
        assert scheduler.get_last_lr() == scheduler.rates_after(updates)
        assert scheduler.last_batch_iteration == updates - 1
        scheduler.optimizer.step()
        scheduler.step()


@given(ANY, st.integers(0, 130))
def test_a_loaded_state_goes_on_as_if_it_had_not_stopped(
    case: tuple[str, Params], updates: int
) -> None:
    """Rates and momenta are in the optimizer before the first step after it."""
    whole, resumed = made(case), made(case)
    whole.optimizer.step()
    resumed.optimizer.step()
    for _ in range(updates):
        whole.step()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        assert steered(resumed) == steered(whole)
        assert resumed.get_last_lr() == whole.get_last_lr()
        whole.step()
        resumed.step()


@given(ANY, st.integers(0, 130))
def test_a_scheduler_can_go_on_from_a_batch(case: tuple[str, Params], batch: int) -> None:
    """By its own argument, and by the state that DeepSpeed saves."""
    ahead = made(case, last_batch_iteration=batch)
    loaded = made(case)
    loaded.load_state_dict({"last_batch_iteration": batch})
    assert steered(ahead) == steered(loaded)
    assert ahead.rates_after(batch + 1) == [rate for rate, _ in steered(ahead)]
    assert ahead.last_batch_iteration == loaded.last_batch_iteration == batch
    loaded.optimizer.step()
    loaded.step()
    assert loaded.last_batch_iteration == batch + 1


@given(merged(WARMUPS, WARMUP_RATES))
def test_a_warmup_never_falls_and_ends_at_the_highest_rate(params: Params) -> None:
    """And is at the lowest in the first two updates, if there is one."""
    scheduler = WarmupLR(adamw(2e-3, 3e-3), **params)
    rates = [scheduler.rates_after(updates) for updates in range(70)]
    for earlier, later in pairwise(rates):
        assert all(a <= b + 1e-15 for a, b in zip(earlier, later, strict=True))
    assert rates[-1] == pytest.approx(scheduler.max_lrs)
    first = scheduler.min_lrs if params["warmup_num_steps"] else scheduler.max_lrs
    assert rates[0] == rates[1] == pytest.approx(first)


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_warmup_is_the_full_rate_from_the_first_update(kind: str, warmup_type: str) -> None:
    """Where DeepSpeed refuses it."""
    params: Params = {"warmup_num_steps": 0, "warmup_type": warmup_type}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": 4}
    params |= {} if kind == "WarmupCosineLR" else {"warmup_max_lr": 2e-3}
    scheduler = scheduler_of(kind, adamw(2e-3), **params)
    assert scheduler.rates_after(0) == [2e-3]
    ends = {"WarmupLR": 2e-3, "WarmupDecayLR": 0.0, "WarmupCosineLR": 2e-7}
    assert scheduler.rates_after(5) == pytest.approx([ends[kind]])


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_fewer_steps_in_all_than_in_the_warmup_are_a_warning(
    kind: type[WarmupDecayLR | WarmupCosineLR],
) -> None:
    """It works; the rate drops when the warmup ends."""
    with pytest.warns(TieringWarning, match="total_num_steps 3 is below its warmup_num") as caught:
        scheduler = kind(adamw(1e-3), 3, warmup_num_steps=5)
    assert caught[0].filename == __file__
    assert scheduler.rates_after(5) == pytest.approx([1e-3])
    assert scheduler.rates_after(6)[0] < 1.1e-7


@pytest.mark.parametrize("kind", [WarmupLR, WarmupCosineLR, LRRangeTest])
def test_a_rate_that_is_a_tensor_stays_that_tensor(kind: Any) -> None:
    """Torch's compiled optimizers hold it."""
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=rate)
    params = {"total_num_steps": 9, "warmup_num_steps": 3} if kind is WarmupCosineLR else {}
    scheduler = kind(optimizer, **params)
    optimizer.step()
    scheduler.step()
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(scheduler.rates_after(1)[0])


def test_a_state_can_be_saved_without_pickled_code() -> None:
    """As a checkpoint that is loaded with weights_only."""
    scheduler = made(("OneCycle", CYCLE))
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == scheduler.state_dict()


def test_a_second_scheduler_warms_up_to_the_optimizers_first_rate() -> None:
    """As torch's do: the rate at the moment is the other scheduler's."""
    optimizer = adamw(2e-3)
    WarmupLR(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0
    assert WarmupLR(optimizer).rates_after(2000) == [2e-3]


# -- bad settings


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_min_lr": -1e-3}, r"warmup_min_lr is -0.001; set a finite number of"),
        ("WarmupLR", {"warmup_max_lr": math.nan}, "warmup_max_lr is nan"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr is 'auto'"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "1 values, and the optimizer has 2 parameter gr"),
        ("WarmupLR", {"warmup_max_lr": [1e-3, True]}, r"warmup_max_lr\[1\] is True"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps is -1; set a whole number"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps is 2.5"),
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type is 'cosine'; set it to log or linear"),
        ("WarmupLR", {"last_batch_iteration": -2}, "last_batch_iteration is -2"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps is 0"),
        ("WarmupCosineLR", {**WARMUP, "cos_min_ratio": -0.1}, "cos_min_ratio is -0.1"),
        (
            "OneCycle",
            {**CYCLE, "cycle_first_step_size": 0},
            "first_step_size is 0; set a number ab",
        ),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": -1}, "cycle_second_step_size is -1"),
        ("OneCycle", {**CYCLE, "cycle_first_stair_count": 0.5}, "cycle_first_stair_count is 0.5"),
        ("OneCycle", {**CYCLE, "cycle_max_mom": 1.0}, "cycle_max_mom is 1.0; .* and below 1"),
        ("OneCycle", {**CYCLE, "cycle_momentum": "no"}, "cycle_momentum is 'no'; set it to true"),
        ("OneCycle", {**CYCLE, "decay_lr_rate": -1}, "decay_lr_rate is -1"),
        ("OneCycle", {**CYCLE, "decay_mom_rate": math.inf}, "decay_mom_rate is inf; .* number$"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size is 0"),
        ("OneCycle", {}, "needs scheduler.params.cycle_min_lr and cycle_max_lr"),
        ("WarmupDecayLR", {}, "WarmupDecayLR needs scheduler.params.total_num_steps"),
        ("WarmupLR", {"warmup_steps": 3}, "params.warmup_steps is not .* nearest is 'warmup_num_s"),
        ("WarmupLR", {"optimizer": 3}, "scheduler.params.optimizer is not a parameter"),
        ("WarmupLr", {}, "'WarmupLr' is not known; the nearest is 'WarmupLR'"),
        ("CosineAnnealingLR", {}, "it is one of LRRangeTest, OneCycle, WarmupLR"),
    ],
)
def test_a_bad_setting_is_refused_and_nothing_has_changed(
    kind: str, params: Params, message: str
) -> None:
    """The message names the key, the value and the remedy."""
    optimizer = adamw(1e-3, 2e-3)
    before = copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ConfigError, match=message):
        scheduler_of(kind, optimizer, **params)
    after = optimizer.param_groups
    keys = ("lr", "betas", "initial_lr")
    assert [[g.get(k) for k in keys] for g in after] == [[g.get(k) for k in keys] for g in before]


def test_a_state_of_other_parameter_groups_is_refused() -> None:
    """Its rates would steer the wrong ones."""
    state = WarmupLR(adamw(1e-3)).state_dict()
    with pytest.raises(ConfigError, match="1 parameter groups, and the optimizer has 2"):
        WarmupLR(adamw(1e-3, 1e-3)).load_state_dict(state)


def test_every_type_has_the_name_of_its_class() -> None:
    """The table is DeepSpeed's."""
    assert {kind: made.__name__ for kind, made in SCHEDULERS.items()} == {k: k for k in SCHEDULERS}


# -- with the engine

ENGINE_CASES: list[tuple[str, Params]] = [
    ("WarmupLR", {"warmup_num_steps": 2, "warmup_min_lr": 1e-4}),
    ("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 4}),
    ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 4}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 2}),
    ("LRRangeTest", RANGE),
]


@pytest.mark.parametrize(("kind", "params"), ENGINE_CASES)
def test_the_engine_trains_with_a_schedule_as_torch_does(
    kind: str, params: Params, tmp_path: Path
) -> None:
    """No warning, the rates of the closed form, and the same weights."""
    model = base_model()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    beside = scheduler_of(kind, reference, **params)
    engine, optimizer, _, scheduler = infinity.initialize(
        model=model,
        config=config_for(tmp_path, param="cpu", optimizer="cpu"),
        lr_scheduler=lambda paged: scheduler_of(kind, paged, **params),
    )
    assert isinstance(scheduler, SCHEDULERS[kind])
    with engine:
        for update, batch in enumerate(base_batches()):
            assert engine.get_lr() == scheduler.rates_after(update) == scheduler.get_last_lr()
            base_loss(plain, batch).backward()
            reference.step()
            beside.step()
            reference.zero_grad()
            engine.backward(base_loss(engine, batch))
            engine.step()
        assert [g["betas"] for g in optimizer.param_groups] == [
            g["betas"] for g in reference.param_groups
        ]
        torch.testing.assert_close(engine.module.state_dict(), plain.state_dict())


def test_a_schedule_made_for_the_users_optimizer_steers_the_engines(tmp_path: Path) -> None:
    """Its first rate is taken over with the groups."""
    model = base_model()
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycle(own, **CYCLE, cycle_first_step_size=2)
    engine, optimizer, *_ = infinity.initialize(
        model=model,
        config=without_optimizer(config_for(tmp_path, param="cpu", optimizer="cpu")),
        optimizer=own,
        lr_scheduler=scheduler,
    )
    with engine:
        for update, batch in enumerate(base_batches()):
            assert engine.get_lr() == scheduler.rates_after(update)
            assert optimizer.param_groups[0]["betas"] == (scheduler.momenta_after(update)[0], 0.99)
            engine.backward(base_loss(engine, batch))
            engine.step()


def test_a_rate_of_zero_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    """The first two updates of a warmup from 0, as with DeepSpeed."""
    model = base_model()
    before = copy.deepcopy(model.state_dict())
    engine, *_ = infinity.initialize(
        model=model,
        config=config_for(tmp_path, param="cpu", optimizer="cpu"),
        lr_scheduler=lambda optimizer: WarmupLR(optimizer, warmup_num_steps=4),
    )
    batches = base_batches()
    with engine:
        for batch in batches[:2]:
            engine.backward(base_loss(engine, batch))
            engine.step()
        assert_equal(engine.module.state_dict(), before)
        engine.backward(base_loss(engine, batches[2]))
        engine.step()
        after = engine.module.state_dict()
        assert not torch.equal(after["0.weight"], before["0.weight"])
