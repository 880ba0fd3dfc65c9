"""The processes of a run: one a rank, on this host, as torchrun would start them.

Each finds its place in the variables that torch and DeepSpeed read (``RANK`` and the like), its
work in its standard input, and speaks into a file. The first that fails ends the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tiering.errors import ConfigError, TieringError

_SAID_LINES: Final = 12  # of a rank that failed
_HOST: Final = "127.0.0.1"


class ContestantError(TieringError):
    """A rank ended without an outcome."""


class Work(NamedTuple):
    """Of one rank.

    Args:
        command: to run.
        told: what comes on its standard input.
    """

    command: Sequence[str]
    told: str


def launch(
    name: str,
    ranks: Sequence[Work],
    *,
    environment: Mapping[str, str],
    place: Path,
    limit_s: float,
) -> None:
    """Run all ranks to their end.

    Args:
        name: for errors.
        ranks: in order.
        environment: of all.
        place: a folder for what they are told and what they say.
        limit_s: when it is over, all are killed.

    Raises:
        ConfigError: the program cannot be run.
        ContestantError: a rank failed; has the last that it said.
    """
    count = len(ranks)
    common = {**_shares(count, environment), **environment, "MASTER_PORT": str(_free_port())}
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        for rank, (command, told) in enumerate(ranks):
            (place / f"told-{rank}").write_text(told, encoding="utf-8")
            own = {**common, **_place_of(rank, count)}
            children.append(_start(command, own, place / f"told-{rank}", _said(place, rank)))

    with contextlib.ExitStack() as closing:
        waiters = closing.enter_context(concurrent.futures.ThreadPoolExecutor(count))
        closing.callback(_end, children)
        # Signals come to the main thread: none can come between a start and its place in the list.
        with concurrent.futures.ThreadPoolExecutor(1) as starter:
            starter.submit(start).result()
        waiting = {waiters.submit(child.wait): rank for rank, child in enumerate(children)}
        try:
            for ended in concurrent.futures.as_completed(waiting, timeout=limit_s):
                if code := ended.result():
                    raise _failed(name, waiting[ended], code, place=place, count=count)
        except concurrent.futures.TimeoutError as error:
            raise ContestantError(
                f"{name} did not end within {limit_s:g} s and was killed; give it more by "
                "--run-limit, or train a smaller model"
            ) from error


def _place_of(rank: int, count: int) -> dict[str, str]:
    """A rank's own variables."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
    }


def _shares(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Cores for each rank, where there are several and nobody has said how many."""
    if count == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}


def _free_port() -> int:
    """Where ranks meet: free now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _start(
    command: Sequence[str], environment: Mapping[str, str], told: Path, said: Path
) -> subprocess.Popen[bytes]:
    with told.open("rb") as given, said.open("wb") as taken:
        try:
            return subprocess.Popen(  # noqa: S603 - the user's own interpreter
                command, env=environment, stdin=given, stdout=taken, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.wait()


def _said(place: Path, rank: int) -> Path:
    return place / f"said-{rank}"


def _failed(name: str, rank: int, code: int, *, place: Path, count: int) -> ContestantError:
    text = _said(place, rank).read_text(encoding="utf-8", errors="replace")
    last = "\n  ".join(text.splitlines()[-_SAID_LINES:])
    who = name if count == 1 else f"{name}: rank {rank}"
    return ContestantError(f"{who} ended with code {code}; the last that it said:\n  {last}")
