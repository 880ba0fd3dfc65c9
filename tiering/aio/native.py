"""The compiled part: `ffi` and `lib`, or the loader's message why they are not there.

Importing this never fails, so that what needs no file I/O works without the compiled part.
"""

from __future__ import annotations

from tiering.errors import ConfigError

try:
    from tiering.aio._native import ffi, lib
except ImportError as error:
    ffi = lib = None
    _loader_message = str(error)
else:
    _loader_message = ""

__all__ = ["check_native", "ffi", "lib", "loader_message"]


def loader_message() -> str:
    """Why the compiled part is not available; empty when it is."""
    return _loader_message


def check_native() -> None:
    """Raise `ConfigError` with the loader's message when the compiled part is not available."""
    if _loader_message:
        raise ConfigError(
            f"native I/O is not available: {_loader_message}; reinstall zero-infinity from a wheel "
            "for this machine, or build it in place (make setup)"
        )
