"""What each value of a configuration becomes, and what is said of a file that cannot work."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Batch, Config, load_config, unresolved
from tests.infinity.conftest import base_model, config_for
from tiering.errors import ConfigError, TieringWarning

Raw = dict[str, Any]

BROKEN = {
    "a section misspelt": (
        {"zero_optimisation": {"stage": 3}},
        ["zero_optimisation: unknown key; did you mean 'zero_optimization'?"],
    ),
    "a key misspelt": (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket": 1}},
        [
            (
                "zero_optimization.stage3_prefetch_bucket: unknown key; did you mean "
                "'zero_optimization.stage3_prefetch_bucket_size'?"
            )
        ],
    ),
    "a value of another type": (
        {"train_batch_size": "many", "gradient_clipping": True, "bf16": {"enabled": "maybe"}},
        [
            "gradient_clipping: must be a number, got true",
            (
                "train_batch_size: must be a valid integer, unable to parse string as an integer, "
                "got 'many'"
            ),
            ("bf16.enabled: must be a valid boolean, unable to interpret input, got 'maybe'"),
        ],
    ),
    "a value in the place of a section": (
        {"scheduler": "WarmupLR", "aio": 3, "zero_optimization": {"offload_param": "cpu"}},
        [
            "scheduler: must be a section in braces, got 'WarmupLR'",
            "zero_optimization.offload_param: must be a section in braces, got 'cpu'",
            "aio: must be a section in braces, got 3",
        ],
    ),
    "no samples, and fewer": (
        {"train_batch_size": 0, "train_micro_batch_size_per_gpu": -1},
        [
            "train_batch_size: must be greater than or equal to 1, got 0",
            "train_micro_batch_size_per_gpu: must be greater than or equal to 1, got -1",
        ],
    ),
    "two types of weights": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        ["fp16.enabled and bf16.enabled are both true; weights are stored in one type"],
    ),
    "an optimizer that is not there": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "cuda_aware": True}}},
        [
            (
                "optimizer.type: there are 'Adam' and 'AdamW', got 'OneBitAdam', whose state is "
                "not paged yet"
            ),
            "optimizer.params.cuda_aware: unknown key; it is not supported (yet)",
        ],
    ),
    "types misspelt": (
        {"optimizer": {"type": "Adamm"}, "scheduler": {"type": "WarmupLRR"}},
        [
            ("optimizer.type: there are 'Adam' and 'AdamW', got 'Adamm'; did you mean 'Adam'?"),
            (
                "scheduler.type: must be one of 'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR', "
                "'OneCycle', 'LRRangeTest', got 'WarmupLRR'; did you mean 'WarmupLR'?"
            ),
        ],
    ),
    "a kernel of an optimizer, and a key in large letters": (
        {"optimizer": {"type": "FusedAdam"}, "Train_Batch_Size": 8},
        [
            "optimizer.type: there are 'Adam' and 'AdamW', got 'FusedAdam'; write 'Adam'",
            "Train_Batch_Size: unknown key; did you mean 'train_batch_size'?",
        ],
    ),
    "a schedule without its length": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_step": 10}}},
        [
            "scheduler.params.total_num_steps: is required",
            (
                "scheduler.params.warmup_num_step: unknown key; did you mean "
                "'scheduler.params.warmup_num_steps'?"
            ),
        ],
    ),
    "a schedule that is not there": (
        {"scheduler": {"type": "Cosine"}},
        [
            (
                "scheduler.type: must be one of 'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR', "
                "'OneCycle', 'LRRangeTest', got 'Cosine'"
            )
        ],
    ),
    "weights offloaded in stage 2, optimizer in stage 0": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        [
            (
                "zero_optimization.offload_param.device is 'cpu', which needs "
                "zero_optimization.stage 3, got 2"
            )
        ],
    ),
    "an optimizer offloaded in stage 0": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        [
            (
                "zero_optimization.offload_optimizer.device is 'cpu', which needs "
                "zero_optimization.stage 1, 2 or 3, got 0"
            )
        ],
    ),
    "what would train differently": (
        {
            "amp": {"enabled": True},
            "fp16": {"fp16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
            "aio": {"use_gds": True},
        },
        [
            'amp: is not supported; use "bf16" or "fp16": {"enabled": true}',
            (
                "fp16.fp16_master_weights_and_grads: is not supported, got True; master weights "
                "and moments are fp32 always; move them with offload_optimizer instead"
            ),
            (
                "zero_optimization.zero_quantized_weights: is not supported, got True; weights and "
                "gradients travel in their own type; leave it out"
            ),
            (
                "aio.use_gds: is not supported, got True; records pass through the host arena; "
                "leave it out"
            ),
        ],
    ),
    "an old and a new name": (
        {
            "zero_optimization": {
                "stage": 1,
                "cpu_offload": True,
                "offload_optimizer": {"device": "none"},
            }
        },
        [
            (
                "zero_optimization.cpu_offload: is the old name of "
                "zero_optimization.offload_optimizer, which is there too; leave it out"
            )
        ],
    ),
    "updates before the norm is known": (
        {"tiering": {"update_in_backward": True}},
        [
            (
                "tiering.update_in_backward needs zero_optimization.stage 3, got 0: below it "
                "weights stay present until the step"
            ),
            (
                "gradient_clipping is 1.0 where it is left out, which needs all gradients before "
                "the first update; so tiering.update_in_backward must be false, or clipping 0"
            ),
        ],
    ),
    "values that are wrong, and values that do not go together": (
        {
            "gradient_clipping": -1,
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}},
            "tiering": {"update_in_backward": True},
        },
        [
            "gradient_clipping: must be greater than or equal to 0, got -1",
            (
                "zero_optimization.offload_param.device is 'nvme', which needs "
                "zero_optimization.stage 3, got 2"
            ),
            (
                "device is nvme, so zero_optimization.offload_param.nvme_path must name a folder "
                "on the drive"
            ),
            (
                "tiering.update_in_backward needs zero_optimization.stage 3, got 2: below it "
                "weights stay present until the step"
            ),
            (
                "fp16.enabled may refuse a step, which is known when all gradients are; so "
                "tiering.update_in_backward must be false"
            ),
        ],
    ),
}


@pytest.mark.parametrize(("raw", "problems"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_has_one_error_with_all_of_its_problems(
    raw: Raw, problems: list[str], tmp_path: Path
) -> None:
    """Word for word, with the name of the file."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    lines = "".join(f"\n  - {problem}" for problem in problems)
    assert str(error.value) == (
        f"the configuration '{path}' has {len(problems)} problem(s):{lines}"
    )


def test_what_is_no_file_of_settings_is_refused(tmp_path: Path) -> None:
    """A missing file, another language, another value."""
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text("stage: 3")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_config(path)


def test_a_loaded_configuration_is_taken_as_it_is() -> None:
    config = load_config({"train_batch_size": 8})
    assert load_config(config) is config


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((16, 2, "auto"), Batch(micro=2, accumulation=2, train=16)),
        (("auto", 2, 3), Batch(micro=2, accumulation=3, train=24)),
        ((16, "auto", "auto"), Batch(micro=4, accumulation=1, train=16)),
        ((16, "auto", 2), Batch(micro=2, accumulation=2, train=16)),
        (("auto", 2, "auto"), Batch(micro=2, accumulation=1, train=8)),
        ((24.0, 2.0, 3.0), Batch(micro=2, accumulation=3, train=24)),
        (("auto", "auto", 3), Batch(micro=None, accumulation=3, train=None)),
        (("auto", "auto", "auto"), Batch(micro=None, accumulation=1, train=None)),
    ],
)
def test_batch_sizes_complete_each_other(sizes: tuple[object, ...], expected: Batch) -> None:
    """On four ranks."""
    assert batch_of(sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (16, 2, 3),
            (
                "train_batch_size is 16, but train_micro_batch_size_per_gpu x "
                "gradient_accumulation_steps x ranks is 2 x 3 x 4 = 24; change one of the three, "
                "or leave one out"
            ),
        ),
        (
            (18, 4, "auto"),
            (
                "train_batch_size 18 cannot be divided by train_micro_batch_size_per_gpu x ranks, "
                "which is 4 x 4 = 16; make it a multiple of that, such as 32, or leave it out"
            ),
        ),
        (
            (18, "auto", 2),
            (
                "train_batch_size 18 cannot be divided by gradient_accumulation_steps x ranks, "
                "which is 2 x 4 = 8; make it a multiple of that, such as 24, or leave it out"
            ),
        ),
        (
            (2, "auto", "auto"),
            (
                "train_batch_size 2 cannot be divided by gradient_accumulation_steps x ranks, "
                "which is 1 x 4 = 4; make it a multiple of that, such as 4, or leave it out"
            ),
        ),
    ],
)
def test_batch_sizes_that_do_not_come_out_are_refused_with_the_sum(
    sizes: tuple[object, ...], message: str
) -> None:
    """On four ranks."""
    with pytest.raises(ConfigError) as error:
        batch_of(sizes)
    assert str(error.value) == message


def batch_of(sizes: tuple[object, ...]) -> Batch:
    """Of a file with these sizes; those that are "auto" are left out half of the time."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = dict(zip(names, sizes, strict=True))
    short = {name: size for name, size in raw.items() if size != "auto"}
    batches = [load_config(file).batch(world_size=4) for file in (raw, short)]
    assert batches[0] == batches[1]
    return batches[0]


def test_whole_floats_are_counts_and_truths_are_not() -> None:
    """1e9 is 1000000000 for every whole number."""
    raw = {"stage": 3.0, "sub_group_size": 1e9, "reduce_bucket_size": 500000000.0}
    zero = load_config({"train_batch_size": 8.0, "zero_optimization": raw}).zero_optimization
    assert (zero.stage, zero.sub_group_size, zero.reduce_bucket_size) == (3, 10**9, 5 * 10**8)
    for wrong in (
        {"train_batch_size": True},
        {"zero_optimization": {"sub_group_size": True}},
        {"zero_optimization": {"stage": True}},
    ):
        with pytest.raises(ConfigError, match="must be a number, got true"):
            load_config(wrong)
    with pytest.raises(ConfigError, match=r"train_batch_size: .* got 1\.5"):
        load_config({"train_batch_size": 1.5})


def test_a_size_with_a_fraction_is_rounded_down_and_said_so() -> None:
    """As 0.9 * 4096 * 4096 gives it."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}
    with pytest.warns(TieringWarning, match=r"size: 15099494\.4 is rounded down to 15099494"):
        config = load_config({"zero_optimization": zero})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 15099494


def remarks_of(raw: Raw) -> list[str]:
    """The lines of a file's warning; there is one warning at most."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(raw)
    assert len(caught) <= 1
    return [line for w in caught for line in str(w.message).split("\n  - ")[1:]]


def test_keys_without_effect_are_told_once_with_the_reason() -> None:
    """One warning for all; those that ask for what always happens are not in it."""
    zero = {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "round_robin_gradients": True,
        "ignore_unused_parameters": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "fast_init": True},
    }
    raw = {"zero_optimization": zero, "aio": {"thread_count": 8, "single_submit": True}}
    assert remarks_of(raw) == [
        (
            "zero_optimization.round_robin_gradients: no effect: every rank copies the part of "
            "each gradient that is its own"
        ),
        (
            "zero_optimization.ignore_unused_parameters: no effect: a parameter without a gradient "
            "is left as it is"
        ),
        ("aio.single_submit: no effect: as many transfers go in one system call as are ready"),
    ]


@pytest.mark.parametrize(
    "section",
    [
        *("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
        *("autotuning", "elasticity", "hybrid_engine", "data_efficiency", "compression_training"),
        *("amp", "torch_autocast", "curriculum_learning", "progressive_layer_drop"),
    ],
)
def test_a_section_that_is_switched_off_is_silent_whatever_is_in_it(section: str) -> None:
    assert not remarks_of({section: {"enabled": False, "project": "x", "unheard_of": [1]}})


def test_a_monitor_that_is_switched_on_has_no_effect() -> None:
    [line] = remarks_of({"tensorboard": {"enabled": True, "output_path": "logs"}})
    assert line.startswith("tensorboard: no effect: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True, "cpu_offload": False}},
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        ),
        (
            {
                "zero_optimization": {
                    "stage3_gather_fp16_weights_on_model_save": True,
                    "prefetch_bucket_size": 7,
                }
            },
            {
                "zero_optimization": {
                    "stage3_gather_16bit_weights_on_model_save": True,
                    "stage3_prefetch_bucket_size": 7,
                }
            },
        ),
    ],
)
def test_a_key_with_an_old_name_is_taken_and_the_new_name_told(old: Raw, new: Raw) -> None:
    assert any("is now called" in r or "is a section now" in r for r in remarks_of(old))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TieringWarning)
        assert load_config(old) == load_config(new)


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_null_for_an_offload_section_is_none(name: str) -> None:
    zero = load_config({"zero_optimization": {"stage": 3, name: None}}).zero_optimization
    assert getattr(zero, name).device == "none"


def test_every_key_of_zero_may_be_auto() -> None:
    """It is the default where nobody knows better."""
    auto = dict.fromkeys(("overlap_comm", "contiguous_gradients", "sub_group_size"), "auto")
    assert load_config({"zero_optimization": {"stage": 2, **auto}}) == load_config(
        {"zero_optimization": {"stage": 2}}
    )


@pytest.mark.parametrize(
    ("section", "decoupled", "decay"),
    [
        ({"type": "Adam"}, True, 0.0),
        ({"type": "adamw"}, True, 0.0),
        ({"type": "ADAM", "params": {"adam_w_mode": False}}, False, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, True, 0.01),
        (
            {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
            False,
            0.0,
        ),
        ({"type": "Adam", "params": {"weight_decay": 0.3}}, True, 0.3),
    ],
)
def test_the_optimizer_is_the_one_that_deepspeed_makes(
    section: Raw, decoupled: bool, decay: float
) -> None:
    """Its Adam decouples decay too, unless told not to, and its own kernels decay by nothing."""
    optimizer = load_config({"optimizer": section}).optimizer
    assert optimizer is not None
    settings = optimizer.settings()
    assert (settings.decoupled, settings.weight_decay) == (decoupled, decay)
    assert (settings.lr, settings.betas, settings.eps) == (1e-3, (0.9, 0.999), 1e-8)


def test_adamw_without_its_mode_is_still_decoupled_and_that_is_told() -> None:
    [line] = remarks_of({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}})
    assert "no effect with type AdamW" in line


ALL_AUTO: Raw = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": 1e-3},
    },
}


def test_what_only_a_trainer_knows_is_told_in_one_error() -> None:
    """A section that the user's own object takes the place of does not count."""
    config = load_config(ALL_AUTO)
    rates = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]
    steps = [f"scheduler.params.{key}" for key in ("total_num_steps", "warmup_min_lr")]
    for optimizer in (False, True):
        for scheduler in (False, True):
            keys = unresolved(config, optimizer_given=optimizer, scheduler_given=scheduler)
            assert keys == [*([] if optimizer else rates), *([] if scheduler else steps)]
    config.require_resolved(optimizer_given=True, scheduler_given=True)
    with pytest.raises(ConfigError) as error:
        config.require_resolved(optimizer_given=True, scheduler_given=False)
    assert str(error.value) == (
        'scheduler.params.total_num_steps, scheduler.params.warmup_min_lr are "auto", which a '
        "trainer fills in and nobody has; give values, or pass your own optimizer and lr_scheduler "
        "to initialize()"
    )


def test_initialize_refuses_what_only_a_trainer_knows(tmp_path: Path) -> None:
    """Before anything moves; with the user's own optimizer it trains."""
    model = base_model()
    config = config_for(tmp_path, param="none", optimizer="none") | {
        "optimizer": ALL_AUTO["optimizer"]
    }
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr, "):
        infinity.initialize(model=model, config=config)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    own = torch.optim.AdamW(model.parameters())
    infinity.initialize(model=model, config=load_config(config), optimizer=own).engine.close()


def test_a_schedule_has_the_parameters_of_its_type() -> None:
    """They are keyword arguments of its class."""
    raw = {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1e-5], "warmup_num_steps": 1e2}}
    scheduler = load_config({"scheduler": raw}).scheduler
    assert scheduler is not None
    assert scheduler.type == "WarmupLR"
    assert scheduler.params.model_dump() == {
        "last_batch_iteration": -1,
        "warmup_min_lr": (0.0, 1e-5),
        "warmup_max_lr": None,
        "warmup_num_steps": 100,
        "warmup_type": "log",
    }


@pytest.mark.parametrize(
    ("raw", "policy"),
    [
        ({}, "ignore"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "skip"),
        ({"bf16": {"check_grad_overflow": False}}, "ignore"),
        (
            {"bf16": {"check_grad_overflow": True}, "tiering": {"nonfinite_gradients": "raise"}},
            "raise",
        ),
    ],
)
def test_what_happens_at_a_nonfinite_gradient_is_settled(raw: Raw, policy: str) -> None:
    assert load_config(raw).nonfinite_gradients == policy


def test_the_defaults_are_deepspeeds() -> None:
    """As of 0.19.8, for what changes the training."""
    config = Config()
    assert config.zero_optimization.stage == 0
    assert config.gradient_clipping == 1.0
    assert (config.gradient_predivide_factor, config.prescale_gradients) == (1.0, False)
    fp16 = config.fp16
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power) == (False, 0.0, 16)
    assert (fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale) == (1000, 2, 1.0)
