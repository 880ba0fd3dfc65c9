"""Where the time of training goes: each moment is charged to one phase.

Phases nest, and an inner one's time is not counted in the outer one's. How long the caller was
blocked is others' to tell (the store of the drive, the communicator of the other ranks), and is
taken off the phase it fell in. So all phases, the waits and what is outside of the engine add up to
the time that has passed.

While somebody profiles, every phase is also a range of the torch profiler, with the name of the
phase and what it was for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

import torch
from torch.profiler import record_function

OUTSIDE: Final = "outside"


class Phases:
    """Adds up seconds by phase.

    Args:
        waited_s: seconds blocked by the drive or by other ranks so far, by hop.
        finish: called where a phase begins or ends, so that a device has done what was asked of it;
            None: phases of a GPU are the time it takes to ask.
    """

    def __init__(
        self,
        waited_s: Callable[[], Mapping[str, float]],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.waited_s = waited_s
        """As given."""
        self._finish = finish
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._within: list[str] = [OUTSIDE]
        self._last_s = time.perf_counter()
        self._last_waited_s = 0.0

    def of(self, phase: str, what: str = "") -> AbstractContextManager[None]:
        """Charge the time of the body to this phase.

        Args:
            phase: forward, backward, gather, reduce, update, or another name.
            what: of the model, for the profiler.
        """
        return _Phase(self, phase, what)

    def begin(self, phase: str) -> None:
        """Charge the time from here on to this phase, until `end`."""
        self._charge()
        self._within.append(phase)

    def end(self) -> None:
        """Charge the time from here on to the phase around."""
        try:
            self._charge()
        finally:
            self._within.pop()

    def spent_s(self) -> dict[str, float]:
        """Seconds so far, by phase, and by hop as ``wait for read`` and the like."""
        self._charge()
        waits = {f"wait for {hop}": seconds for hop, seconds in self.waited_s().items()}
        return {**self._spent_s, **waits}

    def _charge(self) -> None:
        if self._finish is not None:
            self._finish()
        now_s, waited_s = time.perf_counter(), sum(self.waited_s().values())
        self._spent_s[self._within[-1]] += now_s - self._last_s - waited_s + self._last_waited_s
        self._last_s, self._last_waited_s = now_s, waited_s


class _Phase(AbstractContextManager[None]):
    """One phase, and its range if somebody is profiling: ranges cost time even if nobody is."""

    def __init__(self, phases: Phases, phase: str, what: str) -> None:
        self._phases = phases
        self._phase = phase
        self._what = what
        self._range: record_function | None = None

    def __enter__(self) -> None:
        self._phases.begin(self._phase)
        if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - has no other name
            self._range = record_function(f"infinity.{self._phase} {self._what}".rstrip())
            self._range.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._range is not None:
                self._range.__exit__(kind, value, trace)
        finally:
            self._phases.end()


def finisher(device: torch.device) -> Callable[[], None] | None:
    """What waits for a device; None where there is nothing to wait for."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.synchronize(device)
