"""What happens to units at module boundaries: gather, release, and fetch ahead meanwhile.

Note: when a unit is released

In forward, when the scope that needed it is left. In backward, where whoever needs a weight fetches
it, when all the unit's gradients have arrived; if that never happens (frozen or unused parameters,
a tied weight used elsewhere), when backward enters another scope; and at the latest when backward
ends. A unit fetched by an access from outside its scope goes when another one is fetched so, at the
next boundary of a pass, or under pressure for room. Releasing early is never wrong: whoever needs
the unit again fetches it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from infinity.gradients import UnitGradients
from infinity.phases import Phases
from infinity.unit import Unit
from tiering.errors import EngineClosedError, TieringWarning
from tiering.prefetch import Prefetcher

Units = Sequence[Unit]


class Schedule:
    """Decides for all units of one engine, and fetches released parameters when they are used.

    Args:
        pager: leases records and fetches ahead.
        phases: are told when gradients are taken.
    """

    def __init__(self, pager: Prefetcher, phases: Phases) -> None:
        self.backward_ran = False
        """Whether a backward pass has brought a gradient since this was last cleared."""
        self._pager = pager
        self._phases = phases
        self._gradients: Mapping[Unit, UnitGradients] = {}
        self._owner: dict[nn.Parameter, tuple[Unit, int]] = {}
        self._active: Counter[Unit] = Counter()
        self._in_backward = False
        self._in_forward = 0
        self._copying = 0
        self._present: dict[Unit, int] = {}  # and where their flat buffers start
        self._at: dict[int, Unit] = {}  # the same, the other way round
        self._told_of_gradients = False
        self._complete: Callable[[UnitGradients], None] = lambda _gradients: None
        self._failed: Callable[[], None] = lambda: None
        self._unwind: Callable[[], None] = lambda: None

    def tell(
        self, *, complete: Callable[[UnitGradients], None], failed: Callable[[], None]
    ) -> None:
        """Call these when a unit has got all its gradients, and when a backward pass has failed."""
        self._complete, self._failed = complete, failed

    def unwind_by(self, unwind: Callable[[], None]) -> None:
        """Call this to end what interrupted forwards have left."""
        self._unwind = unwind

    def manage(self, units: Iterable[Unit], gradients: Mapping[Unit, UnitGradients]) -> None:
        """Take charge of these units."""
        self._gradients = gradients
        self._owner = {p: (u, i) for u in units for i, p in enumerate(u.parameters)}

    # -- passes

    def reset(self) -> None:
        """Clean up what an interrupted pass has left, and release every unit that need not stay."""
        self.end_failed_backward()
        self._unwind()
        self._in_forward = self._copying = 0
        self._active.clear()
        self._drop_left_gradients()
        self.release_idle()

    def release_all(self) -> None:
        """The same, and those that stay as well: they are updated, or what changed is kept."""
        self.reset()
        for unit in list(self._present):
            self._release(unit)

    def begin_forward(self) -> None:
        """A forward of the whole model starts; within another, or as the first."""
        if not self._in_forward:
            self.reset()
        self._in_forward += 1
        self._pager.advance()

    def end_forward(self) -> None:
        """The forward has ended, well or not."""
        self._in_forward -= 1
        if not self._in_forward:
            self.release_idle()

    def release_idle(self) -> None:
        """Release every unit that no scope is using and that need not stay."""
        for unit in list(self._present):
            self._release_if_idle(unit)

    # -- forward

    def enter(self, units: Units) -> None:
        """A scope's forward starts."""
        self._active.update(units)
        for unit in units:
            self._gather(unit)
        self._pager.advance()

    def leave(self, units: Units) -> None:
        """A scope's forward has ended, well or not."""
        for unit in units:
            self._active[unit] -= self._active[unit] > 0
            if not self._in_backward:
                self._release_if_idle(unit)

    # -- backward

    def enter_backward(self, units: Units) -> None:
        """Backward reaches a scope's outputs: the units of other scopes have had their turn."""
        self._begin_backward()
        for unit in list(self._present):
            if unit not in units:
                self._release_if_idle(unit)
        self._pager.advance()

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Autograd has finished this parameter's gradient of this backward pass."""
        self._begin_backward()
        unit, index = self._owner[parameter]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.backward_ran = True
        gradients = self._gradients[unit]
        with self._phases.of("reduce", unit.names[0]):
            gradients.deposit(index, gradient)
            is_complete = gradients.is_complete
            if is_complete:
                gradients.close()
        if is_complete:
            self._release_if_idle(unit)
            self._complete(gradients)
            self._pager.advance()

    def _begin_backward(self) -> None:
        """Called by whatever notices first that backward is running."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001
                self.end_backward
            )

    def end_failed_backward(self) -> None:
        """End a backward pass that has not ended by itself, if there is one: an exception did."""
        if self._in_backward:
            self.end_backward()
            self.backward_ran = False
            self._failed()

    def end_backward(self) -> None:
        """Backward has ended."""
        self._in_backward = False
        with self._phases.of("reduce"):
            for gradients in self._gradients.values():
                gradients.close()
            for gradients in self._gradients.values():
                gradients.finish()
        self.release_idle()
        self._pager.advance()

    def _drop_left_gradients(self) -> None:
        """What an interrupt left behind, or somebody put there, is not added to the next one."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - nobody asks for them here
            for parameter in self._owner:
                if parameter.grad is not None:
                    parameter.grad = None

    # -- access from outside

    def fetch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make these parameters present, and let go of others that were fetched like this."""
        wanted = list(dict.fromkeys(self._owner[p][0] for p in parameters if p in self._owner))
        self._active.update(wanted)  # so that none of them goes to make room for another
        try:
            if not self._in_backward:
                self.release_idle()
            for unit in wanted:
                self._gather(unit)
                if not (self._in_forward or self._in_backward or self._copying):
                    unit.guard()
        finally:
            self._active.subtract(wanted)

    def require(self, unit: Unit) -> torch.Tensor:
        """The unit's flat buffer, gathered if need be."""
        self._gather(unit)
        assert unit.flat is not None
        return unit.flat

    def unit_at(self, address: int) -> Unit | None:
        """The present unit whose flat buffer starts at this address."""
        return self._at.get(address)

    def relieve(self) -> bool:
        """Make arena room by releasing units nobody is using. Returns whether that helped."""
        idle = [
            unit
            for unit in self._present
            if unit.holds_arena and self._active[unit] <= 0 and not unit.is_changed
        ]
        for unit in idle:
            self._release(unit)
        return bool(idle)

    def begin_copy(self) -> None:
        """What is handed out until `end_copy` is only copied."""
        self._copying += 1

    def end_copy(self) -> None:
        """The other half of `begin_copy`; pairs nest. What is present now would not be guarded."""
        self._copying -= 1
        if not (self._copying or self._in_forward or self._in_backward):
            self.release_idle()

    def asked_for_gradient(self, parameter: nn.Parameter) -> None:
        """Somebody looks at a managed parameter's ``grad``, which is None: say why, once."""
        if self._told_of_gradients or self._in_backward:
            return
        gradients = self._gradients.get(self._owner[parameter][0])
        if gradients is not None and gradients.arrived:
            self._told_of_gradients = True
            warnings.warn(
                "a parameter's .grad was asked for, but gradients are the engine's: what works on "
                ".grad (clip_grad_norm_, module.zero_grad) has no effect; use gradient_clipping, "
                "engine.get_global_grad_norm() and engine.zero_grad()",
                TieringWarning,
                stacklevel=3,
            )

    def forsake(self) -> None:
        """Let go of all memory without a look at it: at the end."""
        for unit in self._present:
            unit.forsake()
        self._present.clear()
        self._at.clear()

    def forsake_in_child(self) -> None:
        """Forget all memory, which is the parent's."""
        for unit in self._present:
            unit.forsake_in_child()
        self._present.clear()
        self._at.clear()

    # -- one unit

    def _gather(self, unit: Unit) -> None:
        if unit not in self._present:
            self._refuse_if_spent(unit)
            self._present[unit] = 0  # to be released, should this be interrupted
        unit.gather()
        assert unit.flat is not None
        address = unit.flat.untyped_storage().data_ptr()
        self._present[unit], self._at[address] = address, unit

    def _refuse_if_spent(self, unit: Unit) -> None:
        """A backward that uses a weight after its update would have another result."""
        gradients = self._gradients.get(unit) if self._in_backward else None
        if gradients is not None and gradients.is_spent:
            raise RuntimeError(
                f"a weight of the unit of {unit.names[0]!r} is used in this backward, under which "
                "it was updated already; set tiering.update_in_backward to false"
            )

    def _release_if_idle(self, unit: Unit) -> None:
        if self._active[unit] <= 0 and not unit.stays:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        unit.release()
        self._at.pop(self._present.pop(unit, 0), None)


class Closed:
    """Answers for released parameters when their engine is gone."""

    def fetch(self, parameters: Sequence[nn.Parameter]) -> NoReturn:
        """Refuse, and say what to do."""
        del parameters
        raise EngineClosedError(
            "the engine that held this model's weights was closed; take "
            "engine.module.state_dict() before closing it"
        )

    def asked_for_gradient(self, parameter: nn.Parameter) -> None:
        """There is none."""
