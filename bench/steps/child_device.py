"""What a GPU gives right now: ``python -m bench.steps.child_device`` prints it, or ``null``.

A process of its own, since whoever starts the runs must have no part of the GPU.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from bench.steps.link import WAYS, Pieces, RawCopies, bytes_per_s, finish

# A tile of optimizer state is as large.
_PIECES = Pieces(12 * 2**22, 5)
_PASSES = 4
_ROUNDS = 5
_EDGE = 8192  # of a matrix
_PRODUCTS = 20  # in each round


def link_bytes_per_s(device: torch.device, pieces: Pieces) -> dict[str, float]:
    """Bytes a second by way, both ways together: the medians of some rounds."""
    copies = RawCopies(device, pieces)
    return {
        way: statistics.median(
            [
                bytes_per_s(copies, way, pieces, device=device, passes=_PASSES)
                for _ in range(_ROUNDS + 1)
            ][1:]
        )
        for way in WAYS
    }


def flop_per_s(device: torch.device, edge: int) -> float:
    """Floating-point operations a second in products of bf16 matrices: the best of some rounds.

    Args:
        device: that multiplies.
        edge: of the matrices, of shape (edge, edge).
    """
    one, two = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    seconds = []
    for _ in range(_ROUNDS + 1):
        finish(device)
        begin = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(one, two, out=out)
        finish(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * edge**3 * _PRODUCTS / min(seconds[1:])


def look() -> dict[str, object] | None:
    """Measure the GPU; None where there is none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")
    return {
        "name": torch.cuda.get_device_name(device),
        "gpu_count": torch.cuda.device_count(),
        "link_bytes_per_s": link_bytes_per_s(device, _PIECES),
        "flop_per_s": flop_per_s(device, _EDGE),
    }


if __name__ == "__main__":
    print(json.dumps(look()))
