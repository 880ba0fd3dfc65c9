"""Short measurements of what the machine can do, to set the run's speed beside it.

The drive is measured the way the engine uses it: through the same backend, from the same kind of
memory, reading and writing at once in equal parts. The arithmetic is measured on a few of the
model's blocks and scaled, so that measuring costs no memory worth counting.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from infinity.demo.model import GPT, GPTConfig
from tiering.aio.backend import AioBackend, File, Transfer
from tiering.arena import Arena, Slot
from tiering.spec import RecordSpec, TensorSpec

_FILE_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20
_IN_FLIGHT = 8  # chunks: half of them read, half written
_BLOCKS_TIMED = 2
_REPEATS = 3


def measure_drive(backend: AioBackend, folder: Path, *, seconds: float) -> float:
    """Measure reading one file while another is overwritten.

    Args:
        backend: what moves the bytes.
        folder: on the drive; two files of 64 MiB are made there and removed again.
        seconds: about how long to measure.

    Returns:
        Bytes a second, both directions together.

    Raises:
        TransferError: a transfer failed.
    """
    with contextlib.ExitStack() as closing:
        arena = Arena(2 * _FILE_BYTES)
        closing.callback(arena.close)
        backend.register(arena.memory)
        private = closing.enter_context(tempfile.TemporaryDirectory(prefix="probe-", dir=folder))
        slots = [_random_slot(arena, name) for name in ("read", "written")]
        files = [_filled_file(backend, Path(private) / slot.owner, slot) for slot in slots]
        for file in files:
            closing.callback(file.close)
        return _mixed_bytes_per_s(backend, files, slots, seconds)


def _random_slot(arena: Arena, name: str) -> Slot:
    """A slot with bytes that no drive can leave out or compress."""
    slot = arena.allocate(_FILE_BYTES, owner=name)
    spec = RecordSpec(name, (TensorSpec("bytes", torch.uint8, (_FILE_BYTES,)),))
    slot.tensors(spec)["bytes"].random_(generator=torch.Generator().manual_seed(0))
    return slot


def _filled_file(backend: AioBackend, path: Path, slot: Slot) -> File:
    """An open file with the slot's bytes on the drive, so that later writes overwrite."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    finally:
        os.close(descriptor)
    file = backend.open(str(path))
    backend.write(file, slot, nbytes=_FILE_BYTES, offset=0).wait()
    backend.sync(file)
    return file


def _mixed_bytes_per_s(
    backend: AioBackend, files: list[File], slots: list[Slot], seconds: float
) -> float:
    start = time.perf_counter()
    moved_bytes = 0
    in_flight: collections.deque[Transfer] = collections.deque()
    for transfer in _chunks(backend, files, slots):
        in_flight.append(transfer)
        moved_bytes += _CHUNK_BYTES
        if len(in_flight) >= _IN_FLIGHT:
            in_flight.popleft().wait()
            if time.perf_counter() - start > seconds:
                break
    for transfer in in_flight:
        transfer.wait()
    return moved_bytes / (time.perf_counter() - start)


def _chunks(backend: AioBackend, files: list[File], slots: list[Slot]) -> Iterator[Transfer]:
    """Start transfers for ever, reads and writes in turn, each through its own file."""
    (read_file, written_file), (read_slot, written_slot) = files, slots
    for offset in itertools.cycle(range(0, _FILE_BYTES, _CHUNK_BYTES)):
        yield backend.read(read_file, read_slot, at=offset, nbytes=_CHUNK_BYTES, offset=offset)
        yield backend.write(
            written_file, written_slot, at=offset, nbytes=_CHUNK_BYTES, offset=offset
        )


def measure_compute(
    config: GPTConfig, *, batch: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Measure forward and backward with everything in memory, on a model of a few blocks.

    Args:
        config: the shape of the whole model.
        batch: windows a step.
        dtype: type to compute in.
        device: where.

    Returns:
        Seconds of one step of the whole model, without the update.
    """
    blocks = min(config.layers, _BLOCKS_TIMED)
    model = GPT(dataclasses.replace(config, layers=blocks)).to(device, dtype)
    ids = torch.randint(config.vocabulary, (batch, config.context + 1), device=device)
    times = [_timed_pass(model, ids) for _ in range(_REPEATS)]
    # All but a hundredth of the arithmetic is in the blocks.
    return min(times) * config.layers / blocks


def _timed_pass(model: GPT, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    loss = model(ids)
    loss.backward()
    model.zero_grad()
    loss.item()  # waits for a GPU
    return time.perf_counter() - start
