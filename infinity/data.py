"""The loader of the training data: which samples a rank gets, in which order.

Every rank orders the samples of an epoch alike, by the seed and the epoch's number, and takes every
``world_size``-th of them from its own rank on. What would break it: ranks in different epochs,
whose parts overlap. So an epoch begins with the first batch of an iteration, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tiering.errors import ConfigError

Sample = TypeVar("Sample")
Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""

MICRO_BATCH_KEY: Final = "train_micro_batch_size_per_gpu"


@runtime_checkable
class HasEpochs(Protocol):
    """Orders its samples by the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Order them for this epoch, the first of which is 0."""


class TrainingLoader(Generic[Sample]):
    """Batches of one rank; each iteration is the next epoch. Made by `training_loader`.

    An iteration that is left early ends its epoch: the next one begins the next.

    Args:
        loader: gives the batches.
        ordered_by: told the number of each epoch before it begins.
    """

    def __init__(self, loader: DataLoader[Sample], ordered_by: HasEpochs | None) -> None:
        self.loader: DataLoader[Sample] = loader
        self.dataset: Dataset[Sample] = loader.dataset
        self.epoch = 0
        """Of the next iteration."""
        self._ordered_by = ordered_by

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, as after a restart. All ranks must do so."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the epoch is told with the first batch: torch asks the sampler then.
        if self._ordered_by is not None:
            self._ordered_by.set_epoch(self.epoch)
        self.epoch += 1
        yield from self.loader

    def __len__(self) -> int:
        """Batches of an epoch, on each rank.

        Raises:
            TypeError: the dataset is iterable, and does not know its length.
        """
        return len(self.loader)


def training_loader(  # noqa: PLR0913 - each is one of DataLoader's, or a rank's place
    dataset: Dataset[Sample],
    *,
    micro_batch: int | None,
    rank: int,
    world_size: int,
    collate_fn: Collate | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    seed: int = 0,
) -> TrainingLoader[Sample]:
    """Make the loader of a rank's batches.

    A dataset with indices is shuffled anew in every epoch and dealt to the ranks by torch's
    `DistributedSampler`: together the ranks see every sample once an epoch, and where their number
    does not divide that of the samples, so many of the first ones in the epoch's order a second
    time that all ranks get equally many. No batch is shared, and all ranks have equally many. The
    order of epoch 0 is DeepSpeed's; DeepSpeed repeats it in all others.

    An iterable dataset gives its samples as it likes. Each rank iterates over its own copy, which
    must pick the rank's part of the samples, as many as on every other rank; so must the copies in
    several workers. If it has ``set_epoch``, that is called.

    Args:
        dataset: with ``__getitem__`` and ``__len__``, or a torch `IterableDataset`.
        micro_batch: samples of a batch; None if the configuration leaves it open.
        rank: whose batches.
        world_size: number of ranks.
        collate_fn: makes a batch of a list of samples; torch's own if None.
        drop_last: leave out a rank's last batch if it is not full. The samples in it are not seen
            in this epoch.
        num_workers: processes that load ahead; with 0 the caller loads. They are forked, and
            forking takes the longer the more host memory is in use.
        pin_memory: put batches into pinned memory; None to do so where there is a GPU.
        seed: of all epochs' orders; the same on all ranks.

    Raises:
        ConfigError: the batch size is open, the dataset is none, or it makes no batch.
    """
    if micro_batch is None:
        raise ConfigError(
            "training_data was given, but the configuration does not say how many samples a batch "
            f"of it has; set {MICRO_BATCH_KEY}, or train_batch_size with "
            "gradient_accumulation_steps"
        )
    if micro_batch < 1:
        raise ConfigError(f"{MICRO_BATCH_KEY} is {micro_batch}; set at least 1")
    sampler: DistributedSampler[Sample] | None = None
    if not isinstance(dataset, IterableDataset):
        _check_indexed(dataset, micro_batch, world_size, drop_last=drop_last)
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=seed)
    loader: DataLoader[Sample] = DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
    )
    if sampler is not None:
        return TrainingLoader(loader, sampler)
    return TrainingLoader(loader, dataset if isinstance(dataset, HasEpochs) else None)


def _check_indexed(dataset: Any, micro_batch: int, world_size: int, *, drop_last: bool) -> None:  # noqa: ANN401
    """Refuse what no sampler can index, and what would train nothing in silence."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"training_data is a {type(dataset).__name__}, which is no dataset; give one with "
            "__getitem__ and __len__, or a torch.utils.data.IterableDataset"
        )
    samples = len(dataset)
    share = -(-samples // world_size)
    if not samples or (drop_last and share < micro_batch):
        raise ConfigError(
            f"training_data has {samples} samples, so {share} on each of {world_size} ranks, which "
            f"do not make one batch of {micro_batch}; give more, lower {MICRO_BATCH_KEY}, or set "
            "dataloader_drop_last to false"
        )
