"""How a model is divided before anything is made: scopes, units, types, and the plan.

Nothing here changes the model or takes memory. All ranks must come to the same outline; `described`
says it line by line, so that they can compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import nn

from infinity.comm import Communicator
from infinity.config import DEFAULT_BUFFERS, Config
from infinity.hooks import is_managed
from infinity.partition import FlatLayout
from infinity.plan import (
    TILE_NUMEL,
    ElementBytes,
    Here,
    ModelSize,
    Plan,
    Tiers,
    UnitSize,
    Wishes,
    device_terms,
    make_plan,
    reside,
    updated_early,
)
from infinity.scopes import Group, Scope, find_scopes
from infinity.unit_records import Types
from tiering.errors import ConfigError
from tiering.spec import Tier
from tiering.tiers.link import AHEAD_BYTES

_STORED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMED: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP32: Final = Types(torch.float32, torch.float32, torch.float32)
# On a GPU: what stays there, what passes from the host, and what comes from the drive.
_TILE_NUMELS: Final = {"none": 2**26, "cpu": 2**22, "nvme": 2**21}
_STATES, _GRADIENTS, _PARAMETERS = 1, 2, 3  # the stages from which on these are partitioned
# What may differ from rank to rank.
_OWN_SETTINGS: Final = ("nvme_path", "nvme_paths", "host_memory", "local_rank")


class Outline(NamedTuple):
    """The division of a model. Groups, layouts, types, early and here have one for each unit."""

    device: torch.device
    """Where it computes."""
    scopes: Sequence[Scope]
    groups: Sequence[Group]
    layouts: Sequence[FlatLayout]
    types: Sequence[Types]
    early: Sequence[bool]
    """Whether a unit is updated under backward."""
    here: Sequence[Here]
    """What of a unit is on the device for good."""
    usual_types: Types
    """Of all that are not kept in fp32."""
    units_stay: bool
    """Whether parameters stay present between their uses."""
    whole_gradients: bool
    """Whether a rank keeps whole gradients until the step: only where they are made."""
    plan: Plan
    device_plan_bytes: int
    """That a GPU holds at once, activations apart."""


def outline_of(model: nn.Module, config: Config, comm: Communicator) -> Outline:
    """Divide a model.

    Raises:
        ConfigError: model and configuration do not go together.
    """
    device = compute_device(model)
    _check_parameters(model)
    tiering, zero = config.tiering, config.zero_optimization
    scopes = find_scopes(model, max_unit_numel=tiering.max_unit_numel, keep_fp32=tiering.keep_fp32)
    groups = list(dict.fromkeys(group for scope in scopes for group in scope.groups))
    parts = comm.size if zero.stage >= _STATES else 1
    layouts = [FlatLayout.of([p.numel() for p in g.parameters], world_size=parts) for g in groups]
    usual = _types(config, model, device, comm)
    types = [_FP32 if group.keeps_fp32 else usual for group in groups]
    early = _early(config, groups, layouts, usual.storage, comm)
    near = device.type == "cpu" or zero.offload_optimizer.device == "none"
    whole_gradients = zero.stage < _GRADIENTS and comm.size > 1 and near
    elements = [ElementBytes(t.storage.itemsize, t.gradient.itemsize) for t in types]
    sizes = [
        UnitSize(layout.shard_numel, g.trained, nbytes, is_early, whole_gradients * layout.numel)
        for g, layout, nbytes, is_early in zip(groups, layouts, elements, early, strict=True)
    ]
    tiers = Tiers(Tier(zero.offload_param.device), Tier(zero.offload_optimizer.device))
    accumulation = config.batch(world_size=comm.size).accumulation
    here = reside(
        sizes,
        tiers,
        device_bytes=or_none(tiering.device_memory) or 0,
        early_near=device.type != "cpu" and accumulation == 1 and zero.stage == _PARAMETERS,
    )
    sizes = [size._replace(here=stay) for size, stay in zip(sizes, here, strict=True)]
    shard_bytes = {
        group: 0 if size.here.shard else size.shard_numel * size.element_bytes.storage_bytes
        for group, size in zip(groups, sizes, strict=True)
    }
    plan = make_plan(
        ModelSize(sizes, _active_bytes(scopes, shard_bytes), usual.storage.itemsize),
        tiers,
        _wishes(config),
        tile_numel=_tile_numel(config, device),
    )
    stay = zero.stage < _PARAMETERS
    whole_bytes = {
        group: 0 if _is_whole(layout, kinds, size, tiers) else layout.numel * kinds.compute.itemsize
        for group, layout, kinds, size in zip(groups, layouts, types, sizes, strict=True)
    }
    on_device = device_terms(
        sizes,
        tiers,
        used_bytes=sum(whole_bytes.values()) if stay else _active_bytes(scopes, whole_bytes),
        tile_numel=plan.tile_numel,
        ahead_bytes=AHEAD_BYTES,
        ranks=parts,
    )
    return Outline(
        device=device,
        scopes=scopes,
        groups=groups,
        layouts=layouts,
        types=types,
        early=early,
        here=here,
        usual_types=usual,
        units_stay=stay,
        whole_gradients=whole_gradients,
        plan=plan,
        device_plan_bytes=sum(nbytes for _, nbytes in on_device),
    )


def _is_whole(layout: FlatLayout, types: Types, size: UnitSize, tiers: Tiers) -> bool:
    """Whether a record on the device is itself what the model computes with."""
    stays = tiers.shards is Tier.DEVICE or size.here.shard
    return stays and layout.world_size == 1 and types.storage is types.compute


def described(model: nn.Module, config: Config, outline: Outline) -> list[str]:
    """What must be the same on all ranks, line by line."""
    parameters = [
        f"parameter {name!r} of shape {tuple(p.shape)}, {p.dtype}, "
        f"{'trained' if p.requires_grad else 'frozen'}"
        for group in outline.groups
        for name, p in zip(group.names, group.parameters, strict=True)
    ]
    units = [
        f"a unit of {layout.numel} elements in {types.storage}, computed in {types.compute}"
        for layout, types in zip(outline.layouts, outline.types, strict=True)
    ]
    buffers = [
        f"buffer {name!r} of shape {tuple(buffer.shape)}, {buffer.dtype}"
        for name, buffer in model.named_buffers()
    ]
    settings = _settings(config.model_dump(), "")
    return [f"torch {torch.__version__}", *parameters, *buffers, *units, *settings]


def _settings(section: Mapping[str, object], prefix: str) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif key not in _OWN_SETTINGS:
            yield f"{prefix}{key} = {value!r}"


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


def _types(config: Config, model: nn.Module, device: torch.device, comm: Communicator) -> Types:
    """Storage as configured; a sum of several gradients needs more than 16 bits."""
    storage = _storage(config, model)
    accumulation = config.batch(world_size=comm.size).accumulation
    gradient = storage if accumulation == 1 else torch.float32
    if config.data_types.grad_accum_dtype is not None:
        gradient = _NAMED[config.data_types.grad_accum_dtype]
    return Types(storage, gradient, _compute_dtype(config, storage, device))


def _storage(config: Config, model: nn.Module) -> torch.dtype:
    """A type that is ``auto`` is on if the model has it already."""
    found = {p.dtype for p in model.parameters()}
    for section, dtype in ((config.bf16, torch.bfloat16), (config.fp16, torch.float16)):
        if section.enabled is True or (section.enabled == "auto" and found == {dtype}):
            return dtype
    return torch.float32


def _compute_dtype(config: Config, storage: torch.dtype, device: torch.device) -> torch.dtype:
    """As configured, else the storage type where the device is fast in it."""
    chosen = config.tiering.compute_dtype
    if chosen != "auto":
        return _NAMED[chosen]
    if device.type != "cpu":
        return storage
    fast = storage is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001
    return storage if fast else torch.float32


def _early(
    config: Config,
    groups: Sequence[Group],
    layouts: Sequence[FlatLayout],
    storage: torch.dtype,
    comm: Communicator,
) -> Sequence[bool]:
    """Which groups are updated under backward."""
    if not config.tiering.update_in_backward:
        return [False] * len(groups)
    if storage is torch.float16:
        raise ConfigError(
            "the model's weights are fp16, whose loss scale may refuse a step, which is known when "
            "all gradients are; so tiering.update_in_backward must be false, or the weights bf16"
        )
    if comm.size > 1:
        raise ConfigError(
            f"tiering.update_in_backward is for one rank, and there are {comm.size}: a unit's "
            "gradients are complete when all ranks have theirs; set it to false"
        )
    return updated_early(
        [layout.shard_numel * g.trained for g, layout in zip(groups, layouts, strict=True)]
    )


def _tile_numel(config: Config, device: torch.device) -> int:
    """Most elements of a tile: a GPU's kernels and copies want more at once than a drive."""
    home = config.zero_optimization.offload_optimizer.device
    return TILE_NUMEL if device.type == "cpu" else _TILE_NUMELS[home]


def _wishes(config: Config) -> Wishes:
    """What the config asks for; buffers without a size are none to go by."""
    zero = config.zero_optimization
    size = or_none(zero.offload_param.buffer_size)
    count = or_none(zero.offload_param.buffer_count) or DEFAULT_BUFFERS
    return Wishes(
        budget_bytes=or_none(config.tiering.host_memory),
        sub_group_numel=or_none(zero.sub_group_size),
        weight_numel=None if size is None else size * count,
        tile_tensors=or_none(zero.offload_optimizer.buffer_count),
        resident_numel=or_none(zero.offload_param.max_in_cpu),
    )


def or_none(value: int | Literal["auto"]) -> int | None:
    """None for ``auto``."""
    return None if value == "auto" else value


def _active_bytes(scopes: Sequence[Scope], shard_bytes: Mapping[Group, int]) -> int:
    """Most bytes of shards that a scope and the scopes around it need at once."""

    def around(scope: Scope) -> Iterable[Scope]:
        inside = f"{scope.name}."
        return (s for s in scopes if s is scope or s.is_root or inside.startswith(f"{s.name}."))

    needed = ({g for s in around(scope) for g in s.groups} for scope in scopes)
    return max((sum(shard_bytes[g] for g in groups) for groups in needed), default=0)
