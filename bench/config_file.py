"""Changes the ``aio`` block of a DeepSpeed-style JSON file and leaves every other byte alone.

Reading the file and writing it anew would keep the values, but turn ``1e9`` into ``1000000000.0``
and lose the layout. So the place of the block in the text is found, and only that is exchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from tiering.errors import ConfigError

_KEY: Final = "aio"
_INDENT: Final = "  "
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"\s*")

AioBlock = dict[str, int | bool]


class _Span(NamedTuple):
    """Where a value stands in a text."""

    start: int
    end: int


def write_aio_block(path: Path, block: AioBlock) -> None:
    """Put settings into a file's ``aio`` block, in one step: nobody ever sees half a file.

    Args:
        path: of the file.
        block: the settings; others of the block are kept.

    Raises:
        ConfigError: no such file, not a JSON object, or it cannot be written.
    """
    path = path.resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        edited = with_aio_block(text, block)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be edited: {error}") from error
    try:
        _replace(path, edited)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def with_aio_block(text: str, block: AioBlock) -> str:
    """The text of a JSON object with settings put into its ``aio`` block.

    Raises:
        ValueError: it is not a JSON object.
    """
    spans = _members(text)
    if _KEY in spans:
        span = spans[_KEY]
        old = json.loads(text[span.start : span.end])
        merged = {**old, **block} if isinstance(old, dict) else block
        return text[: span.start] + _rendered(merged) + text[span.end :]
    body = text.rstrip()[:-1].rstrip()
    comma = "," if spans else ""
    tail = text[len(text.rstrip()) :]
    return f"{body}{comma}\n{_INDENT}{json.dumps(_KEY)}: {_rendered(block)}\n}}{tail}"


def _rendered(block: AioBlock) -> str:
    return json.dumps(block, indent=len(_INDENT)).replace("\n", f"\n{_INDENT}")


def _members(text: str) -> dict[str, _Span]:
    """Where the values of a JSON object's own keys stand; of a repeated key, the last."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - about text, not a type
    spans = {}
    at = text.index("{") + 1
    while text[at := _skip(text, at)] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)  # over the colon
        _, end = _DECODER.raw_decode(text, start)
        spans[key] = _Span(start, end)
        at = _skip(text, end)
        at += text[at] == ","
    return spans


def _skip(text: str, at: int) -> int:
    """The next position that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
