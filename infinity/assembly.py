"""Builds what an engine consists of, from the model and the configuration, and takes it down again.

Nothing of the model is changed before everything that can be refused has been, on all ranks: the
plan, the optimizer's groups, the room on the drives. The parameters are released last, when all
their values are in the records.

Note: stages

A stage says what a rank keeps whole. Stage 3 partitions everything. At 2, parameters stay present
between their uses; at 1, gradients are whole until the step as well; at 0 so are the optimizer's
states, and each rank makes all of the update. It is the same engine: a unit that `stays`, a
gradient record of the whole unit, a layout for one rank.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.access import States
from infinity.agreement import Agreement
from infinity.comm import Communicator
from infinity.config import Config, OffloadOptimizer, OffloadParam, real_path
from infinity.gradients import Reduction, UnitGradients
from infinity.hooks import Hooks
from infinity.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from infinity.optimizer import PagedAdam, StepRules
from infinity.outline import Outline, described, or_none, outline_of
from infinity.parameters import Stubs
from infinity.phases import Phases, finisher
from infinity.plan import Plan, stays, sum_of
from infinity.schedule import Closed, Schedule
from infinity.sharing import Claim, drive_claims, memory_claims, shortage
from infinity.unit import Unit
from infinity.unit_records import Home, Homes, Types, UnitRecords
from tiering import records as record_files
from tiering.aio import AioConfig, AnyEngine, Faults, open_engine
from tiering.arena import Arena
from tiering.bandwidth import make_volumes
from tiering.errors import ConfigError, SpaceError
from tiering.prefetch import Prefetcher
from tiering.records import aligned_bytes
from tiering.spec import RecordSpec, Tier
from tiering.store import TieredStore
from tiering.tiers.device import DeviceTier
from tiering.tiers.nvme import NvmeTier
from tiering.volumes import open_folders

_COMMUNICATED = {
    None: None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}


class OptimizerGroups(NamedTuple):
    """As torch's optimizers take them."""

    groups: Sequence[dict[str, Any]]
    defaults: dict[str, Any]


class Drive(NamedTuple):
    """What reads and writes the swap folder of one path, or those of several together."""

    aio: AnyEngine
    tier: NvmeTier


class Storage(NamedTuple):
    """Where records live, and what each unit, in the order of the outline, keeps there."""

    arena: Arena
    device_tier: DeviceTier
    store: TieredStore
    drives: tuple[Drive, ...]
    records: Sequence[UnitRecords]
    homes: Sequence[Homes]

    def contents(self) -> list[tuple[RecordSpec, Home]]:
        """All records, and where each lives."""
        units = zip(self.records, self.homes, strict=True)
        return [record for records, homes in units for record in records.homes(homes)]


Steer: TypeAlias = Callable[[PagedAdam], LRScheduler | None]
"""Makes the scheduler of an optimizer, if there is one."""


@dataclass(frozen=True)
class Parts:
    """Everything an engine consists of."""

    device: torch.device
    comm: Communicator
    agreement: Agreement
    types: Types
    """Of most units."""
    arena: Arena
    device_tier: DeviceTier
    drives: tuple[Drive, ...]
    store: TieredStore
    pager: Prefetcher
    phases: Phases
    schedule: Schedule
    hooks: Hooks
    optimizer: PagedAdam
    lr_scheduler: LRScheduler | None
    states: States
    units: tuple[Unit, ...]
    kept: frozenset[str]
    """Keys of the drive's records that stay in the arena."""
    unmanaged: tuple[tuple[str, nn.Parameter], ...]
    """Parameters that are not trained, with their names."""
    state_bytes: int
    """Of all records but the gradients."""
    device_plan_bytes: int
    """That a GPU holds at once, activations apart."""
    huge_bytes: int
    """Of the arena, on huge pages."""


def assemble(  # noqa: PLR0913
    model: nn.Module,
    config: Config,
    optimizer: OptimizerGroups,
    closing: ExitStack,
    *,
    comm: Communicator,
    steer: Steer,
    faults: Faults | None,
) -> Parts:
    """Build an engine's parts and move the model's weights into them; all ranks together.

    Args:
        model: changed only when all else has succeeded. Every rank gets rank 0's values.
        config: checked.
        optimizer: its groups.
        closing: receives what must be done to take everything down.
        comm: the ranks; opened here.
        steer: makes the optimizer's scheduler, before the model is changed.
        faults: for tests.

    Raises:
        ConfigError: model, configuration and optimizer do not go together, or the ranks' differ.
        RankError: another rank failed.
        SpaceError: a drive cannot hold the records.
        TransferError: a drive failed while weights were written to it.
    """
    with comm.agree():
        outline = outline_of(model, config, comm)
    comm.agree_on(described(model, config, outline))
    comm.open(outline.device, timeout_s=config.tiering.collective_timeout_s)
    closing.callback(comm.close)
    _require_memory(outline.plan, comm)
    with comm.agree():
        storage = _open_storage(config, outline, closing, comm=comm, faults=faults)
    with comm.agree():  # when all have measured their drives, which takes room
        claims = drive_claims(_needed_bytes(storage))
    _require_space(storage, claims, comm)
    with comm.agree():
        parts = _build(
            model, config, optimizer, outline, closing, storage=storage, comm=comm, steer=steer
        )
    comm.agree_on(_trained(parts))
    if comm.size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            _equalize(tensor, outline.device, comm)
    with comm.agree():
        _store_values(parts)
        buffers = [buffer.to(parts.device) for buffer in model.buffers()]
    _take_over(model, outline, parts, buffers)
    return parts


def _open_storage(
    config: Config,
    outline: Outline,
    closing: ExitStack,
    *,
    comm: Communicator,
    faults: Faults | None,
) -> Storage:
    """The memory, the drives, and what will be in them; nothing is yet."""
    plan, poison = outline.plan, config.tiering.poison
    arena = _arena(plan, poison=poison)
    closing.callback(arena.close)
    device_tier = DeviceTier(outline.device, poison=poison)
    device_tier.register(arena.memory.address, arena.capacity_bytes)
    closing.callback(device_tier.unregister)
    store = TieredStore(arena, device_tier, patience_s=config.tiering.io_timeout_s)
    closing.callback(store.close)
    drives = _open_drives(config, arena, closing, faults)
    records = [
        UnitRecords(
            f"unit{number}",
            layout,
            types,
            rank=comm.rank if layout.world_size > 1 else 0,
            tile_numel=plan.tile_numel if group.trained else 0,
            whole_gradient=outline.whole_gradients,
        )
        for number, (group, layout, types) in enumerate(
            zip(outline.groups, outline.layouts, outline.types, strict=True)
        )
    ]
    homes = _homes(config, outline, drives)
    return Storage(arena, device_tier, store, tuple(drives.values()), records, homes)


def _build(  # noqa: PLR0913
    model: nn.Module,
    config: Config,
    optimizer: OptimizerGroups,
    outline: Outline,
    closing: ExitStack,
    *,
    storage: Storage,
    comm: Communicator,
    steer: Steer,
) -> Parts:
    """All parts, and the empty records; the model is as it was."""
    device, plan = outline.device, outline.plan
    arena, device_tier, store, drives, unit_records, homes = storage
    pager = Prefetcher(store)
    finish = finisher(device) if config.wall_clock_breakdown else None
    phases = Phases(lambda: {**store.stats.waited_s, **comm.waited_s}, finish)
    schedule = Schedule(pager, phases)
    store.relieve_by(schedule.relieve)
    stubs = Stubs(schedule, device)
    closing.callback(stubs.answer_by, Closed())
    closing.callback(schedule.forsake)
    agreement = Agreement(comm)

    units = [
        Unit(
            group.names,
            group.parameters,
            layout,
            records,
            compute_dtype=types.compute,
            pager=pager,
            device=device_tier,
            comm=comm,
            agreement=agreement,
            phases=phases,
            stubs=stubs,
            stays=outline.units_stay,
        )
        for group, layout, types, records in zip(
            outline.groups, outline.layouts, outline.types, unit_records, strict=True
        )
    ]
    early = frozenset(compress(units, outline.early))
    loss_scale = _loss_scale(config, outline.usual_types)
    reduction = Reduction(
        comm,
        agreement,
        device_tier,
        scale=lambda: loss_scale.value,
        whole_gradients=outline.whole_gradients,
        dtype=_COMMUNICATED[config.communication_data_type],
        predivisor=_predivisor(config, comm),
    )
    gradients = {
        unit: UnitGradients(
            unit,
            pager,
            reduction,
            early=unit in early,
            on_device=device.type == "cpu" or home.gradients.tier is Tier.DEVICE,
        )
        for unit, home in zip(units, homes, strict=True)
        if unit.records.tiles
    }
    adam = PagedAdam(
        *optimizer,
        gradients=list(gradients.values()),
        pager=pager,
        rules=_rules(config, outline.usual_types),
        loss_scale=loss_scale,
        device=device_tier,
        comm=comm,
        agreement=agreement,
        phases=phases,
        release=schedule.release_all,  # whoever calls for the step
    )
    records = storage.contents()
    for spec, home in records:
        store.create(spec, home.tier, drive=home.drive)
    kept = _kept(records, {unit.records.shard.key for unit in units}, plan)
    for key in kept:
        store.keep(key)
    bucket_numel = or_none(config.zero_optimization.stage3_prefetch_bucket_size)
    if bucket_numel is not None:
        shards = [unit.records.shard for unit in units]
        itemsize = outline.usual_types.storage.itemsize
        pager.limit({s.key: s.nbytes for s in shards}, bucket_numel * itemsize)
    schedule.manage(units, gradients)
    hooks = Hooks(schedule, saves_on_host=config.activation_checkpointing.cpu_checkpointing)
    closing.callback(hooks.remove)
    trained = {p for unit in gradients for p in unit.parameters}
    return Parts(
        device=device,
        comm=comm,
        agreement=agreement,
        types=outline.usual_types,
        arena=arena,
        device_tier=device_tier,
        drives=drives,
        store=store,
        pager=pager,
        phases=phases,
        schedule=schedule,
        hooks=hooks,
        optimizer=adam,
        lr_scheduler=steer(adam),
        states=States(gradients, adam.steps, schedule, pager, comm=comm, agreement=agreement),
        units=tuple(units),
        kept=frozenset(kept),
        unmanaged=tuple((n, p) for n, p in model.named_parameters() if p not in trained),
        state_bytes=sum(spec.nbytes for u in units for spec in (u.records.shard, *u.records.tiles)),
        device_plan_bytes=outline.device_plan_bytes,
        huge_bytes=min(arena.memory.page_report().huge_bytes, arena.capacity_bytes),
    )


def _trained(parts: Parts) -> list[str]:
    """What the optimizer does to each parameter, line by line."""
    settings = {
        parameter: ", ".join(f"{key} {group[key]}" for key in parts.optimizer.defaults)
        for group in parts.optimizer.param_groups
        for parameter in group["params"]
    }
    return [
        f"parameter {name!r}, "
        + (f"trained with {settings[p]}" if p in settings else "not trained")
        for unit in parts.units
        for name, p in zip(unit.names, unit.parameters, strict=True)
    ]


def _store_values(parts: Parts) -> None:
    """Copy the parameters' values into the records; what stays first, so that it lies together."""
    rest = {s.key for u in parts.units for s in (u.records.shard, *u.records.tiles)} - parts.kept
    for keys in (parts.kept, rest):
        for unit in parts.units:
            unit.store_initial(keys)
    parts.store.flush()


def _take_over(
    model: nn.Module, outline: Outline, parts: Parts, buffers: Sequence[torch.Tensor]
) -> None:
    """Release the parameters, and have the schedule called where the model uses them.

    Args:
        model: from here on the engine's; nothing here may fail.
        outline: of it.
        parts: that it needs.
        buffers: the model's, on the device.
    """
    for unit in parts.units:
        unit.forsake()
    for buffer, moved in zip(model.buffers(), buffers, strict=True):
        buffer.data = moved
    units = dict(zip(outline.groups, parts.units, strict=True))
    for scope in outline.scopes:
        parts.hooks.attach(scope.module, [units[group] for group in scope.groups])
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            parts.hooks.copy_on_state_dict(module)
    for unit in parts.units:
        for parameter in unit.parameters if unit.records.tiles else ():
            parts.hooks.take_gradient(parameter)


def _equalize(tensor: torch.Tensor, device: torch.device, comm: Communicator) -> None:
    """Give every rank rank 0's values, as bytes, so that any type will do."""
    if not tensor.numel():
        return
    # An expanded tensor has each of its elements once.
    once = tensor.detach()[tuple(slice(0, 1 if s == 0 else None) for s in tensor.stride())]
    flat = torch.empty(once.numel(), dtype=once.dtype, device=device)
    whole = flat.view(once.shape).copy_(once)
    comm.broadcast(flat.view(torch.uint8))
    once.copy_(whole)


def _predivisor(config: Config, comm: Communicator) -> float:
    """By which a gradient is divided before it is summed over the ranks."""
    return float(comm.size) if config.prescale_gradients else config.gradient_predivide_factor


def _rules(config: Config, types: Types) -> StepRules:
    half = types.storage is torch.float16
    return StepRules(
        max_norm=0.0 if config.gradient_clipping == "auto" else config.gradient_clipping,
        nonfinite="skip" if half else config.nonfinite_gradients,
        max_skipped=config.tiering.max_skipped_steps,
    )


def _loss_scale(config: Config, types: Types) -> LossScale:
    """fp16's; the range of the other types needs none."""
    fp16 = config.fp16
    if types.storage is not torch.float16:
        return StaticLossScale()
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        refills_at_once=fp16.consecutive_hysteresis,
        least=fp16.min_loss_scale,
    )


def _arena(plan: Plan, *, poison: bool) -> Arena:
    """Take the memory; refuse if there is not that much."""
    try:
        return Arena(plan.arena_bytes, poison=poison)
    except ConfigError as error:
        raise ConfigError(
            f"the arena: {error}. It is for:{sum_of(plan.terms)}\nSet tiering.host_memory to what "
            "can be had, or move more to nvme"
        ) from error


_DriveKey: TypeAlias = tuple[str, ...]


def _open_drives(
    config: Config, arena: Arena, closing: ExitStack, faults: Faults | None
) -> dict[_DriveKey, Drive]:
    """One drive for each distinct path of the config, or one for all paths together."""
    zero = config.zero_optimization
    drives: dict[_DriveKey, Drive] = {}
    for section in (zero.offload_param, zero.offload_optimizer):
        paths = config.nvme_paths(section)
        if section.device == "nvme" and _key(paths) not in drives:
            drives[_key(paths)] = _open_drive(config, paths, closing, faults)
    for drive in drives.values():
        drive.aio.register(arena.memory)
    return drives


def _open_drive(
    config: Config, paths: Mapping[str, float | None], closing: ExitStack, faults: Faults | None
) -> Drive:
    folders = open_folders(_key(paths))
    for folder in folders:
        closing.callback(folder.close)
    engine = open_engine(
        AioConfig(
            block_bytes=config.aio.block_size,
            queue_depth=config.aio.queue_depth,
            backend=config.tiering.aio_backend,
            require_native=config.tiering.require_native,
        ),
        faults=faults,
    )
    timeout_s = config.tiering.io_timeout_s
    closing.callback(engine.close, timeout_s)
    speeds = [gb_per_s for gb_per_s in paths.values() if gb_per_s is not None]
    volumes = make_volumes(folders, engine, gb_per_s=speeds or None, timeout_s=timeout_s)
    tier = NvmeTier(volumes, engine, patience_s=timeout_s)
    closing.callback(tier.close)
    closing.callback(engine.close, timeout_s)  # again: before the tier, which waits for each file
    return Drive(engine, tier)


def _key(paths: Iterable[str]) -> _DriveKey:
    return tuple(map(real_path, paths))


def _homes(config: Config, outline: Outline, drives: dict[_DriveKey, Drive]) -> list[Homes]:
    """Of each unit's records."""
    zero, plan = config.zero_optimization, outline.plan

    def home(device: str, section: OffloadParam | OffloadOptimizer) -> Home:
        drive = drives[_key(config.nvme_paths(section))].tier if device == "nvme" else None
        return Home(Tier(device), drive)

    shards = home(zero.offload_param.device, zero.offload_param)
    tiles = home(zero.offload_optimizer.device, zero.offload_optimizer)
    gradients = home(plan.gradient_home.value, zero.offload_optimizer)
    near = Home(Tier.DEVICE)
    return [
        Homes(
            shards=near if here.shard else shards,
            tiles=near if here.tiles else tiles,
            # Gradients of early units may pile up where backward takes another order: on the drive
            # then.
            gradients=near if here.gradient else (tiles if early else gradients),
        )
        for here, early in zip(outline.here, outline.early, strict=True)
    ]


def _kept(
    records: Sequence[tuple[RecordSpec, Home]], shards: AbstractSet[str], plan: Plan
) -> list[str]:
    """The records of the drive that stay in the arena, as far as there is room: shards first.

    A byte of either kind saves two bytes a step that would be read or written. But a shard that is
    not there is waited for in the middle of the model.
    """
    kept: list[str] = []
    room_bytes = plan.spare_bytes
    for are_shards, most_bytes in ((True, plan.spare_weight_bytes), (False, plan.spare_bytes)):
        specs = [s for s, home in records if home.drive and (s.key in shards) is are_shards]
        sizes_bytes = [aligned_bytes(spec.nbytes) for spec in specs]
        stay = stays(sizes_bytes, room_bytes=min(room_bytes, most_bytes))
        kept += [spec.key for spec in compress(specs, stay)]
        room_bytes -= sum(compress(sizes_bytes, stay))
    return kept


def _require_memory(plan: Plan, comm: Communicator) -> None:
    """Refuse now, on all ranks, if those of one host want more than it has."""
    short = shortage(comm.gather_objects(memory_claims(plan.arena_bytes)))
    if short is None:
        return
    raise ConfigError(
        f"the host memory asked for by {short.ranks} is more than there is: "
        f"{' and '.join(pool.said for pool in short.pools)}{short}\ntiering.host_memory is of each "
        f"rank. This one's arena is for:{sum_of(plan.terms)}\nSet it to what can be had, start "
        "fewer ranks, or move more to nvme"
    )


def _needed_bytes(storage: Storage) -> dict[NvmeTier, int]:
    """Of the record files of this rank, by where they will be."""
    needed: dict[NvmeTier, int] = {}
    for spec, home in storage.contents():
        if home.drive is not None:
            needed[home.drive] = needed.get(home.drive, 0) + record_files.file_bytes(spec)
    return needed


def _require_space(storage: Storage, claims: Sequence[Claim], comm: Communicator) -> None:
    """Refuse now, on all ranks, if a drive cannot hold what all of them will store on it."""
    short = shortage(comm.gather_objects(list(claims)))
    if short is None:
        return
    raise SpaceError(
        f"the record files of {short.ranks} need {sum(short.claimed.values())} bytes, "
        f"{', '.join(pool.said for pool in short.pools)}",
        errno=errno.ENOSPC,
        path=os.pathsep.join(v.path for drive in storage.drives for v in drive.tier.volumes()),
    )
