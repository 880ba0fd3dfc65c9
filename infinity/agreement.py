"""How ranks agree on the next collective, so that no two of them ever wait for each other.

Note: why they have to

Each rank runs a program of its own: one may use an expert that another skips, look at a weight, or
evaluate while the others train. A collective that one rank calls and another does not would wait
for ever. So a rank says what it wants (`perform`), all hear it, and all take part in everything
that anybody wants, in the order of the ranks. Who wants nothing waits in `meet` and takes part
until all have come there. Ranks that run the same program always want the same, and the talk is one
exchange of a few bytes before each collective.

Note: promises

That exchange costs more than a small collective. But what was done since the last step is known to
all ranks, since all took part in it. If two cycles in a row were the same, that is a promise of all
ranks to do it once more, and nothing needs to be said until the next step. A rank that comes to
want something else keeps the promise first: it takes part in what is left of it, up to what it
wants or to the end, and then says what it wants. So ranks that diverge lose time, and no more.
What is promised is known ahead, so a gather begins while the model still uses the unit before.

What would break it: a collective outside of this, and a part that performs another one.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
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

_AHEAD: Final = 2  # of the promised; in backward a sum stands between two gathers
Part = Callable[[bool], None]


class Agreement:
    """The collectives of one engine.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._parts: list[Part] = []
        self._begins: list[Callable[[], None] | None] = []
        # All of these are the same on every rank, but for how much of the promise it has kept.
        self._done: list[int] = []  # since the last step
        self._done_before: list[int] = []  # in the cycle before
        self._promised: deque[int] = deque()

    def add(self, part: Part, begin: Callable[[], None] | None = None) -> int:
        """Make a collective known; every rank adds the same ones in the same order.

        Args:
            part: this rank's part in it; is told whether this rank wants the outcome.
            begin: begins it, if it can go on in the background; the part then ends it.

        Returns:
            The number by which it is performed.
        """
        self._parts.append(part)
        self._begins.append(begin)
        return len(self._parts) - 1

    def perform(self, number: int) -> None:
        """Do this collective; the other ranks take part."""
        if self._comm.size == 1:
            self._parts[number](True)  # noqa: FBT003
        elif not self._keep_promise(number):
            self._turn(number)

    def meet(self, place: Place) -> None:
        """Wait until all ranks are at this place, and take part in what they want until then.

        Raises:
            RankError: another rank has come to another place, so that neither could go on.
        """
        if self._comm.size == 1:
            return
        self._keep_promise(place)
        while True:
            wanted = self._turn(place)
            if all(number == place for number in wanted):
                break
            if all(number < 0 for number in wanted):
                where = ", ".join(f"{r}: {_CALLS[Place(n)]}" for r, n in enumerate(wanted))
                with suppress(RuntimeError):
                    where += f"; {reason}" if (reason := self._comm.reason()) else ""
                raise RankError(f"the ranks are in different calls ({where}); all must make them")

        if place is Place.STEP:
            self._promise()

    def _promise(self) -> None:
        """All ranks are at a step: what they have done twice they will do again."""
        done, self._done = self._done, []
        self._promised = deque(done if done == self._done_before else ())
        self._done_before = done

    def _keep_promise(self, wanted: int) -> bool:
        """Do what was promised, up to what is wanted; returns whether that was among it."""
        while self._promised:
            number = self._promised.popleft()
            self._do(number, number == wanted)
            self._begin_next()
            if number == wanted:
                return True
        return False

    def _begin_next(self) -> None:
        """Begin what can be begun of that which is promised next; on all ranks at this place."""
        for number in itertools.islice(self._promised, _AHEAD):
            begin = self._begins[number]
            if begin is not None:
                begin()
                return

    def _do(self, number: int, wanted: bool) -> None:  # noqa: FBT001 - as the parts have it
        self._done.append(number)
        self._parts[number](wanted)

    def _turn(self, mine: int) -> list[int]:
        wanted = [int(number) for (number,) in self._comm.exchange([mine])]
        for number in dict.fromkeys(wanted):
            if number >= 0:
                self._do(number, number == mine)
        return wanted
