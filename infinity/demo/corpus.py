"""Real text that is on every machine: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch

VOCABULARY = 256
MAX_BYTES = 8 << 20

# Not part of the library, or not written by people: packages, tests, tables of characters.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}
)


def read_corpus(folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> torch.Tensor:
    """Concatenate the Python files under a folder, in the order of their names.

    Args:
        folder: where to look; by default the standard library of the running interpreter.
        max_bytes: the text is cut there.

    Returns:
        The text: uint8, shape (bytes,). The same interpreter always gives the same.

    Raises:
        FileNotFoundError: the folder holds no Python file.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources under {root}; name a folder that has some")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8).clone()


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


class Share(NamedTuple):
    """Which part of each batch is one's own."""

    rank: int = 0
    size: int = 1
    """In how many equal parts a batch is divided."""


_ALL: Final = Share()


def batches(
    text: torch.Tensor, *, batch: int, context: int, seed: int, share: Share = _ALL
) -> Iterator[torch.Tensor]:
    """Draw windows of the text at random places, for ever.

    Args:
        text: uint8, shape (bytes,).
        batch: windows of one share of a batch.
        context: bytes of a window the model reads; one more is drawn, the last to be predicted.
        seed: of the places; equal seeds draw equal batches.
        share: which of them to give.

    Yields:
        int64, shape (batch, context + 1).

    Raises:
        ValueError: the text is shorter than one window.
    """
    places = len(text) - context
    if places < 1:
        raise ValueError(f"a window is {context + 1} bytes, and the text has only {len(text)}")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(places, (share.size, batch, 1), generator=generator)
        yield text[starts[share.rank] + window].long()
