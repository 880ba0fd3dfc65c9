"""Ctrl-C at a chosen place: for tests of what it leaves behind."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# Python drops what is raised where the garbage collector calls, or lets go of a generator.
_COLLECTOR = frozenset({"_let_go", "_runs", "<genexpr>"})


class Interrupted:
    """Raises KeyboardInterrupt where the ``nth`` function of ours is called in the body; once.

    Args:
        nth: from 1; 0: nowhere, to count them.
    """

    def __init__(self, nth: int) -> None:
        self.calls = 0
        self._nth = nth

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        ours = "/infinity/" in code.co_filename or "/tiering/" in code.co_filename
        if event != "call" or not ours or "/tests/" in code.co_filename:
            return
        if code.co_name in _COLLECTOR:
            return
        self.calls += 1
        if self.calls == self._nth:
            sys.settrace(None)
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupted:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
