"""The factor by which losses are multiplied so that small 16-bit gradients do not become zero.

Pure arithmetic. The dynamic scale follows DeepSpeed's rule, so that the same configuration gives
the same scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

_FACTOR = 2.0


class LossScaleError(ArithmeticError):
    """Gradients are not finite, and the configuration says not to go on."""


class LossScale(Protocol):
    """A factor that hears after each step how it did."""

    @property
    def value(self) -> float:
        """The factor of the next step."""
        ...

    def update(self, *, overflow: bool) -> None:
        """A step was made, or skipped because its gradients were not finite.

        Raises:
            LossScaleError: it cannot become smaller.
        """
        ...


@dataclass
class StaticLossScale:
    """Always the same.

    Args:
        value: 1: none.
    """

    value: float = 1.0

    def update(self, *, overflow: bool) -> None:
        """Nothing to do."""


@dataclass
class DynamicLossScale:
    """Halved when gradients overflow, doubled when none has for a while.

    Args:
        value: to begin with.
        window: steps without overflow after which it is doubled.
        hysteresis: overflows in a row of which only the last one halves it.
        refills_at_once: whether one good step gives the whole hysteresis back; else a doubling.
        least: below this it does not go.

    Source:
        The rule is that of DeepSpeed's ``DynamicLossScaler``; Micikevicius et al., "Mixed Precision
        Training", section 3.2.
    """

    value: float
    window: int = 1000
    hysteresis: int = 2
    refills_at_once: bool = False
    least: float = 1.0
    _left: int = field(init=False)
    _since: int = field(init=False, default=0)  # steps since the last overflow

    def __post_init__(self) -> None:
        self._left = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Halve, double, or stay; see `LossScale.update`."""
        if overflow:
            self._since = 0
            if self._left > 1:
                self._left -= 1
            elif self.value <= self.least:
                raise LossScaleError(
                    f"the loss scale is at its minimum of {self.value:g} (fp16.min_loss_scale) and "
                    "gradients still are not finite"
                )
            else:
                self.value = max(self.value / _FACTOR, self.least)
            return
        self._since += 1
        if self.refills_at_once:
            self._left = self.hysteresis
        if self._since % self.window == 0:
            self._left = self.hysteresis
            self.value *= _FACTOR
