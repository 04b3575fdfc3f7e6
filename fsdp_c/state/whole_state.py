"""Optimizer state whose shape differs from its parameter's: stored unsharded on the owner rank.

[Note: Whole state]
Adafactor's rows and columns, and Shampoo's and SOAP's factors, cannot be sharded like parameters.
``WholeParameters`` holds, saves and loads them as tensors on one rank, and on the meta device on the others,
so that all ranks know the structure; 0-d tensors are on all ranks. A full state dict has them everywhere, a
sharded one as ShardedTensors with all elements in one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_c.sharding.process_groups import all_gather_objects
from fsdp_c.state.redistribution import gather, rank_partition, redistribute


class WholeState:
    """Tensor, or nested containers of tensors, on rank ``holder`` of the default group; None for all ranks.

    Not iterable, because ``Optimizer.load_state_dict`` would cast its elements.
    """

    def __init__(self, value: Any, holder: int | None) -> None:
        self.value, self.holder = value, holder

    def __eq__(self, other: object) -> bool:
        """Return True for the same structure, shapes and dtypes."""
        return isinstance(other, WholeState) and self._form() == other._form()

    def _form(self) -> object:
        return pytree.tree_map_only(Tensor, lambda one: (tuple(one.shape), one.dtype), self.value)

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in pytree.tree_leaves(self.value) if isinstance(one, Tensor) and one.dim()]

    @property
    def is_here(self) -> bool:
        return not any(one.is_meta for one in self.tensors)

    def mapped(self, function: Callable[[Tensor], Any]) -> WholeState:
        """Return a copy with ``function`` applied to tensors. 0-d tensors are copied to the CPU, as in other state."""

        def of(tensor: Tensor) -> Any:
            is_number = not isinstance(tensor, ShardedTensor) and tensor.dim() == 0
            return tensor.detach().to("cpu", copy=True) if is_number else function(tensor)

        return WholeState(pytree.tree_map_only(Tensor, of, self.value), self.holder)

    def described(self) -> WholeState:
        return self.mapped(lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))

    def own(self, device: torch.device) -> Any:
        """Return a copy for an optimizer."""
        return pytree.tree_map_only(Tensor, lambda one: one.detach().to(device, copy=True), self.value)


torch.serialization.add_safe_globals([WholeState])


def has_tensors(value: object, *kinds: type) -> bool:
    """Return True if a list, tuple or dict contains tensors, or objects of ``kinds``."""
    if isinstance(value, Tensor):
        return False
    return any(isinstance(one, (Tensor, *kinds)) for one in pytree.tree_leaves(value))


# ----------------------------------------------------------------- saving


def full_values(
    states: Sequence[WholeState],
    group: dist.ProcessGroup | None,
    device: torch.device,
    rank0_only: bool,
    offloads: bool,
) -> Iterator[Any]:
    """Yield each value with all of its tensors; with ``rank0_only`` on rank 0. Collective."""
    group = group or dist.distributed_c10d._get_default_group()
    places = [(one, _rank_in(group, state)) for state in states for one in state.tensors]
    made = gather(
        (_flat(one, device) for one, _ in places),
        [rank_partition(one.numel(), rank) for one, rank in places],
        group,
        device=device,
        shapes=[one.shape for one, _ in places],
        rank0_only=rank0_only,
    )
    offloaded = (one.cpu() if offloads and one is not None else one for one in made)
    for state in states:
        yield state.mapped(lambda _: next(offloaded)).value


def sharded_value(state: WholeState, group: dist.ProcessGroup | None, offloads: bool) -> Any:
    """Return each tensor as a ShardedTensor with one shard, on the rank that has it.

    Other ranks have a shard without rows: DCP drops tensors without a local shard, and mistakes the result
    for a checkpoint of an old version.
    """

    def sharded(tensor: Tensor) -> ShardedTensor:
        rows, *columns = tensor.shape
        zeros = [0] * len(columns)
        if tensor.is_meta:
            local = torch.empty(0, *columns, dtype=tensor.dtype, device="cpu")
            own = ShardMetadata([rows, *zeros], [0, *columns], f"rank:{dist.get_rank()}/cpu")
            places = [ShardMetadata([0, *zeros], [rows, *columns], f"rank:{state.holder}/cpu"), own]
        else:
            local = tensor.detach().to("cpu" if offloads else tensor.device, copy=True).contiguous()
            own = ShardMetadata([0, *zeros], [rows, *columns], f"rank:{state.holder}/{local.device}")
            places = [own]
        metadata = ShardedTensorMetadata(places, tensor.shape, TensorProperties(tensor.dtype))
        return ShardedTensor._init_from_local_shards_and_global_metadata([Shard(local, own)], metadata, group)

    return state.mapped(sharded).value


def _rank_in(group: dist.ProcessGroup, state: WholeState) -> int:
    assert state.holder is not None
    return dist.get_group_rank(group, state.holder)


def _flat(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.reshape(-1)


# ----------------------------------------------------------------- loading


def loaded_state(value: Any) -> WholeState:
    """Return loaded state: full tensors on every rank, or those of one rank."""
    sharded = [one for one in pytree.tree_leaves(value) if isinstance(one, ShardedTensor)]
    place = sharded[0].metadata().shards_metadata[0].placement if sharded else None
    return WholeState(value, place.rank() if place else None).mapped(_local)


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not isinstance(tensor, ShardedTensor):
        return tensor
    (shard,), shape = tensor.local_shards(), tensor.metadata().size
    if shard.tensor.shape == shape:
        return shard.tensor
    return torch.empty(shape, dtype=shard.tensor.dtype, device="meta")


def moved_to_owners(
    states: dict[tuple[str, str], WholeState],
    owned: frozenset[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[tuple[str, str], WholeState]:
    """Return the states held by one rank, moved to their owners, by (FQN, state name). Collective if there are any.

    ``owned``: FQNs of the parameters of this rank.
    """
    states = {key: state for key, state in states.items() if state.holder is not None}
    if not states:
        return {}
    group = group or dist.distributed_c10d._get_default_group()
    owned_by_rank = all_gather_objects(owned & {fqn for fqn, _ in states}, group)
    owners = {fqn: rank for rank, one in enumerate(owned_by_rank) for fqn in one}
    places = [
        (one, _rank_in(group, state), owners[fqn])
        for (fqn, _), state in states.items()
        for one in state.tensors
    ]
    made = redistribute(
        (_flat(one, device) for one, _, _ in places),
        [rank_partition(one.numel(), holder) for one, holder, _ in places],
        [rank_partition(one.numel(), owner) for one, _, owner in places],
        group,
        device=device,
        shapes=[one.shape if owner == group.rank() else (0,) for one, _, owner in places],
    )
    moved = {}
    for (fqn, name), state in states.items():
        taken = state.mapped(lambda _: next(made))
        is_own = owners[fqn] == group.rank()
        holder = dist.get_global_rank(group, owners[fqn])
        moved[fqn, name] = WholeState(taken.value if is_own else state.described().value, holder)
    return moved
