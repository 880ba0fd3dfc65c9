"""Train a small GPT with its states on the drive, and show what that costs."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

import infinity
from infinity.demo import probe, report
from infinity.demo.corpus import read_corpus
from infinity.demo.model import GPT
from infinity.demo.options import Options, engine_config, parse
from infinity.demo.train import TORCH_DTYPES, PlainTorch, train
from infinity.outline import compute_device
from tiering.aio import AioConfig, open_engine
from tiering.errors import TieringError, TieringWarning

_PROBE_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: of the command line; the process's own by default.

    Returns:
        0, or 1 when the package says that something cannot work.
    """
    options = parse(arguments)
    console = Console()
    try:
        with _folder(options), _warnings_as_notes():
            result = _run(options, console)
    except (TieringError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
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
    return 0


@contextlib.contextmanager
def _folder(options: Options) -> Iterator[None]:
    """Make the folder if there is none; remove it again if it was made and is left empty."""
    made = options.offload == "nvme" and not options.path.exists()
    if made:
        options.path.mkdir(parents=True)
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                options.path.rmdir()


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Show the package's warnings without the line of code they come from."""
    with warnings.catch_warnings():
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


def _run(options: Options, console: Console) -> report.Result:
    text = read_corpus()
    nvme_bytes_per_s = _drive_speed(options)
    memory = report.PeakMemory()
    torch.manual_seed(options.seed)
    model = GPT(options.model)
    numel = sum(parameter.numel() for parameter in model.parameters())
    device = compute_device(model)
    plain = PlainTorch(model, options, device) if options.compare_torch else None
    engine, *_ = infinity.initialize(model=model, config=engine_config(options, numel))
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
        _introduce(console, options, numel, limits)
        steps = []
        budget_bytes = stats.arena_budget_bytes
        with report.Progress(console, options, limits, budget_bytes=budget_bytes) as progress:
            for step in train(engine, text, options, plain):
                steps.append(step)
                progress.show(len(steps), step)
        return report.Result(options, steps, engine.stats(), limits, memory.over_start_bytes())


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


def _introduce(console: Console, options: Options, numel: int, limits: report.Limits) -> None:
    places = {
        "none": "beside the model, as plain torch has them",
        "cpu": "in the host arena",
        "nvme": f"on the drive, under {options.path}",
    }
    drive = limits.nvme_bytes_per_s / 1e9
    console.print(
        f"A GPT of {numel / 1e6:.1f} million parameters, {options.dtype} weights; all states live "
        f"{places[options.offload]}."
        + (f" Measured: {drive:.2f} GB/s reading and writing at once." if drive else ""),
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(main())
