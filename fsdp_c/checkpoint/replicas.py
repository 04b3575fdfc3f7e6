"""Parameters of one name over several process groups: replicas of each other, or an expert of each group.

Groups do not say which of the two. So ranks tell each other over which groups they hold what. A name is contested
if groups do not connect all ranks that have it: it is saved once only if its values are equal on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from fsdp_c.checkpoint.model_state import uncompiled_names
from fsdp_c.checkpoint.pieces import in_memory, memory
from fsdp_c.checkpoint.planning import Content, Held
from fsdp_c.sharding.common import managed_params
from fsdp_c.sharding.holders import Holders, Ranks
from fsdp_c.sharding.sharded_module import units_with_paths
from fsdp_c.sharding.traversal import clean_name, clean_path, joined

Groups = frozenset[Ranks]  # all with this rank in them


class HeldUnit(NamedTuple):
    """A unit that fewer ranks hold than save, as far as its groups say."""

    path: str
    groups: Groups
    names: tuple[str, ...]  # of its parameters, in the model


def units_of_some(model: nn.Module, count: int) -> list[HeldUnit]:
    """The units that fewer than ``count`` ranks hold. Ranks of tensor parallelism are in one group."""
    uncompiled = uncompiled_names(model)
    found = []
    for path, module in units_with_paths(model):
        if module._handle is not None and (holders := Holders.of(module)).size < count:
            names = (clean_name(joined(path, param.fqn)) for param in managed_params(module._handle))
            found.append(HeldUnit(clean_path(path), holders.groups, tuple(map(uncompiled, names))))
    return found


def contested(own: list[HeldUnit], told: Iterable[list[HeldUnit]]) -> dict[str, HeldUnit]:
    """The parameters of ``own`` units that ranks hold over unconnected groups. ``told``: the units of all ranks."""
    held: dict[str, set[Groups]] = {}
    for unit in (unit for units in told for unit in units):
        for name in unit.names:
            held.setdefault(name, set()).add(unit.groups)
    return {name: unit for unit in own for name in unit.names if not _are_connected(held[name])}


def _are_connected(held: Iterable[Groups]) -> bool:
    pools: list[set[int]] = []
    for groups in held:
        pool = {rank for ranks in groups for rank in ranks}
        pools = [pool.union(*(one for one in pools if one & pool)), *(one for one in pools if not one & pool)]
    return len(pools) == 1


def with_content(held: Held, boxes: Iterable[Tensor], unit: HeldUnit) -> Held:
    """``held`` with what tells its values from those of other groups."""
    crc32 = 0
    for box in boxes:
        crc32 = zlib.crc32(memory(in_memory(box)), crc32)
    return held._replace(content=Content(unit.path, tuple(sorted(frozenset().union(*unit.groups))), crc32))
