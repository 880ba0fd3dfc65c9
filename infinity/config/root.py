"""The whole file: its sections, and what they must agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from infinity.config.activation_checkpointing import ActivationCheckpointing
from infinity.config.aio import Aio
from infinity.config.batch import BatchSizes
from infinity.config.elsewhere import Elsewhere
from infinity.config.fields import NullIsDefault
from infinity.config.optimizer import Optimizer
from infinity.config.paths import NvmePath, real_path
from infinity.config.precision import Bf16, DataTypes, Fp16
from infinity.config.reporting import Reporting
from infinity.config.scheduler import Scheduler
from infinity.config.tiering import OnNonfinite, Tiering
from infinity.config.training import Training
from infinity.config.zero import OffloadOptimizer, OffloadParam, ZeroOptimization
from tiering.errors import ConfigError

_PARAM = "zero_optimization.offload_param"
_OPTIMIZER = "zero_optimization.offload_optimizer"
_EARLY_STAGE = 3  # below it weights are present until the step


class Config(BatchSizes, Training, Reporting, Elsewhere):
    """The whole file."""

    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    data_types: DataTypes = DataTypes()
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_optimization: ZeroOptimization = ZeroOptimization()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    aio: Annotated[Aio, NullIsDefault] = Aio()
    tiering: Tiering = Tiering()

    @property
    def nonfinite_gradients(self) -> OnNonfinite:
        """What happens at one, with bf16 or fp32 weights; with fp16 the step is always skipped."""
        chosen = self.tiering.nonfinite_gradients
        if chosen != "auto":
            return chosen
        return "skip" if self.bf16.check_grad_overflow else "ignore"

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

    def require_resolved(self, *, optimizer_given: bool, scheduler_given: bool) -> None:
        """Refuse a file with values in it that only a trainer or the user can know.

        Args:
            optimizer_given: the user's own takes the place of the section.
            scheduler_given: likewise.

        Raises:
            ConfigError: with all of them.
        """
        keys = unresolved(self, optimizer_given=optimizer_given, scheduler_given=scheduler_given)
        if keys:
            raise ConfigError(
                f'{", ".join(keys)} {"is" if len(keys) == 1 else "are"} "auto", which a trainer '
                "fills in and nobody has; give values, or pass your own optimizer and lr_scheduler "
                "to initialize()"
            )


def unresolved(config: Config, *, optimizer_given: bool, scheduler_given: bool) -> list[str]:
    """Dotted keys that are "auto" and that only a trainer or the user can know.

    Args:
        config: of a file.
        optimizer_given: the user's own takes the place of the section.
        scheduler_given: likewise.
    """
    sections = {
        "optimizer.params": config.optimizer and not optimizer_given and config.optimizer.params,
        "scheduler.params": config.scheduler and not scheduler_given and config.scheduler.params,
    }
    return [
        f"{name}.{key}"
        for name, section in sections.items()
        if section
        for key in type(section).model_fields
        if getattr(section, key) == "auto"
    ]


class Disagreement(NamedTuple):
    """Keys that do not go together."""

    keys: tuple[str, ...]
    message: str


def disagreements(config: Config) -> Iterator[Disagreement]:
    """All that is wrong with a file whose values are each right."""
    yield from _stages(config)
    yield from _places(config)
    yield from _steps(config)


def _stages(config: Config) -> Iterator[Disagreement]:
    """What is offloaded must be partitioned."""
    zero = config.zero_optimization
    for name, section, least in (
        (_PARAM, zero.offload_param, 3),
        (_OPTIMIZER, zero.offload_optimizer, 1),
    ):
        if section.device != "none" and zero.stage < least:
            yield Disagreement(
                (f"{name}.device", "zero_optimization.stage"),
                f"{name}.device is {section.device!r}, which needs zero_optimization.stage "
                f"{least if least == 3 else '1, 2 or 3'}, got {zero.stage}",  # noqa: PLR2004
            )


def _places(config: Config) -> Iterator[Disagreement]:
    """What lives on the drive must have a folder there."""
    zero = config.zero_optimization
    sections: dict[str, OffloadParam | OffloadOptimizer] = {
        _PARAM: zero.offload_param,
        _OPTIMIZER: zero.offload_optimizer,
    }
    paths = {f"{name}.nvme_path": s.nvme_path for name, s in sections.items() if s.nvme_path}
    if config.tiering.nvme_paths is not None:
        yield from _strangers(paths, config.tiering.nvme_paths)
        return
    missing = [n for n, s in sections.items() if s.device == "nvme" and not s.nvme_path]
    if missing:
        hint = next((f" (its sibling has {p!r})" for p in paths.values()), "")
        keys = tuple(f"{name}.nvme_path" for name in missing)
        yield Disagreement(
            (*keys, "tiering.nvme_paths"),
            f"device is nvme, so {' and '.join(keys)} must name a folder on the drive{hint}",
        )


def _strangers(own: Mapping[str, str], paths: Sequence[NvmePath]) -> Iterator[Disagreement]:
    """A path of a section that is not among those for all; which is meant is unknown."""
    real = {real_path(path.path) for path in paths}
    others = {key: path for key, path in own.items() if real_path(path) not in real}
    if others:
        named = " and ".join(f"{key} {path!r}" for key, path in others.items())
        names = ", ".join(repr(path.path) for path in paths)
        yield Disagreement(
            (*others, "tiering.nvme_paths"),
            f"{named} must be among tiering.nvme_paths ({names}), which take its place; leave it "
            "out, or name it there too",
        )


def _steps(config: Config) -> Iterator[Disagreement]:
    """A step has one type, and under backward it cannot wait for the last gradient."""
    if config.fp16.enabled is True and config.bf16.enabled is True:
        yield Disagreement(
            ("fp16.enabled", "bf16.enabled"),
            "fp16.enabled and bf16.enabled are both true; weights are stored in one type",
        )
    if not config.tiering.update_in_backward:
        return
    early = "tiering.update_in_backward"
    if config.zero_optimization.stage < _EARLY_STAGE:
        yield Disagreement(
            (early, "zero_optimization.stage"),
            f"{early} needs zero_optimization.stage {_EARLY_STAGE}, got "
            f"{config.zero_optimization.stage}: below it weights stay present until the step",
        )
    if config.gradient_clipping not in (0, "auto"):
        how = "" if "gradient_clipping" in config.model_fields_set else " where it is left out"
        yield Disagreement(
            ("gradient_clipping", early),
            f"gradient_clipping is {config.gradient_clipping}{how}, which needs all gradients "
            f"before the first update; so {early} must be false, or clipping 0",
        )
    skips = {
        "fp16.enabled": config.fp16.enabled is True,
        "tiering.nonfinite_gradients": config.tiering.nonfinite_gradients in ("skip", "raise"),
        "bf16.check_grad_overflow": config.nonfinite_gradients == "skip"
        and config.tiering.nonfinite_gradients == "auto",
    }
    for key in (key for key, is_on in skips.items() if is_on):
        yield Disagreement(
            (key, early),
            f"{key} may refuse a step, which is known when all gradients are; so {early} must be "
            "false",
        )
