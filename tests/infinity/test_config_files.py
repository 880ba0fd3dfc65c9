"""The ready files of the repository: each loads without a warning, and trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch

from infinity.config import load_config, unresolved
from tests.infinity.conftest import base_model, train

FOLDER: Final = Path(__file__).parents[2] / "configs"
FILES: Final = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_loads_without_a_warning(path: Path) -> None:
    """Warnings are errors here."""
    config = load_config(path)
    batch = config.batch(world_size=1)
    assert batch.train is not None or path.stem == "all_auto"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_trains(path: Path, tmp_path: Path) -> None:
    """With its paths pointed at a scratch folder, and what a trainer fills in given by hand."""
    config = json.loads(path.read_text())
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(tmp_path)
    for number, drive in enumerate(config.get("tiering", {}).get("nvme_paths", [])):
        drive["path"] = str(tmp_path / str(number))
    model, given = base_model(), {}
    if unresolved(load_config(path), optimizer_given=False, scheduler_given=False):
        given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given["lr_scheduler"] = torch.optim.lr_scheduler.ConstantLR(given["optimizer"])
    losses, weights = train(model, config, steps=2, **given)
    assert all(torch.isfinite(torch.tensor(losses)))
    before = dict(base_model().named_parameters())
    # A norm's weight of 1 may be what it rounds to in bf16.
    assert all(not torch.equal(before[n], w) for n, w in weights.items() if w.ndim > 1)


def test_each_stage_and_each_place_has_a_file() -> None:
    zeros = [load_config(path).zero_optimization for path in FILES]
    assert {zero.stage for zero in zeros} == {1, 2, 3}
    assert {zero.offload_optimizer.device for zero in zeros} == {"none", "cpu", "nvme"}
    assert {zero.offload_param.device for zero in zeros} == {"none", "cpu", "nvme"}


def test_the_file_for_a_trainer_leaves_the_rates_to_it() -> None:
    config = load_config(FOLDER / "all_auto.json")
    assert unresolved(config, optimizer_given=True, scheduler_given=True) == []
    assert unresolved(config, optimizer_given=False, scheduler_given=False) == [
        *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{key}"
            for key in ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        ),
    ]
