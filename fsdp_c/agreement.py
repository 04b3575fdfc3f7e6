"""Whether all ranks wrap the same model: compared once, before the first collective of a tree of units (parity 21).

Each rank hashes what its units will gather; 16 bytes of each rank go over the root's groups. Only where they differ are
the plans themselves exchanged, and every rank raises the same error, which names the first difference.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from fsdp_c.traversal import clean_path

DIGEST_NBYTES = 16


class UnitPlan(NamedTuple):
    """What must be the same for one unit on all ranks of its group."""

    module: str
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    sharding_strategy: str
    padded_numel: int
    mixed_precision: str
    use_orig_params: bool

    def entries(self) -> Iterator[tuple[str, Any]]:
        """One by one, in the order in which differences are looked for; the names before what they have."""
        yield "module", self.module
        yield "use_orig_params", self.use_orig_params
        yield "sharding_strategy", self.sharding_strategy
        for index, name in enumerate(self.parameters):
            yield f"parameter {index}", name
        for name, shape in zip(self.parameters, self.shapes, strict=True):
            yield f"shape of {name}", shape
        yield "dtype", self.dtype
        yield "mixed_precision", self.mixed_precision
        yield "padded number of elements", self.padded_numel


class RankPlan(NamedTuple):
    """The plan of one rank, or why it has none."""

    rank: int
    error: str | None
    units: list[UnitPlan]


def agree(root: Any, units: Sequence[tuple[str, Any]], error: Exception | None) -> None:
    """Raise unless all ranks of the root's groups have the same ``units``, given with their paths from the root.

    Collective over those groups, unless this rank's plan is the one agreed on before. ``error`` is what this rank found
    by itself: it is raised here, so that the other ranks hear of it instead of waiting. Units with groups of their own
    may differ. RuntimeError on every rank, naming the first difference and which ranks have what.
    """
    plan = [] if error is not None else [_unit_plan(path, unit) for path, unit in units if _shares_groups(unit, root)]
    digest = digest_of(repr((plan, str(error))).encode())
    groups = [group for group in (root.process_group, _replicate_group(root)) if group is not None and group.size() > 1]
    try:
        compares = digest != root._agreed_plan and detect_fake_mode() is None  # fake ranks have nothing to say
        if compares and not _all_equal(digest, groups, root.compute_device):
            everyone = _exchange(RankPlan(dist.get_rank(), error and str(error), plan), groups)
            raise RuntimeError(difference(everyone))
    finally:
        if error is not None:
            raise error from None  # also where the device is what is wrong, and nothing can be sent
    root._agreed_plan = digest


def _unit_plan(path: str, unit: Any) -> UnitPlan:
    handle = unit._handle
    flat_param = handle.flat_param
    return UnitPlan(
        clean_path(path),
        tuple(flat_param._fqns),
        tuple(map(tuple, flat_param._shapes)),
        str(flat_param.dtype),
        unit.sharding_strategy.name,
        handle.layout.padded_numel,
        f"param_dtype {handle._fwd_bwd_param_dtype}, reduce_dtype {handle._reduce_dtype}",
        unit._use_orig_params,
    )


def _replicate_group(unit: Any) -> dist.ProcessGroup | None:
    return vars(unit).get("_inter_node_pg")


def _shares_groups(unit: Any, root: Any) -> bool:
    """Units over part of the ranks, experts for instance, are other units elsewhere."""
    same = unit.process_group is root.process_group and _replicate_group(unit) is _replicate_group(root)
    return same and unit._handle is not None


def digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_NBYTES).digest()


def _all_equal(digest: bytes, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Over several groups each step passes on what it saw, so that all ranks come to the same answer."""
    equal = True
    for group in groups:
        everyone = _gather(digest, group, device)
        if everyone[group.rank()] != digest:
            continue  # this group sends nothing: a dry run
        equal = equal and len(set(everyone)) == 1
        digest = digest_of(b"".join(everyone))
    return equal


def _gather(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    # The group's own method: what stands under the name in torch.distributed is watched for parameters.
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    everyone = torch.zeros(group.size() * DIGEST_NBYTES, dtype=torch.uint8, device=device)
    work = group._allgather_base(everyone, own)
    if work is not None:
        work.wait()
    data = bytes(everyone.tolist())
    return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]


def _exchange(plan: RankPlan, groups: Sequence[dist.ProcessGroup]) -> list[RankPlan]:
    known = [plan]
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, known, group=group)
        known = [one for part in gathered for one in part]
    return sorted(known)


# ----------------------------------------------------------------- the difference


def difference(plans: Sequence[RankPlan]) -> str:
    """What to tell the user about plans that are not all equal."""
    failed = [f"rank {plan.rank}: {plan.error}" for plan in plans if plan.error is not None]
    if failed:
        return "other ranks cannot initialise their units, so that this one cannot either:\n" + "\n".join(failed)
    for index in range(max(len(plan.units) for plan in plans)):
        found = _unit_difference(index, plans)
        if found is not None:
            field, values = found
            held = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            return (
                f"ranks wrap different models. The first difference is in unit {index}, {_name(index, plans)}: {field} "
                f"is {held}. Build the same model with the same arguments on every rank."
            )
    return "ranks wrap different models"


def _unit_difference(index: int, plans: Sequence[RankPlan]) -> tuple[str, dict[str, list[int]]] | None:
    """The first field in which the units at ``index`` differ, and which ranks have which value."""
    entries = {plan.rank: dict(plan.units[index].entries()) if index < len(plan.units) else {} for plan in plans}
    fields = max(entries.values(), key=len)
    for field in fields:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, own in entries.items():
            values[repr(own[field]) if field in own else "none"].append(rank)
        if len(values) > 1:
            return field, values
    return None


def _name(index: int, plans: Sequence[RankPlan]) -> str:
    module = next(plan.units[index].module for plan in plans if index < len(plan.units))
    return f"the module {module!r}" if module else "the root"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
