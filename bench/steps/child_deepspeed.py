"""A measured run of DeepSpeed: ``python -m bench.steps.child_deepspeed OUTCOME < RUN``.

Runs in DeepSpeed's own interpreter, from a folder in which ``bench`` is all there is of us.
"""

from __future__ import annotations

import os
import socket

import deepspeed
import torch

from bench.steps.loop import DTYPES, Trainer, serve
from bench.steps.model import build
from bench.steps.wire import Run

_ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class DeepSpeed(Trainer):
    """DeepSpeed's engine as the run's configuration says.

    Args:
        run: the work.
    """

    is_strict = False  # we do not know all its kernels
    version = f"{torch.__version__}, DeepSpeed {deepspeed.__version__}"

    def __init__(self, run: Run) -> None:
        training = run.training
        os.environ.update({**_ONE_RANK, "MASTER_PORT": str(_free_port())})
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.compute_dtype = training.compute_dtype
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo")
        compute_dtype = DTYPES[training.compute_dtype]
        model = build(
            training.shape,
            seed=training.seed,
            compute_dtype=compute_dtype,
            checkpointing=training.checkpointing,
        )
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=run.config
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self._engine(ids)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients."""
        self._engine.backward(loss)

    def update(self) -> None:
        """Update."""
        self._engine.step()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(DeepSpeed)
