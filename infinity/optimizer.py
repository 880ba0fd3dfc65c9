"""The update: tile by tile through the arena, reads ahead and writes behind.

Note: the trip of a tile

Its ``read`` was started earlier, by the trace. `_pass_tile` brings it to where the model computes
(``upload``; on a CPU it is there), widens the gradient and makes one Adam ``step``,
and the new weights are ``publish``ed into the unit's new shard (rounded to the storage type), which
takes the old one's place when it is whole. The tile goes back (``offload``), and its ``write``
starts and runs behind the next tile's step; the shard's when its last tile is done. A new shard
that was made on a GPU is used from there.

Note: when a unit is updated

`PagedAdam.step` only decides: the norm, the scale, the settings. Each unit makes its own update
when somebody next needs its weights, which is normally the next forward. So the drive moves the
state of later units while earlier ones compute, a new shard is used from the arena before it could
have to be read again, and the order of the update is that of the forward, whatever it is. Nobody
can see an old weight: every use of a unit goes through `Unit.gather`, which settles it first.

Where that was asked for, some units are updated earlier: under backward, when their gradients are
complete. Then the drive has work in both passes, and those gradients need no room until the step.

Note: what the ranks decide together

At the step all ranks have finished backward. They tell each other which parameters got a gradient
anywhere, so that all update the same ones, and sum the squares of their parts. From there on each
goes on alone: what they decide on (norm, scale, skipping) is the same on all.

What would break it: changing a gradient record between the step and the update. `UnitGradients`
settles the unit before it opens the record for the next cycle. Losing an update, or making it
twice: it is due until its last tile is done, and one that is interrupted in between tears the
state, for good. A device without memory is no such interruption for one rank: tiles that passed
through it are new or old as a whole, and the rest is made when the unit is next needed. (Among
several the others have gathered meanwhile what this one could not make.)
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import nn

from infinity.adam import AdamSettings, AdamState, adam_step
from infinity.agreement import Agreement, Place
from infinity.comm import Communicator
from infinity.gradients import UnitGradients
from infinity.loss_scale import LossScale, LossScaleError, StaticLossScale
from infinity.partition import Extent
from infinity.phases import Phases
from infinity.unit import Unit, UnitState
from tiering.errors import ConfigError, EngineClosedError, TieringWarning
from tiering.prefetch import Prefetcher
from tiering.spec import RecordSpec
from tiering.tiers.device import DeviceTier
from tiering.trace import Access

Settings: TypeAlias = Mapping[nn.Parameter, AdamSettings]


class Early(NamedTuple):
    """An update that was made under backward."""

    settings: Settings
    changes: int
    """Of the unit, when it had been made."""


class Run(NamedTuple):
    """Neighbouring elements of a tile that are updated alike."""

    extent: Extent
    step: int
    settings: AdamSettings


@dataclass
class Decision:
    """What a step has decided for one unit, and how much of it was done."""

    gradients: UnitGradients
    runs: Sequence[Sequence[Run]]
    """Of each tile."""
    scale: float
    done: int = 0
    """Tiles that are updated already: an update may be made again when memory was short."""
    is_changing: bool = False
    """Whether a tile at home on the device is half old, half new."""


class StepRules(NamedTuple):
    """What a step does with its gradients as a whole."""

    max_norm: float = 0.0
    """Largest global gradient norm; 0 for no clipping."""
    nonfinite: Literal["ignore", "skip", "raise"] = "ignore"
    """What becomes of a step whose gradients are not all finite."""
    max_skipped: int = 0
    """Most steps skipped in a row with a scale that stays; one more is an error. 0: no limit."""


class PagedAdam(torch.optim.Optimizer):
    """Adam or AdamW on paged state. ``param_groups`` steer it as they do torch's own.

    Args:
        groups: as torch's optimizers take them; the parameters are the model's.
        defaults: values for what a group leaves out: lr, betas, eps, weight_decay, decoupled,
            fused.
        gradients: one a trained unit, in the order of the model.
        pager: leases records, fetches ahead and writes behind.
        rules: for a step as a whole.
        loss_scale: by which gradients are too large.
        device: where updates are made.
        comm: the ranks that step together.
        agreement: where they meet.
        phases: are told when updates are made.
        release: makes the model let go of all weights, changed ones kept.
    """

    def __init__(  # noqa: PLR0913
        self,
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        gradients: Sequence[UnitGradients],
        pager: Prefetcher,
        rules: StepRules,
        loss_scale: LossScale,
        device: DeviceTier,
        comm: Communicator,
        agreement: Agreement,
        phases: Phases,
        release: Callable[[], None],
    ) -> None:
        self._managed = {p for g in gradients for p in g.unit.parameters}
        super().__init__([dict(group) for group in groups], defaults)
        self.global_grad_norm: float | None = None
        """Norm of the last step's gradients before clipping; None before the first step."""
        self.overflow = False
        """Whether the last step was skipped because its gradients were not finite."""
        self.skipped_steps = 0
        self._gradients = tuple(gradients)
        self._pager = pager
        self._rules = rules
        self._loss_scale = loss_scale
        self._device = device
        self._comm = comm
        self._agreement = agreement
        self._phases = phases
        self._release = release
        self._skipped_in_a_row = 0
        self.steps: dict[nn.Parameter, int] = {}
        """Updates of each parameter so far, by which Adam corrects its moments."""
        self._pid = os.getpid()
        self._due: dict[Unit, Decision] = {}  # decided and not made yet
        self._made_early: dict[UnitGradients, Early] = {}  # in this cycle
        self._scratch: torch.Tensor | None = None
        self._order = device.order()  # of work on it
        self.torn = ""
        """Why weights and states are of different steps; empty when they are not."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Decide the update of every parameter that got a gradient in this cycle.

        Each unit makes its update when its weights are next needed, or in `settle`.

        Raises:
            ValueError: a closure was given; the forward belongs to the engine.
            EngineClosedError: an earlier update is torn.
            RuntimeError: rates or other settings were changed after some units were updated under
                backward; the engine goes on no more.
            LossScaleError: gradients are not finite, and the rules say so; nothing was updated.
            RankError: another rank failed.
        """
        self.refuse_if_torn()
        if closure is not None:
            raise ValueError(
                "a closure is not supported; call engine(...), engine.backward(...), engine.step()"
            )
        self._release()  # what the user's hooks have looked at, too
        self._agreement.meet(Place.STEP)
        with self._phases.of("reduce"):
            active = self._arrived_anywhere()
        self.global_grad_norm = self._norm([*active, *self._made_early])
        settings = self._settings()
        self.overflow = not math.isfinite(self.global_grad_norm) and self._is_refused()
        if self.overflow:
            self._end_early(settings)
            self._skip(active)
            return
        scale = self._clip_scale() / self._loss_scale.value
        self._loss_scale.update(overflow=False)
        self._skipped_in_a_row = 0
        self._end_early(settings)
        self.settle()
        try:
            for gradients in active:
                self._decide(gradients, settings, scale)
        except BaseException as error:
            self.torn = f"a step was interrupted by {error!r}"
            raise
        self._opt_called = True  # torch's schedulers ask for it

    @torch.no_grad()
    def update_early(self, gradients: UnitGradients) -> None:
        """Update a unit under backward if it is one of those; its gradients are complete.

        Raises:
            TransferError: the drive failed; the state is torn then.
        """
        unit = gradients.unit
        if not gradients.early or unit.state is UnitState.PRESENT:
            return  # one that is still being looked at waits for the step
        self.refuse_if_torn()
        settings = self._settings()
        gradients.is_spent = True
        self._made_early[gradients] = Early(settings, unit.changes)
        try:
            with torch.inference_mode(mode=False):
                self._decide(gradients, settings, 1.0)
                unit.settle()
            self._made_early[gradients] = Early(settings, unit.changes)
        except BaseException as error:
            self.torn = self.torn or f"an update under backward was interrupted by {error!r}"
            raise

    def backward_failed(self, error: BaseException | None = None) -> None:
        """A backward pass ended with an exception; what was updated under it cannot be undone."""
        if self._made_early:
            by = "" if error is None else f" by {error!r}"
            self.torn = self.torn or (
                f"backward was interrupted{by} when a part of the model was updated"
            )

    def _end_early(self, settings: Settings) -> None:
        """The step has come for what was updated before it."""
        made, self._made_early = self._made_early, {}
        for gradients, early in made.items():
            gradients.is_spent = False
            unit = gradients.unit
            if any(early.settings.get(p) != settings.get(p) for p in unit.parameters):
                self.torn = (
                    "the optimizer's settings were changed after backward, when the unit of "
                    f"{unit.names[0]!r} had been updated by the old ones"
                )
            elif unit.changes != early.changes:
                self.torn = (
                    "weights were changed after backward, when the unit of "
                    f"{unit.names[0]!r} had been updated from the old ones"
                )
        if self.torn:
            raise RuntimeError(
                f"{self.torn}; change them before backward, or set tiering.update_in_backward to "
                "false"
            )

    def settle(self) -> None:
        """Make every update that was decided and not made yet.

        Raises:
            TransferError: the drive failed; the state is torn then.
        """
        for gradients in self._gradients:
            gradients.unit.settle()

    def refuse_if_torn(self) -> None:
        """Raise `EngineClosedError` if weights and states are of different steps."""
        if self.torn:
            raise EngineClosedError(
                f"{self.torn}: weights and optimizer state are of different steps; start again "
                "from the last good state"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the engine manages.

        Frozen ones are passed over, as in torch.

        Raises:
            ConfigError: a setting cannot be honoured; a parameter is not the model's, or was frozen
                when the engine was made and is not now.
        """
        super().add_param_group(param_group)
        try:
            check_settings(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise
        given = self.param_groups[-1]["params"]
        strangers = [p for p in given if p.requires_grad and p not in self._managed]
        if strangers:
            self.param_groups.pop()
            raise ConfigError(
                f"{len(strangers)} of the optimizer's parameters (the first of shape "
                f"{tuple(strangers[0].shape)}) are not trained by this engine: they are not the "
                "model's, or were frozen when infinity.initialize() was called; unfreeze them "
                "before it"
            )

    @property
    def is_due(self) -> bool:
        """Whether any unit has its update still before it."""
        return bool(self._due)

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter got a gradient in this cycle."""
        return bool(self._made_early) or any(g.arrived for g in self._gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Forget the gradients of this cycle, all ranks together: what was summed is of all.

        Raises:
            RuntimeError: some of them were used already, under backward.
            RankError: another rank failed, or is in another call.
        """
        del set_to_none
        if self._made_early:
            raise RuntimeError(
                "a part of the model was updated under backward, so these gradients can't be "
                "forgotten; call step(), or set tiering.update_in_backward to false"
            )
        self._agreement.meet(Place.ZERO_GRAD)
        self.forget()

    def forget(self) -> None:
        """Forget this rank's gradients only; the others' would no longer belong to them."""
        for gradients in self._gradients:
            gradients.discard()

    def state_dict(self) -> NoReturn:
        """Refuse: the state is paged."""
        raise RuntimeError(
            "the optimizer's state is paged out and is no dictionary in memory; "
            "engine.get_state(parameter, field) copies a parameter's, and set_state puts it back"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # noqa: ANN401
        """Refuse, for the same reason."""
        del state_dict
        self.state_dict()

    # -- before the tiles

    def _arrived_anywhere(self) -> list[UnitGradients]:
        """Those with a gradient on any rank, which all ranks have now made one."""
        for gradients in self._gradients:
            gradients.close()
        if self._comm.size > 1:
            places = [(g, i) for g in self._gradients for i in range(len(g.unit.parameters))]
            flags = self._comm.exchange([float(index in g.arrived) for g, index in places])
            for (gradients, index), *found in zip(places, *flags, strict=True):
                if any(found):
                    gradients.arrived.add(index)
        active = [g for g in self._gradients if g.arrived]
        for gradients in active:
            gradients.reduce()
        return active

    def _norm(self, active: Sequence[UnitGradients]) -> float:
        """Of all gradients of all ranks, as they would be without a loss scale."""
        sums = [g.square_sum for g in active]
        there = [s for s in sums if isinstance(s, torch.Tensor)]
        own = math.fsum(s for s in sums if not isinstance(s, torch.Tensor))
        if there:
            own += float(torch.stack(there).sum())  # waits for the device, once
        shared = all(g.unit.layout.world_size > 1 for g in active)
        parts = self._comm.exchange([own]) if shared else [[own]]
        return math.sqrt(math.fsum(part for (part,) in parts)) / self._loss_scale.value

    def _clip_scale(self) -> float:
        """What gradients are multiplied by. Source: torch.nn.utils.clip_grad_norm_."""
        assert self.global_grad_norm is not None
        if not self._rules.max_norm:
            return 1.0
        scale = self._rules.max_norm / (self.global_grad_norm + 1e-6)
        return min(scale, 1.0)  # a norm that is not a number stays one, as in torch

    # -- gradients that are not finite

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 without fp16."""
        return self._loss_scale.value

    def _is_refused(self) -> bool:
        return self._rules.nonfinite != "ignore"

    def _skip(self, active: Sequence[UnitGradients]) -> None:
        """Forget the gradients, and leave weights and states as they are."""
        where = self._first_nonfinite(active)
        self.forget()
        if self._rules.nonfinite == "raise":
            raise LossScaleError(
                f"the gradient of {where} is not finite (tiering.nonfinite_gradients is raise); "
                "nothing was updated"
            )
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        try:
            self._loss_scale.update(overflow=True)
        except LossScaleError as error:
            raise LossScaleError(f"{error}; the first is that of {where}") from None
        if not isinstance(self._loss_scale, StaticLossScale):
            return
        if 0 < self._rules.max_skipped < self._skipped_in_a_row:
            raise LossScaleError(
                f"{self._skipped_in_a_row} steps in a row were skipped "
                f"(tiering.max_skipped_steps is {self._rules.max_skipped}): the gradient of "
                f"{where} is not finite"
            )
        warnings.warn(
            f"a step was skipped: the gradient of {where} is not finite",
            TieringWarning,
            stacklevel=4,
        )

    def _first_nonfinite(self, active: Sequence[UnitGradients]) -> str:
        """The name of the first parameter whose gradient is not finite, on any rank."""
        names = [name for g in active for name in g.unit.names]
        first, before = len(names), 0
        for gradients in active:
            found = gradients.first_nonfinite()
            if found is not None:
                first = before + found
                break
            before += len(gradients.unit.names)
        (least,) = min(self._comm.exchange([float(first)]))
        return repr(names[int(least)]) if least < len(names) else "a parameter"

    def _settings(self) -> Settings:
        settings = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            adam = AdamSettings(
                float(group["lr"]), float(beta1), float(beta2), float(group["eps"]),
                float(group["weight_decay"]), bool(group["decoupled"]), bool(group["fused"]),
            )  # fmt: skip
            settings.update(dict.fromkeys(group["params"], adam))
        return settings

    # -- unit by unit, tile by tile

    def _decide(self, gradients: UnitGradients, settings: Settings, scale: float) -> None:
        unit = gradients.unit
        updated = frozenset(i for i in gradients.take() if unit.parameters[i] in settings)
        for index in updated:
            parameter = unit.parameters[index]
            self.steps[parameter] = self.steps.get(parameter, 0) + 1
        whole = list(self._runs(unit, updated, settings))
        runs = [
            [
                run._replace(extent=part)
                for run in whole
                if (part := run.extent.intersect(tile)).numel
            ]
            for tile in unit.records.extents
        ]
        self._due[unit] = Decision(gradients, runs, scale)
        unit.update_by(functools.partial(self._update, unit), updated)

    @torch.no_grad()
    def _update(self, unit: Unit) -> torch.Tensor | None:
        decision = self._due.get(unit)
        if decision is None or self.torn:
            return None  # it was made; or what is left of the weights may still be looked at
        if os.getpid() != self._pid:  # torch's threads are not there, and the state is its parent's
            raise EngineClosedError(f"this update belongs to process {self._pid}, not to its child")
        try:
            with torch.inference_mode(mode=False), self._phases.of("update", unit.names[0]):
                updated = self._update_unit(decision)
            del self._due[unit]
        except torch.OutOfMemoryError as error:
            if decision.is_changing:
                self.torn = f"the update of the unit of {unit.names[0]!r} had no memory: {error!r}"
            raise  # else nothing is lost: it is made when the unit is next needed
        except BaseException as error:
            self.torn = f"the update of the unit of {unit.names[0]!r} was interrupted by {error!r}"
            raise
        return updated

    def _update_unit(self, decision: Decision) -> torch.Tensor | None:
        """Update all tiles where the model computes; the new shard if its home is elsewhere.

        What passes through a GPU is on its way there, is updated, and on its way back, each for
        another tile; nobody waits here.
        """
        unit, device = decision.gradients.unit, self._device
        records = unit.records
        with ExitStack() as failing:
            gradient_lease = decision.gradients.lease()
            failing.callback(gradient_lease.abandon)
            shard_lease = self._pager.lease(records.shard.key, Access.OVERWRITE)
            failing.callback(shard_lease.abandon)
            gradient, gradient_hop = device.upload(gradient_lease["gradient"])
            unit.order.follow(gradient)
            home = shard_lease["shard"]
            is_elsewhere = home.device.type != device.device.type
            shard = torch.empty_like(home, device=device.device) if is_elsewhere else home
            start = records.own.start - records.own_of_gradient.start
            for number, (spec, extent) in enumerate(
                zip(records.tiles, records.extents, strict=True)
            ):
                self._pass_tile(
                    spec,
                    decision,
                    number,
                    gradient[slice(*extent.relative_to(start))],
                    shard[slice(*extent.relative_to(records.own.start))],
                )
                self._pager.advance()
            shard_hop = device.offload(shard, home)
            failing.pop_all()
        shard_lease.release_behind(shard_hop, functools.partial(self._shard_came_home, unit))
        gradient_lease.release_behind(gradient_hop, decision.gradients.drop)
        return shard if shard_hop is not None else None

    def _shard_came_home(self, unit: Unit) -> None:
        unit.came_home()
        self._pager.write_back(unit.records.shard.key)

    def _pass_tile(
        self,
        spec: RecordSpec,
        decision: Decision,
        number: int,
        gradient: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Update one tile unless it is done, and round its new weights into their place."""
        device, start = self._device, decision.gradients.unit.records.extents[number].start
        lease = self._pager.lease(spec.key, Access.UPDATE)
        try:
            home = lease.whole()
            here, _ = device.upload(home)
            state = AdamState(**spec.views(here))
            if number >= decision.done:
                wide = self._widened(gradient, decision.scale)
                decision.is_changing = here is home
                for run in decision.runs[number]:
                    part = slice(*run.extent.relative_to(start))
                    adam_step(
                        AdamState(*(tensor[part] for tensor in state)),
                        wide[part],
                        step=run.step,
                        settings=run.settings,
                    )
            weights.copy_(state.master)
            hop = device.offload(here, home)
            decision.done, decision.is_changing = max(decision.done, number + 1), False
        except BaseException:
            lease.abandon()
            raise
        lease.release_behind(hop, functools.partial(self._pager.write_back, spec.key))

    def _runs(
        self,
        unit: Unit,
        updated: AbstractSet[int],
        settings: Settings,
    ) -> Iterator[Run]:
        """The own part's updated elements, neighbours with equal step and settings as one."""
        current = None
        for index, parameter in enumerate(unit.parameters):
            extent = unit.layout.padded(index).intersect(unit.records.own)
            if not extent.numel or index not in updated:
                continue
            run = Run(extent, self.steps[parameter], settings[parameter])
            if current and current[1:] == run[1:] and current.extent.stop == extent.start:
                current = Run(Extent(current.extent.start, extent.stop), *run[1:])
            else:
                if current:
                    yield current
                current = run
        if current:
            yield current

    def _widened(self, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """The gradient in fp32, scaled, in memory of our own that serves every tile."""
        numel, device = gradient.numel(), gradient.device
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.device != device:
            self._scratch = torch.empty(numel, dtype=torch.float32, device=device)
        self._order.follow(self._scratch)
        wide = self._scratch[:numel].copy_(gradient)
        return wide.mul_(scale) if scale != 1.0 else wide


def check_settings(group: Mapping[str, Any]) -> None:
    """Refuse what of a group's settings cannot be honoured.

    Args:
        group: of this optimizer, or of torch's Adam or AdamW.

    Raises:
        ConfigError: names the setting, its value, and what could be honoured.
    """
    beta1, beta2 = (*group["betas"], None, None)[:2]
    wrong = [
        *(
            f"{switch}=True, which is not supported; leave it out"
            for switch in ("amsgrad", "maximize")
            if group.get(switch)
        ),
        *(
            f"{key} {group[key]!r}, which must be a number from 0"
            for key in ("lr", "eps", "weight_decay")
            if not 0 <= _number(group[key]) < math.inf
        ),
    ]
    if not (0 <= _number(beta1) < 1 and 0 <= _number(beta2) < 1):
        wrong.append(f"betas {group['betas']!r}, which must be two numbers from 0, below 1")
    if wrong:
        raise ConfigError(f"a group of parameters has {'; and '.join(wrong)}")


def _number(value: Any) -> float:  # noqa: ANN401 - whatever a user has put there
    """As torch's optimizers take it: a tensor of one element is one too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


# A scheduler made for another optimizer may be pointed at this one without a warning.
PagedAdam.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
