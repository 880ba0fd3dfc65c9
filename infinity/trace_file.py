"""The trace file: in which order each kind of pass uses its records, kept for the next run.

A run that reads it fetches ahead from its first step on, instead of from its second. It is a hint:
a trace that is wrong costs time and never a result. One of another model is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tiering.errors import ConfigError
from tiering.trace import Access, Trace, Use

_VERSION = 1


def write_traces(
    path: str | os.PathLike[str], traces: Mapping[str, Trace], records: Mapping[str, int]
) -> None:
    """Write a trace file; an older one stays as it is until the new one is whole.

    Args:
        path: of the file.
        traces: by kind of pass.
        records: bytes of every record, by key.

    Raises:
        OSError: it cannot be written.
    """
    numbers = {key: number for number, key in enumerate(records)}
    document = {
        "version": _VERSION,
        "records": dict(records),
        "traces": {
            kind: [[numbers[use.key], use.access.value] for use in trace.uses]
            for kind, trace in traces.items()
        },
    }
    target = Path(path)
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(document), encoding="utf-8")
        fresh.replace(target)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def read_traces(path: str | os.PathLike[str], records: Mapping[str, int]) -> dict[str, Trace]:
    """Read a trace file.

    Args:
        path: of the file.
        records: of the model that is going to follow it.

    Raises:
        ConfigError: it cannot be read, or is of another model, plan or version; says which.
    """
    name = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        version, found = document["version"], dict(document["records"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the trace file {name!r} cannot be read: {error!r}") from error
    if version != _VERSION:
        raise ConfigError(f"the trace file {name!r} is of version {version}, not {_VERSION}")
    if found != dict(records):
        differing = {k for k in {*found, *records} if found.get(k) != records.get(k)}
        raise ConfigError(
            f"the trace file {name!r} is of another model or another plan: {len(differing)} "
            f"records differ, {min(differing)!r} among them; record it anew by a run without it"
        )
    keys = list(found)
    try:
        return {
            kind: Trace([Use(keys[number], Access(access)) for number, access in uses])
            for kind, uses in document["traces"].items()
        }
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the trace file {name!r} cannot be read: {error!r}") from error
