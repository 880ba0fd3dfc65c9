"""The collective hops: the only module that talks to torch.distributed.

With one rank every hop is the identity: the shard is the whole, and nothing is copied.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# Newer releases of torch have other names for the same two collectives.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Communicator:
    """The ranks that share each unit.

    Without an initialised process group there is one rank. A launcher (torchrun) makes the group;
    this class only uses it.
    """

    def __init__(self) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if grouped else 0
        self.size: int = dist.get_world_size() if grouped else 1

    def all_gather(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Put all ranks' shards together.

        Args:
            shard: shape (numel / size,).
            whole: shape (numel,), same dtype and device; receives them in the order of the ranks.

        Returns:
            ``whole``; with one rank ``shard`` itself, and ``whole`` is not touched.
        """
        if self.size == 1:
            return shard
        _ALL_GATHER(whole, shard)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Average all ranks' buffers and keep the own part.

        Args:
            whole: shape (numel,). Its contents are undefined afterwards.
            shard: shape (numel / size,), same dtype and device; receives the mean.

        Returns:
            ``shard``; with one rank ``whole`` itself, and ``shard`` is not touched.
        """
        if self.size == 1:
            return whole
        _REDUCE_SCATTER(shard, whole.div_(self.size))
        return shard
