"""What ranks on one host share, and whether it is enough for all of them together.

Pure. Memory and drives are pools. Each rank says what it is going to take, and from which pools;
all hear it before anybody takes anything, and all come to the same answer. For each of them alone
there may be enough: the kernel promises memory to both, and kills one of them later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tiering.aio.headroom import headrooms, machine_id, reserved_huge_bytes
from tiering.tiers.nvme import NvmeTier


class Pool(NamedTuple):
    """What may be taken from."""

    key: str
    """The same on all ranks that share it."""
    free_bytes: int
    said: str
    """How much that is of what, for people."""


class Claim(NamedTuple):
    """What one rank is going to take from some pools, it does not matter from which of them."""

    nbytes: int
    pools: tuple[Pool, ...]

    @property
    def keys(self) -> frozenset[str]:
        """Of the pools."""
        return frozenset(pool.key for pool in self.pools)


class Shortage(NamedTuple):
    """More is claimed of some pools than they have."""

    claimed: Mapping[int, int]
    """Bytes by rank."""
    pools: tuple[Pool, ...]

    @property
    def ranks(self) -> str:
        """Who claims, in words."""
        *most, last = map(str, self.claimed)
        return f"ranks {', '.join(most)} and {last} together" if most else f"rank {last}"

    def __str__(self) -> str:
        """The sum, a line each."""
        terms = [(nbytes, f"rank {rank}") for rank, nbytes in self.claimed.items()]
        terms.append((sum(self.claimed.values()), "together"))
        return "".join(f"\n  {nbytes:>16,} bytes  {who}" for nbytes, who in terms)


def shortage(claims: Sequence[Iterable[Claim]]) -> Shortage | None:
    """The first pools of which more is claimed than there is, by all who can take from no others.

    Args:
        claims: of each rank. Where ranks see different amounts free, the least counts.
    """
    pools: dict[str, Pool] = {}
    for claim in (claim for own in claims for claim in own):
        for pool in claim.pools:
            pools[pool.key] = min(pool, pools.get(pool.key, pool))
    for keys in sorted({claim.keys for own in claims for claim in own}, key=_by_size):
        claimed = {
            rank: sum(claim.nbytes for claim in own if claim.keys <= keys)
            for rank, own in enumerate(claims)
        }
        shared = tuple(pools[key] for key in sorted(keys))
        if sum(claimed.values()) > sum(pool.free_bytes for pool in shared):
            return Shortage({r: nbytes for r, nbytes in claimed.items() if nbytes}, shared)
    return None


def _by_size(keys: frozenset[str]) -> tuple[int, list[str]]:
    """Those first who can take from the fewest pools; in one order on all ranks."""
    return len(keys), sorted(keys)


def memory_claims(nbytes: int) -> list[Claim]:
    """Of this rank's arena: by the machine and by each control group. See `PinnedMemory`."""
    huge_bytes = (
        reserved_huge_bytes() // max(nbytes, 1) * nbytes
    )  # an arena is there as a whole, or not
    huge = Pool(
        f"huge pages of {machine_id()}", huge_bytes, f"{huge_bytes} bytes are in huge pages"
    )
    return [
        Claim(
            nbytes,
            (
                Pool(left.pool, left.nbytes, f"{left.nbytes} bytes are {left.limit}"),
                *([huge] if huge_bytes else []),
            ),
        )
        for left in headrooms()
    ]


def drive_claims(needed: Mapping[NvmeTier, int]) -> list[Claim]:
    """Of this rank's record files.

    Args:
        needed: bytes of the files, by where they will be.

    Raises:
        TransferError: a path is gone.
    """
    machine = machine_id()
    return [
        Claim(
            nbytes,
            tuple(
                Pool(f"file system {room.device} of {machine}", room.free_bytes, str(room))
                for room in drive.rooms()
            ),
        )
        for drive, nbytes in needed.items()
    ]
