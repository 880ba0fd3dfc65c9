"""Builds what an engine consists of, from the model and the configuration, and takes it down again.

Nothing of the model is changed before everything that can be refused has been: the plan, the
optimizer's groups, the room on the drives. The parameters are released last, when all their values
are in the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress, starmap
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from infinity.comm import Communicator
from infinity.config import (
    DEFAULT_BUFFERS,
    Config,
    OffloadOptimizer,
    OffloadParam,
    real_path,
)
from infinity.gradients import UnitGradients
from infinity.hooks import Hooks, is_managed
from infinity.optimizer import PagedAdam
from infinity.parameters import Stubs
from infinity.partition import FlatLayout
from infinity.plan import (
    ElementBytes,
    ModelSize,
    Plan,
    Tiers,
    UnitSize,
    Wishes,
    make_plan,
    stays,
    sum_of,
    updated_early,
)
from infinity.schedule import Closed, Schedule
from infinity.scopes import Group, Scope, find_scopes
from infinity.unit import Unit
from infinity.unit_records import Home, Homes, Types, UnitRecords
from tiering import records as record_files
from tiering.aio import AioConfig, AnyEngine, Faults, open_engine
from tiering.arena import Arena
from tiering.bandwidth import make_volumes
from tiering.errors import ConfigError
from tiering.prefetch import Prefetcher
from tiering.records import aligned_bytes
from tiering.spec import RecordSpec, Tier
from tiering.store import TieredStore
from tiering.tiers.device import DeviceTier
from tiering.tiers.nvme import NvmeTier
from tiering.volumes import open_folders

_STORED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class OptimizerGroups(NamedTuple):
    """As torch's optimizers take them."""

    groups: Sequence[dict[str, Any]]
    defaults: dict[str, Any]


class Drive(NamedTuple):
    """What reads and writes the swap folder of one path, or those of several together."""

    aio: AnyEngine
    tier: NvmeTier


@dataclass(frozen=True)
class Parts:
    """Everything an engine consists of."""

    device: torch.device
    types: Types
    arena: Arena
    device_tier: DeviceTier
    drives: tuple[Drive, ...]
    store: TieredStore
    pager: Prefetcher
    schedule: Schedule
    hooks: Hooks
    optimizer: PagedAdam
    unmanaged: tuple[tuple[str, nn.Parameter], ...]
    """Parameters that are not trained, with their names."""
    state_bytes: int
    """Of all records but the gradients."""
    huge_bytes: int
    """Of the arena, on huge pages."""


def assemble(
    model: nn.Module,
    config: Config,
    optimizer: OptimizerGroups,
    closing: ExitStack,
    *,
    faults: Faults | None,
) -> Parts:
    """Build an engine's parts and move the model's weights into them.

    Args:
        model: changed only when all else has succeeded.
        config: checked.
        optimizer: its groups.
        closing: receives what must be done to take everything down.
        faults: for tests.

    Raises:
        ConfigError: model, configuration and optimizer do not go together.
        SpaceError: a drive cannot hold the records.
        TransferError: a drive failed while weights were written to it.
    """
    device = compute_device(model)
    _check_parameters(model)
    types = _types(config, device)
    scopes = find_scopes(model, max_unit_numel=config.tiering.max_unit_numel)
    parts = list(dict.fromkeys(group for scope in scopes for group in scope.groups))
    comm = _communicator()
    layouts = [
        FlatLayout.of([p.numel() for p in g.parameters], world_size=comm.size) for g in parts
    ]
    plan = _plan(config, types, scopes, dict(zip(parts, layouts, strict=True)))

    arena = _arena(plan)
    closing.callback(arena.close)
    device_tier = DeviceTier(device)
    store = TieredStore(arena, device_tier, patience_s=config.tiering.io_timeout_s)
    closing.callback(store.close)
    drives = _open_drives(config, arena, closing, faults)
    pager = Prefetcher(store)
    schedule = Schedule(pager)
    store.relieve_by(schedule.relieve)
    stubs = Stubs(schedule, device)
    closing.callback(stubs.answer_by, Closed())
    closing.callback(schedule.forsake)

    units = [
        Unit(
            group.names,
            group.parameters,
            layout,
            UnitRecords(
                f"unit{number}",
                layout,
                types,
                rank=comm.rank,
                tile_numel=plan.tile_numel if group.trained else 0,
            ),
            compute_dtype=types.compute,
            pager=pager,
            device=device_tier,
            comm=comm,
            stubs=stubs,
        )
        for number, (group, layout) in enumerate(zip(parts, layouts, strict=True))
    ]
    early = frozenset(compress(units, _early(config, parts, layouts)))
    gradients = {
        u: UnitGradients(u, pager, comm, early=u in early) for u in units if u.records.tiles
    }
    adam = PagedAdam(
        *optimizer,
        gradients=list(gradients.values()),
        pager=pager,
        max_norm=0.0 if config.gradient_clipping == "auto" else config.gradient_clipping,
    )
    adam.register_step_pre_hook(lambda *_: schedule.reset())  # whoever calls for the step
    homes = _homes(config, plan, drives)
    # Gradients of early units may pile up where backward takes another order: on the drive then.
    spilling = homes._replace(gradients=homes.tiles)
    records = [r for u in units for r in u.records.homes(spilling if u in early else homes)]
    _require_space(records)
    for spec, home in records:
        store.create(spec, home.tier, drive=home.drive)
    kept = _kept(records, {unit.records.shard.key for unit in units}, plan)
    for key in kept:
        store.keep(key)
    for keys in (set(kept), {spec.key for spec, _ in records}.difference(kept)):
        for unit in units:  # those that stay first, so that they lie together
            unit.store_initial(keys)
    store.flush()

    bucket_numel = _or_none(config.zero_optimization.stage3_prefetch_bucket_size)
    if bucket_numel is not None:
        shards = [unit.records.shard for unit in units]
        pager.limit({s.key: s.nbytes for s in shards}, bucket_numel * types.storage.itemsize)

    hooks = Hooks(schedule)
    closing.callback(hooks.remove)
    schedule.manage(units, gradients)
    for unit in units:
        unit.forsake()
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    _attach(hooks, model, scopes, dict(zip(parts, units, strict=True)))
    trained = {p for unit in gradients for p in unit.parameters}
    return Parts(
        device=device,
        types=types,
        arena=arena,
        device_tier=device_tier,
        drives=tuple(drives.values()),
        store=store,
        pager=pager,
        schedule=schedule,
        hooks=hooks,
        optimizer=adam,
        unmanaged=tuple((n, p) for n, p in model.named_parameters() if p not in trained),
        state_bytes=sum(spec.nbytes for u in units for spec in (u.records.shard, *u.records.tiles)),
        huge_bytes=min(arena.memory.page_report().huge_bytes, arena.capacity_bytes),
    )


def compute_device(model: nn.Module) -> torch.device:
    """Where the model will compute: on the GPU if there is one, else where it is.

    Raises:
        ConfigError: its parameters are on several devices, or it has none.
    """
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise ConfigError("the model has no parameters")
    if len(devices) != 1:
        found = sorted(map(str, devices))
        raise ConfigError(f"the model's parameters must be on one device, found {found}")
    device = devices.pop()
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_parameters(model: nn.Module) -> None:
    """Refuse what could not be stored and given back as it is."""
    if is_managed(model):
        raise ConfigError("the model belongs to another engine; close that one first")
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            if kind == "ReleasedParameter":
                raise ConfigError(
                    f"parameter {name!r} belongs to another engine, or to a closed one"
                )
            raise ConfigError(
                f"parameter {name!r} is a {kind}; only plain torch.nn.Parameter can be paged"
            )
        if parameter.dtype not in _STORED_TYPES:
            raise ConfigError(
                f"parameter {name!r} is of type {parameter.dtype}; float32, bfloat16 and float16 "
                "can be paged: convert it, or make it a buffer"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values yet; build the model "
                "on a device, with its weights"
            )


def _communicator() -> Communicator:
    comm = Communicator()
    if comm.size > 1:
        raise ConfigError(f"this process group has {comm.size} ranks; one is what works so far")
    return comm


def _types(config: Config, device: torch.device) -> Types:
    """Storage as configured; a sum of several gradients needs more than 16 bits."""
    storage = torch.bfloat16 if config.bf16.enabled else torch.float32
    accumulation = config.batch(world_size=1).accumulation
    gradient = storage if accumulation == 1 else torch.float32
    return Types(storage, gradient, _compute_dtype(config, storage, device))


def _compute_dtype(config: Config, storage: torch.dtype, device: torch.device) -> torch.dtype:
    """As configured, else the storage type where the device is fast in it."""
    chosen = config.tiering.compute_dtype
    if chosen != "auto":
        return torch.bfloat16 if chosen == "bf16" else torch.float32
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    return storage if fast else torch.float32


def _plan(
    config: Config, types: Types, scopes: Sequence[Scope], layouts: dict[Group, FlatLayout]
) -> Plan:
    zero = config.zero_optimization
    early = _early(config, list(layouts), list(layouts.values()))
    sizes = [
        UnitSize(layout.shard_numel, group.trained, is_early)
        for (group, layout), is_early in zip(layouts.items(), early, strict=True)
    ]
    return make_plan(
        ModelSize(sizes, _active_numel(scopes, layouts)),
        Tiers(Tier(zero.offload_param.device), Tier(zero.offload_optimizer.device)),
        ElementBytes(types.storage.itemsize, types.gradient.itemsize),
        _wishes(config),
    )


def _early(
    config: Config, groups: Sequence[Group], layouts: Sequence[FlatLayout]
) -> Sequence[bool]:
    """Which groups are updated under backward."""
    if not config.tiering.update_in_backward:
        return [False] * len(groups)
    return updated_early(
        [layout.shard_numel * g.trained for g, layout in zip(groups, layouts, strict=True)]
    )


def _wishes(config: Config) -> Wishes:
    """What the config asks for; buffers without a size are none to go by."""
    zero = config.zero_optimization
    size = _or_none(zero.offload_param.buffer_size)
    count = _or_none(zero.offload_param.buffer_count) or DEFAULT_BUFFERS
    return Wishes(
        budget_bytes=_or_none(config.tiering.host_memory),
        sub_group_numel=_or_none(zero.sub_group_size),
        weight_numel=None if size is None else size * count,
        tile_tensors=_or_none(zero.offload_optimizer.buffer_count),
        resident_numel=_or_none(zero.offload_param.max_in_cpu),
    )


def _or_none(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value


def _arena(plan: Plan) -> Arena:
    """Take the memory; refuse if there is not that much."""
    try:
        return Arena(plan.arena_bytes)
    except ConfigError as error:
        raise ConfigError(
            f"the arena: {error}. It is for:{sum_of(plan.terms)}\nSet tiering.host_memory to what "
            "can be had, or move more to nvme"
        ) from error


def _active_numel(scopes: Sequence[Scope], layouts: dict[Group, FlatLayout]) -> int:
    """Most shard elements that a scope and the scopes around it need at once."""

    def around(scope: Scope) -> Iterable[Scope]:
        inside = f"{scope.name}."
        return (s for s in scopes if s is scope or s.is_root or inside.startswith(f"{s.name}."))

    needed = ({g for s in around(scope) for g in s.groups} for scope in scopes)
    return max((sum(layouts[g].shard_numel for g in groups) for groups in needed), default=0)


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
    tier = NvmeTier(volumes, engine)
    closing.callback(tier.close)
    closing.callback(engine.close, timeout_s)  # again: before the tier, which waits without end
    return Drive(engine, tier)


def _key(paths: Iterable[str]) -> _DriveKey:
    return tuple(map(real_path, paths))


def _homes(config: Config, plan: Plan, drives: dict[_DriveKey, Drive]) -> Homes:
    zero = config.zero_optimization

    def home(device: str, section: OffloadParam | OffloadOptimizer) -> Home:
        drive = drives[_key(config.nvme_paths(section))].tier if device == "nvme" else None
        return Home(Tier(device), drive)

    return Homes(
        shards=home(zero.offload_param.device, zero.offload_param),
        tiles=home(zero.offload_optimizer.device, zero.offload_optimizer),
        gradients=home(plan.gradient_home.value, zero.offload_optimizer),
    )


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


def _require_space(records: Sequence[tuple[RecordSpec, Home]]) -> None:
    """Refuse now if a drive cannot hold what will be stored on it."""
    needed: dict[NvmeTier, int] = {}
    for spec, home in records:
        if home.drive is not None:
            needed[home.drive] = needed.get(home.drive, 0) + record_files.file_bytes(spec)
    list(starmap(NvmeTier.require, needed.items()))


def _attach(
    hooks: Hooks, model: nn.Module, scopes: Sequence[Scope], units: dict[Group, Unit]
) -> None:
    for scope in scopes:
        hooks.attach(scope.module, [units[group] for group in scope.groups])
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.copy_on_state_dict(module)
    for group, unit in units.items():
        for parameter in group.parameters if unit.records.tiles else ():
            hooks.take_gradient(parameter)
