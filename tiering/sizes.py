"""Sizes as people write them, and powers of two."""

from __future__ import annotations

import re
from typing import Final

from tiering.errors import ConfigError

_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_UNITS: Final = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``64K`` (1024 each), ``1.5GB`` (1000 each) or ``4096``.

    Raises:
        ConfigError: no such size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is no size; write it like 4GiB, 64KiB, 1GB or 4096")
    nbytes = float(match[1]) * factor
    if nbytes != int(nbytes) or nbytes <= 0:
        raise ConfigError(f"{text!r} is {nbytes} bytes; a size is a whole number above 0")
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """A size with the largest binary unit that does not make it less than one."""
    for name, unit in _UNITS.items():
        if nbytes >= unit:
            return f"{nbytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{nbytes} bytes"


def write_bytes(nbytes: int) -> str:
    """A size as `parse_bytes` reads it back, in the largest binary unit that divides it."""
    for name, unit in _UNITS.items():
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def power_of_two_above(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


def power_of_two_below(value: int) -> int:
    """The greatest power of two that is not more; 1 for values below 1."""
    return 1 << max(0, value.bit_length() - 1)


def is_power_of_two(value: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on."""
    return value > 0 and value & (value - 1) == 0
