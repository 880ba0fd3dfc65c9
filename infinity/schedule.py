"""What happens to units at module boundaries: gather, release, and fetch ahead meanwhile.

Note: when a unit is released
----------------------------- In forward, when the scope that needed it is left, unless the trace
expects it next. In backward, when all its gradients have arrived; if that never happens (frozen or
unused parameters, a tied weight used elsewhere) when backward enters another scope, and at the
latest when backward ends. A unit fetched by an access from outside its scope goes when another one
is fetched so, at the next boundary of a pass, or under pressure for room. Releasing early is never
wrong: whoever needs the unit again fetches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from infinity.gradients import UnitGradients
from infinity.unit import Unit, UnitState
from tiering.prefetch import Prefetcher

Units = Sequence[Unit]


class Schedule:
    """Decides for all units of one engine; implements the parameters' `Pager`.

    Args:
        pager: leases records and fetches ahead.
    """

    def __init__(self, pager: Prefetcher) -> None:
        self._pager = pager
        self._gradients: Mapping[Unit, UnitGradients] = {}
        self._owner: dict[nn.Parameter, tuple[Unit, int]] = {}
        self._active: Counter[Unit] = Counter()
        self._in_backward = False
        self._copying = 0
        self._present: dict[Unit, int] = {}  # and where their flat buffers start
        self._at: dict[int, Unit] = {}  # the same, the other way round

    def adopt_units(self, units: Iterable[Unit], gradients: Mapping[Unit, UnitGradients]) -> None:
        """Take charge of these units."""
        self._gradients = gradients
        self._owner = {p: (u, i) for u in units for i, p in enumerate(u.parameters)}

    # -- passes

    def begin_forward(self) -> None:
        """A forward of the whole model starts; what an interrupted one left is cleaned up."""
        if self._in_backward:
            self.end_backward()
        self._copying = 0
        self._active.clear()
        self.release_all()

    def begin_pass(self, kind: str) -> None:
        """A pass of this kind starts, inside the one under way if there is one."""
        self._pager.begin(kind)
        self._pager.advance()

    def release_all(self) -> None:
        """Release every unit that no scope is using."""
        for unit in list(self._present):
            self._release_idle(unit)

    # -- forward

    def enter(self, units: Units) -> None:
        """A scope's forward starts."""
        self._active.update(units)
        for unit in units:
            self._gather(unit)
        self._pager.advance()

    def leave(self, units: Units) -> None:
        """A scope's forward has ended, well or not."""
        self._active.subtract(units)
        for unit in units:
            if not self._in_backward and not self._pager.is_next(unit.records.shard.key):
                self._release_idle(unit)
        self._pager.advance()

    # -- backward

    def enter_backward(self, units: Units) -> None:
        """Backward reaches a scope's outputs."""
        self._begin_backward()
        for unit in list(self._present):
            if unit not in units:
                self._release_idle(unit)
        for unit in units:
            self._gather(unit)
        self._pager.advance()

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has finished this parameter's gradient of this backward pass."""
        self._begin_backward()
        unit, index = self._owner[parameter]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        gradients = self._gradients[unit]
        gradients.deposit(index, gradient)
        if gradients.is_complete:
            gradients.close()
            self._release_idle(unit)
            self._pager.advance()

    def _begin_backward(self) -> None:
        """Called by whatever notices first that backward is running."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001
                self.end_backward
            )

    def end_backward(self) -> None:
        """Backward has ended."""
        self._in_backward = False
        for gradients in self._gradients.values():
            gradients.close()
        self.release_all()
        self._pager.advance()

    # -- access from outside

    def fetch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make these parameters present, and let go of others that were fetched like this."""
        wanted = list(dict.fromkeys(self._owner[p][0] for p in parameters))
        self._active.update(wanted)  # so that none of them goes to make room for another
        try:
            if not self._in_backward:
                self.release_all()
            for unit in wanted:
                self._gather(unit)
        finally:
            self._active.subtract(wanted)

    def expose(self, parameters: Sequence[nn.Parameter]) -> None:
        """Their memory is handed out in a way that hides changes."""
        if not self._copying:
            for parameter in parameters:
                self._owner[parameter][0].expose()

    def begin_copy(self) -> None:
        """What is handed out until `end_copy` is only copied."""
        self._copying += 1

    def end_copy(self) -> None:
        """The other half of `begin_copy`; pairs nest."""
        self._copying -= 1

    def forsake(self) -> None:
        """In a forked child: the arena is not there, so no parameter may point into it."""
        for unit in self._present:
            unit.forsake()
        self._present.clear()
        self._at.clear()

    def relieve(self) -> bool:
        """Make arena room by releasing units nobody is using. Returns whether that helped."""
        idle = [
            unit
            for unit in self._present
            if unit.holds_arena and not self._active[unit] and not unit.is_changed
        ]
        for unit in idle:
            self._release(unit)
        return bool(idle)

    def unit_at(self, address: int) -> Unit | None:
        """The present unit whose flat buffer starts at this address."""
        return self._at.get(address)

    # -- one unit

    def _gather(self, unit: Unit) -> None:
        if unit.state is UnitState.PRESENT:
            return
        unit.gather()
        assert unit.flat is not None
        address = unit.flat.untyped_storage().data_ptr()
        self._present[unit], self._at[address] = address, unit

    def require(self, unit: Unit) -> torch.Tensor:
        """The unit's flat buffer, gathered if need be."""
        self._gather(unit)
        assert unit.flat is not None
        return unit.flat

    def _release_idle(self, unit: Unit) -> None:
        if not self._active[unit]:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        unit.release()
        self._at.pop(self._present.pop(unit, 0), None)
