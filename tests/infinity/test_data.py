"""The training loader: every sample once an epoch, equally many batches on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import infinity
from infinity.data import TrainingLoader, training_loader
from tests.infinity.conftest import base_loss, base_model, config_for
from tiering.errors import ConfigError


class Numbers(Dataset[int]):
    """The samples 0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same, which can only be iterated over; of each epoch's own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The hundreds of its numbers."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (100 * self.epoch + number for number in range(self.count))


def batches(loader: TrainingLoader[int]) -> list[list[int]]:
    """Of one epoch."""
    return [batch.tolist() for batch in loader]


def loaders(count: int, ranks: int, micro: int, **more: Any) -> list[TrainingLoader[int]]:
    """One for each rank."""
    return [
        training_loader(Numbers(count), micro_batch=micro, rank=rank, world_size=ranks, **more)
        for rank in range(ranks)
    ]


COUNTS = st.integers(1, 60)
RANKS = st.integers(1, 5)
MICROS = st.integers(1, 8)


@given(COUNTS, RANKS, MICROS)
def test_together_the_ranks_see_every_sample_once_an_epoch(
    count: int, ranks: int, micro: int
) -> None:
    """But for those that make the ranks' parts equally large, which are the first of the order."""
    parts = [[batches(loader) for _ in range(2)] for loader in loaders(count, ranks, micro)]
    for epoch in range(2):
        flat = [[sample for batch in part[epoch] for sample in batch] for part in parts]
        seen = Counter(sample for own in flat for sample in own)
        assert set(seen) == set(range(count))
        assert sum(seen.values()) == -(-count // ranks) * ranks
        in_turn = [sample for row in zip(*flat, strict=True) for sample in row]
        assert in_turn[count:] == (in_turn[:count] * ranks)[: len(in_turn) - count]


@given(COUNTS, RANKS, MICROS, st.booleans())
def test_all_ranks_get_equally_many_batches_of_the_asked_size(
    count: int, ranks: int, micro: int, drop_last: bool
) -> None:
    """Only the last one may be smaller, and not even that one with drop_last."""
    if drop_last and -(-count // ranks) < micro:
        with pytest.raises(ConfigError, match="do not make one batch"):
            loaders(count, ranks, micro, drop_last=True)
        return
    made = loaders(count, ranks, micro, drop_last=drop_last)
    sizes = [[len(batch) for batch in batches(loader)] for loader in made]
    assert all(own == sizes[0] for own in sizes)
    assert {len(loader) for loader in made} == {len(sizes[0])}
    assert set(sizes[0][:-1]) <= {micro}
    assert sizes[0][-1] == micro if drop_last else 1 <= sizes[0][-1] <= micro


def test_each_iteration_is_the_next_epoch_with_an_order_of_its_own() -> None:
    """Nobody needs to call set_epoch."""
    (loader,) = loaders(50, 1, 50)
    orders = [batches(loader)[0] for _ in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    loader.set_epoch(1)
    assert batches(loader)[0] == orders[1]
    assert batches(loader)[0] == orders[2]
    assert loader.epoch == 3


def test_the_first_epoch_is_in_the_order_of_torchs_sampler() -> None:
    """Which is DeepSpeed's, with the seed 0."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    first, second = loaders(20, 2, 10)
    assert batches(first) == [order[::2]]
    assert batches(second) == [order[1::2]]


def test_another_seed_is_another_order() -> None:
    """And the same one is the same."""

    def order(seed: int) -> list[list[int]]:
        return batches(
            training_loader(Numbers(50), micro_batch=50, rank=0, world_size=1, seed=seed)
        )

    assert order(3) == order(3) != order(4)


def test_an_iteration_that_is_left_early_ends_its_epoch() -> None:
    """Ranks that leave at the same batch are in the same epoch afterwards."""
    (loader,) = loaders(50, 1, 5)
    next(iter(loader))
    rest = [sample for batch in loader for sample in batch.tolist()]
    loader.set_epoch(1)
    assert rest == [sample for batch in loader for sample in batch.tolist()]


def test_two_iterations_at_once_are_two_whole_epochs() -> None:
    """The order of one is not changed by the other's begin."""
    (loader,) = loaders(30, 1, 3)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.set_epoch(0)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == expected


def test_workers_load_the_same_batches() -> None:
    """In the same order, epoch by epoch."""
    with_workers = training_loader(Numbers(12), micro_batch=3, rank=0, world_size=1, num_workers=1)
    (alone,) = loaders(12, 1, 3)
    assert [batches(with_workers) for _ in range(2)] == [batches(alone) for _ in range(2)]


def test_an_iterable_dataset_gives_its_own_order_and_is_told_the_epoch() -> None:
    """The samples of a rank are its copy's affair."""
    loader = training_loader(Stream(5), micro_batch=2, rank=1, world_size=2)
    assert batches(loader) == [[0, 1], [2, 3], [4]]
    assert batches(loader) == [[100, 101], [102, 103], [104]]
    loader.set_epoch(7)
    assert batches(loader)[0] == [700, 701]
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_an_iterable_dataset_can_leave_out_what_is_no_whole_batch() -> None:
    """As one with indices."""
    loader = training_loader(Stream(5), micro_batch=2, rank=0, world_size=1, drop_last=True)
    assert batches(loader) == [[0, 1], [2, 3]]


def test_a_batch_is_made_by_the_function_given() -> None:
    """It gets a list of samples."""
    loader = training_loader(Numbers(4), micro_batch=4, rank=0, world_size=1, collate_fn=sorted)
    assert list(loader) == [[0, 1, 2, 3]]


def test_an_open_batch_size_is_refused_with_the_key_to_set() -> None:
    """Nothing else says how large a batch is."""
    with pytest.raises(ConfigError, match="set train_micro_batch_size_per_gpu, or train_batch"):
        training_loader(Numbers(4), micro_batch=None, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("count", "micro", "message"),
    [(4, 0, "train_micro_batch_size_per_gpu is 0"), (0, 1, "0 samples, so 0 on each of 2 ranks")],
)
def test_what_makes_no_batch_is_refused(count: int, micro: int, message: str) -> None:
    """A loop over nothing would train nothing, in silence."""
    with pytest.raises(ConfigError, match=message):
        training_loader(Numbers(count), micro_batch=micro, rank=0, world_size=2)


def test_what_is_no_dataset_is_refused() -> None:
    """A generator can be iterated over only once, and has no indices."""
    numbers = (number for number in range(3))
    with pytest.raises(ConfigError, match="training_data is a generator, which is no dataset"):
        training_loader(cast("Any", numbers), micro_batch=1, rank=0, world_size=1)


def test_the_engine_trains_on_what_the_loader_gives(tmp_path: Path) -> None:
    """Two epochs, two batches each."""
    tokens = torch.randint(0, 100, (2, 4, 9))
    loader = training_loader(TensorDataset(*tokens), micro_batch=2, rank=0, world_size=1)
    engine, *_ = infinity.initialize(
        model=base_model(), config=config_for(tmp_path, param="cpu", optimizer="cpu")
    )
    with engine:
        for _ in range(2):
            for batch in loader:
                engine.backward(base_loss(engine, batch))
                engine.step()
        assert engine.global_steps == 2 * len(loader) == 4
