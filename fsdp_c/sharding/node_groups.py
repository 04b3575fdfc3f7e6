"""Within which ranks a backward gathers what a forward has gathered over all: ``reshard_after_forward``."""

from __future__ import annotations

import contextlib
import contextvars
import os
import weakref
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c.compat.upstream import ShardingStrategy

RESHARDING_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
VARIABLE = "FSDP_C_RESHARD_AFTER_FORWARD"

_chosen: contextvars.ContextVar[int | DeviceMesh | None] = contextvars.ContextVar("_chosen", default=None)
_groups_by_size: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_groups_by_size = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def reshard_after_forward(ranks: int | DeviceMesh) -> Iterator[None]:
    """Units built in the body keep what a forward has gathered between the ranks of a node, until their backward.

    After its forward each rank keeps a part of the unit's unsharded parameters, and the backward gathers these parts
    within the node instead of the shards over all ranks: less travels between nodes, by a third of a step's traffic,
    and each rank holds the unsharded parameters of its units, in the dtype that computes, divided by the ranks of a
    node, from forward to backward. Bits stay the same. (ZeRO++ calls this hpZ, FSDP2 ``reshard_after_forward=8``.)

    ``ranks``: how many ranks a node has, where those of a node follow each other; or the dimension of a DeviceMesh in
    which they are, as ``mesh["node"]``. With a number, the first unit makes the groups, which is a collective of all
    ranks. FSDP_C_RESHARD_AFTER_FORWARD=8 in the environment does the same for unmodified scripts.

    Units whose strategy keeps parameters gathered, the outermost unit, optional units, and units that shard over one
    node alone are as ever. A parameter that is changed between a forward and its backward is seen by the next forward
    alone. Raises TypeError or ValueError for what is no number of ranks and no mesh of one dimension, as does wrapping
    where the ranks that share a unit do not fill nodes.
    """
    token = _chosen.set(_checked(ranks))
    try:
        yield
    finally:
        _chosen.reset(token)


def _checked(ranks: int | DeviceMesh) -> int | DeviceMesh:
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ValueError(
                f"reshard_after_forward takes a mesh of one dimension, that of a node, but got {ranks}: pass for "
                'instance mesh["node"]'
            )
        return ranks
    return _checked_number(ranks)


def _checked_number(ranks: int) -> int:
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(
            f"reshard_after_forward takes a number of ranks or a DeviceMesh, not {type(ranks).__name__} {ranks!r}: "
            "pass as many as a node has"
        )
    if ranks < 2:
        raise ValueError(
            f"reshard_after_forward takes at least 2 ranks, not {ranks}: SHARD_GRAD_OP keeps a unit whole on each rank"
        )
    return ranks


def _wanted() -> int | DeviceMesh | None:
    """What ``reshard_after_forward`` or the environment says."""
    chosen, text = _chosen.get(), os.environ.get(VARIABLE, "")
    if chosen is not None or not text:
        return chosen
    if not text.isdecimal():
        raise ValueError(f"{VARIABLE} is {text!r}: set it to the number of ranks that a node has, or leave it out")
    return _checked(int(text))


def node_group(shard_group: dist.ProcessGroup, strategy: ShardingStrategy) -> dist.ProcessGroup | None:
    """The ranks of ``shard_group`` within which a unit of this strategy is gathered for its backward.

    None where that is over all of them. Collective where it makes groups.
    """
    wanted = _wanted()
    if wanted is None or strategy not in RESHARDING_STRATEGIES or shard_group.size() == wanted:
        return None
    if isinstance(wanted, DeviceMesh):
        group = wanted.get_group()
    else:
        check_fills(shard_group.size(), wanted)
        group = _group_of_size(wanted)
    check_fits(dist.get_process_group_ranks(group), dist.get_process_group_ranks(shard_group))
    return group if group.size() < shard_group.size() else None


def planned_ranks(ranks: int | None, shards: int, strategy: ShardingStrategy) -> int | None:
    """How many ranks a unit over ``shards`` ranks would be gathered within. Raises as wrapping does."""
    if ranks is None or shards == _checked_number(ranks) or strategy not in RESHARDING_STRATEGIES:
        return None
    check_fills(shards, ranks)
    return ranks


def _group_of_size(ranks: int) -> dist.ProcessGroup:
    """This rank's among the nodes of so many consecutive ranks, made once."""
    world = dist.group.WORLD
    assert world is not None
    groups = _groups_by_size.setdefault(world, {})
    if ranks not in groups:
        check_fills(world.size(), ranks)
        groups[ranks], _ = dist.new_subgroups(ranks)
    return groups[ranks]


def check_fills(count: int, ranks: int) -> None:
    """ValueError unless nodes of so many ranks can be made of ``count``."""
    if count % ranks:
        raise ValueError(
            f"reshard_after_forward: the {count} ranks that share a unit do not fill nodes of {ranks}: choose "
            "a number that divides them"
        )


def check_fits(node: Sequence[int], shard: Sequence[int]) -> None:
    """ValueError unless ``node`` is a part of ``shard``, as are others of its size."""
    if set(node) <= set(shard) and len(shard) % len(node) == 0:
        return
    raise ValueError(
        f"reshard_after_forward (rank {dist.get_rank()}): the node has the ranks {_listed(node)}, and a unit is "
        f"sharded over {_listed(shard)}. A node is a part of these, and they fill nodes of equal size: pass the "
        "dimension of a DeviceMesh in which the ranks of a node are that share parameters"
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = list(map(str, ranks))
    return ", ".join(shown if len(shown) <= 16 else [*shown[:15], "...", shown[-1]])
