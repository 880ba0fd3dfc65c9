"""One Adam step over a piece of optimizer state, in place: all optimizer arithmetic there is.

It is torch's own arithmetic. The default kernel gives torch's bits for every element; the fused one
makes a single pass over memory and differs from it in the last bit, as it does in torch. Both give
the same bits for an element wherever its piece was cut (at a multiple of 16).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

# The default kernel makes nine passes; what one piece needs stays in the cache.
_PIECE_NUMEL = 2**18


class AdamSettings(NamedTuple):
    """Hyper-parameters of one parameter group at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW (decay applied to the weight); False: Adam (decay added to the gradient)."""

    fused: bool
    """True: torch's fused kernel."""


class AdamState(NamedTuple):
    """One piece of optimizer state: fp32 tensors of shape (numel,)."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def adam_step(state: AdamState, grad: torch.Tensor, *, step: int, settings: AdamSettings) -> None:
    """Advance the state by one step, in place.

    Args:
        state: fp32, shape (numel,), on the device the update runs on.
        grad: fp32, shape (numel,), same device. Left unchanged.
        step: number of this step, from 1; it sets the bias correction.
        settings: hyper-parameters.

    Source:
        Kingma and Ba, "Adam", algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay
        Regularization", algorithm 2.
    """
    numel = grad.numel()
    in_one = settings.fused or grad.device.type != "cpu"
    piece = numel if in_one else _PIECE_NUMEL
    for start in range(0, numel, piece):
        part = slice(start, start + piece)
        _step_piece(AdamState(*(t[part] for t in state)), grad[part], step=step, settings=settings)


def _step_piece(state: AdamState, grad: torch.Tensor, *, step: int, settings: AdamSettings) -> None:
    kernel = adamw if settings.decoupled else adam
    kernel(
        [state.master],
        [grad],
        [state.exp_avg],
        [state.exp_avg_sq],
        [],
        # The kernel counts up before it uses it; the default one would wait for a GPU to read it.
        [torch.full((), step - 1.0, device=grad.device if settings.fused else "cpu")],
        foreach=False,
        fused=settings.fused,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
