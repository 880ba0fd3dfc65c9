"""The configuration: DeepSpeed-style JSON in, frozen typed models out, once, at the edge.

Sections and keys have DeepSpeed's names; the package's own keys are in the section ``tiering``.
Every key that is not a field below is refused, with the nearest one named, so that a misspelt key
never passes for a setting. All problems of a file are reported together.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tiering.errors import ConfigError
from tiering.sizes import parse_bytes


def _whole(value: object) -> object:
    """Counts may be written as floats such as 1e9."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: object) -> object:
    """Sizes may be written as "8GiB"."""
    if not isinstance(value, str) or value == "auto":
        return _whole(value)
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def real_path(path: str) -> str:
    """The directory that a path of the configuration leads to; it may be missing.

    Raises:
        ConfigError: it leads nowhere, or to something else.
    """
    try:
        real = Path(os.path.realpath(Path(path).expanduser()))
        if real.exists() and not real.is_dir():
            raise ConfigError(f"{path!r} is not a directory; name one on the drive")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"path {path!r} cannot be used: {error}") from error
    return str(real)


def _is_path(path: str) -> str:
    if not path:
        raise ValueError("is empty; name a directory on the drive")
    try:
        real_path(path)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return path


def _nvme_path(value: object) -> object:
    """A path may stand alone, without its speed."""
    if isinstance(value, str):
        return {"path": value}
    if isinstance(value, (Mapping, NvmePath)):
        return value
    raise ValueError(f'must be a path, or {{"path": ..., "gb_per_s": ...}}, got {value!r}')


DEFAULT_BUFFERS: Final = 5
"""``offload_param.buffer_count`` where only the size is given."""

Auto = Literal["auto"]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]
OffloadDevice = Literal["none", "cpu", "nvme"]


class _Section(BaseModel):
    """What all sections share: frozen, nothing unknown, values of the stated types only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OffloadParam(_Section):
    """``zero_optimization.offload_param``: where the 16-bit (or fp32) weights live."""

    device: OffloadDevice = "none"
    """none: next to the compute; cpu: in the host arena; nvme: on the drive."""
    nvme_path: str | None = None
    """Folder on the drive; needed with nvme."""
    pin_memory: bool = False
    """No effect: the arena is pinned where the machine allows it."""
    buffer_count: Positive | Auto = "auto"
    """With buffer_size: room for weights on their way. auto: 5, as DeepSpeed has it."""
    buffer_size: Positive | Auto = "auto"
    """Elements. Where `tiering.host_memory` is auto, so many times buffer_count of the weights have
    room on their way, and always as many as are needed at once; a parameter may be larger. auto:
    as many as are needed.
    """
    max_in_cpu: Count | Auto = "auto"
    """Most elements of weights that stay in the arena and are not read again. Where
    `tiering.host_memory` is auto it grows by them; else they have what it leaves over. auto: all
    that it leaves over.
    """


class OffloadOptimizer(_Section):
    """``zero_optimization.offload_optimizer``: where fp32 weights and Adam's moments live."""

    device: OffloadDevice = "none"
    """none: next to the compute; cpu: in the host arena; nvme: on the drive."""
    nvme_path: str | None = None
    """Folder on the drive; needed with nvme."""
    pin_memory: bool = False
    """No effect: the arena is pinned where the machine allows it."""
    buffer_count: Positive | Auto = "auto"
    """Where `tiering.host_memory` is auto: tensors of a tile's size that have room on their way,
    four a tile, and always as many as are needed.
    """
    fast_init: bool = False
    """No effect: the state is always written tile by tile."""
    pipeline_read: bool = False
    """No effect: reads run ahead always."""
    pipeline_write: bool = False
    """No effect: writes run behind always."""


class ZeroOptimization(_Section):
    """``zero_optimization``."""

    stage: Literal[0, 1, 2, 3] = 0
    """Parameters, gradients and optimizer state are all partitioned and paged."""
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    sub_group_size: Positive | Auto = "auto"
    """Most elements of one optimizer tile; 524,288 at most, since larger ones only take room."""
    contiguous_gradients: bool = True
    """No effect: gradients are always contiguous."""
    overlap_comm: bool | None = None
    """No effect with one rank."""
    reduce_bucket_size: Positive | Auto = "auto"
    """No effect: gradients are reduced unit by unit."""
    stage3_prefetch_bucket_size: Count | Auto = "auto"
    """Elements of weights fetched ahead, the last unit whole; 0: none. auto: as far as there is
    room.
    """
    stage3_param_persistence_threshold: Count | Auto = "auto"
    """No effect: small parameters travel with their unit and cost no transfer of their own."""
    stage3_max_live_parameters: Positive | Auto = "auto"
    """No effect: a unit is live while it is used."""
    stage3_max_reuse_distance: Count | Auto = "auto"
    """No effect: what is used farthest in the future goes first."""


class Bf16(_Section):
    """``bf16``."""

    enabled: bool = False
    """Weights are stored as bf16, gradients rounded to bf16, the update done on fp32 master
    weights.
    """


def _switched_off(value: object) -> object:
    if value is True:
        raise ValueError('loss scaling is not there yet; use "bf16": {"enabled": true}')
    return value


class Fp16(_Section):
    """``fp16``: accepted only switched off, with whatever else templates have in it."""

    enabled: bool = False
    consecutive_hysteresis: bool = False
    auto_cast: bool = False
    """No effect."""
    loss_scale: float = 0
    """No effect."""
    loss_scale_window: Count = 1000
    """No effect."""
    initial_scale_power: Count = 16
    """No effect."""
    hysteresis: Count = 2
    """No effect."""
    min_loss_scale: float = 1
    """No effect."""


class AdamParams(_Section):
    """``optimizer.params`` of Adam and AdamW; torch's defaults."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(ge=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: torch's default of the type, 0.01 for AdamW and 0 for Adam."""
    fused: bool = False
    """True: torch's fused kernel, which is faster and differs from the default one in the last bit.
    """
    torch_adam: bool = False
    """No effect: the update is torch's own kernel."""
    adam_w_mode: bool | None = None
    """Overrides the type: True is AdamW, False is Adam."""


class Optimizer(_Section):
    """``optimizer``."""

    type: Literal["Adam", "AdamW"] = "AdamW"
    params: AdamParams = AdamParams()


class Aio(_Section):
    """``aio``: how the drive is driven."""

    block_size: Annotated[int, BeforeValidator(_whole), Field(ge=4096)] = 2**20
    """Bytes of one transfer; a power of two."""
    queue_depth: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=4096)] = 32
    """Transfers in flight."""
    thread_count: Positive = 1
    """No effect: one worker keeps a drive's queue full."""
    intra_op_parallelism: Positive = 1
    """No effect, for the same reason."""
    single_submit: bool = False
    """No effect: as many transfers go in one system call as are ready."""
    overlap_events: bool = True
    """No effect: submission and completion always overlap."""

    @model_validator(mode="after")
    def _block_is_power_of_two(self) -> Aio:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        return self


class NvmePath(_Section):
    """An element of ``tiering.nvme_paths``."""

    path: Annotated[str, AfterValidator(_is_path)]
    """A folder on a drive; made if missing."""
    gb_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How fast the drive is, reading and writing, in 1e9 bytes a second. None: it is measured."""


def _spreadable(paths: tuple[NvmePath, ...]) -> tuple[NvmePath, ...]:
    """All that is wrong with the paths as a list."""
    problems = [] if paths else ["is empty; name a folder on each drive, or leave the key out"]
    seen: dict[str, str] = {}
    for path in (p.path for p in paths):
        real = real_path(path)
        if real in seen:
            problems.append(f"{seen[real]!r} and {path!r} are one directory; name each path once")
        seen[real] = path
    unknown = [p.path for p in paths if p.gb_per_s is None]
    if 0 < len(unknown) < len(paths):
        names = ", ".join(map(repr, unknown))
        problems.append(f"{names} have no gb_per_s; give it for all paths, or for none to measure")
    if problems:
        raise ValueError("; and ".join(problems))
    return paths


class Tiering(_Section):
    """``tiering``: this package's own settings."""

    host_memory: Bytes | Auto = "auto"
    """Bytes of the one host arena, or text such as "8GiB". auto: gradients and working buffers for
    NVMe, everything for cpu.
    """
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type the model computes in. auto: the storage type where the device has fast matrix units for
    it, else fp32.
    """
    aio_backend: Literal["auto", "uring", "threads"] = "auto"
    """auto falls back to threads where io_uring is not to be had; a named one is an error then."""
    require_native: bool = False
    """True: nvme is an error where the compiled part cannot be loaded. False: auto falls back to
    threads of Python there, with a warning.
    """
    io_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for one transfer of the drive, in seconds; after that an error names it."""
    nvme_paths: (
        Annotated[
            tuple[Annotated[NvmePath, BeforeValidator(_nvme_path)], ...],
            AfterValidator(_spreadable),
        ]
        | None
    ) = None
    """Folders on several drives, over which everything on NVMe is spread in proportion to their
    speeds: paths, or objects with ``path`` and ``gb_per_s``. They take the place of ``nvme_path``.
    """
    update_in_backward: bool = False
    """True: the later half of the model is updated under backward, each unit as soon as its
    gradients are complete, so that the drive works in backward as it does in forward. For training
    without clipping whose loop always steps after backward: what an update does (rates, decay) is
    settled by then, and `zero_grad` or a change of it before the step is an error.
    """
    collective_timeout_s: float = 600.0
    """t"""
    nonfinite_gradients: Literal["ignore", "skip", "raise"] = "ignore"
    """n"""
    max_skipped_steps: Positive = 50
    """m"""
    keep_fp32: tuple[str, ...] = ()
    """k"""
    max_unit_numel: Positive = 2**28
    """A list element larger than this is split into units at its children."""


class DataTypes(_Section):
    grad_accum_dtype: str | None = None


class Config(_Section):
    """The whole file."""

    data_types: DataTypes = DataTypes()

    train_batch_size: Positive | Auto = "auto"
    train_micro_batch_size_per_gpu: Positive | Auto = "auto"
    gradient_accumulation_steps: Positive | Auto = "auto"
    gradient_clipping: Annotated[float, Field(ge=0)] | Auto = 0.0
    """Largest global gradient norm; 0: no clipping."""
    communication_data_type: str | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    steps_per_print: Positive | Auto = 10
    """No effect yet."""
    wall_clock_breakdown: bool = False
    """No effect: `engine.stats()` always has it."""
    zero_allow_untested_optimizer: bool = True
    """No effect: torch's Adam and AdamW are taken, others refused."""
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    optimizer: Optimizer | None = None
    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    tiering: Tiering = Tiering()

    @model_validator(mode="after")
    def _nvme_has_a_path(self) -> Config:
        zero = self.zero_optimization
        sections: dict[str, OffloadParam | OffloadOptimizer] = {
            "zero_optimization.offload_param": zero.offload_param,
            "zero_optimization.offload_optimizer": zero.offload_optimizer,
        }
        paths = {f"{name}.nvme_path": s.nvme_path for name, s in sections.items() if s.nvme_path}
        if self.tiering.nvme_paths is not None:
            _check_agreement(paths, self.tiering.nvme_paths)
            return self
        missing = [n for n, s in sections.items() if s.device == "nvme" and not s.nvme_path]
        if missing:
            hint = next((f" (its sibling has {p!r})" for p in paths.values()), "")
            keys = " and ".join(f"{name}.nvme_path" for name in missing)
            raise ValueError(f"device is nvme, so {keys} must name a folder on the drive{hint}")
        return self

    @model_validator(mode="after")
    def _early_updates_need_no_norm(self) -> Config:
        if self.tiering.update_in_backward and self.gradient_clipping not in (0, "auto"):
            raise ValueError(
                f"gradient_clipping is {self.gradient_clipping}, which needs all gradients before "
                "the first update; so tiering.update_in_backward must be false, or clipping 0"
            )
        return self

    def nvme_paths(self, section: OffloadParam | OffloadOptimizer) -> dict[str, float | None]:
        """Where a section's records lie if its device is nvme: on all the paths, else on its own.

        Args:
            section: of ``zero_optimization``.

        Returns:
            The paths with their ``gb_per_s``.
        """
        if self.tiering.nvme_paths is not None:
            return {path.path: path.gb_per_s for path in self.tiering.nvme_paths}
        return {section.nvme_path: None} if section.nvme_path else {}

    def batch(self, *, world_size: int) -> Batch:
        """Batch sizes with the open ones worked out.

        Raises:
            ConfigError: train_batch_size is not micro-batch x accumulation x ranks.
        """
        return _batch(self, world_size)


def _check_agreement(own: Mapping[str, str], paths: Sequence[NvmePath]) -> None:
    """Refuse a path of a section that is not among those for all; which is meant is unknown."""
    real = {real_path(path.path) for path in paths}
    others = [f"{key} {path!r}" for key, path in own.items() if real_path(path) not in real]
    if others:
        names = ", ".join(repr(path.path) for path in paths)
        raise ValueError(
            f"{' and '.join(others)} must be among tiering.nvme_paths ({names}), which take its "
            "place; leave it out, or name it there too"
        )


class Batch(BaseModel):
    """How a step's samples are divided."""

    micro: int | None
    """Samples a forward on one rank; None when the config leaves it open."""
    accumulation: int
    """Forward and backward passes a step."""


def _batch(config: Config, ranks: int) -> Batch:
    train, micro, steps = (
        None if value == "auto" else value
        for value in (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
    )
    if train is None:
        return Batch(micro=micro, accumulation=steps or 1)
    if micro is None:
        steps = steps or 1
        micro = train // (steps * ranks)
    elif steps is None:
        steps = max(1, train // (micro * ranks))
    if train != micro * steps * ranks:
        raise ConfigError(
            f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {ranks} ranks = {micro * steps * ranks}"
        )
    return Batch(micro=micro, accumulation=steps)


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> Config:
    """Read and check a configuration.

    Args:
        source: a mapping, or the path of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or has problems; all of them are listed.
    """
    try:
        return Config.model_validate(_mapping(source))
    except ValidationError as error:
        problems = _problems(error)
        name = "" if isinstance(source, Mapping) else f" {os.fspath(source)!r}"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(
            f"the configuration{name} has {len(problems)} problem(s):{lines}"
        ) from None


def _mapping(source: str | os.PathLike[str] | Mapping[str, object]) -> dict[str, object]:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"the configuration must be a mapping or a path, got {source!r}")
    try:
        loaded = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"the configuration file {os.fspath(source)!r} cannot be read: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the configuration file {os.fspath(source)!r} must hold a JSON object")
    return loaded


def _problems(error: ValidationError) -> list[str]:
    """One line a key, in the user's terms: a value that fits no alternative has one problem."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors():
        place = ".".join(_own_parts(problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown key{_nearest(place)}"
        elif problem["type"] != "value_error":
            message = f"{message}, got {problem['input']!r}"
        lines.setdefault(place, []).append(message)
    return [
        f"{place}: {'; or '.join(messages)}" if place else "; ".join(messages)
        for place, messages in lines.items()
    ]


def _own_parts(location: tuple[int | str, ...]) -> Iterator[str]:
    """What of an error's place is the user's key, and not an alternative of its type."""
    model: type[BaseModel] | None = Config
    for part in location:
        if model is None:
            return
        yield str(part)
        if isinstance(part, str):  # a number is a place in a list of sections
            field = model.model_fields.get(part)
            model = next(_sections(field.annotation), None) if field else None


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def _nearest(place: str) -> str:
    known = dict(_keys(Config, ""))
    close = difflib.get_close_matches(place, known, n=1, cutoff=0.85)
    leaf = difflib.get_close_matches(
        place.rsplit(".", 1)[-1], {k.rsplit(".", 1)[-1]: None for k in known}, n=1, cutoff=0.85
    )
    match = close or [k for k in known if leaf and k.rsplit(".", 1)[-1] == leaf[0]]
    return f"; did you mean {match[0]!r}?" if match else "; it is not supported (yet)"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, None]]:
    """Every key of the format, dotted."""
    for name, field in model.model_fields.items():
        yield prefix + name, None
        for section in _sections(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")
