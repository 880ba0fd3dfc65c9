"""The configuration: DeepSpeed-style JSON in, frozen typed models out, once, at the edge.

Sections and keys have DeepSpeed's names; the package's own keys are in the section ``tiering``.
Every key of DeepSpeed's schema acts, or has no effect and a warning says so, or is refused with
what to use instead; docs/config.md has them all. Any other key is refused with the nearest one
named, so that a misspelt key never passes for a setting. All problems of a file are reported
together.

The modules, from the ground up: `spelling`, `fields`, one for each section, `root`, `names`,
`loading`; `reference` writes the document.
"""

from __future__ import annotations

from infinity.config.batch import Batch
from infinity.config.loading import load_config
from infinity.config.optimizer import AdamParams, AdamSettings, Optimizer
from infinity.config.paths import NvmePath, real_path
from infinity.config.precision import Bf16, DataTypes, Fp16
from infinity.config.root import Config, unresolved
from infinity.config.scheduler import Scheduler
from infinity.config.tiering import OnNonfinite, Tiering
from infinity.config.zero import (
    DEFAULT_BUFFERS,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
    ZeroOptimization,
)

__all__ = [
    "DEFAULT_BUFFERS",
    "AdamParams",
    "AdamSettings",
    "Batch",
    "Bf16",
    "Config",
    "DataTypes",
    "Fp16",
    "NvmePath",
    "OffloadDevice",
    "OffloadOptimizer",
    "OffloadParam",
    "OnNonfinite",
    "Optimizer",
    "Scheduler",
    "Tiering",
    "ZeroOptimization",
    "load_config",
    "real_path",
    "unresolved",
]
