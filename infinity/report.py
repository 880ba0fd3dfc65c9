"""What an engine tells of itself: figures for programs, and lines for people on rank 0."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from infinity.config import Config
from infinity.phases import OUTSIDE
from tiering.volumes import VolumeStats

_USUAL_STEPS: Final = 10  # between lines, if only the breakdown was asked for


@dataclass(frozen=True)
class EngineStats:
    """What an engine is and has done. Bytes and seconds; counters start when `initialize` ends."""

    steps: int
    parameter_numel: int
    state_bytes: int
    """Weights as stored, master weights and moments of all parameters, without gradients."""
    arena_budget_bytes: int
    arena_used_bytes: int
    arena_peak_bytes: int
    arena_huge_bytes: int
    """Of the arena, on huge pages."""
    device_spare_bytes: int
    """On the device, kept for flat buffers to come."""
    device_plan_bytes: int
    """Most that the engine means to have on a GPU at once, beside the model's activations."""
    link_bytes: dict[str, int]
    """Copied between host and GPU: ``upload`` and ``offload``."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    nvme_paths: tuple[VolumeStats, ...]
    """The same by path, and what each holds."""
    prefetch_hits: int
    """Uses of NVMe records that found them in the arena or on their way."""
    prefetch_misses: int
    prefetch_wasted: int
    """Records fetched ahead and evicted unused."""
    waited_s: dict[str, float]
    """Time the caller was blocked, by hop: of the drive, ``read`` and ``write``; with several ranks
    by the others, ``exchange``, ``gather`` and ``reduce``. (A GPU waits by itself in the last two.)
    """
    device_waited_s: dict[str, float]
    """Time a GPU's compute had to wait, by hop: ``upload``. The caller may have been ahead."""
    backend: str
    backend_reason: str
    """Why not io_uring; empty when it is."""
    direct_io: bool
    compute_dtype: str
    spent_s: dict[str, float]
    """Seconds by phase (forward, backward, gather, reduce, update, step, outside) and waits as in
    ``waited_s``; together all the time there was. See `infinity.phases`.
    """

    def scalars(self) -> dict[str, float]:
        """All that is a number, under names like ``spent_s/forward``."""
        found = {}
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, dict):
                found.update({f"{name}/{key}": float(v) for key, v in value.items()})
            elif isinstance(value, (int, float)):
                found[name] = float(value)
        return found


class Reporter:
    """Prints a line every so many steps, and where their time went if that was asked for.

    Args:
        config: ``steps_per_print``, ``wall_clock_breakdown``.
        rank: prints if it is 0.
    """

    def __init__(self, config: Config, *, rank: int) -> None:
        self._breaks_down = config.wall_clock_breakdown
        usual = _USUAL_STEPS if self._breaks_down else 0
        given = config.steps_per_print
        self._every_steps = (given if isinstance(given, int) else usual) if rank == 0 else 0
        self._last_step = 0
        self._last_s = time.perf_counter()
        self._last: Mapping[str, float] = {}

    def begin(self, scalars: Mapping[str, float]) -> None:
        """Training begins, with these figures; what was before is not told of."""
        self._last_s, self._last = time.perf_counter(), dict(scalars)

    def wants(self, step: int) -> bool:
        """Whether this step is told of."""
        return self._every_steps > 0 and step % self._every_steps == 0

    def tell(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print what there is to say after a step."""
        if not self.wants(step):
            return
        now_s, steps = time.perf_counter(), step - self._last_step
        seconds = (now_s - self._last_s) / steps
        rates = ", ".join(f"{v:.3e}" for k, v in scalars.items() if k.startswith("lr/"))
        line = f"step {step}: {seconds:.3f} s, lr {rates}, gradient norm {scalars['grad_norm']:.4g}"
        if scalars["loss_scale"] != 1:
            line += f", loss scale {scalars['loss_scale']:g}"
        if scalars["skipped_steps"]:
            line += f", {scalars['skipped_steps']:.0f} skipped"
        lines = [line]
        if self._breaks_down:
            lines.append(f"step {step}: {_breakdown(self._last, scalars, steps)}")
        print(*lines, sep="\n", file=sys.stdout, flush=True)  # noqa: T201 - asked for
        self._last_step, self._last_s, self._last = step, now_s, dict(scalars)


def _breakdown(before: Mapping[str, float], now: Mapping[str, float], steps: int) -> str:
    """Seconds a step, by phase."""
    parts = {
        name.removeprefix("spent_s/"): (seconds - before.get(name, 0.0)) / steps
        for name, seconds in now.items()
        if name.startswith("spent_s/")
    }
    parts[OUTSIDE] = parts.pop(OUTSIDE, 0.0)  # last
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
