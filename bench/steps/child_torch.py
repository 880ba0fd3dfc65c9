"""A measured run of plain torch: ``python -m bench.steps.child_torch OUTCOME < RUN``.

Everything is in memory: bf16 weights and gradients, fp32 master weights and moments, torch's AdamW.
"""

from __future__ import annotations

import torch

from bench.steps.loop import DTYPES, Trainer, serve
from bench.steps.model import build
from bench.steps.wire import Run


class Plain(Trainer):
    """Mixed precision by hand.

    Args:
        run: the work; its configuration has AdamW's settings and ``gradient_clipping``.
    """

    def __init__(self, run: Run) -> None:
        training = run.training
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compute_dtype = training.compute_dtype
        compute_dtype = DTYPES[training.compute_dtype]
        self._model = build(
            training.shape,
            seed=training.seed,
            compute_dtype=compute_dtype,
            checkpointing=training.checkpointing,
        )
        self._model.to(self.device)
        self._stored = list(self._model.parameters())
        self._master = [p.detach().float().requires_grad_() for p in self._stored]
        self._max_norm = float(run.config["gradient_clipping"])
        self._optimizer = torch.optim.AdamW(self._master, **run.config["optimizer"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self._model(ids)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients, in the type the weights are stored in."""
        loss.backward()

    @torch.no_grad()
    def update(self) -> None:
        """Widen the gradients, clip, step, and round the new weights."""
        for master, stored in zip(self._master, self._stored, strict=True):
            if stored.grad is not None:
                master.grad, stored.grad = stored.grad.float(), None
        if self._max_norm:
            torch.nn.utils.clip_grad_norm_(self._master, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for master, stored in zip(self._master, self._stored, strict=True):
            stored.copy_(master)


if __name__ == "__main__":
    serve(Plain)
