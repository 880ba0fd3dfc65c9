"""The demo for torchrun, with a drive that fails rank 1 in its second step."""

from __future__ import annotations

import errno
import os
import sys

import torch

from infinity.demo.__main__ import main
from infinity.demo.model import GPT
from tiering.errors import TransferError

forward = GPT.forward


def failing(self: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The first pass over the whole model is that of the first step."""
    if len(self.blocks) > 2:  # not the one that is measured
        failing.passes += 1
        if failing.passes == 2:
            raise TransferError("a read failed", errno=errno.EIO, path="unit0")
    return forward(self, ids)


failing.passes = 0

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        GPT.forward = failing
    sys.exit(main(sys.argv[1:]))
