"""Looking at, and changing, what the engine keeps of one parameter: states and gradient.

All ranks call these together; each has a part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final, Literal, get_args

import torch
from torch import nn

from infinity.agreement import Agreement, Place
from infinity.comm import Communicator
from infinity.gradients import UnitGradients
from infinity.partition import Extent
from infinity.schedule import Schedule
from infinity.unit import Unit
from tiering.errors import ConfigError, RankError
from tiering.prefetch import Prefetcher
from tiering.spec import RecordSpec
from tiering.trace import Access

Field = Literal["master", "exp_avg", "exp_avg_sq", "step", "gradient"]
_FIELDS: Final = get_args(Field)


class States:
    """The states of all parameters of an engine.

    Args:
        gradients: of each trained unit.
        steps: that each parameter has taken.
        schedule: has the parameters present, which changes have to reach.
        pager: leases the records.
        comm: the ranks.
        agreement: where they meet.
    """

    def __init__(  # noqa: PLR0913
        self,
        gradients: Mapping[Unit, UnitGradients],
        steps: MutableMapping[nn.Parameter, int],
        schedule: Schedule,
        pager: Prefetcher,
        *,
        comm: Communicator,
        agreement: Agreement,
    ) -> None:
        self._gradients = gradients
        self._steps = steps
        self._owner = {p: (u, i) for u in gradients for i, p in enumerate(u.parameters)}
        self._schedule = schedule
        self._pager = pager
        self._comm = comm
        self._agreement = agreement

    def get(self, parameter: nn.Parameter, field: Field) -> torch.Tensor | None:
        """Copy one field.

        Args:
            parameter: one that is trained.
            field: the fp32 weight, one of Adam's moments, how many steps Adam has counted for it,
                or the gradient of this cycle as it is without a loss scale (mean over the ranks,
                sum over micro-batches).

        Returns:
            fp32, of the parameter's shape, on the engine's device; of the count one element, on
            the CPU, as in torch's optimizers; None for a gradient that no rank has got.

        Raises:
            ConfigError: the parameter is not trained, or there is no such field.
        """
        unit, index = self._find(parameter, field)
        if field == "step":
            return torch.tensor(float(self._steps.get(parameter, 0)), device="cpu")
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if field == "gradient":
            has_one = self._gradients[unit].read(index, whole)
            if not any(found for (found,) in self._comm.exchange([float(has_one)])):
                return None
        else:
            for spec, mine, theirs in self._tiles(unit, index):
                with self._pager.lease(spec.key, Access.READ) as lease:
                    whole[mine].copy_(lease[field][theirs])
        if unit.layout.world_size > 1 or field == "gradient":
            self._comm.all_reduce(whole)
        return whole.view(parameter.shape)

    def set(self, parameter: nn.Parameter, field: Field, value: torch.Tensor | float) -> None:
        """Change one field; a weight that is set is used from the next forward on.

        Args:
            parameter: one that is trained.
            field: as for `get`; a gradient takes the place of what has come in this cycle.
            value: of the parameter's shape, or one whole number from 0 for the count; the same on
                all ranks.

        Raises:
            ConfigError: the parameter is not trained, there is no such field, or the value does not
                fit it.
        """
        unit, index = self._find(parameter, field)
        value = torch.as_tensor(value)
        if value.is_complex():
            raise ConfigError(f"{field} of {unit.names[index]!r} must be real, got {value.dtype}")
        if field == "step":
            if value.numel() != 1 or not float(value).is_integer() or value < 0:
                raise ConfigError(
                    f"step of {unit.names[index]!r} must be one whole number from 0, got {value!r}"
                )
            self._steps[parameter] = int(value)
            return
        if value.shape != parameter.shape:
            raise ConfigError(
                f"{field} of {unit.names[index]!r} is of shape {tuple(parameter.shape)}, got "
                f"{tuple(value.shape)}"
            )
        flat = value.detach().reshape(-1)
        if field == "gradient":
            self._gradients[unit].write(index, flat)
            return
        for spec, mine, theirs in self._tiles(unit, index):
            with self._pager.lease(spec.key, Access.UPDATE) as lease:
                lease[field][theirs].copy_(flat[mine])
        own = unit.records.own
        part = unit.layout.parameters[index].intersect(own)
        if field == "master":
            unit.changed(index)
        if field == "master" and part.numel:
            with self._pager.lease(unit.records.shard.key, Access.UPDATE) as lease:
                start = unit.layout.parameters[index].start
                shard = lease["shard"][slice(*part.relative_to(own.start))]
                shard.copy_(flat[slice(*part.relative_to(start))])

    def _find(self, parameter: nn.Parameter, field: str) -> tuple[Unit, int]:
        """Whose it is; nothing of it is present or due from here on."""
        if field not in _FIELDS:
            raise ConfigError(f"there is no {field!r}; there are {', '.join(_FIELDS)}")
        if parameter not in self._owner:
            raise ConfigError("the parameter is not trained by this engine")
        self._schedule.release_all()
        self._agreement.meet(Place.STATE)
        unit, index = self._owner[parameter]
        asked = [float(list(self._gradients).index(unit)), float(index), _FIELDS.index(field)]
        if any(theirs != asked for theirs in self._comm.exchange(asked)):
            raise RankError(
                f"the ranks ask for different states; all must ask for {field} of "
                f"{unit.names[index]!r}, as this one does"
            )
        unit.settle()
        return unit, index

    def _tiles(self, unit: Unit, index: int) -> Iterator[tuple[RecordSpec, slice, slice]]:
        """This rank's tiles of a parameter: which of its elements, at which of the tile's."""
        place = unit.layout.parameters[index]
        for spec, extent in zip(unit.records.tiles, unit.records.extents, strict=True):
            part: Extent = place.intersect(extent)
            if part.numel:
                mine, theirs = part.relative_to(place.start), part.relative_to(extent.start)
                yield spec, slice(*mine), slice(*theirs)
