"""The engine: owns everything, brackets the passes, closes what it opened.

A training cycle is ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. Everything else
happens at module boundaries (`schedule`), in autograd (`hooks`, `gradients`) and in the update
(`optimizer`).
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.comm import Communicator
from infinity.config import Batch, Config
from infinity.gradients import UnitGradients
from infinity.hooks import Hooks
from infinity.optimizer import PagedAdam
from infinity.parameters import Stubs
from infinity.partition import FlatLayout
from infinity.plan import STATE_BYTES, Homes, Plan, Types, UnitSize, make_plan
from infinity.schedule import Schedule
from infinity.scopes import Group, Scope, find_scopes
from infinity.unit import Home, Records, Unit
from tiering import records as record_files
from tiering.aio import AioConfig, AnyEngine, Faults, open_engine
from tiering.arena import Arena
from tiering.errors import ConfigError, EngineClosedError, TieringWarning
from tiering.folder import SwapFolder
from tiering.prefetch import Prefetcher
from tiering.spec import RecordSpec, Tier
from tiering.store import TieredStore
from tiering.tiers.device import DeviceTier
from tiering.tiers.nvme import NvmeTier


@dataclass(frozen=True)
class EngineStats:
    """What an engine is and has done. Bytes and seconds; counters start when `initialize` ends."""

    steps: int
    parameter_numel: int
    state_bytes: int
    """Weights as stored, master weights and moments of all parameters, without gradients."""
    arena_budget_bytes: int
    arena_used_bytes: int
    arena_peak_bytes: int
    arena_huge_bytes: int
    """Of the arena, on huge pages."""
    device_spare_bytes: int
    """On the device, kept for flat buffers to come."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    prefetch_hits: int
    """Uses of NVMe records that found them in the arena or on their way."""
    prefetch_misses: int
    prefetch_wasted: int
    """Records fetched ahead and evicted unused."""
    waited_s: dict[str, float]
    """Time the caller was blocked, by hop."""
    backend: str
    backend_reason: str
    """Why not io_uring; empty when it is."""
    direct_io: bool
    compute_dtype: str


class Drive(NamedTuple):
    """One swap folder and what reads and writes it."""

    folder: SwapFolder
    aio: AnyEngine
    tier: NvmeTier


class InfinityEngine:
    """Trains a model whose weights and optimizer state are paged. Made by `infinity.initialize`.

    Args:
        model: taken over: its parameters stay the user's objects, their memory is the engine's.
        config: checked already.
        groups: optimizer parameter groups.
        defaults: what groups leave out.
        faults: for tests: what goes wrong in the I/O below.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        faults: Faults | None = None,
    ) -> None:
        self.module = model
        self.config = config
        self.device = compute_device(model)
        self.global_steps = 0
        self._pid = os.getpid()
        self._comm = Communicator()
        self.batch: Batch = config.batch(world_size=self._comm.size)
        if self._comm.size > 1:
            raise ConfigError(
                f"this process group has {self._comm.size} ranks; one is what works so far"
            )
        self._micro_steps = 0
        self._told_unmanaged: set[str] = set()
        self._closing = contextlib.ExitStack()
        try:
            self._build(groups, defaults, faults)
        except BaseException:
            self._closing.close()
            raise

    # -- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        """Run the model's forward."""
        self._check_open()
        self._schedule.begin_forward()
        if not torch.is_grad_enabled():
            return self._evaluate(*args, **kwargs)
        if "train" not in self._pager.kinds:
            self._schedule.begin_pass("train")
        with self._hooks.saving():
            output = self.module(*args, **kwargs)
        self._schedule.release_all()
        return output

    forward = __call__

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._schedule.begin_pass("eval")
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._pager.abandon()
            raise
        self._pager.end()
        self._schedule.release_all()
        return output

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Run backward of one micro-batch's loss, divided by the number of micro-batches of a step.

        Args:
            loss: one element.

        Returns:
            The loss as it was given.
        """
        self._check_open()
        scaled = loss if self.batch.accumulation == 1 else loss / self.batch.accumulation
        scaled.backward()
        self._micro_steps += 1
        return loss

    def step(self) -> None:
        """Update the weights, if all micro-batches of the step have been through backward.

        Raises:
            RuntimeError: no backward since the last step.
            TransferError: the drive failed.
        """
        self._check_open()
        if not self.optimizer.has_gradients:
            raise RuntimeError("engine.step() without engine.backward(loss) before it")
        if not self.is_gradient_accumulation_boundary():
            return
        self._warn_of_unmanaged()
        self._schedule.release_all()
        self.optimizer.step()
        self._micro_steps = 0
        self.global_steps += 1
        if "train" in self._pager.kinds:
            self._pager.end()

    def _warn_of_unmanaged(self) -> None:
        """Say once which parameters got a gradient that nobody will use."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and name not in self._told_unmanaged:
                self._told_unmanaged.add(name)
                warnings.warn(
                    f"parameter {name!r} got a gradient but is not trained: it was frozen, or not "
                    "there, when infinity.initialize() was called; unfreeze it before",
                    TieringWarning,
                    stacklevel=3,
                )
            parameter.grad = None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether a `step` now updates the weights."""
        return self._micro_steps % self.batch.accumulation == 0

    def zero_grad(self) -> None:
        """Forget the gradients that have come since the last step."""
        self.optimizer.zero_grad()
        self._micro_steps = 0

    def train(self, mode: bool = True) -> InfinityEngine:  # noqa: FBT001, FBT002 - nn.Module's signature
        """Switch the model to training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> InfinityEngine:
        """Switch the model to evaluation mode."""
        return self.train(False)  # noqa: FBT003

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.module.parameters()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a micro-batch on one rank; None if the config leaves it open."""
        return self.batch.micro

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; None without clipping."""
        return self.optimizer.global_grad_norm

    # -- observing and ending

    def stats(self) -> EngineStats:
        """Figures of this engine so far."""
        arena, store = self._arena.stats(), self._store.stats
        aio = [drive.aio.stats() for drive in self._drives.values()]
        return EngineStats(
            steps=self.global_steps,
            parameter_numel=sum(p.numel() for p in self.module.parameters()),
            state_bytes=self._state_bytes,
            arena_budget_bytes=arena.capacity_bytes,
            arena_used_bytes=arena.used_bytes,
            arena_peak_bytes=arena.peak_bytes,
            arena_huge_bytes=self._huge_bytes,
            device_spare_bytes=self._device_tier.spare_bytes(),
            nvme_read_bytes=sum(d.tier.read_bytes for d in self._drives.values())
            - self._initial[0],
            nvme_written_bytes=sum(d.tier.written_bytes for d in self._drives.values())
            - self._initial[1],
            prefetch_hits=store.hits,
            prefetch_misses=store.misses,
            prefetch_wasted=store.wasted,
            waited_s=dict(store.waited_s),
            backend=aio[0].backend if aio else "none",
            backend_reason=aio[0].backend_reason if aio else "",
            direct_io=not any(d.buffered_blocks for d in aio),
            compute_dtype=str(self._compute_dtype).removeprefix("torch."),
        )

    def flush(self) -> None:
        """Write everything that is newer in memory to the drive, and wait until it is written."""
        self._check_open()
        self._store.flush()

    def close(self) -> None:
        """Wait for what is under way and remove the swap folder.

        The model's parameters stay released: take ``module.state_dict()`` before, if its weights
        are wanted. A second call does nothing.
        """
        self._finalizer()

    def __enter__(self) -> InfinityEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}, not to this forked one"
            )
        if not self._finalizer.alive:
            raise EngineClosedError("the engine was closed")

    # -- building

    def _build(
        self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any], faults: Faults | None
    ) -> None:
        scopes = find_scopes(self.module, max_unit_numel=self.config.tiering.max_unit_numel)
        parts = list(dict.fromkeys(group for scope in scopes for group in scope.groups))
        layouts = [
            FlatLayout.of([p.numel() for p in part.parameters], world_size=self._comm.size)
            for part in parts
        ]
        self._compute_dtype = _compute_dtype(self.config, self.device)
        plan = self._plan(parts, layouts)
        self._arena = Arena(plan.arena_bytes)
        huge_bytes = self._arena.memory.page_report().huge_bytes
        self._huge_bytes = min(huge_bytes, self._arena.capacity_bytes)
        self._drives = self._open_drives(faults)
        self._device_tier = DeviceTier(self.device)
        for buffer in self.module.buffers():
            buffer.data = buffer.to(self.device)
        self._store = TieredStore(
            self._arena, self._device_tier, patience_s=self.config.tiering.io_timeout_s
        )
        self._pager = Prefetcher(self._store)
        self._schedule = Schedule(self._pager)
        self._store.relieve_by(self._schedule.relieve)
        units = self._make_units(parts, layouts, plan)
        self._require_space(units, plan)
        gradients = self._store_units(units, plan)
        self._schedule.adopt_units(units, gradients)
        self._hooks = Hooks(self._schedule)
        self._attach(scopes, dict(zip(parts, units, strict=True)))
        self.optimizer = PagedAdam(
            groups,
            defaults,
            gradients=list(gradients.values()),
            pager=self._pager,
            store=self._store,
            max_norm=0.0
            if self.config.gradient_clipping == "auto"
            else self.config.gradient_clipping,
        )
        self._closing.callback(self._hooks.remove)
        os.register_at_fork(after_in_child=_forsaking(self._schedule))
        self._finalizer = weakref.finalize(self, self._closing.close)

    def _plan(self, parts: Sequence[Group], layouts: Sequence[FlatLayout]) -> Plan:
        zero = self.config.zero_optimization
        homes = Homes(Tier(zero.offload_param.device), Tier(zero.offload_optimizer.device))
        host_memory = self.config.tiering.host_memory
        return make_plan(
            [UnitSize(lo.shard_numel, p.trained) for p, lo in zip(parts, layouts, strict=True)],
            homes,
            Types(self._storage_dtype.itemsize, self._gradient_dtype.itemsize),
            budget_bytes=None if host_memory == "auto" else host_memory,
            sub_group_numel=None if zero.sub_group_size == "auto" else zero.sub_group_size,
        )

    @property
    def _storage_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.bf16.enabled else torch.float32

    @property
    def _gradient_dtype(self) -> torch.dtype:
        """16 bits hold one micro-batch's gradient; a sum of several needs more."""
        return self._storage_dtype if self.batch.accumulation == 1 else torch.float32

    def _open_drives(self, faults: Faults | None) -> dict[str, Drive]:
        """One drive for each distinct path of the config."""
        zero, aio = self.config.zero_optimization, self.config.aio
        sections = (zero.offload_param, zero.offload_optimizer)
        drives: dict[str, Drive] = {}
        for path in dict.fromkeys(s.nvme_path for s in sections if s.device == "nvme"):
            assert path is not None
            folder = SwapFolder(path)
            self._closing.callback(folder.close)
            engine = open_engine(
                AioConfig(
                    block_bytes=aio.block_size,
                    queue_depth=aio.queue_depth,
                    backend=self.config.tiering.aio_backend,
                    require_native=self.config.tiering.require_native,
                ),
                faults=faults,
            )
            tier = NvmeTier(folder, engine)
            self._closing.callback(tier.close)
            self._closing.callback(engine.close, self.config.tiering.io_timeout_s)
            engine.register(self._arena.memory)
            drives[path] = Drive(folder, engine, tier)
        return drives

    def _make_units(
        self, parts: Sequence[Group], layouts: Sequence[FlatLayout], plan: Plan
    ) -> list[Unit]:
        stubs = Stubs(self._schedule, self.device)
        return [
            Unit(
                part.names,
                part.parameters,
                layout,
                Records(
                    f"unit{number}",
                    layout,
                    rank=self._comm.rank,
                    tile_numel=plan.tile_numel if part.trained else 0,
                    storage_dtype=self._storage_dtype,
                    gradient_dtype=self._gradient_dtype,
                ),
                compute_dtype=self._compute_dtype,
                pager=self._pager,
                device=self._device_tier,
                comm=self._comm,
                stubs=stubs,
            )
            for number, (part, layout) in enumerate(zip(parts, layouts, strict=True))
        ]

    def _require_space(self, units: Sequence[Unit], plan: Plan) -> None:
        """Refuse now if a drive cannot hold what will be stored on it."""
        needs: dict[str, int] = {}
        for spec, drive in self._drive_records(units, plan):
            needs[drive] = needs.get(drive, 0) + record_files.file_bytes(spec)
        for path, nbytes in needs.items():
            self._drives[path].tier.require(nbytes)

    def _drive_records(self, units: Sequence[Unit], plan: Plan) -> Iterator[tuple[RecordSpec, str]]:
        zero = self.config.zero_optimization
        for unit in units:
            if zero.offload_param.device == "nvme" and zero.offload_param.nvme_path:
                yield unit.records.shard, zero.offload_param.nvme_path
            if zero.offload_optimizer.device == "nvme" and zero.offload_optimizer.nvme_path:
                for tile in unit.records.tiles:
                    yield tile, zero.offload_optimizer.nvme_path
                if plan.gradient_home is Tier.NVME and unit.trained:
                    yield unit.records.gradient, zero.offload_optimizer.nvme_path

    def _store_units(self, units: Sequence[Unit], plan: Plan) -> dict[Unit, UnitGradients]:
        """Create every unit's records, and move the parameters' values into them, unit by unit."""
        zero = self.config.zero_optimization
        gradients = {}
        for unit in units:
            unit.store_initial(
                self._store,
                shards=self._home(zero.offload_param.device, zero.offload_param.nvme_path),
                tiles=self._home(zero.offload_optimizer.device, zero.offload_optimizer.nvme_path),
            )
            if unit.trained:
                home = self._home(plan.gradient_home.value, zero.offload_optimizer.nvme_path)
                self._store.create(unit.records.gradient, home.tier, drive=home.drive)
                gradients[unit] = UnitGradients(unit, self._pager, self._store, self._comm)
        self._store.flush()
        tiers = [drive.tier for drive in self._drives.values()]
        self._initial = (sum(t.read_bytes for t in tiers), sum(t.written_bytes for t in tiers))
        self._state_bytes = sum(
            u.layout.shard_numel
            * (self._storage_dtype.itemsize + (STATE_BYTES if u.trained else 0))
            for u in units
        )
        return gradients

    def _home(self, device: str, path: str | None) -> Home:
        drive = self._drives[path].tier if device == "nvme" and path else None
        return Home(Tier(device), drive)

    def _attach(self, scopes: Sequence[Scope], units: dict[Group, Unit]) -> None:
        for scope in scopes:
            self._hooks.attach(scope.module, [units[group] for group in scope.groups])
        for module in self.module.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._hooks.copy_on_state_dict(module)
        for part, unit in units.items():
            for parameter in part.parameters if unit.trained else ():
                self._hooks.watch(parameter)


def _forsaking(schedule: Schedule) -> Callable[[], None]:
    """Runs in every forked child from now on; must not keep the engine alive in the parent."""
    reference = weakref.ref(schedule)

    def forsake() -> None:
        alive = reference()
        if alive is not None:
            alive.forsake()

    return forsake


def compute_device(model: nn.Module) -> torch.device:
    """Where the model will compute: on the GPU if there is one, else where it is.

    Raises:
        ConfigError: its parameters are on several devices.
    """
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise ConfigError(
            f"the model's parameters must be on one device, found {sorted(map(str, devices))}"
        )
    device = devices.pop()
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """As configured, else the storage type where the device is fast in it."""
    chosen = config.tiering.compute_dtype
    if chosen != "auto":
        return torch.bfloat16 if chosen == "bf16" else torch.float32
    if not config.bf16.enabled:
        return torch.float32
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    return torch.bfloat16 if fast else torch.float32
