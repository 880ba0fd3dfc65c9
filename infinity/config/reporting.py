"""Keys at the top of the file that say what is told about a run, and to whom."""

from __future__ import annotations

from typing import Annotated

from infinity.config.fields import Auto, NoEffect, Positive, Section, anything, given, off

_LOGS = "what is logged is yours: engine.stats() has the figures of every step"


class Reporting(Section):
    """What is told about a run."""

    steps_per_print: Positive | Auto | None = None
    """Every so many steps, rank 0 prints a line with the seconds a step, rates, gradient norm and
    loss scale. auto and None: never; with `wall_clock_breakdown` every 10 steps.
    """
    wall_clock_breakdown: bool = False
    """True: a second line says where the time of these steps went: forward, backward, gathering,
    reducing, updating, waiting for the drive.
    """
    dump_state: Annotated[
        bool, NoEffect("print engine.config and engine.stats()", given(False))
    ] = False
    memory_breakdown: Annotated[
        bool, NoEffect("engine.stats() has the memory of each tier", given(False))
    ] = False
    log_level: Annotated[str | None, NoEffect("use logging.getLogger of the names you want")] = None
    flops_profiler: Annotated[
        dict[str, object] | None,
        NoEffect(
            "use torch.utils.flop_counter or torch.profiler",
            met_by=off,
            keys=(
                *("enabled", "recompute_fwd_factor", "profile_step", "module_depth"),
                *("top_modules", "detailed", "output_file"),
            ),
        ),
    ] = None
    comms_logger: Annotated[
        dict[str, object] | None,
        NoEffect(
            "use torch.profiler, which shows every collective",
            met_by=off,
            keys=("enabled", "prof_all", "prof_ops", "verbose", "debug"),
        ),
    ] = None
    timers: Annotated[
        dict[str, object] | None,
        NoEffect(
            "engine.stats() has the times",
            met_by=anything,
            keys=("throughput", "throughput.enabled", "throughput.synchronized"),
        ),
    ] = None
    tensorboard: Annotated[
        dict[str, object] | None,
        NoEffect(_LOGS, met_by=off, keys=("enabled", "output_path", "job_name")),
    ] = None
    wandb: Annotated[
        dict[str, object] | None,
        NoEffect(_LOGS, met_by=off, keys=("enabled", "group", "team", "project")),
    ] = None
    csv_monitor: Annotated[
        dict[str, object] | None,
        NoEffect(_LOGS, met_by=off, keys=("enabled", "output_path", "job_name")),
    ] = None
    comet: Annotated[
        dict[str, object] | None,
        NoEffect(
            _LOGS,
            met_by=off,
            keys=(
                *("enabled", "samples_log_interval", "project", "workspace", "api_key"),
                *("experiment_name", "experiment_key", "online", "mode"),
            ),
        ),
    ] = None
