"""How the C engine and its binding are compiled: declarations from aio.h, flags, liburing.

liburing is linked statically where its archive is found, so that a wheel works on a machine without
it. ``ZERO_INFINITY_NO_URING=1`` builds with the thread backend alone and needs no liburing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from cffi import FFI

NO_URING_SWITCH = "ZERO_INFINITY_NO_URING"
HEADERS = ("aio", "backend", "clock", "engine", "split")
SOURCES = (
    "engine",
    "inbox",
    "requests",
    "worker",
    "file",
    "uring",
    "threads",
    "faulty",
    "memory",
    "split",
)
FLAGS = ["-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
# Commands that only describe the project and need no compiler.
DESCRIBING = frozenset({"egg_info", "dist_info", "sdist", "clean", "--version", "--name"})

# setuptools wants paths relative to setup.py, which is where it runs this from.
_SOURCE_FOLDER = Path("csrc/aio")
_ROOT = Path.cwd() if Path("setup.py").exists() else Path(__file__).parents[2]


class Uring(NamedTuple):
    """What the build needs to know about liburing.

    Args:
        macros: for the compiler.
        objects: archives to link.
        libraries: shared libraries to link.
    """

    macros: list[tuple[str, str | None]]
    objects: list[str]
    libraries: list[str]


def declarations(header: str) -> str:
    """The part of aio.h that cffi reads: what stands between its two markers."""
    return header.partition("/* cffi: begin */")[2].partition("/* cffi: end */")[0]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))


def _has_header() -> bool:
    ran = subprocess.run(  # noqa: S603 - the compiler that the build is going to use
        [*_compiler(), *shlex.split(os.environ.get("CFLAGS", "")), "-E", "-x", "c", "-"],
        input=b"#include <liburing.h>\n",
        capture_output=True,
        check=False,
    )
    return ran.returncode == 0


def _static_archive() -> str | None:
    ran = subprocess.run(  # noqa: S603 - likewise
        [*_compiler(), "-print-file-name=liburing.a"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = ran.stdout.strip()
    return found if found != "liburing.a" and Path(found).exists() else None


def _uring() -> Uring:
    if os.environ.get(NO_URING_SWITCH, "") not in {"", "0"}:
        return Uring([("AIO_NO_URING", None)], [], [])
    if DESCRIBING.intersection(sys.argv[1:]):
        return Uring([], [], [])
    if not _has_header():
        sys.exit(
            "liburing.h is not found: install liburing-dev (Debian, Ubuntu) or liburing-devel "
            f"(Fedora), or set {NO_URING_SWITCH}=1 to build with the thread backend alone"
        )
    archive = _static_archive()
    return Uring([], [archive], []) if archive else Uring([], [], ["uring"])


def _builder() -> FFI:
    uring = _uring()
    builder = FFI()
    builder.cdef(declarations((_ROOT / _SOURCE_FOLDER / "aio.h").read_text()))
    builder.set_source(
        "tiering.aio._native",
        '#include "aio.h"',
        sources=[str(_SOURCE_FOLDER / f"{name}.c") for name in SOURCES],
        depends=[str(_SOURCE_FOLDER / f"{name}.h") for name in HEADERS],
        include_dirs=[str(_SOURCE_FOLDER)],
        define_macros=uring.macros,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-Wl,--exclude-libs,ALL"],
        extra_objects=uring.objects,
        libraries=uring.libraries,
    )
    return builder


ffibuilder = _builder()
