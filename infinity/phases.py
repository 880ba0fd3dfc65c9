"""Where the time of training goes: each moment is charged to one phase.

Phases nest, and an inner one's time is not counted in the outer one's. What the caller was blocked
by the drive is the store's to tell, and is taken off the phase it fell in. So all phases, the waits
and what is outside of the engine add up to the time that has passed.

Every phase is also a range of the torch profiler, with the name of the phase and what it was for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch.profiler import record_function

OUTSIDE: Final = "outside"


class Phases:
    """Adds up seconds by phase.

    Args:
        waited_s: seconds blocked by the drive so far, by hop.
        finish: called where a phase begins or ends, so that a device has done what was asked of it;
            None: phases of a GPU are the time it takes to ask.
    """

    def __init__(
        self,
        waited_s: Callable[[], Mapping[str, float]],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._waited_s = waited_s
        self._finish = finish
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._within: list[str] = [OUTSIDE]
        self._last_s = time.perf_counter()
        self._last_waited_s = 0.0

    @contextmanager
    def of(self, phase: str, what: str = "") -> Iterator[None]:
        """Charge the time of the body to this phase.

        Args:
            phase: forward, backward, gather, reduce, update, or another name.
            what: of the model, for the profiler.
        """
        self._charge()
        self._within.append(phase)
        try:
            with record_function(f"infinity.{phase} {what}".rstrip()):
                yield
        finally:
            try:
                self._charge()
            finally:
                self._within.pop()

    def spent_s(self) -> dict[str, float]:
        """Seconds so far, by phase, and by hop of the drive as ``wait for read`` and the like."""
        self._charge()
        waits = {f"wait for {hop}": seconds for hop, seconds in self._waited_s().items()}
        return {**self._spent_s, **waits}

    def _charge(self) -> None:
        if self._finish is not None:
            self._finish()
        now_s, waited_s = time.perf_counter(), sum(self._waited_s().values())
        self._spent_s[self._within[-1]] += now_s - self._last_s - waited_s + self._last_waited_s
        self._last_s, self._last_waited_s = now_s, waited_s


def finisher(device: torch.device) -> Callable[[], None] | None:
    """What waits for a device; None where there is nothing to wait for."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.synchronize(device)
