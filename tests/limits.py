"""Limits that a process puts on itself, for tests that start one. Knows nothing of the product."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
import types

NOBODY = 65534
# The same numbers on all machines but alpha.
RING_CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}

_SET_NO_NEW_PRIVILEGES = 38
_SET_SECCOMP = 22
_FILTER = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL_WITH, _ALLOW = 0x00050000, 0x7FFF0000


def without_torch() -> None:
    """Make `tiering.aio` importable by itself; `tiering` imports torch, which takes seconds."""
    package = types.ModuleType("tiering")
    package.__path__ = ["tiering"]
    sys.modules["tiering"] = package


def forbid(call: str, error: int) -> None:
    """Have a system call of io_uring fail from now on, as a container's filter does."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_JUMP_IF_EQUAL, 0, 1, RING_CALLS[call]),
            (_RETURN, 0, 0, _FAIL_WITH | error),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert prctl(_SET_SECCOMP, _FILTER, ctypes.c_char_p(head), 0, 0) == 0


def become_nobody(*, lock_kib: int) -> None:
    """Become an ordinary user under a limit on locked memory, which does not bind root."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (lock_kib * 1024, lock_kib * 1024))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def leave_descriptors(count: int) -> list[int]:
    """Use up the descriptors but for so many. Returns those taken, which may be closed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        assert error.errno == errno.EMFILE  # noqa: PT017 - the loop has no other end
    for _ in range(count):
        os.close(taken.pop())
    return taken
