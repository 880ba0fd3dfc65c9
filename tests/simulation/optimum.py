"""The least that any schedule could move: a search over all that could be kept.

A state is what the arena holds, and what of that is newer than the drive. Bytes are moved only when
they must be: a read when its record is used, a write when its room is needed; to do either earlier
costs no fewer. New contents are written beside old ones that are newer than the drive, as the store
guarantees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tests.simulation.model import Case
from tiering.trace import Access, Use

_ROUNDS = 12  # steady states that take 1, 2, 3, 4 or 6 passes are found exactly
_WARM_UP = 12

_State = tuple[frozenset[str], frozenset[str]]  # held, and newer than the drive
_Edges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def least_pages(case: Case, *, behind: bool) -> Fraction:
    """Pages a pass, on average over ever so many, that every schedule must at least move.

    Args:
        case: the pass.
        behind: every change is written at once, so nothing held is newer than the drive.
    """
    states = list(_states(case, behind=behind))
    at = {state: number for number, state in enumerate(states)}
    moves = {use: _edges(case, use, at, behind=behind) for use in set(case.uses)}
    cost = np.zeros(len(states), dtype=np.int64)
    for number in range(_WARM_UP + _ROUNDS):
        if number == _WARM_UP:
            before = cost
        for use in case.uses:
            source, target, pages = moves[use]
            reached = np.full(len(states), 2**40, dtype=np.int64)
            np.minimum.at(reached, target, cost[source] + pages)
            cost = reached
    known = before < 2**39
    return Fraction(int((cost - before)[known].min()), _ROUNDS)


def _states(case: Case, *, behind: bool) -> Iterator[_State]:
    for held in _subsets(frozenset(case.sizes)):
        if sum(case.sizes[key] for key in held) <= case.budget:
            yield from ((held, newer) for newer in ([frozenset()] if behind else _subsets(held)))


def _edges(case: Case, use: Use, at: dict[_State, int], *, behind: bool) -> _Edges:
    found = [
        (number, at[target], pages)
        for state, number in at.items()
        for target, pages in _moves(case, use, state, behind=behind)
    ]
    source, target, pages = np.array(found, dtype=np.int64).T
    return source, target, pages


def _moves(case: Case, use: Use, state: _State, *, behind: bool) -> Iterator[tuple[_State, int]]:
    """What may be held after the use, and the pages moved for that."""
    held, newer = state
    key, access = use
    size, changes = case.sizes[key], access is not Access.READ
    others = held - {key}
    paid = size * (behind and changes)
    if access is not Access.OVERWRITE:
        room = size
        paid += size * (key not in held)
    elif key in newer:
        yield from _moves(case, use, (others, newer - {key}), behind=behind)  # see below: dropped
        room = 2 * size
    else:
        room = size
    for gone in _subsets(others):
        left = others - gone
        if sum(case.sizes[k] for k in left) + room <= case.budget:
            kept = newer & left | ({key} if changes and not behind else newer & {key})
            written = sum(case.sizes[k] for k in gone & newer)
            yield (left | {key}, frozenset(kept)), paid + written


def _subsets(keys: frozenset[str]) -> Iterator[frozenset[str]]:
    ordered = sorted(keys)
    for count in range(len(ordered) + 1):
        yield from map(frozenset, itertools.combinations(ordered, count))
