"""A measured run of DeepSpeed: ``python -m bench.steps.child_deepspeed OUTCOME < RUN``.

Runs in DeepSpeed's own interpreter, from a folder in which ``bench`` is all there is of us.
"""

from __future__ import annotations

import deepspeed
import torch

from bench.steps.loop import DTYPES, Trainer, serve
from bench.steps.model import build
from bench.steps.wire import Run


class DeepSpeed(Trainer):
    """DeepSpeed's engine as the run's configuration says.

    Args:
        run: the work.
    """

    is_strict = False  # we do not know all its kernels
    version = f"{torch.__version__}, DeepSpeed {deepspeed.__version__}"

    def __init__(self, run: Run) -> None:
        training = run.training
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

    def close(self) -> None:
        """Leave the process group: torch's threads abort an interpreter that keeps it."""
        deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    serve(DeepSpeed)
