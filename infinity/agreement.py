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
What is promised is known ahead, so a gather begins while the model still uses the unit before; who
changes a weight then mends what comes (`Unit._adopt`).

What would break it: a collective outside of this, and a part that performs another one. A part that
fails is the end for this rank, since the others have made it.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import torch

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

_T = TypeVar("_T")
_MOST_DONE: Final = 2**16
_AHEAD: Final = 2  # of the promised; in backward a sum stands between two gathers
Outcome = torch.Tensor | None


class Collective(NamedTuple):
    """This rank's part in one."""

    part: Callable[[], Outcome]
    """Makes it; what it returns goes to who performs it here, and is dropped where nobody does."""
    begin: Callable[[], None] | None = None
    """Begins it, if it can go on in the background; the part then ends it."""


class Agreement:
    """The collectives of one engine.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._collectives: list[Collective] = []
        # All of these are the same on every rank, but for how much of the promise it has kept.
        self._done: list[int] = []  # since the last step
        self._done_before: list[int] = []  # in the cycle before
        self._promised: deque[int] = deque()
        self.broken = ""
        """Why this rank takes part in nothing any more: it did not make what the others made."""

    def add(self, collective: Collective) -> int:
        """Make a collective known; every rank adds the same ones in the same order.

        Returns:
            The number by which it is performed.
        """
        self._collectives.append(collective)
        return len(self._collectives) - 1

    def perform(self, number: int) -> Outcome:
        """Do this collective; the other ranks take part.

        Raises:
            RankError: an earlier one failed here.
        """
        if self._comm.size == 1:
            return self._collectives[number].part()
        self._refuse_if_broken()
        kept = self._keep_promise(number)
        return kept[number] if kept else self._turn(number)[1][number]

    def meet(self, place: Place) -> None:
        """Wait until all ranks are at this place, and take part in what they want until then.

        Raises:
            RankError: another rank has come to another place, so that neither could go on; or an
                earlier collective failed here.
        """
        if self._comm.size == 1:
            return
        self._refuse_if_broken()
        self._keep_promise(place)
        while True:
            wanted, _ = self._turn(place)
            if all(number == place for number in wanted):
                break
            if all(number < 0 for number in wanted):
                where = ", ".join(f"{r}: {_CALLS[Place(n)]}" for r, n in enumerate(wanted))
                with suppress(RuntimeError):
                    where += f"; {reason}" if (reason := self._comm.reason()) else ""
                raise RankError(f"the ranks are in different calls ({where}); all must make them")
        if place is Place.STEP:
            self._promise()

    def _refuse_if_broken(self) -> None:
        if self.broken:
            raise RankError(
                f"this rank did not make a collective that the others made ({self.broken}), so "
                "nothing it would get from them is right any more; start again"
            )

    def _promise(self) -> None:
        """All ranks are at a step: what they have done twice they will do again."""
        done, self._done = self._done, []
        self._promised = deque(done if done == self._done_before else ())
        self._done_before = done

    def _keep_promise(self, wanted: int) -> dict[int, Outcome]:
        """Do what was promised, up to what is wanted; returns that if it was among it."""
        while self._promised:
            number = self._promised.popleft()
            outcome = self._do(number)
            self._begin_next()
            if number == wanted:
                return {number: outcome}
        return {}

    def _begin_next(self) -> None:
        """Begin the next gather that is promised soon; on all ranks at this place."""
        for number in itertools.islice(self._promised, _AHEAD):
            begin = self._collectives[number].begin
            if begin is not None:
                self.guarded(begin)
                return

    def _turn(self, mine: int) -> tuple[list[int], dict[int, Outcome]]:
        """One exchange, and what anybody wants; returns what each wants, and my outcome."""
        wanted = [int(number) for (number,) in self._comm.exchange([mine])]
        outcomes = {n: self._do(n) for n in dict.fromkeys(wanted) if n >= 0}
        return wanted, {n: outcome for n, outcome in outcomes.items() if n == mine}

    def _do(self, number: int) -> Outcome:
        if len(self._done) == _MOST_DONE:  # no step for long, as in evaluation
            self._done.clear()
        self._done.append(number)
        return self.guarded(self._collectives[number].part)

    def guarded(self, make: Callable[[], _T]) -> _T:
        """Do what belongs to a collective. What fails has been made by the others: no way back."""
        if self._comm.size == 1:
            return make()
        try:
            return make()
        except BaseException as error:
            self.broken = self.broken or repr(error)
            raise
