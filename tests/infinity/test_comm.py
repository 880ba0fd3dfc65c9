"""The collective hops over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import infinity
from infinity.comm import Communicator
from tests.infinity.conftest import base_model, config_for
from tiering.errors import ConfigError


def test_one_rank_copies_nothing() -> None:
    """The shard is the whole."""
    comm, shard = Communicator(), torch.arange(16.0)
    assert comm.all_gather(shard, torch.empty(16)) is shard
    assert comm.reduce_scatter(shard, torch.empty(16)) is shard


def _two_ranks(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    comm = Communicator()
    mine = torch.arange(16.0) + 100 * rank
    whole = comm.all_gather(mine, torch.empty(32))
    assert torch.equal(whole, torch.cat([torch.arange(16.0), torch.arange(16.0) + 100]))
    mean = comm.reduce_scatter(torch.arange(32.0) * (rank + 1), torch.empty(16))
    assert torch.equal(mean, torch.arange(32.0)[16 * rank : 16 * rank + 16] * 1.5)
    with pytest.raises(ConfigError, match="2 ranks"):
        infinity.initialize(model=base_model(), config=config_for(Path(rendezvous).parent))
    dist.destroy_process_group()


def test_two_ranks_gather_in_order_and_reduce_to_the_mean(tmp_path: Path) -> None:
    """Over gloo; and an engine over several ranks is refused as long as it is not proven."""
    mp.spawn(_two_ranks, args=(str(tmp_path / "rendezvous"),), nprocs=2)
