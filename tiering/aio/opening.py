"""Which engine moves the bytes: the one place that decides.

The native engine, wherever it can be loaded. Without it, ``"auto"`` falls back to `PureEngine` and
warns; whatever was asked for by name is an error then, since a choice is never replaced silently.
"""

from __future__ import annotations

import warnings
from typing import TypeAlias

from tiering.aio.config import AioConfig, Faults
from tiering.aio.engine import AioEngine
from tiering.aio.native import loader_message, why_not_native
from tiering.aio.pure import PureEngine
from tiering.errors import ConfigError, TieringWarning

AnyEngine: TypeAlias = AioEngine | PureEngine


def open_engine(config: AioConfig | None = None, *, faults: Faults | None = None) -> AnyEngine:
    """Make the engine that the configuration asks for.

    Args:
        config: how to drive the drive; the defaults fit an NVMe drive.
        faults: deliberate faults, for tests; only the native engine has them.

    Raises:
        ConfigError: what was asked for cannot be had.
    """
    config = config or AioConfig()
    if not loader_message:
        return AioEngine(config, faults=faults)
    if config.backend != "auto":
        raise ConfigError(
            f"backend {config.backend!r} cannot be had: {why_not_native()}; "
            "or choose the backend 'auto'"
        )
    if faults is not None:
        raise ConfigError(f"faults cannot be had: {why_not_native()}")
    if config.require_native:
        raise ConfigError(f"{why_not_native()}; or do without require_native, at lower speed")
    warnings.warn(
        f"file I/O goes through threads of Python, which is slower: {why_not_native()}",
        TieringWarning,
        stacklevel=2,
    )
    return PureEngine(config)
