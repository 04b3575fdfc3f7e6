"""The ranks that hold a model, derived from the process groups and meshes of its units."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from fsdp_c.compat.errors import first_names, ranks_text
from fsdp_c.sharding.process_groups import all_gather_objects, multi_rank_groups
from fsdp_c.sharding.sharded_module import ShardedModule, units_of, units_with_paths
from fsdp_c.sharding.traversal import clean_path

Ranks = tuple[int, ...]  # ranks of the default group
# groups made here, alive as long as the shard group
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Ranks, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Holders(NamedTuple):
    """The process groups of a unit. ``mesh_ranks``: ranks of the whole mesh if the shard group is a slice."""

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    mesh_ranks: Ranks

    @classmethod
    def of(cls, module: ShardedModule) -> Holders:
        mesh_ranks: Ranks = ()
        if module._fsdp_extension is not None and module._device_mesh is not None:
            mesh_ranks = tuple(module._device_mesh._get_root_mesh().mesh.flatten().tolist())
        return cls(module.process_group, module._replicate_group, mesh_ranks)

    @property
    def size(self) -> int:
        return len(self.mesh_ranks) or holder_count(self.shard, self.replicate)

    @property
    def groups(self) -> frozenset[Ranks]:
        """This rank's groups, each as a tuple of ranks."""
        groups = map(ranks_of, multi_rank_groups(self.shard, self.replicate))
        return frozenset({*groups, self.mesh_ranks, (dist.get_rank(),)} - {()})


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))


def holder_count(shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None) -> int:
    """Return the number of ranks that hold shards of a unit or replicas of them."""
    return shard.size() * (1 if replicate is None else replicate.size())


def group_of_model(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold ``model``, a default for collective calls; None for all ranks.

    None is also returned if no unit spans all ranks of the other units. The first call is collective over the
    holders of a unit with several groups or a slice of a mesh, unless these are all ranks.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    found = dict.fromkeys(map(Holders.of, units_of(model)))
    if not found:
        return None
    largest = max(found, key=lambda each: each.size)
    if largest.size >= world_size:
        return None
    shards = [ranks_of(largest.shard)]
    if largest.replicate is not None:
        shards = all_gather_objects(shards[0], largest.replicate)
    ranks = largest.mesh_ranks or tuple(sorted({rank for shard in shards for rank in shard}))
    groups = (group for each in found for group in (each.shard, each.replicate) if group is not None)
    if any(not {*ranks_of(group)} <= {*ranks} for group in groups):
        return None
    if len(ranks) == largest.shard.size():
        return largest.shard
    made = _made.setdefault(largest.shard, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[ranks]


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_partial_units(model: nn.Module, units: Sequence[ShardedModule]) -> None:
    """Warn once if fewer ranks hold some units than others: state dicts have this rank's values only."""
    counts = [holder_count(module.process_group, module._replicate_group) for module in units]
    if len(set(counts)) < 2 or model in _warned:
        return
    _warned.add(model)
    few = [module for module, count in zip(units, counts, strict=True) if count < max(counts)]
    paths = [clean_path(path) for path, module in units_with_paths(model) if module in few]
    warnings.warn(
        f"rank {dist.get_rank()}: {ranks_text(ranks_of(few[0].process_group))} hold unit "
        f"{paths[0]!r}, and more ranks the model around it (such units: {first_names(paths)}). A "
        "state dict has only the parameters of its own rank. If other ranks hold different ones, "
        "such as experts: save the full state dict of a rank of each group, and before "
        "torch.distributed.checkpoint saves sharded ones, give the modules different names.",
        stacklevel=2,
    )
