"""Within which ranks a backward gathers what a forward has gathered over all: ``reshard_after_forward``."""

from __future__ import annotations

import contextlib
import contextvars
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c.compat.errors import ranks_text
from fsdp_c.compat.upstream import ShardingStrategy
from fsdp_c.sharding.sharded_module import ShardedModule

RESHARDING_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
VARIABLE = "FSDP_C_RESHARD_AFTER_FORWARD"

_chosen: contextvars.ContextVar[int | DeviceMesh | None] = contextvars.ContextVar("_chosen", default=None)
_groups_by_size: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_groups_by_size = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def reshard_after_forward(ranks: int | DeviceMesh) -> Iterator[None]:
    """Units built in the body keep what a forward has gathered within a node, until their backward.

    After its forward each rank keeps a part of the unit's unsharded parameters, and the backward gathers
    these parts within the node instead of the shards over all ranks: less travels between nodes, by a third
    of a step's traffic, and each rank holds the unsharded parameters of its units, in the dtype that
    computes, divided by the ranks of a node, from forward to backward. Bits stay the same. (ZeRO++ calls this
    hpZ, FSDP2 ``reshard_after_forward=8``.)

    ``ranks``: how many ranks a node has, where those of a node follow each other; or the dimension of a
    DeviceMesh in which they are, as ``mesh["node"]``. With a number, the first step makes the groups, which
    is a collective of all ranks. FSDP_C_RESHARD_AFTER_FORWARD=8 in the environment does the same for
    unmodified scripts.

    Units whose strategy keeps parameters gathered, the outermost unit, optional units, and units that shard
    over one node alone are as ever. A parameter that is changed between a forward and its backward is seen by
    the next forward alone. Raises TypeError or ValueError for what is no number of ranks and no mesh of one
    dimension, as does wrapping where the ranks that share a unit do not fill nodes.
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
                f"reshard_after_forward takes a mesh of one dimension, that of a node, but got {ranks}: pass "
                "for "
                'instance mesh["node"]'
            )
        return ranks
    return _checked_number(ranks)


def _checked_number(ranks: int) -> int:
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(
            f"reshard_after_forward takes a number of ranks or a DeviceMesh, not {type(ranks).__name__} "
            f"{ranks!r}: pass as many as a node has"
        )
    if ranks < 2:
        raise ValueError(
            f"reshard_after_forward takes at least 2 ranks, not {ranks}: SHARD_GRAD_OP keeps a unit whole on "
            "each rank"
        )
    return ranks


def _wanted() -> int | DeviceMesh | None:
    """What ``reshard_after_forward`` or the environment says."""
    chosen, text = _chosen.get(), os.environ.get(VARIABLE, "")
    if chosen is not None or not text:
        return chosen
    if not text.isdecimal():
        raise ValueError(
            f"{VARIABLE} is {text!r}: set it to the number of ranks that a node has, or leave it out"
        )
    return _checked(int(text))


def node_group(shard_group: dist.ProcessGroup, strategy: ShardingStrategy) -> dist.ProcessGroup | None:
    """The ranks of ``shard_group`` within which a unit of this strategy is gathered for its backward.

    None where that is over all of them. Ranks that have no group yet get one by ``make_groups``.
    """
    wanted = _wanted()
    if wanted is None or strategy not in RESHARDING_STRATEGIES or shard_group.size() == wanted:
        return None
    if isinstance(wanted, DeviceMesh):
        group = wanted.get_group()
        ranks: Sequence[int] = dist.get_process_group_ranks(group)
    else:
        check_fills(shard_group.size(), wanted)
        ranks = _ranks_of_node(wanted)
        group = _groups_by_size.get(_world(), {}).get(wanted) or cast("dist.ProcessGroup", _Promised(ranks))
    check_fits(ranks, dist.get_process_group_ranks(shard_group))
    return group if group.size() < shard_group.size() else None


class _Promised:
    """Stands for the group of ``ranks``, which is made by a collective of all: some may not know of it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return self._ranks.index(dist.get_rank())

    def size(self) -> int:
        return len(self._ranks)


def make_groups(modules: Iterable[ShardedModule]) -> None:
    """Make the groups promised to these units, on whose plans all ranks agree. Collective over all ranks."""
    groups: list[tuple[ShardedModule, object]] = [(module, module._node_group) for module in modules]
    waiting = [(module, group.size()) for module, group in groups if isinstance(group, _Promised)]
    for module, ranks in waiting:
        group = _group_of_size(ranks)
        if module._handle is not None and not module._handle._use_fake_all_gather:
            module._handle.fake_all_gather(module.process_group, group)
    for module, ranks in waiting:
        module._whole._node_group = _group_of_size(ranks)


def planned_ranks(ranks: int | None, shards: int, strategy: ShardingStrategy) -> int | None:
    """How many ranks a unit over ``shards`` ranks would be gathered within. Raises as wrapping does."""
    if ranks is None or shards == _checked_number(ranks) or strategy not in RESHARDING_STRATEGIES:
        return None
    check_fills(shards, ranks)
    return ranks


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _ranks_of_node(count: int) -> Sequence[int]:
    """This rank's among the nodes of so many consecutive ranks."""
    check_fills(_world().size(), count)
    first = dist.get_rank() // count * count
    return range(first, first + count)


def _group_of_size(ranks: int) -> dist.ProcessGroup:
    """The group of this rank's node, made once."""
    groups = _groups_by_size.setdefault(_world(), {})
    if ranks not in groups:
        groups[ranks], _ = dist.new_subgroups(ranks)
    return groups[ranks]


def check_fills(count: int, ranks: int) -> None:
    """ValueError unless nodes of so many ranks can be made of ``count``."""
    if count % ranks:
        raise ValueError(
            f"reshard_after_forward: the {count} ranks that share a unit do not fill nodes of {ranks}: "
            "choose a number that divides them"
        )


def check_fits(node: Sequence[int], shard: Sequence[int]) -> None:
    """ValueError unless ``node`` is a part of ``shard``, as are others of its size."""
    if set(node) <= set(shard) and len(shard) % len(node) == 0:
        return
    raise ValueError(
        f"reshard_after_forward (rank {dist.get_rank()}): the node has {ranks_text(node)}, and a unit "
        f"is sharded over {ranks_text(shard)}. A node is a part of these, and they fill nodes of equal size: "
        "pass the dimension of a DeviceMesh in which the ranks of a node are that share parameters"
    )
