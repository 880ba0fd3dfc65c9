"""Samples a step: how many there are, and how ranks and passes share them."""

from __future__ import annotations

from typing import NamedTuple

from infinity.config.fields import Auto, Positive, Section
from tiering.errors import ConfigError


class Batch(NamedTuple):
    """How a step's samples are divided."""

    micro: int | None
    """Samples of a forward on one rank; None where the configuration leaves it open."""
    accumulation: int
    """Forward and backward passes a step."""
    train: int | None
    """Samples of a step on all ranks; None where the configuration leaves it open."""


class BatchSizes(Section):
    """Samples a step: any two of the three give the third; "auto" is a key left out."""

    train_batch_size: Positive | Auto = "auto"
    """Samples of a step, on all ranks together."""
    train_micro_batch_size_per_gpu: Positive | Auto = "auto"
    """Samples of one forward on one rank."""
    gradient_accumulation_steps: Positive | Auto = "auto"
    """Forward and backward passes a step."""

    def batch(self, *, world_size: int) -> Batch:
        """The sizes, with the open ones worked out.

        Raises:
            ConfigError: train_batch_size is not micro-batch x accumulation x ranks.
        """
        train, micro, steps = (
            None if value == "auto" else value
            for value in (
                self.train_batch_size,
                self.train_micro_batch_size_per_gpu,
                self.gradient_accumulation_steps,
            )
        )
        if train is None:
            total = None if micro is None else micro * (steps or 1) * world_size
            return Batch(micro, steps or 1, total)
        if micro is None:
            steps = steps or 1
            micro = train // (steps * world_size)
        elif steps is None:
            steps = train // (micro * world_size)
        if not micro or not steps or train != micro * steps * world_size:
            raise ConfigError(self._mismatch(train, micro, steps, world_size))
        return Batch(micro, steps, train)

    def _mismatch(self, train: int, micro: int, steps: int, ranks: int) -> str:
        """The sum that does not come out; what was not in the file is not blamed."""
        is_open = (
            self.train_micro_batch_size_per_gpu == "auto",
            self.gradient_accumulation_steps == "auto",
        )
        if not any(is_open):
            return (
                f"train_batch_size is {train}, but train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps x ranks is {micro} x {steps} x {ranks} = "
                f"{micro * steps * ranks}; change one of the three, or leave one out"
            )
        if is_open[0]:
            name, value = "gradient_accumulation_steps", steps
        else:
            name, value = "train_micro_batch_size_per_gpu", micro
        unit = value * ranks
        return (
            f"train_batch_size {train} cannot be divided by {name} x ranks, which is "
            f"{value} x {ranks} = {unit}; make it a multiple of that, such as "
            f"{-(-train // unit) * unit}, or leave it out"
        )
