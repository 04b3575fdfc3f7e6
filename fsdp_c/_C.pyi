"""The typed contract of the C side: read it first.

Three owners nest: a ``FlatLayout`` (immutable integers) in a ``Handle`` (one flat parameter: storage and two enums) in a ``Unit``
(one FullyShardedDataParallel instance), and the units of one tree in a ``Runtime`` (one per root). Python checks arguments once,
names FQNs and holds context managers; every decision about sharding state is made here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Handle.param_state: what the storage holds
PARAM_SHARDED: int
PARAM_UNSHARDING: int
PARAM_UNSHARDED: int

# Handle.training_state and Unit.training_state: who is using it. The handle's five have the order of torch's HandleTrainingState
USE_IDLE: int
USE_FORWARD: int
USE_BACKWARD_PRE: int
USE_BACKWARD_POST: int
USE_SUMMON_FULL_PARAMS: int

# Handle.__init__(strategy=...) : the values of torch's ShardingStrategy
FULL_SHARD: int
SHARD_GRAD_OP: int
NO_SHARD: int
HYBRID_SHARD: int
HYBRID_SHARD_ZERO2: int

class FlatLayout:
    """Offsets, padding and shards of one flat parameter; element counts only. Immutable.

    ``FlatLayout(param_numels, aligned_numel, world_size, rank, sharded)``; ValueError for a negative size, alignment or rank.
    """

    def __init__(self, param_numels: Sequence[int], aligned_numel: int, world_size: int, rank: int, sharded: bool) -> None: ...
    num_params: int
    numel: int  # alignment and divisibility padding included, right padding not
    shard_numel: int
    padded_numel: int  # shard_numel * world_size
    shard_start: int
    shard_numel_valid: int
    shard_numel_padded: int  # right padding of this rank's shard
    world_size: int
    rank: int
    sharded: bool
    param_numels: tuple[int, ...]
    param_offsets: tuple[int, ...]
    numels_with_padding: tuple[int, ...]
    is_padding_mask: tuple[bool, ...]
    def shard_ranges(self, rank: int | None = None) -> tuple[tuple[bool, int, int, int], ...]:
        """Per parameter (in_shard, offset_in_shard, numel_in_shard, offset_in_param) for a rank, by default this one."""

class Handle:
    """One flat parameter, its sharded and unsharded storage, its views and gradients. Base of FlatParamHandle."""

    name: str  # writable: what errors call the unit
    flat_param: nn.Parameter
    layout: FlatLayout
    param_state: int
    training_state: int
    needs_unshard: bool
    unsharded_nbytes: int  # bytes of unsharded parameter storage alive now
    gradient_nbytes: int  # bytes of unsharded gradient storage alive now
    def summon_enter(self, writeback: bool) -> None:
        """IDLE -> SUMMON_FULL_PARAMS: take over the user's edits, gather in full precision, and put full-shape Parameters on
        the modules. Collective over the unit's group. RuntimeError when the handle is not IDLE."""
    def summon_exit(self) -> None:
        """Copy this rank's part back if ``writeback`` was asked for, restore the sharded views and the storage state of before."""
    def summon_hide(self) -> None:
        """Inside summon: free the full parameters and show sharded ones (ranks other than 0 under rank0_only)."""
    def summon_grads(self) -> None:
        """Inside summon: gather the gradients and put full-shape ones on the parameters. Collective. use_orig_params only."""
    def summon_grads_exit(self, writeback: bool) -> None: ...
    def point_params_at_shard(self) -> None:
        """``flat_param.data`` was replaced (``.to()``), and no Runtime is bound: make the original Parameters, and their
        gradients, parts of the new shard. use_orig_params only."""
    def sharded_grads(self) -> list[Tensor]:
        """Gradients of this rank's shard that clip_grad_norm_ counts: the flat gradient, or one per original parameter."""

class Unit:
    """One FullyShardedDataParallel instance: the entry points of the step."""

    def __init__(
        self,
        module: nn.Module,  # the FullyShardedDataParallel instance, which owns the unit; the first forward calls its _lazy_init()
        handle: Handle | None,
        *,
        name: str,
        param_dtype: torch.dtype | None,  # cast of floating inputs: the mixed precision's param_dtype
        cast_forward_inputs: bool,
        cast_root_forward_inputs: bool,
        backward_prefetch: int,  # 0 none, 1 BACKWARD_PRE, 2 BACKWARD_POST
        forward_prefetch: bool,
        limit_all_gathers: bool,
    ) -> None: ...
    handle: Handle | None
    runtime: Runtime | None
    is_root: bool | None  # None before lazy init
    training_state: int  # USE_IDLE, USE_FORWARD (= FORWARD_BACKWARD) or USE_SUMMON_FULL_PARAMS
    sync_gradients: bool  # writable: no_sync() sets it
    def forward(self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Root pre-forward, pre-forward, ``wrapped(*args, **kwargs)``, post-forward. An exception resets the unit and propagates."""

class Runtime:
    """One root and its units, in traversal order, the root first: execution order, prefetch, final callback."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Bind the units: units[0] becomes the root, every handle gets its lazy attributes."""
    units: tuple[Unit, ...]
    iteration: int
    def final_callback(self) -> None:
        """End of backward: wait for reductions, reshard what is left, hand the gradients over. Legal at any time on a root."""
    def release(self) -> None:
        """Unbind the units, as before lazy init. Only while everything is IDLE and sharded."""
    def reset_grad_info(self) -> None: ...

def live_unsharded_nbytes() -> int:
    """Bytes of unsharded parameter storage alive in this process, over all handles."""

def peak_unsharded_nbytes(reset: bool = False) -> int:
    """The highest value of live_unsharded_nbytes since the last reset."""
