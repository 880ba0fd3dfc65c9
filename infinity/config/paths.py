"""Folders on drives, as a configuration names them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from infinity.config.fields import Section
from tiering.errors import ConfigError


def real_path(path: str) -> str:
    """The directory that a path of the configuration leads to; it may be missing.

    Raises:
        ConfigError: it leads nowhere, or to something else.
    """
    try:
        real = Path(os.path.realpath(Path(path).expanduser()))
        if real.exists() and not real.is_dir():
            raise ConfigError(f"{path!r} is not a directory; name one on the drive")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"path {path!r} cannot be used: {error}") from error
    return str(real)


def _is_path(path: str) -> str:
    if not path:
        raise ValueError("is empty; name a directory on the drive")
    try:
        real_path(path)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return path


def _nvme_path(value: object) -> object:
    """A path may stand alone, without its speed."""
    if isinstance(value, str):
        return {"path": value}
    if isinstance(value, (Mapping, NvmePath)):
        return value
    raise ValueError(f'must be a path, or {{"path": ..., "gb_per_s": ...}}, got {value!r}')


class NvmePath(Section):
    """An element of ``tiering.nvme_paths``."""

    path: Annotated[str, AfterValidator(_is_path)]
    """A folder on a drive; made if missing."""
    gb_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How fast the drive is, reading and writing, in 1e9 bytes a second. None: it is measured."""


def _spreadable(paths: tuple[NvmePath, ...]) -> tuple[NvmePath, ...]:
    """All that is wrong with the paths as a list."""
    problems = [] if paths else ["is empty; name a folder on each drive, or leave the key out"]
    seen: dict[str, str] = {}
    for path in (p.path for p in paths):
        real = real_path(path)
        if real in seen:
            problems.append(f"{seen[real]!r} and {path!r} are one directory; name each path once")
        seen[real] = path
    unknown = [p.path for p in paths if p.gb_per_s is None]
    if 0 < len(unknown) < len(paths):
        names = ", ".join(map(repr, unknown))
        problems.append(f"{names} have no gb_per_s; give it for all paths, or for none to measure")
    if problems:
        raise ValueError("; and ".join(problems))
    return paths


NvmePaths = Annotated[
    tuple[Annotated[NvmePath, BeforeValidator(_nvme_path)], ...], AfterValidator(_spreadable)
]
