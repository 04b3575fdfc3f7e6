"""One unit in numbers: what a summary tells of it, and what the memory of a step is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_c.compat.upstream import BackwardPrefetch, ShardingStrategy
from fsdp_c.sharding.traversal import joined


@dataclass(frozen=True)
class UnitSummary:
    """One unit. Sizes in elements or bytes; those of shards are of one rank, and the same on all."""

    path: str  # from the summarised module, "" for that itself
    module: str  # the wrapped module's class
    names: tuple[str, ...]  # of its parameters, from the unit
    numel: int  # of its parameters
    padded_numel: int
    shard_numel: int
    dtype: torch.dtype | None  # of the shard; None for a unit without parameters, as the two below
    param_dtype: torch.dtype | None  # computes
    reduce_dtype: torch.dtype | None
    sharding_strategy: ShardingStrategy
    shards: int  # ranks that share the parameters
    replicas: int  # groups of such ranks; 1 unless the strategy is hybrid
    is_trainable: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    device_type: str  # of the device that computes
    parent: int | None  # which unit is around it, by its place in Summary.units
    offload_params: bool = False  # shards and gradients are in CPU memory
    backward_prefetch_limit: int = 1  # units prefetched; its root's count
    forward_prefetch_limit: int = 1
    # further names of its parameters, also in inner units: (further, name)
    tied: tuple[tuple[str, str], ...] = ()
    # a rank need not run it: it is gathered with the unit around it that is not optional
    is_optional: bool = False
    is_segment: bool = False  # one more flat parameter of the unit at ``parent``, of another dtype or frozen
    node_ranks: int | None = None  # within which its backward gathers: ``reshard_after_forward``

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of its parameters from the summarised module."""
        return tuple(joined(self.path, name) for name in self.names)

    @property
    def padding(self) -> int:
        """Padding elements, for alignment and for shards of equal size."""
        return self.padded_numel - self.numel

    @property
    def is_sharded(self) -> bool:
        """Whether a rank keeps a part only: not so under NO_SHARD."""
        return self.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def sharded_nbytes(self) -> int:
        """Bytes that a rank keeps all the time."""
        return _nbytes(self.shard_numel, self.dtype)

    @property
    def unsharded_nbytes(self) -> int:
        """What a rank has beside that while the unit computes: nothing, where parameters are whole."""
        moves = self.offload_params and self.device_type != "cpu"
        is_whole = not self.is_sharded and self.dtype == self.param_dtype and not moves
        return 0 if is_whole else _nbytes(self.padded_numel, self.param_dtype)

    @property
    def all_gather_nbytes(self) -> int:
        """Bytes that one all-gather fills."""
        return _nbytes(self.padded_numel, self.param_dtype) if self.is_sharded else 0

    @property
    def node_nbytes(self) -> int:
        """What a rank keeps from a forward for its backward, which gathers within the node."""
        return self.all_gather_nbytes // self.node_ranks if self.node_ranks else 0

    @property
    def reduce_scatter_nbytes(self) -> int:
        """Bytes of the gradients that go into its reduce-scatter."""
        return _nbytes(self.padded_numel, self.reduce_dtype) if self.is_sharded and self.is_trainable else 0

    @property
    def all_reduce_nbytes(self) -> int:
        """The gradients in its all-reduce: of the replicas of a shard, or of all under NO_SHARD."""
        ranks = self.replicas if self.is_sharded else self.replicas * self.shards
        return _nbytes(self.shard_numel, self.reduce_dtype) if ranks > 1 and self.is_trainable else 0


def _nbytes(numel: int, dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else numel * dtype.itemsize
