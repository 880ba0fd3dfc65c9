"""What a misspelt word may have been meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_LIKENESS: Final = 0.85  # one letter in seven may be wrong; more is another word


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like another, in small or large letters, if any is like it."""
    spellings = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=_LEAST_LIKENESS)
    return spellings[close[0]] if close else None


def did_you_mean(word: str | None) -> str:
    """The end of a message; empty if nothing is like it."""
    return f"; did you mean {word!r}?" if word else ""
