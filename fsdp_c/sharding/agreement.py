"""Comparison of the model that each rank wraps, once per tree, before its first collective.

Each rank hashes the plan of its units and all-gathers the 16-byte digest over the root's groups. If digests
differ, the ranks exchange their full plans, and each rank raises the same error with the first difference.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding.optional import is_optional
from fsdp_c.sharding.process_groups import all_gather_objects, global_rank, multi_rank_groups
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.sharding.traversal import clean_path

T = TypeVar("T")
DIGEST_NBYTES = 16


class UnitPlan(NamedTuple):
    """One unit's plan: ``needs`` must match on all ranks of its group; names need not.

    Names may differ between ranks that ignore different modules.
    """

    module: str
    parameters: tuple[str, ...]
    needs: dict[str, object]  # compared in this order

    def shown(self, field: str) -> str:
        """Return the value of ``field`` in ``needs`` for the error; a parameter is shown with its name."""
        value = self.needs.get(field)
        if field.startswith("parameter ") and value is not None:
            return f"{self.parameters[int(field.split()[1])]!r} of shape {value}"
        return "none" if value is None else repr(value)


class RankPlan(NamedTuple):
    """The plan of one rank, or the error that prevented it."""

    rank: int
    error: str | None
    units: list[UnitPlan]


def values_if_different(
    mine: T, compared: object, groups: Iterable[dist.ProcessGroup | None], device: torch.device
) -> list[T]:
    """Return every rank's ``mine`` if ``repr(compared)`` differs between ranks of ``groups``, else an empty list.

    Collective over ``groups``, one after another. Values are sent only if digests differ. With one group the
    result is in rank order. With several, each group forwards the result of the previous one, so that all
    ranks return the same decision.
    """
    groups, digest, is_same = multi_rank_groups(*groups), digest_of(compared), True
    for group in groups:
        everyone = _gather(digest, group, device)
        if everyone[group.rank()] == digest:  # False for a fake group, which transfers nothing
            is_same = is_same and len(set(everyone)) == 1
            digest = digest_of(everyone)
    known = [] if is_same else [mine]
    for group in groups if known else ():
        known = [one for part in all_gather_objects(known, group) for one in part]
    return known


def agree(root: ShardedModule, modules: Sequence[tuple[str, ShardedModule]], error: Exception | None) -> None:
    """Raise unless ``modules`` (paths are relative to the root) match on all ranks of the root's groups.

    Collective over the root's groups; skipped if this rank's plan was agreed on before. ``error`` is the
    local failure of this rank, if any: ``agree`` reports it to the other ranks before raising, so that they
    do not wait. Units with other process groups may differ.

    Raises RuntimeError on every rank, with the first difference and its ranks.
    """
    groups = (root.process_group, root._replicate_group)
    plan = [
        _unit_plan(path, module, is_optional(root, path))
        for path, module in modules
        if error is None
        and module._handle is not None
        and (module.process_group, module._replicate_group) == groups
    ]
    compared = digest_of(([one.needs for one in plan], str(error)))
    try:
        if compared != root._agreed_plan and detect_fake_mode() is None:  # fake ranks do not communicate
            own = RankPlan(global_rank(), None if error is None else str(error), plan)
            if plans := values_if_different(own, compared, groups, root.compute_device):
                raise RuntimeError(difference(plans))
    finally:
        if error is not None:
            raise error from None  # raised even if the exchange itself fails, e.g. on a wrong device
    root._agreed_plan = compared


def agree_to_sync(name: str, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Raise RuntimeError unless all ranks of ``groups`` wrap unit ``name`` with sync_module_states=True.

    Collective. Ranks without sync_module_states take part only at their first step, through ``agree``: its
    digest has the same size, so the two collectives match.
    """
    failure = (
        f"unit {name} is wrapped with sync_module_states=True here, but not on all ranks, so the "
        "broadcast of its values would hang. Pass the same value on every rank."
    )
    own = RankPlan(global_rank(), failure, [])
    if detect_fake_mode() is None and (
        plans := values_if_different(own, "sync_module_states", groups, device)
    ):
        raise RuntimeError(difference(plans))


def _unit_plan(path: str, module: ShardedModule, optional: bool) -> UnitPlan:
    handle = handle_of(module)
    flat_param = handle.flat_param
    needs = {
        "use_orig_params": module._use_orig_params,
        "sharding_strategy": module.sharding_strategy.name,
        **{f"parameter {index}": tuple(shape) for index, shape in enumerate(flat_param._shapes)},
        "dtype": str(flat_param.dtype),
        "mixed_precision": f"param_dtype {handle._fwd_bwd_param_dtype}, reduce_dtype {handle._reduce_dtype}",
        "padded number of elements": handle.layout.padded_numel,
        "optional": optional,
    }
    return UnitPlan(clean_path(path), tuple(flat_param._fqns), needs)


def digest_of(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=DIGEST_NBYTES).digest()


def _gather(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    # Call the group's own method: users may monkey-patch torch.distributed's.
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    everyone = torch.zeros(group.size() * DIGEST_NBYTES, dtype=torch.uint8, device=device)
    all_gather = getattr(group, "all_gather_single", None) or getattr(group, "_allgather_base", None)
    if all_gather is None:
        raise TypeError(
            f"rank {group.rank()}: its process group {group!r} cannot all-gather: it has no "
            "_allgather_base(). Pass a torch.distributed.ProcessGroup, or one of its backends"
        )
    with _disable_current_modes():  # CommDebugMode counts the collectives of the step alone, as with torch
        work = all_gather(everyone, own)
    if work is not None:
        work.wait()
    data = bytes(everyone.tolist())
    return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]


# ----------------------------------------------------------------- error message


def difference(plans: Sequence[RankPlan]) -> str:
    """Return the error message for plans that differ."""
    plans = sorted(plans)
    failed = [f"rank {plan.rank}: {plan.error}" for plan in plans if plan.error is not None]
    if failed:
        lines = "\n".join(failed)
        return f"this rank cannot initialise its units, because other ranks cannot:\n{lines}"
    for index in range(max(len(plan.units) for plan in plans)):
        units = {plan.rank: plan.units[index] for plan in plans if index < len(plan.units)}
        if len(units) < len(plans):
            field: str | None = "module"
            values = {plan.rank: "none" for plan in plans}
            values |= {rank: repr(unit.module) for rank, unit in units.items()}
        else:
            needs = [unit.needs for unit in units.values()]
            differing = (one for one in max(needs, key=len) if len({own.get(one) for own in needs}) > 1)
            if (field := next(differing, None)) is None:
                continue
            values = {rank: unit.shown(field) for rank, unit in units.items()}
        names = {
            rank: f"the module {unit.module!r}" if unit.module else "the root" for rank, unit in units.items()
        }
        where = set(names.values()).pop() if len(set(names.values())) == 1 else _on_ranks(names, ", ")
        return (
            f"ranks wrap different models. The first difference is in unit {index}, {where}: {field} is "
            f"{_on_ranks(values, '; ')}. Build the same model with the same arguments on every rank."
        )
    return "ranks wrap different models"


def _on_ranks(values: dict[int, str], separator: str) -> str:
    """Format the values, each with the ranks that have it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return separator.join(f"{value} on {ranks_text(own)}" for value, own in ranks.items())
