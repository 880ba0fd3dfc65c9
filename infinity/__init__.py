"""Train models larger than memory, paging their state between GPU, host and NVMe.

    engine, optimizer, _, _ = infinity.initialize(model=model, config="ds_config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The modules, in the order in which bytes pass through them: `config`, `scopes`, `partition`, `plan`,
`outline`, `unit_records`, `parameters`, `unit`, `gradients`, `schedule`, `hooks`, `loss_scale`,
`adam`, `optimizer`, `access`, `assembly`, `engine`, `report`; `comm` and `agreement` are the way to
other ranks, `lr_schedules` and `data` what training needs beside them, `phases` the clock,
`arguments` what scripts give, `absent` what is not there.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler as Scheduler
from torch.utils.data import Dataset

from infinity.absent import absence
from infinity.arguments import add_config_arguments, check_arguments
from infinity.assembly import OptimizerGroups
from infinity.comm import Communicator, init_distributed
from infinity.config import Config, Optimizer, load_config
from infinity.data import TrainingLoader, training_loader
from infinity.engine import InfinityEngine
from infinity.lr_schedules import scheduler_of
from infinity.optimizer import PagedAdam, check_settings
from infinity.report import EngineStats
from tiering.aio import Faults
from tiering.errors import ConfigError, EngineClosedError, TieringWarning

__all__ = [
    "Config",
    "ConfigError",
    "EngineClosedError",
    "EngineStats",
    "InfinityEngine",
    "Initialized",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_config",
]

if not TYPE_CHECKING:  # a type checker goes on finding what is not there

    def __getattr__(name: str) -> NoReturn:
        """Say what to do instead of what DeepSpeed's package has and this one has not."""
        raise absence(sys.modules[__name__], name)


OptimizerMaker: TypeAlias = Callable[[list[Any]], torch.optim.Optimizer]
ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, object] | Config


class Initialized(NamedTuple):
    """What `initialize` returns, in DeepSpeed's order."""

    engine: InfinityEngine
    optimizer: PagedAdam
    dataloader: TrainingLoader[Any] | None
    lr_scheduler: Scheduler | None


def initialize(  # noqa: PLR0913 - the arguments people already pass
    *,
    model: nn.Module,
    config: ConfigSource | None = None,
    optimizer: torch.optim.Optimizer | OptimizerMaker | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    lr_scheduler: Scheduler | Callable[[PagedAdam], Scheduler] | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    args: object = None,
    config_params: ConfigSource | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mesh_param: object = None,
    mpu: object = None,
    faults: Faults | None = None,
) -> Initialized:
    """Page a model's weights and optimizer state as the configuration says.

    Args:
        model: on one device, with parameters of floating types. Its parameters stay its own objects
            with their names and shapes; their type becomes the compute type.
        config: a mapping or a JSON file with DeepSpeed's keys, or what `load_config` made of one.
        optimizer: a `torch.optim.Adam` or `AdamW` whose parameter groups are taken over, instead of
            the config's section; or a function that makes one of the parameters it is given.
        model_parameters: parameters or groups to train, for the config's optimizer; all trainable
            ones if None.
        lr_scheduler: one of torch's, made for ``optimizer``, which steers the returned optimizer
            from now on; or a function that makes one for it, instead of the config's section.
            `InfinityEngine.step` steps it.
        training_data: what the returned data loader deals out to the ranks, batch by batch.
        collate_fn: how it makes a batch of samples; torch's default if None.
        args: whose ``deepspeed_config`` is the configuration if there is no other, as scripts for
            DeepSpeed have it; see `add_config_arguments`.
        config_params: an older name of ``config``.
        dist_init_required: False: do not make a process group.
        distributed_port: no effect; where ranks meet is the launcher's.
        mesh_param: must be None, as ``mpu``.
        mpu: must be None; all ranks are data-parallel.
        faults: for tests: what goes wrong in the I/O below.

    Returns:
        engine, optimizer, dataloader (None without ``training_data``), lr_scheduler. The engine has
        them as ``optimizer``, ``training_dataloader`` and ``lr_scheduler`` too.

    Raises:
        ConfigError: the configuration, the model or the optimizer cannot work; nothing has been
            changed.
        SpaceError: the drive cannot hold the state.
    """
    del distributed_port
    if dist_init_required is not False:
        init_distributed()
    comm = Communicator()
    with comm.agree(), warnings.catch_warnings():
        if comm.rank > 0:
            warnings.simplefilter("ignore", TieringWarning)  # rank 0 says it
        for name, parallelism in (("mpu", mpu), ("mesh_param", mesh_param)):
            if parallelism is not None:
                raise ConfigError(
                    f"{name} is for model parallelism, which there is none of; leave it out"
                )
        checked = load_config(_the_one(config, config_params, args))
        checked.require_resolved(
            optimizer_given=optimizer is not None, scheduler_given=lr_scheduler is not None
        )
        check_arguments(
            checked,
            model=model,
            model_parameters=model_parameters,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(_parameters(model, model_parameters))
        if optimizer is not None:
            groups = _from_torch(optimizer)
        else:
            groups = _from_config(checked.optimizer or Optimizer(), model, model_parameters)
        _check_scheduler(lr_scheduler, optimizer)
        loader = _loader(training_data, collate_fn, checked, comm)
    steer = functools.partial(_scheduler, lr_scheduler, checked)
    engine = InfinityEngine(model, checked, groups, comm=comm, steer=steer, faults=faults)
    engine.training_dataloader = loader
    if isinstance(lr_scheduler, Scheduler):
        lr_scheduler.optimizer = engine.optimizer
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


def _the_one(
    config: ConfigSource | None, config_params: ConfigSource | None, args: object
) -> ConfigSource:
    """The configuration, wherever it was given."""
    given = [config, config_params, getattr(args, "deepspeed_config", None)]
    found = [source for source in given if source is not None]
    if len(found) != 1:
        raise ConfigError(
            f"there must be one configuration, got {len(found)}: give initialize() config= (or "
            "args.deepspeed_config, as scripts for DeepSpeed do)"
        )
    return found[0]


def _loader(
    dataset: Dataset[Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Config,
    comm: Communicator,
) -> TrainingLoader[Any] | None:
    if dataset is None:
        return None
    return training_loader(
        dataset,
        micro_batch=config.batch(world_size=comm.size).micro,
        rank=comm.rank,
        world_size=comm.size,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
    )


def _check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse, before anything moves, one that could not steer the optimizer."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau needs a metric; step it yourself, without the engine")
    if isinstance(scheduler, Scheduler):
        if optimizer is None or scheduler.optimizer is not optimizer:
            raise ConfigError(
                "the lr_scheduler steers another optimizer than the one given; give both, or a "
                "function that makes the scheduler: lr_scheduler=lambda optimizer: ..."
            )
    elif scheduler is not None and not callable(scheduler):
        raise ConfigError(f"lr_scheduler must be one of torch's or a function, got {scheduler!r}")


def _scheduler(
    scheduler: Scheduler | Callable[[PagedAdam], Scheduler] | None,
    config: Config,
    optimizer: PagedAdam,
) -> Scheduler | None:
    """The user's scheduler, or one that steers this optimizer."""
    if isinstance(scheduler, Scheduler):
        return scheduler
    if scheduler is not None:
        return scheduler(optimizer)
    section = config.scheduler
    if section is None:
        return None
    return scheduler_of(section.type, optimizer, **section.params.model_dump())


def _from_torch(optimizer: torch.optim.Optimizer) -> OptimizerGroups:
    """The groups of a user's torch optimizer."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(
            f"the optimizer must be torch.optim.Adam or AdamW, got {type(optimizer).__name__}; "
            "its state is paged, which other optimizers are not ready for yet"
        )
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps already; give it before its first step")
    decoupled = type(optimizer) is torch.optim.AdamW
    kept = ("params", "lr", "betas", "eps", "weight_decay")
    groups = []
    for group in optimizer.param_groups:
        check_settings(group)
        extra = {k: v for k, v in group.items() if k not in optimizer.defaults}
        own = {"decoupled": decoupled, "fused": bool(group.get("fused"))}
        groups.append({**extra, **{k: group[k] for k in kept}, **own})
    defaults = {
        **{k: optimizer.defaults[k] for k in kept[1:]},
        "decoupled": decoupled,
        "fused": bool(optimizer.defaults.get("fused")),
    }
    return OptimizerGroups(groups, defaults)


def _parameters(model: nn.Module, given: Iterable[Any] | None) -> list[Any]:
    """Those to train, or groups of them."""
    return list(model.parameters() if given is None else given)


def _from_config(
    section: Optimizer, model: nn.Module, parameters: Iterable[Any] | None
) -> OptimizerGroups:
    """Groups by the config's section."""
    defaults = section.settings()._asdict()
    chosen = _parameters(model, parameters)
    if chosen and isinstance(chosen[0], dict):
        return OptimizerGroups([dict(group) for group in chosen], defaults)
    return OptimizerGroups([{"params": [p for p in chosen if p.requires_grad]}], defaults)
