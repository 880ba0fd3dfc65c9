"""How ranks agree on the next collective, so that no two of them ever wait for each other.

Note: why they have to

Each rank runs a program of its own: one may use an expert that another skips, look at a weight, or
evaluate while the others train. A collective that one rank calls and another does not would wait
for ever. So a rank says what it wants (`perform`), all hear it, and all take part in everything
that anybody wants, in the order of the ranks. Who wants nothing waits in `meet` and takes part
until all have come there. Ranks that run the same program always want the same, and the talk is one
exchange of a few bytes before each collective.

What would break it: a collective outside of this, and a part that performs another one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from infinity.comm import Communicator
from tiering.errors import RankError


class Place(enum.IntEnum):
    """Where all ranks come together."""

    STEP = -1
    CLOSE = -2
    STATE = -3
    ZERO_GRAD = -4


_CALLS: Final = {
    Place.STEP: "engine.step()",
    Place.CLOSE: "engine.close()",
    Place.STATE: "engine.get_state() or set_state()",
    Place.ZERO_GRAD: "engine.zero_grad()",
}

Part = Callable[[bool], None]


class Agreement:
    """The collectives of one engine.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._parts: list[Part] = []

    def add(self, part: Part) -> int:
        """Make a collective known; every rank adds the same ones in the same order.

        Args:
            part: this rank's part in it; is told whether this rank wants the outcome.

        Returns:
            The number by which it is performed.
        """
        self._parts.append(part)
        return len(self._parts) - 1

    def perform(self, number: int) -> None:
        """Do this collective; the other ranks take part."""
        if self._comm.size == 1:
            self._parts[number](True)  # noqa: FBT003
        else:
            self._turn(number)

    def meet(self, place: Place) -> None:
        """Wait until all ranks are at this place, and take part in what they want until then.

        Raises:
            RankError: another rank has come to another place, so that neither could go on.
        """
        if self._comm.size == 1:
            return
        while True:
            wanted = self._turn(place)
            if all(number == place for number in wanted):
                return
            if all(number < 0 for number in wanted):
                where = ", ".join(f"{r}: {_CALLS[Place(n)]}" for r, n in enumerate(wanted))
                with suppress(RuntimeError):
                    where += f"; {reason}" if (reason := self._comm.reason()) else ""
                raise RankError(f"the ranks are in different calls ({where}); all must make them")

    def _turn(self, mine: int) -> list[int]:
        wanted = [int(number) for (number,) in self._comm.exchange([mine])]
        for number in dict.fromkeys(wanted):
            if number >= 0:
                self._parts[number](number == mine)
        return wanted
