"""Train a small GPT with its states on the drive, and show what that costs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

import infinity
from infinity.comm import Communicator
from infinity.demo import probe, report
from infinity.demo.corpus import read_corpus
from infinity.demo.model import GPT
from infinity.demo.options import Options, engine_config, parse
from infinity.demo.train import TORCH_DTYPES, PlainTorch, as_one, train
from infinity.outline import compute_device
from tiering.aio import AioConfig, open_engine
from tiering.errors import ConfigError, RankError, TieringError, TieringWarning

_PROBE_S = 1.0
_PATIENCE_S = 600.0  # for other ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; under torchrun on every rank, of which the first tells what there is to say.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        0, or 1 when the package says that something cannot work.
    """
    infinity.init_distributed()
    comm = Communicator()
    with _silent(comm.rank > 0):
        options = parse(arguments)
    console = Console(quiet=comm.rank > 0)
    voice = _Voice(comm.rank)
    try:
        with _ended_in_order(), _together(comm), _warnings_as_notes(comm.rank):
            result = _run(options, console, comm, voice)
    except (TieringError, OSError) as error:
        voice.complain(error)
        return 1
    if comm.rank == 0:
        _tell(result, options, console)
    return 0


def _tell(result: report.Result, options: Options, console: Console) -> None:
    if options.losses:
        for number, step in enumerate(result.steps, start=1):
            print(f"loss {number} {step.loss!r} {step.loss.hex()}")
    if options.json:
        options.json.write_text(json.dumps(report.as_json(result), indent=2) + "\n")
    console.print(report.table(result))
    if len(result.steps) < options.steps:
        console.print(
            f"{len(result.steps)} of {options.steps} steps: the limit of {options.seconds:g} s was "
            "reached (--seconds)",
            highlight=False,
        )


class _Voice:
    """Says why the demo has ended: what all ranks have heard of, once.

    Args:
        rank: whose.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.all_hear = True
        """Whether what fails on one rank fails on all, as before training."""

    def complain(self, error: Exception) -> None:
        """Tell of an error, if that is this rank's to do."""
        is_told = self.all_hear or isinstance(error, RankError)
        if self._rank > 0 and is_told:
            return
        where = f" on rank {self._rank}" if self._rank else ""
        Console(stderr=True).print(
            f"error{where}: {error}", style="red", markup=False, soft_wrap=True
        )


@contextlib.contextmanager
def _silent(silent: bool) -> Iterator[None]:  # noqa: FBT001
    """Print nothing."""
    with contextlib.ExitStack() as closing:
        if silent:
            nowhere = closing.enter_context(Path(os.devnull).open("w"))
            closing.enter_context(contextlib.redirect_stdout(nowhere))
            closing.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Clean up when told to end, as torchrun tells all ranks when one has failed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _together(comm: Communicator) -> Iterator[None]:
    """Have the ranks talk to each other; who fails leaves the others a reason."""
    comm.open(torch.device("cpu"), timeout_s=_PATIENCE_S)
    try:
        yield
    except BaseException as error:
        comm.leave_reason(error)
        raise
    finally:
        comm.close()


@contextlib.contextmanager
def _folder(options: Options, comm: Communicator) -> Iterator[None]:
    """Make the folder if there is none; remove it again if it was made and is left empty.

    Each rank does so, as it may be alone on its host; the last one's removal succeeds.
    """
    made = options.offload == "nvme" and not options.path.exists()
    with comm.agree():  # when all have looked
        pass
    try:
        with comm.agree():
            if made:
                options.path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                options.path.rmdir()


@contextlib.contextmanager
def _warnings_as_notes(rank: int) -> Iterator[None]:
    """Show the package's warnings without the line of code they come from, on rank 0."""
    with warnings.catch_warnings():
        if rank > 0:
            warnings.simplefilter("ignore", TieringWarning)
        plain = warnings.formatwarning
        warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
            f"note: {message}\n"
            if issubclass(category, TieringWarning)
            else plain(message, category, filename, lineno, line)
        )
        try:
            yield
        finally:
            warnings.formatwarning = plain


def _run(options: Options, console: Console, comm: Communicator, voice: _Voice) -> report.Result:
    """Train, and return the figures of all ranks together."""
    with _folder(options, comm):
        with comm.agree():
            if options.compare_torch and comm.size > 1:
                raise ConfigError("--compare-torch is for one rank; plain torch trains on one")
            text = read_corpus()
        with comm.agree():
            nvme_bytes_per_s = _drive_speed(options)
        memory = report.PeakMemory()
        torch.manual_seed(options.seed)
        model = GPT(options.model)
        numel = sum(parameter.numel() for parameter in model.parameters())
        device = compute_device(model)
        plain = PlainTorch(model, options, device) if options.compare_torch else None
        config = engine_config(options, -(-numel // comm.size))
        engine, *_ = infinity.initialize(model=model, config=config)
        voice.all_hear = False
        with engine:
            stats = engine.stats()
            limits = report.Limits(
                compute_s=probe.measure_compute(
                    options.model,
                    batch=options.batch,
                    dtype=TORCH_DTYPES[stats.compute_dtype],
                    device=device,
                ),
                nvme_bytes_per_s=nvme_bytes_per_s,
            )
            everybody = comm.gather_objects((limits, stats.arena_budget_bytes))
            limits_of_all = report.Limits.as_one([limits for limits, _ in everybody])
            _introduce(console, options, numel, limits_of_all, ranks=comm.size)
            steps = []
            with report.Progress(
                console,
                options,
                limits_of_all,
                budget_bytes=sum(budget_bytes for _, budget_bytes in everybody),
                ranks=comm.size,
            ) as progress:
                for step in train(engine, text, options, plain, comm):
                    steps.append(step[comm.rank])
                    progress.show(len(steps), as_one(step))
            own = report.Result(options, steps, engine.stats(), limits, memory.over_start_bytes())
            return report.Result.as_one(comm.gather_objects(own))


def _drive_speed(options: Options) -> float:
    """Bytes a second of the drive, read and written at once; 0 when it is not used."""
    if options.offload != "nvme":
        return 0.0
    seconds = _PROBE_S / 10 if options.smoke else _PROBE_S
    with contextlib.ExitStack() as closing:
        # What the backend has to say, the engine's own is going to say again.
        closing.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", TieringWarning)
        backend = open_engine(AioConfig(backend=options.backend))
        closing.callback(backend.close)
        return probe.measure_drive(backend, options.path, seconds=seconds)


def _introduce(
    console: Console, options: Options, numel: int, limits: report.Limits, *, ranks: int
) -> None:
    places = {
        "none": "beside the model, as plain torch has them",
        "cpu": "in the host arena",
        "nvme": f"on the drive, under {options.path}",
    }
    drive = limits.nvme_bytes_per_s / 1e9
    console.print(
        f"A GPT of {numel / 1e6:.1f} million parameters, {options.dtype} weights; all states live "
        f"{places[options.offload]}."
        + (f" {ranks} ranks train it, each with its part of them." if ranks > 1 else "")
        + (f" Measured: {drive:.2f} GB/s reading and writing at once." if drive else ""),
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
