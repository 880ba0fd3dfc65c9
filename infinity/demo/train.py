"""The training loop, and the same loop in plain torch to compare it with."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from infinity.comm import Communicator
from infinity.demo.corpus import Share, batches
from infinity.demo.options import Options
from infinity.engine import InfinityEngine

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WARM_UP_STEPS = 10


class Step(NamedTuple):
    """What one step did.

    Args:
        loss: mean cross-entropy of its batch, in nats.
        seconds: forward, backward and update, with the waits in them.
        read_bytes: from NVMe, as far as done when the step ended.
        written_bytes: to NVMe, likewise.
        arena_bytes: of the host arena, in use when the step ended.
        torch_seconds: the same step of the plain copy, if there is one.
    """

    loss: float
    seconds: float
    read_bytes: int
    written_bytes: int
    arena_bytes: int
    torch_seconds: float | None


def as_one(steps: Sequence[Step]) -> Step:
    """The same step of several ranks: the mean loss, the time of the slowest, the bytes of all."""
    in_torch = [step.torch_seconds for step in steps if step.torch_seconds is not None]
    return Step(
        loss=statistics.fmean(step.loss for step in steps),
        seconds=max(step.seconds for step in steps),
        read_bytes=sum(step.read_bytes for step in steps),
        written_bytes=sum(step.written_bytes for step in steps),
        arena_bytes=sum(step.arena_bytes for step in steps),
        torch_seconds=max(in_torch, default=None),
    )


def warm_up(optimizer: torch.optim.Optimizer) -> LinearLR:
    """Lead the learning rate up to its full height; without that the first steps overshoot."""
    return LinearLR(optimizer, start_factor=1 / _WARM_UP_STEPS, total_iters=_WARM_UP_STEPS - 1)


class PlainTorch:
    """A copy of the model with everything in memory and torch's own AdamW, fused.

    It keeps fp32 weights and computes under autocast when the compute type is bf16, the usual way
    of mixed precision in plain torch.

    Args:
        model: copied now, before the engine takes it.
        options: for the optimizer's settings.
        device: where to compute.
    """

    def __init__(self, model: nn.Module, options: Options, device: torch.device) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._schedule = warm_up(self._optimizer)

    def step(self, ids: torch.Tensor, compute_dtype: torch.dtype) -> float:
        """Train on one batch, int64 of shape (batch, context + 1); return the seconds it took."""
        start = time.perf_counter()
        with torch.autocast(
            ids.device.type, torch.bfloat16, enabled=compute_dtype is torch.bfloat16
        ):
            loss = self._model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start


def train(
    engine: InfinityEngine,
    text: torch.Tensor,
    options: Options,
    plain: PlainTorch | None,
    comm: Communicator,
) -> Iterator[list[Step]]:
    """Train step by step until the steps or, on any rank, the seconds are used up.

    Args:
        engine: holds the model.
        text: uint8, shape (bytes,).
        options: how much, and from which seed.
        plain: trained on the same batches in turns, or None.
        comm: the ranks that train together.

    Yields:
        What each rank has done in a step.
    """
    drawn = batches(
        text,
        batch=options.batch,
        context=options.model.context,
        seed=options.seed,
        share=Share(comm.rank, comm.size),
    )
    schedule = warm_up(engine.optimizer)
    stats = engine.stats()
    compute_dtype = TORCH_DTYPES[stats.compute_dtype]
    end = time.perf_counter() + options.seconds
    for drawn_ids in itertools.islice(drawn, options.steps):
        ids = drawn_ids.to(engine.device)
        loss, seconds = _timed_step(engine, ids)
        schedule.step()
        before, stats = stats, engine.stats()
        step = Step(
            loss=loss,
            seconds=seconds,
            read_bytes=stats.nvme_read_bytes - before.nvme_read_bytes,
            written_bytes=stats.nvme_written_bytes - before.nvme_written_bytes,
            arena_bytes=stats.arena_used_bytes,
            torch_seconds=None,
        )
        if plain:
            step = step._replace(torch_seconds=plain.step(ids, compute_dtype))
        everybody = comm.gather_objects((step, time.perf_counter() > end))
        yield [step for step, _ in everybody]
        if any(is_late for _, is_late in everybody):
            return


def _timed_step(engine: InfinityEngine, ids: torch.Tensor) -> tuple[float, float]:
    """Train on one batch; return the loss and the seconds."""
    start = time.perf_counter()
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    return loss.item(), time.perf_counter() - start
