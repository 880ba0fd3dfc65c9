"""The engine: brackets the passes of training, and owns everything it is made of.

A training cycle is ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. Everything else
happens at module boundaries (`schedule`), in autograd (`hooks`, `gradients`) and in the update
(`optimizer`); `assembly` puts the parts together.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from infinity.access import Field
from infinity.agreement import Place
from infinity.assembly import OptimizerGroups, Parts, Steer, assemble
from infinity.comm import Communicator
from infinity.config import Batch, Config
from infinity.data import TrainingLoader
from infinity.gradients import UnitGradients
from infinity.loss_scale import LossScaleError
from infinity.optimizer import PagedAdam
from infinity.report import EngineStats, Reporter
from infinity.schedule import Schedule
from infinity.trace_file import read_traces, write_traces
from tiering.aio import Faults
from tiering.errors import EngineClosedError, RankError, TieringWarning
from tiering.tiers.nvme import Observer
from tiering.volumes import VolumeStats

# nn.Module's methods that would have no effect on a paged model, and return it without its engine.
_MOVES: Final = frozenset(
    {"to", "cuda", "cpu", "half", "bfloat16", "float", "double", "type", "to_empty"}
)
_MOVES_WHY: Final = "where weights live, and in which type, is in the configuration"

StepCallback: TypeAlias = Callable[[int, Mapping[str, float]], None]


class InfinityEngine:
    """Trains a model whose weights and optimizer state are paged. Made by `infinity.initialize`.

    One thread at a time may use it.

    Args:
        model: taken over: its parameters stay the user's objects, their memory is the engine's.
        config: checked already.
        optimizer: parameter groups and what they leave out.
        comm: the ranks, each of which makes an engine like this one.
        steer: makes the optimizer's scheduler.
        faults: for tests: what goes wrong in the I/O below.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        config: Config,
        optimizer: OptimizerGroups,
        *,
        comm: Communicator,
        steer: Steer,
        faults: Faults | None = None,
    ) -> None:
        self.module = model
        self.config = config
        self.global_steps = 0
        """Steps so far, with those that were skipped."""
        self.micro_steps = 0
        """Micro-batches that went through backward so far."""
        self.world_size = comm.size
        self.global_rank = comm.rank
        self.local_rank = comm.local_rank
        self.batch: Batch = config.batch(world_size=comm.size)
        self._is_scaled = False  # the loss of the user's next own backward
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._micro_steps = 0
        self._boundary: bool | None = None  # as the user has set it
        self._awaits_step = False  # a backward has run since the last call of step
        self._was_applied = False
        self._cycle = ""  # the kind of training pass under way, or the last one
        self._told_unmanaged: set[str] = set()
        closing = ExitStack()
        try:
            self._parts: Parts = assemble(
                model, config, optimizer, closing, comm=comm, steer=steer, faults=faults
            )
        except BaseException:
            closing.close()
            raise
        self._parts.schedule.tell(
            complete=_weakly(self._update_early), failed=self._parts.optimizer.backward_failed
        )
        self._finalizer = weakref.finalize(self, _close_in_parent, self._pid, closing)
        os.register_at_fork(after_in_child=_forsaking(self._parts.schedule))
        self._initial = self._volumes()
        self.device: torch.device = self._parts.device
        self.optimizer: PagedAdam = self._parts.optimizer
        self._has_begun = False
        self._callbacks: list[StepCallback] = []
        self._reporter = Reporter(config, rank=comm.rank)
        self.lr_scheduler: LRScheduler | None = self._parts.lr_scheduler
        """Stepped after each update."""
        self.training_dataloader: TrainingLoader[Any] | None = None
        """Of the ``training_data`` given to `infinity.initialize`."""

    # -- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        """Run the model's forward: with gradients enabled for training, else to evaluate."""
        with self._in_use():
            if not self._has_begun:
                self._has_begun = True
                self._reporter.begin(self.scalars())
            self._count_plain_backward()
            if self.config.fp16.auto_cast:
                args, kwargs = tree_map(self._cast, (args, kwargs))
            if torch.is_grad_enabled():
                return self._train(*args, **kwargs)
            return self._evaluate(*args, **kwargs)

    forward = __call__

    if not TYPE_CHECKING:  # or every misspelt name would be Any

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the model's own
            """What is not the engine's is the model's, as with DeepSpeed's engine."""
            if name.startswith("_") or name in _MOVES:
                why = f"; {_MOVES_WHY}" if name in _MOVES else ""
                raise AttributeError(f"an engine has no {name!r}{why}")
            try:
                return getattr(self.module, name)
            except AttributeError:
                raise AttributeError(f"neither the engine nor its model has {name!r}") from None

    def _cast(self, value: Any) -> Any:  # noqa: ANN401
        """A floating input in the type the model computes in."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._parts.types.compute)
        return value

    def _train(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not self._parts.pager.is_under_way(self._cycle):
            self._begin_cycle()
        with self._forward(), self._parts.hooks.saving():
            return self.module(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        pager = self._parts.pager
        self._settle()
        pager.begin("eval")
        try:
            with self._forward():
                output = self.module(*args, **kwargs)
            pager.end("eval")
        finally:
            pager.abandon("eval")  # if it has not ended
        return output

    def _begin_cycle(self) -> None:
        """Start a pass; one with updates in its forward uses other records than one without."""
        self._cycle = "train" if self.optimizer.is_due else "train, up to date"
        self._parts.pager.begin(self._cycle)

    def _settle(self) -> None:
        """Make the updates now. A cycle that has not begun by then is one without them."""
        self.optimizer.settle()
        if not self._micro_steps:
            self._parts.pager.abandon(self._cycle)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with self._parts.phases.of("forward"):
            self._parts.schedule.begin_forward()
            try:
                yield
            finally:
                self._parts.schedule.end_forward()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor:
        """Run backward of one micro-batch's loss.

        The loss is divided by the number of micro-batches of a step, and multiplied by the loss
        scale.

        Args:
            loss: one element.
            retain_graph: keep what autograd has saved, for another backward.
            scale_wrt_gas: False: do not divide; the loss has its share of the step already.

        Returns:
            The loss as it was given.
        """
        with self._in_use():
            if self._parts.schedule.backward_ran:  # by the user, in the same micro-batch
                self._refuse_if_unscaled()
            scaled = self._scaled(loss, by_accumulation=scale_wrt_gas)
            try:
                with self._parts.phases.of("backward"):
                    scaled.backward(retain_graph=retain_graph)
            except BaseException as error:
                self.optimizer.backward_failed(error)
                raise
            finally:
                self._parts.schedule.backward_ran = False
            self._count_backward()
            return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what `backward` runs backward of, for a ``.backward()`` of one's own."""
        self._is_scaled = True
        return self._scaled(loss, by_accumulation=True)

    def _scaled(self, loss: torch.Tensor, *, by_accumulation: bool) -> torch.Tensor:
        divisor = self.batch.accumulation if by_accumulation else 1
        factor = self.optimizer.loss_scale
        scaled = loss if divisor == 1 else loss / divisor
        # In fp32: a scaled loss is larger than fp16 has numbers for.
        return scaled if factor == 1.0 else scaled.float() * factor

    def _update_early(self, gradients: UnitGradients) -> None:
        """A unit has its gradients of this micro-batch."""
        if self._completes(self._micro_steps + 1):
            self.optimizer.update_early(gradients)

    def _count_backward(self) -> None:
        self._micro_steps += 1
        self.micro_steps += 1
        self._awaits_step = True

    def _count_plain_backward(self) -> None:
        """A ``loss.backward()`` of the user's since the last call counts as a micro-batch."""
        self._parts.schedule.end_failed_backward()
        self.optimizer.refuse_if_torn()
        if not self._parts.schedule.backward_ran:
            return
        self._parts.schedule.backward_ran = False
        self._count_backward()
        self._refuse_if_unscaled()

    def _refuse_if_unscaled(self) -> None:
        """A backward of the user's has run: refuse if its loss lacked the scale."""
        is_scaled, self._is_scaled = self._is_scaled, False
        if self.optimizer.loss_scale != 1.0 and not is_scaled:
            self.optimizer.forget()
            self._micro_steps = 0
            self._awaits_step = False
            raise RuntimeError(
                "loss.backward() without the loss scale that fp16 needs; call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )

    def step(self) -> None:
        """Update the weights, if all micro-batches of the step have been through backward.

        The step is decided here; each weight gets its new value when it is next used, at the latest
        in the next forward, under which the drive moves the optimizer's states.

        With several ranks, all call it; one that has no samples left calls it all the same.

        Raises:
            RuntimeError: no backward since the last step, with one rank.
            LossScaleError: gradients are not finite and the configuration says not to go on;
                nothing was updated.
            RankError: another rank failed, or is in another call.
            TransferError: a write of an earlier update failed; its bytes are in memory. (A read
                that fails in an update is raised by who needed the weight; the update is torn then,
                and the engine goes on no more.)
        """
        with self._in_use():
            self._count_plain_backward()
            if self.world_size > 1 and not self._awaits_step:
                self._count_backward()  # of nothing: the others may have samples left
            if not self._awaits_step:
                raise RuntimeError("engine.step() without engine.backward(loss) before it")
            self._was_applied = False
            if not self.is_gradient_accumulation_boundary():
                self._awaits_step = False
                return
            self._warn_of_unmanaged()
            try:
                with self._parts.phases.of("step"):
                    self.optimizer.step()
            except LossScaleError:
                self._end_cycle()
                raise
            self._was_applied = not self.optimizer.overflow
            self._end_cycle()
            if self.lr_scheduler is not None and self._was_applied:
                self.lr_scheduler.step()
            self._parts.store.raise_failed_writes()
            self._begin_cycle()  # so that reading goes on until the next forward
            self._parts.pager.advance()
            self._tell()

    def _end_cycle(self) -> None:
        self._awaits_step = False
        self._micro_steps = 0
        self.global_steps += 1
        self._parts.pager.end(self._cycle)

    def _tell(self) -> None:
        """What a step is worth telling: to the callbacks, and on rank 0 to people."""
        if not self._callbacks and not self._reporter.wants(self.global_steps):
            return
        scalars = self.scalars()
        for callback in self._callbacks:
            callback(self.global_steps, scalars)
        self._reporter.tell(self.global_steps, scalars)

    def _warn_of_unmanaged(self) -> None:
        """Say once which parameters got a gradient that nobody will use, and drop it."""
        for name, parameter in self._parts.unmanaged:
            if parameter.grad is None:
                continue
            parameter.grad = None
            if name not in self._told_unmanaged:
                self._told_unmanaged.add(name)
                warnings.warn(
                    f"parameter {name!r} got a gradient but is not trained: it was frozen when "
                    "infinity.initialize() was called; unfreeze it before",
                    TieringWarning,
                    stacklevel=4,
                )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step, which `step` then makes."""
        current = self._micro_steps if self._awaits_step else self._micro_steps + 1
        return self._completes(current)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:  # noqa: FBT001
        """Decide oneself, from now on, whether the next `step` updates the weights."""
        self._boundary = is_boundary

    def _completes(self, micro_steps: int) -> bool:
        if self._boundary is not None:
            return self._boundary
        return micro_steps % self.batch.accumulation == 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate within; a step is counted by micro-batches, so there is nothing to switch."""
        yield

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights: it was a boundary, and was not skipped."""
        return self._was_applied

    @property
    def skipped_steps(self) -> int:
        """Steps that updated nothing because gradients were not finite."""
        return self.optimizer.skipped_steps

    def zero_grad(self) -> None:
        """Forget the gradients that have come since the last step, all ranks together."""
        with self._in_use():
            self._parts.schedule.reset()
            self._parts.schedule.backward_ran = False
            self.optimizer.zero_grad()
            self._micro_steps = 0
            self._awaits_step = False
            self._is_scaled = False

    def train(self, mode: bool = True) -> InfinityEngine:  # noqa: FBT001, FBT002 - nn.Module's
        """Switch the model to training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> InfinityEngine:
        """Switch the model to evaluation mode."""
        self.module.eval()
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.module.parameters()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a micro-batch on one rank; None if the config leaves it open."""
        return self.batch.micro

    def train_batch_size(self) -> int | None:
        """Samples of a step on all ranks; None if the config leaves it open."""
        return (
            None
            if self.batch.micro is None
            else (self.batch.micro * self.batch.accumulation * self.world_size)
        )

    def zero_optimization_stage(self) -> int:
        """What is partitioned: 0 nothing, 1 optimizer states, 2 gradients, 3 parameters."""
        return self.config.zero_optimization.stage

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type the model computes in: that of its parameters, and of inputs to match them."""
        return self._parts.types.compute

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; None before the first."""
        return self.optimizer.global_grad_norm

    def get_state(self, parameter: nn.Parameter, field: Field) -> torch.Tensor | None:
        """Copy what is kept of a parameter, whole, on every rank.

        Args:
            parameter: one that is trained.
            field: ``master`` (the fp32 weight), ``exp_avg``, ``exp_avg_sq``, ``step``, or
                ``gradient``; see `infinity.access.States.get`.
        """
        with self._in_use():
            return self._parts.states.get(parameter, field)

    def set_state(self, parameter: nn.Parameter, field: Field, value: torch.Tensor | float) -> None:
        """Change one of them, on all ranks alike.

        Args:
            parameter: one that is trained.
            field: as for `get_state`.
            value: of its shape; see `infinity.access.States.set`.
        """
        with self._in_use():
            self._parts.states.set(parameter, field, value)

    def save_checkpoint(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Refuse: there are no checkpoints yet."""
        raise NotImplementedError(
            "there are no checkpoints yet; engine.module.state_dict() has the weights, "
            "engine.get_state(parameter, field) each parameter's master, exp_avg, exp_avg_sq and "
            "step, which set_state brings back, and lr_scheduler.state_dict() the schedule"
        )

    load_checkpoint = save_16bit_model = save_checkpoint

    # -- observing and ending

    def stats(self) -> EngineStats:
        """Figures of this engine so far."""
        parts = self._parts
        arena, store = parts.arena.stats(), parts.store.stats
        aio = [drive.aio.stats() for drive in parts.drives]
        link = parts.device_tier.link_stats()
        volumes = tuple(map(_since, self._initial, self._volumes()))
        return EngineStats(
            steps=self.global_steps,
            parameter_numel=sum(p.numel() for p in self.module.parameters()),
            state_bytes=parts.state_bytes,
            arena_budget_bytes=arena.capacity_bytes,
            arena_used_bytes=arena.used_bytes,
            arena_peak_bytes=arena.peak_bytes,
            arena_huge_bytes=parts.huge_bytes,
            device_spare_bytes=parts.device_tier.spare_bytes(),
            device_plan_bytes=parts.device_plan_bytes,
            link_bytes={"upload": link.uploaded_bytes, "offload": link.offloaded_bytes},
            nvme_read_bytes=sum(volume.read_bytes for volume in volumes),
            nvme_written_bytes=sum(volume.written_bytes for volume in volumes),
            nvme_paths=volumes,
            prefetch_hits=store.hits,
            prefetch_misses=store.misses,
            prefetch_wasted=store.wasted,
            waited_s=dict(parts.phases.waited_s()),
            device_waited_s={"upload": link.upload_waited_s},
            backend=aio[0].backend if aio else "none",
            backend_reason=aio[0].backend_reason if aio else "",
            direct_io=not any(d.buffered_blocks for d in aio),
            compute_dtype=str(parts.types.compute).removeprefix("torch."),
            spent_s=parts.phases.spent_s(),
        )

    @property
    def exchanges(self) -> int:
        """How often the ranks have told each other what they want, so far."""
        return self._parts.comm.exchanges

    def scalars(self) -> dict[str, float]:
        """Numbers of this engine so far, for TensorBoard, W&B and the like; see `EngineStats`."""
        norm = self.optimizer.global_grad_norm
        return {
            **self.stats().scalars(),
            "skipped_steps": float(self.skipped_steps),
            "loss_scale": self.optimizer.loss_scale,
            "grad_norm": float("nan") if norm is None else norm,
            **{f"lr/{number}": rate for number, rate in enumerate(self.get_lr())},
        }

    def on_step(self, callback: StepCallback) -> None:
        """Have this called after every step, on this rank, with its number and `scalars`."""
        self._callbacks.append(callback)

    def on_transfer(self, observer: Observer) -> None:
        """Have this called for each read and write of a drive when it begins, on this rank."""
        for drive in self._parts.drives:
            drive.tier.observe_by(observer)

    def _volumes(self) -> list[VolumeStats]:
        return [volume for drive in self._parts.drives for volume in drive.tier.volumes()]

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write down in which order training and evaluation use what is paged.

        Args:
            path: of the file; `load_trace` in a later run reads it.

        Raises:
            OSError: it cannot be written.
        """
        with self._in_use():
            write_traces(path, self._parts.pager.traces, self._parts.store.sizes_bytes())

    def load_trace(self, path: str | os.PathLike[str]) -> None:
        """Fetch ahead from the first step on, by the order that another run has written down.

        Raises:
            ConfigError: it cannot be read, or is of another model or plan.
        """
        with self._in_use():
            self._parts.pager.adopt(read_traces(path, self._parts.store.sizes_bytes()))

    def flush(self) -> None:
        """Write everything that is newer in memory to the drive, and wait until it is written.

        Raises:
            TransferError: a write failed; its bytes are still in memory.
        """
        with self._in_use():
            self._parts.schedule.release_all()
            self._settle()
            self._parts.store.flush()

    def close(self) -> None:
        """Wait for what is under way, remove the swap folders and free the memory.

        With several ranks, all close together: until then each still gives the others what they
        need. The model's parameters stay released: take ``module.state_dict()`` before, if its
        weights are wanted. A second call does nothing.
        """
        try:
            if self._finalizer.alive and os.getpid() == self._pid and not self.optimizer.torn:
                with suppress(RankError):  # the others have gone already
                    self._parts.agreement.meet(Place.CLOSE)
        finally:
            self._finalizer()

    def abandon(self) -> None:
        """Close without waiting for other ranks, which will find this one gone."""
        self._finalizer()

    def __enter__(self) -> InfinityEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is None:
            self.close()
        else:  # the others are somewhere else, and learn of it there
            self._parts.comm.leave_reason(value)
            self.abandon()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Refuse in a forked child, after `close`, after a torn update, and to a second thread."""
        if os.getpid() != self._pid:
            raise EngineClosedError(f"this engine belongs to process {self._pid}, not to its child")
        if not self._finalizer.alive:
            raise EngineClosedError("the engine was closed")
        self.optimizer.refuse_if_torn()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another thread is using the engine; let one do so at a time")
        try:
            if not self._parts.agreement.broken:
                self._parts.comm.withdraw_reason()
            yield
        except BaseException as error:
            self._parts.comm.leave_reason(error)
            raise
        finally:
            self._lock.release()


def _since(before: VolumeStats, now: VolumeStats) -> VolumeStats:
    """What a path holds, and has moved since."""
    return replace(
        now,
        read_bytes=now.read_bytes - before.read_bytes,
        written_bytes=now.written_bytes - before.written_bytes,
    )


def _weakly(method: Callable[[UnitGradients], None]) -> Callable[[UnitGradients], None]:
    """Calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(gradients: UnitGradients) -> None:
        alive = reference()
        if alive is not None:
            alive(gradients)

    return call


def _close_in_parent(pid: int, closing: ExitStack) -> None:
    """A forked child has nothing to close: files and memory are its parent's."""
    if os.getpid() == pid:
        closing.close()


def _forsaking(schedule: Schedule) -> Callable[[], None]:
    """Runs in every forked child from now on; must not keep the engine alive in the parent."""
    reference = weakref.ref(schedule)

    def forsake() -> None:
        alive = reference()
        if alive is not None:
            alive.forsake_in_child()

    return forsake
