"""A measured run of our engine: ``python -m bench.steps.child_ours OUTCOME < RUN``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

import infinity
from bench.steps import timeline
from bench.steps.loop import DTYPES, Moved, Trainer, serve
from bench.steps.model import build
from bench.steps.wire import Paging, Run
from infinity.report import EngineStats
from tiering.aio.backend import Transfer

_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


class Ours(Trainer):
    """The engine as the run's configuration says.

    Args:
        run: the work.
    """

    def __init__(self, run: Run) -> None:
        training = run.training
        model = build(
            training.shape,
            seed=training.seed,
            compute_dtype=None,
            checkpointing=training.checkpointing,
        )
        self._engine, *_ = infinity.initialize(model=model, config=run.config)
        self._start: EngineStats = self._engine.stats()
        self.device = self._engine.device
        self.compute_dtype = _NAMES[self._start.compute_dtype]

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

    def moved(self) -> Moved:
        """Bytes of the drive and of the link so far."""
        stats = self._engine.stats()
        link = stats.link_bytes
        return Moved(
            stats.nvme_read_bytes, stats.nvme_written_bytes, link["upload"], link["offload"]
        )

    def watch_drive(self) -> Callable[[], Iterator[timeline.Transfer]]:
        """Note transfers from now on; see `Trainer`."""
        begun: list[tuple[int, str, str, int, Transfer]] = []

        def note(verb: str, key: str, nbytes: int, transfer: Transfer) -> None:
            begun.append((time.perf_counter_ns(), verb, key, nbytes, transfer))

        def ended() -> Iterator[timeline.Transfer]:
            for asked_ns, verb, key, nbytes, transfer in begun:
                transfer.wait()
                begin_ns = asked_ns + int(transfer.queue_s * 1e9)
                end_ns = begin_ns + int(transfer.device_s * 1e9)
                yield timeline.Transfer(verb, key, nbytes, asked_ns, begin_ns, end_ns)

        self._engine.on_transfer(note)
        return ended

    def begin_measuring(self) -> None:
        """Count from here."""
        self._start = self._engine.stats()

    def paging(self) -> Paging:
        """Of the measured steps."""
        first, last = self._start, self._engine.stats()
        return Paging(
            state_bytes=last.state_bytes,
            arena_budget_bytes=last.arena_budget_bytes,
            arena_peak_bytes=last.arena_peak_bytes,
            arena_huge_bytes=last.arena_huge_bytes,
            hits=last.prefetch_hits - first.prefetch_hits,
            misses=last.prefetch_misses - first.prefetch_misses,
            wasted=last.prefetch_wasted - first.prefetch_wasted,
            waited_s=_since(first.waited_s, last.waited_s),
            device_waited_s=_since(first.device_waited_s, last.device_waited_s),
            device_plan_bytes=last.device_plan_bytes,
            backend=last.backend,
            direct_io=last.direct_io,
        )

    def close(self) -> None:
        """Remove the swap folder."""
        self._engine.close()


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Seconds since then, by hop."""
    return {hop: seconds - before.get(hop, 0.0) for hop, seconds in now.items()}


if __name__ == "__main__":
    serve(Ours)
