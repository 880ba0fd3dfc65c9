"""What DeepSpeed's package has and this one has not, and what to do instead."""

from __future__ import annotations

from types import ModuleType
from typing import Final

INSTEAD: Final = {
    "checkpointing": "recompute blocks with torch.utils.checkpoint; the engine needs no other",
    "init_inference": (
        "there is no engine for inference yet; to evaluate a model in training, call "
        "engine.eval(), and the engine under torch.no_grad()"
    ),
    "moe": "experts are parameters like others; write them as modules of the model",
    "ops": (
        "the optimizer is torch.optim.Adam or AdamW, given to initialize() or named in the "
        "configuration; its state is paged in any case"
    ),
    "pipe": "there is no pipeline parallelism; give initialize() the model as one module",
    "runtime": (
        "what it has inside is not here; schedules of the learning rate are in "
        "infinity.lr_schedules, checked configurations come from infinity.load_config()"
    ),
    "utils": (
        "in place of safe_get_full_fp32_param and its kind there are engine.get_state(parameter, "
        "field) and engine.set_state"
    ),
    "zero": (
        "in place of zero.Init, build the model in memory, with its values, and give it to "
        "initialize(): one that is never whole in memory, or is on the meta device, cannot be "
        "taken yet; in place of zero.GatheredParameters, use the parameters as they are: a weight "
        "comes when it is touched, and a change of it is kept"
    ),
}
"""By the name in DeepSpeed's package."""


def absence(module: ModuleType, name: str) -> AttributeError:
    """The error for a name that a module does not have: the usual one, and what to do instead."""
    usual = f"module {module.__name__!r} has no attribute {name!r}"
    message = f"{usual}: {INSTEAD[name]}" if name in INSTEAD else usual
    return AttributeError(message, name=name, obj=module)
