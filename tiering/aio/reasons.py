"""Why the engine does less than it could, in words, and what to do about it."""

from __future__ import annotations

import errno
import os
import resource

from tiering.aio.config import BACKENDS
from tiering.aio.native import lib

_PERMISSION = (
    "allow it in the container's seccomp profile, or set sysctl kernel.io_uring_disabled=0"
)
_REMEDIES = {
    errno.EPERM: _PERMISSION,
    errno.EACCES: _PERMISSION,
    errno.ENOSYS: "use Linux 5.6 or later, in a container runtime that passes it on",
    errno.ENOMEM: "raise the limit on locked memory (ulimit -l) or close other engines",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def _named(error: int) -> str:
    return f"{errno.errorcode.get(error, error)}: {os.strerror(error)}"


def why_no_uring(error: int) -> str:
    """Why io_uring is not in use; empty for no error."""
    if not error:
        return ""
    if not lib.aio_has_uring():
        return "this build has no io_uring; build it where liburing-dev is installed"
    remedy = _REMEDIES.get(error, "use a kernel and a file system that support it")
    return f"io_uring is refused ({_named(error)}); {remedy}"


def why_unregistered(error: int, backend: int, wanted_bytes: int) -> str:
    """Why memory is not registered with the ring; empty for no error."""
    if not error:
        return ""
    if backend != BACKENDS["uring"]:
        return "fixed buffers: off (the thread backend has none)"
    if error != errno.ENOMEM:
        return f"fixed buffers: off ({_named(error)}; Linux 5.19 or later has them)"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "none" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return (
        f"fixed buffers: off (lock limit {limit}, want {wanted_bytes / 2**20:.0f} MiB; "
        "raise it by ulimit -l or LimitMEMLOCK=)"
    )


def why_not_open(path: str, error: int) -> str:
    """What a failed open means."""
    if error == errno.EMFILE:
        return (
            f"cannot open {path}: no place is left for it; close files, or raise max_files or the "
            "limit on open files (ulimit -n)"
        )
    return f"cannot open {path}"
