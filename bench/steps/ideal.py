"""The least time a step could take, and the least bytes it could move: sums, nothing measured.

Note: the time. A step must do its arithmetic and must move its bytes, and at best does both at
once:

    ideal = max(compute, drive, link)
    drive = max(read / reading, written / writing, (read + written) / both)
    link  = max(up / upload, down / offload, (up + down) / both)

compute is the same engine's step with everything on the device, update included; the speeds are
what a probe of the drive, and of the link to a GPU, gave in bytes a second. The largest term binds.

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

from typing import Final, Literal, NamedTuple, get_args

Binding = Literal[
    "compute",
    "reading",
    "writing",
    "reading and writing",
    "upload",
    "offload",
    "upload and offload",
]

_WEIGHT: Final = 2.0  # bytes a parameter; a gradient takes as much
_STATE: Final = 12.0


class Speeds(NamedTuple):
    """Of a drive, or of the link to a GPU, in bytes a second.

    Args:
        read: reading alone; of a link, uploading.
        write: writing alone; of a link, offloading.
        mixed: both together, of one byte written for one read.
    """

    read: float
    write: float
    mixed: float


class Traffic(NamedTuple):
    """Of a step.

    Args:
        read: bytes from the drive; of a link, to the GPU.
        written: bytes to the drive; of a link, from the GPU.
    """

    read: float
    written: float


class Load(NamedTuple):
    """What a step puts on a drive or a link.

    Args:
        traffic: the step's.
        speeds: that it could have.
    """

    traffic: Traffic
    speeds: Speeds

    def seconds(self) -> tuple[float, float, float]:
        """At least, for what goes the one way, for what goes the other, and for both."""
        read, written = self.traffic
        return (
            read / self.speeds.read,
            written / self.speeds.write,
            (read + written) / self.speeds.mixed,
        )


class Ideal(NamedTuple):
    """The least time of a step.

    Args:
        seconds: of it.
        binds: the resource that takes as long.
        compute_s: of the arithmetic.
        drive_s: of the transfers; 0 without a drive.
        link_s: of the copies; 0 without a GPU.
    """

    seconds: float
    binds: Binding
    compute_s: float
    drive_s: float
    link_s: float


def ideal(compute_s: float, drive: Load | None, link: Load | None = None) -> Ideal:
    """The least time of a step.

    Args:
        compute_s: a step with everything on the device takes.
        drive: what the step puts on it; None without one.
        link: likewise.
    """
    idle = (0.0, 0.0, 0.0)
    drive_s, link_s = (load.seconds() if load else idle for load in (drive, link))
    names: tuple[Binding, ...] = get_args(Binding)
    terms = dict(zip(names, (compute_s, *drive_s, *link_s), strict=True))
    binds = max(terms, key=lambda name: terms[name])
    return Ideal(terms[binds], binds, compute_s, max(drive_s), max(link_s))


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
