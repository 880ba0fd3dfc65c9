"""The section ``tiering``: this package's own settings."""

from __future__ import annotations

from typing import Literal

from infinity.config.fields import Auto, Bytes, Factor, Positive, Section
from infinity.config.paths import NvmePaths

OnNonfinite = Literal["raise", "skip", "ignore"]


class Tiering(Section):
    """``tiering``: what DeepSpeed has no key for."""

    host_memory: Bytes | Auto = "auto"
    """Bytes of the one host arena of each rank, or text such as "8GiB". auto: gradients and working
    buffers for NVMe, everything for cpu. What the ranks of one host ask for together must be there.
    """
    device_memory: Bytes | Auto = "auto"
    """Bytes of the device, or text such as "4GiB", for what would be offloaded and stays there all
    the same: gradients first, then weights, then optimizer states. Beside them it holds the weights
    in use, up to 512 MiB on their way, and what the model takes. auto: nothing stays.
    """
    compute_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type the model computes in. auto: the storage type where the device has fast matrix units for
    it, else fp32.
    """
    keep_fp32: tuple[str, ...] = ()
    """Names of parameters, with ``*`` and ``?`` as in file names, that are stored and computed in
    fp32 whatever the rest is.
    """
    nonfinite_gradients: OnNonfinite | Auto = "auto"
    """What happens at an infinite or undefined gradient. raise: an error names the first parameter.
    skip: no weight is changed by that step. ignore: it is used, as torch does. auto: skip with fp16
    and with `bf16.check_grad_overflow`, else ignore.
    """
    max_skipped_steps: Positive = 50
    """After so many skipped steps in a row one more is an error. (A loss scale that is being found
    has an end of its own: an overflow at `fp16.min_loss_scale` is an error.)
    """
    collective_timeout_s: Factor = 600.0
    """Longest wait for other ranks, in seconds; after that an error names what was waited for."""
    aio_backend: Literal["auto", "uring", "threads"] = "auto"
    """auto falls back to threads where io_uring is not to be had; a named one is an error then."""
    require_native: bool = False
    """True: nvme is an error where the compiled part cannot be loaded. False: auto falls back to
    threads of Python there, with a warning.
    """
    io_timeout_s: Factor = 60.0
    """Longest wait for one transfer of the drive, in seconds; after that an error names it."""
    nvme_paths: NvmePaths | None = None
    """Folders on several drives, over which everything on NVMe is spread in proportion to their
    speeds: paths, or objects with ``path`` and ``gb_per_s``. They take the place of ``nvme_path``.
    """
    update_in_backward: bool = False
    """True: half of the model, unit for unit, is updated under backward, each as soon as its
    gradients are complete, so that the drive works in backward as it does in forward. For training
    without clipping whose loop always steps after backward: what an update does (rates, decay) is
    settled by then, and `zero_grad` or a change of it before the step is an error. On a GPU the
    gradients of that half wait there: two units' at a time, but all of those units of which not
    every parameter gets one in each backward.
    """
    poison: bool = False
    """True: for debugging. Memory that is free, in the arena and on the device, is filled with
    bytes of 255, no number in any floating type, so that a use before arrival or after release ends
    in NaN and not in values that happen to be right. Costs a pass over all that moves.
    """
    max_unit_numel: Positive = 2**28
    """A list element larger than this is split into units at its children."""
