"""The collective hops: the only module that talks to torch.distributed.

With one rank every hop is the identity: the shard is the whole, and nothing is copied. Which
collective comes next is agreed on elsewhere (`agreement`).

Note: a rank that fails

The others wait in a collective. If its process has ended they learn of it at once, else after
`open`'s timeout; in both cases they raise `RankError`, with the reason if the rank left one
(`leave_reason`), or with the ranks that did not come. Ranks that wait for each other in collectives
of their own making (a user's barrier, the engines of one process in another order) are only found
out by the timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from tiering.errors import ConfigError, RankError

# Newer releases of torch have other names for the same two collectives.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_HOPS: Final = ("exchange", "gather", "reduce")
_LATE_S: Final = 5.0  # by which ranks' timeouts differ, at most
_GONE_S: Final = 0.5  # by which they notice that a process has ended


def init_distributed(backend: str | None = None, *, timeout_s: float | None = None) -> None:
    """Make torch's process group if a launcher such as torchrun has started several processes.

    Does nothing if there is a group, or one process only. `infinity.initialize` calls it. A group
    that is made here ends with the interpreter.

    Args:
        backend: of torch.distributed; None: nccl and gloo where there is a GPU, else gloo.
        timeout_s: of the group's collectives; None: torch's default.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ
    if not dist.is_available() or dist.is_initialized() or alone:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group(chosen, timeout=timeout)
    atexit.register(_end_distributed)


def _end_distributed() -> None:
    """What was made here ends in order: torch's threads abort an interpreter that leaves them."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


class Communicator:
    """The ranks of the process group; one if there is none.

    Only `agree` works before `open`.
    """

    def __init__(self) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if grouped else 0
        self.size: int = dist.get_world_size() if grouped else 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0
        self.exchanges = 0
        """How often ranks have told each other something."""
        self.waited_s = dict.fromkeys(_HOPS, 0.0) if self.size > 1 else {}
        """How long this rank was blocked by the others in what came after `open`, by hop. (A GPU's
        collectives are only asked for here; what waits for them there is not counted.)"""
        self._talk: Any = None
        self._data: Any = None
        self._timeout_s = 0.0
        self._reasons: Any = None
        self._has_left_reason = False

    def open(self, device: torch.device, *, timeout_s: float) -> None:
        """Make groups of one's own, so that no collective of the user's gets in between.

        All ranks call it together.

        Args:
            device: of the tensors that will be given.
            timeout_s: longest wait for the other ranks in one collective.
        """
        if self.size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._talk = dist.new_group(backend="gloo", timeout=timeout)
        on_device = device.type == "cuda"
        self._data = dist.new_group(backend="nccl", timeout=timeout) if on_device else self._talk
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        self._reasons = dist.distributed_c10d.PrefixStore(
            f"zero_infinity/{self._talk.group_name}", store
        )

    def close(self) -> None:
        """Leave the groups, without waiting for anybody."""
        groups = dict.fromkeys(g for g in (self._data, self._talk) if g is not None)
        self._talk = self._data = None
        if dist.is_initialized():
            for group in groups:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    # -- one rank's failure is everybody's

    @contextlib.contextmanager
    def agree(self) -> Iterator[None]:
        """What fails in the body on any rank fails on all; all ranks leave it together.

        Raises:
            RankError: it failed on another rank only; ConfigError if it was that there.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as own:  # noqa: BLE001 - raised again below, when all have heard of it
            error = own
        found = self.gather_objects(None if error is None else _said(error))
        if error is not None:
            raise error
        for rank, said in enumerate(found):
            if said is not None:
                kind = ConfigError if said[0] == ConfigError.__name__ else RankError
                raise kind(f"rank {rank} failed: {said[0]}: {said[1]}")

    def agree_on(self, lines: Sequence[str]) -> None:
        """Refuse, on all ranks, if they do not all have the same.

        Args:
            lines: what should be the same, line by line.

        Raises:
            ConfigError: names the first difference.
        """
        everybody = self.gather_objects(list(lines))
        for rank, others in enumerate(everybody):
            for number in range(max(len(others), len(everybody[0]))):
                theirs, first = (
                    said[number] if number < len(said) else "nothing more"
                    for said in (others, everybody[0])
                )
                if theirs != first:
                    raise ConfigError(
                        f"the ranks disagree: rank 0 has {first}, rank {rank} has {theirs}; every "
                        "rank must build the same model with the same configuration"
                    )

    def gather_objects(self, mine: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Everybody's, by rank."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        with self._explaining("telling each other something"):
            dist.all_gather_object(found, mine, group=self._talk)
        return found

    def leave_reason(self, error: BaseException) -> None:
        """Say why this rank will come to no more collectives."""
        if self._reasons is not None:
            with contextlib.suppress(Exception):  # the others may be gone as well
                self._reasons.set(f"failed/{self.rank}", ": ".join(_said(error)))
                self._has_left_reason = True

    def withdraw_reason(self) -> None:
        """This rank goes on: what failed was caught."""
        if self._has_left_reason:
            self._has_left_reason = False
            with contextlib.suppress(Exception):  # as above
                self._reasons.delete_key(f"failed/{self.rank}")

    def reason(self) -> str:
        """What another rank has failed of, if it has said so; else empty.

        Raises:
            RuntimeError: whoever keeps the reasons has gone.
        """
        for rank in range(self.size):
            key = f"failed/{rank}"
            if rank != self.rank and self._reasons is not None and self._reasons.check([key]):
                return f"rank {rank} failed: {self._reasons.get(key).decode()}"
        return ""

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(f"{what} failed on rank {self.rank}: {self._explain(error)}") from error

    def _explain(self, error: RuntimeError) -> str:
        """Who is missing, and why as far as that is known."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._reasons is None:
            return str(error)
        try:
            self._reasons.set(f"waiting/{self.rank}", "")
            if reason := self.reason():
                return reason
            is_late = "imed out" in str(error)
            patience_s = _LATE_S if is_late else _GONE_S
            silent = [r for r in others if not self._is_waiting(r, patience_s)]
        except (RuntimeError, ValueError):
            return f"other ranks have gone ({error})"
        names = ", ".join(map(str, silent))
        if is_late:
            return (
                f"rank {names} did not come to it within {self._timeout_s:g} s "
                f"(tiering.collective_timeout_s): {error}"
            )
        return f"rank {names} has gone, without a reason: {error}"

    def _is_waiting(self, rank: int, patience_s: float) -> bool:
        with contextlib.suppress(RuntimeError, ValueError):
            self._reasons.wait([f"waiting/{rank}"], timedelta(seconds=patience_s))
            return True
        return False

    # -- the hops

    @contextlib.contextmanager
    def _hop(self, hop: str, what: str) -> Iterator[None]:
        """Count the time of the body as waited, and say what failed in it."""
        begin_s = time.perf_counter()
        try:
            with self._explaining(what):
                yield
        finally:
            self.waited_s[hop] += time.perf_counter() - begin_s

    def exchange(self, mine: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, by rank; all give equally many."""
        if self.size == 1:
            return [list(mine)]
        self.exchanges += 1
        numbers = torch.tensor(mine, dtype=torch.float64, device="cpu")
        found = torch.empty(self.size * len(mine), dtype=torch.float64, device="cpu")
        with self._hop("exchange", "an exchange"):
            _ALL_GATHER(found, numbers, group=self._talk)
        return [list(map(float, part)) for part in found.view(self.size, -1).tolist()]

    def all_gather(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Put all ranks' shards together.

        Args:
            shard: shape (numel / size,).
            whole: shape (numel,), same dtype and device; receives them in the order of the ranks.

        Returns:
            ``whole``; with one rank ``shard`` itself, and ``whole`` is not touched.
        """
        if self.size == 1:
            return shard
        self.begin_all_gather(shard, whole)()
        return whole

    def begin_all_gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Callable[[], None]:
        """The same in the background; with more than one rank.

        Returns:
            What makes ``whole`` complete for all later work; both tensors are in use until then.
        """
        with self._hop("gather", "an all-gather"):
            work = _ALL_GATHER(whole, shard, group=self._data, async_op=True)
        return self._finishing(work, "gather", "an all-gather")

    def reduce_scatter(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' buffers and keep the own part.

        Args:
            whole: shape (numel,). Its contents are undefined afterwards.
            shard: shape (numel / size,), same dtype and device; receives the sum.

        Returns:
            ``shard``; with one rank ``whole`` itself, and ``shard`` is not touched.
        """
        if self.size == 1:
            return whole
        self.begin_reduce_scatter(whole, shard)()
        return shard

    def begin_reduce_scatter(self, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """The same in the background; with more than one rank.

        Returns:
            What makes ``shard`` complete for all later work; both tensors are in use until then.
        """
        with self._hop("reduce", "a reduce-scatter"):
            work = _REDUCE_SCATTER(shard, whole, group=self._data, async_op=True)
        return self._finishing(work, "reduce", "a reduce-scatter")

    def all_reduce(self, whole: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' buffers, in place."""
        if self.size > 1:
            self.begin_all_reduce(whole)()
        return whole

    def begin_all_reduce(self, whole: torch.Tensor) -> Callable[[], None]:
        """Sum all ranks' buffers, in place, in the background; with more than one rank.

        Returns:
            What makes ``whole`` complete for all later work.
        """
        with self._hop("reduce", "an all-reduce"):
            work = dist.all_reduce(whole, group=self._data, async_op=True)
        return self._finishing(work, "reduce", "an all-reduce")

    def _finishing(self, work: dist.Work, hop: str, what: str) -> Callable[[], None]:
        def finish() -> None:
            with self._hop(hop, what):
                work.wait()

        return finish

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what rank 0 has, in place; contiguous, on the device of `open`."""
        if self.size > 1:
            with self._explaining("a broadcast"):
                dist.broadcast(tensor, src=0, group=self._data)


def _said(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)
