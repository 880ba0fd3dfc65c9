"""The compiled part: `ffi` and `lib`, or the loader's message why they are not there.

Importing this never fails, so that what needs no file I/O works without the compiled part.
"""

from __future__ import annotations

from tiering.errors import ConfigError

try:
    from tiering.aio._native import ffi, lib
except ImportError as error:
    # Nothing uses them before check_native has raised.
    ffi = lib = None  # type: ignore[assignment]
    loader_message = str(error)
else:
    loader_message = ""

__all__ = ["check_native", "ffi", "lib", "loader_message", "why_not_native"]


def why_not_native() -> str:
    """Why the compiled part is not in use, and the remedy; empty when it is."""
    if not loader_message:
        return ""
    return (
        f"native I/O is not available: {loader_message}; reinstall zero-infinity from a wheel "
        "for this machine, or build it in place (make setup)"
    )


def check_native() -> None:
    """Raise `ConfigError` with the loader's message when the compiled part is not available."""
    if loader_message:
        raise ConfigError(why_not_native())
