"""The least time a step could take, and the least bytes it could move: sums, nothing measured.

Note: the time. A step must do its arithmetic and must move its bytes, and at best does both at
once:

    ideal = max(compute, read / reading, written / writing, (read + written) / both)

compute is the same engine's step with everything in memory, update included; reading, writing and
both are what a probe of the drive gave in bytes a second. The largest term binds.

Note: the bytes. Without any memory a step reads 18 bytes a parameter: the weight (2) for forward
and for backward, the gradient (2) and the state (12) for the update; and writes 16: gradient, state
and weight. With memory for ``a`` bytes a parameter:

- The update makes the weights shortly before forward uses them, and backward uses them soon after,
  in the opposite order; then they are not needed until the next update makes new ones. What fits of
  them through these two turns is read at neither and never written: saves 3.
- Of the gradients, for which the weights make room in backward, what fits saves 2: its writing and
  its reading.
- What fits beside weights or gradients may be state that stays for good: saves 2.

      fits    = min(a, 2)
      kept    = a - 2, from 0 to 12
      read    = 18 - 3 fits - kept
      written = 16 - 2 fits - kept

No memory is set aside for working, so no engine can do with less, and all need a little more.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Binding = Literal["compute", "reading", "writing", "reading and writing"]

_WEIGHT: Final = 2.0  # bytes a parameter; a gradient takes as much
_STATE: Final = 12.0


class Speeds(NamedTuple):
    """Of a drive, in bytes a second.

    Args:
        read: reading alone.
        write: writing alone.
        mixed: both together, of one byte written for one read.
    """

    read: float
    write: float
    mixed: float


class Traffic(NamedTuple):
    """Of a step.

    Args:
        read: bytes from the drive.
        written: bytes to it.
    """

    read: float
    written: float


class Ideal(NamedTuple):
    """The least time of a step.

    Args:
        seconds: of it.
        binds: the resource that takes as long.
        compute_s: of the arithmetic.
        drive_s: of the transfers; 0 without a drive.
    """

    seconds: float
    binds: Binding
    compute_s: float
    drive_s: float


def ideal(compute_s: float, traffic: Traffic, speeds: Speeds | None) -> Ideal:
    """The least time of a step.

    Args:
        compute_s: a step in memory takes.
        traffic: the step's.
        speeds: the drive's; None without one.
    """
    terms: dict[Binding, float] = {}
    if speeds is not None:
        terms["reading"] = traffic.read / speeds.read
        terms["writing"] = traffic.written / speeds.write
        terms["reading and writing"] = (traffic.read + traffic.written) / speeds.mixed
    drive_s = max(terms.values(), default=0.0)
    terms["compute"] = compute_s
    binds = max(terms, key=lambda name: terms[name])
    return Ideal(terms[binds], binds, compute_s, drive_s)


def least_traffic(memory_bytes: float) -> Traffic:
    """Bytes a parameter that a step must move, as the second note says.

    Args:
        memory_bytes: a parameter.
    """
    fits = min(memory_bytes, _WEIGHT)
    kept = min(max(memory_bytes - _WEIGHT, 0.0), _STATE)
    return Traffic(
        read=3 * _WEIGHT + _STATE - 3 * fits - kept,
        written=2 * _WEIGHT + _STATE - 2 * fits - kept,
    )
