"""Units, sizes, collectives and memory of a wrapped model: ``fsdp_c.summary``, ``print(model)``, the log."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp_c import operator_kernels
from fsdp_c.compat.upstream import NO_RESHARD_AFTER_FORWARD_STRATEGIES, BackwardPrefetch, ShardingStrategy
from fsdp_c.sharding.optional import is_optional
from fsdp_c.sharding.sharded_module import Segment, ShardedModule, parts_of, units_with_paths
from fsdp_c.sharding.traversal import clean_name, clean_path, joined

logger = logging.getLogger("fsdp_c")


@dataclass(frozen=True)
class UnitSummary:
    """One flat parameter of a unit. Sizes are in elements or bytes; shard sizes are those of one rank."""

    path: str  # path from the summarized module, "" for that module itself
    module: str  # class of the wrapped module
    sharding_strategy: ShardingStrategy
    shards: int  # number of ranks that share the parameters
    replicas: int  # number of groups of such ranks; 1 unless the strategy is hybrid
    parent: int | None  # index in Summary.units of the enclosing unit
    is_segment: bool  # true for a further flat parameter of the unit at ``parent``
    is_optional: bool  # true if a rank need not run the unit
    is_trainable: bool
    # units unsharded at once, by prefetch and deferred frees, in (forward, backward)
    num_unsharded: tuple[int, int]
    names: tuple[str, ...] = ()  # parameters, relative to the unit
    tied: tuple[str, ...] = ()  # "further name = name" of shared parameters
    numel: int = 0
    padded_numel: int = 0  # NumelOut of the all-gather, NumelIn of the reduce-scatter
    shard_numel: int = 0  # NumelIn of the all-gather, NumelOut of the reduce-scatter
    # dtype of the shard; None for a unit without parameters, as the next two
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None  # dtype of computation
    reduce_dtype: torch.dtype | None = None
    sharded_nbytes: int = 0  # parameters that a rank always keeps
    unsharded_nbytes: int = 0  # additional bytes while the unit is unsharded
    all_gather_nbytes: int = 0  # output of one all-gather on each rank
    reduce_scatter_nbytes: int = 0  # input of the reduce-scatter on each rank: gradients
    all_reduce_nbytes: int = 0  # gradients in the all-reduce: over replicas, or all ranks under NO_SHARD


@dataclass(frozen=True)
class Summary:
    """The units of a model, outer ones before inner ones. ``str()`` and ``print()`` show a table."""

    units: tuple[UnitSummary, ...]
    owners: tuple[str, ...] = ()  # description of each rank's share, if the optimizer is WholeParameters

    @property
    def numel(self) -> int:
        """Number of elements of all parameters in units."""
        return sum(unit.numel for unit in self.units)

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of parameters that each rank keeps."""
        return sum(unit.sharded_nbytes for unit in self.units)

    @property
    def peak_unsharded_nbytes(self) -> int:
        """Estimate of the peak bytes of unsharded parameters on a rank in a training step.

        Counts roots, units whose strategy keeps parameters for the backward, the enclosing units of the
        running one, and prefetched units, assuming that units run in the order of modules. Accurate to a
        tenth where units follow each other; less exact for nested units.
        """
        wholes: list[int] = []  # index by unit of the unit with which it is unsharded
        sizes = [0] * len(self.units)
        for index, unit in enumerate(self.units):
            is_with_parent = unit.parent is not None and (unit.is_segment or unit.is_optional)
            wholes.append(wholes[unit.parent or 0] if is_with_parent else index)
            sizes[wholes[index]] += unit.unsharded_nbytes
        kept = {
            index
            for index, unit in enumerate(self.units)
            if unit.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
            or (unit.parent is None and unit.sharding_strategy is not ShardingStrategy.NO_SHARD)
        }
        forward = [index for index, whole in enumerate(wholes) if index == whole and sizes[index]]
        most = 0
        for direction, order in enumerate((forward, forward[::-1])):
            for place, index in enumerate(order):
                unit = self.units[index]
                held = {index, *order[place:][: unit.num_unsharded[direction]]}
                while unit.parent is not None:
                    held.add(wholes[unit.parent])
                    unit = self.units[unit.parent]
                most = max(most, sum(sizes[one] for one in held - kept))
        return most + sum(sizes[index] for index in kept)

    def __str__(self) -> str:
        # units whose paths differ only in numbers share a row
        counts = Counter((re.sub(r"\b\d+\b", "*", unit.path), *_cells(unit).values()) for unit in self.units)
        rows: list[tuple[str, ...]] = [("unit", *_cells(self.units[0]))]
        for (path, *cells), count in counts.items():
            rows.append((f"{path} (x{count})" if count > 1 else path or "(root)", *cells))
        names = [f"{label}: {held}" for label, *_, held in rows[1:]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row[:-1], widths)).rstrip() for row in rows]
        head = f"{len(self.units)} units and segments, {self.numel:,} parameters"
        owners = [f"optimizer: {owners}" for owners in self.owners]
        return "\n".join([head, "", *table, "", *names, "", _memory(self), *owners])


def summary(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Summary:
    """Return names, sizes, dtypes, collectives and memory of the units in ``module``, itself included.

    ``optimizer``: a ``fsdp_c.optim.WholeParameters``, to include the bytes and the work that each rank owns.
    Not collective, callable at any time. Raises TypeError if ``module`` is not a module, ValueError if it has
    no units.
    """
    found = units_with_paths(module)
    if not found:
        raise ValueError(f"{type(module).__name__} has no FullyShardedDataParallel in it: wrap it first.")
    places: dict[ShardedModule | None, int] = {one: index for index, (_, one) in enumerate(found)}
    roots: list[ShardedModule] = []
    units = []
    for path, fsdp_module in found:
        parent = places.get(fsdp_module._enclosing_unit)
        roots.append(fsdp_module if parent is None else roots[parent])
        units.append(_of_unit(fsdp_module, roots[-1], clean_path(path), parent, is_optional(module, path)))
    shares = getattr(optimizer, "shares", tuple)  # method of WholeParameters
    return Summary(tuple(units), tuple(shares()))


def _of_unit(
    fsdp_module: ShardedModule,
    root: ShardedModule,
    path: str = "",
    parent: int | None = None,
    is_optional: bool = False,
) -> UnitSummary:
    handle, replicate_group = fsdp_module._handle, fsdp_module._replicate_group
    limits, is_on_cpu = root._exec_order_data, fsdp_module.compute_device.type == "cpu"
    is_sharded = fsdp_module.sharding_strategy is not ShardingStrategy.NO_SHARD
    prefetches_first = fsdp_module.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    # forwards on a GPU reshard a unit only when the next one computes
    forward = 2 - is_on_cpu + (limits._forward_prefetch_limit if fsdp_module.forward_prefetch else 0)
    backward = limits._backward_prefetch_limit + prefetches_first if fsdp_module.backward_prefetch else 1
    unit = UnitSummary(
        path=path,
        module=type(fsdp_module.module).__name__,
        sharding_strategy=fsdp_module.sharding_strategy,
        shards=fsdp_module.world_size,
        replicas=1 if replicate_group is None else replicate_group.size(),
        parent=parent,
        is_segment=isinstance(fsdp_module, Segment),
        is_optional=is_optional,
        is_trainable=handle is not None and any(param.requires_grad for param in handle.script_params),
        num_unsharded=(forward, backward),
    )
    if handle is None:
        return unit
    layout, dtype, param_dtype = handle.layout, handle._orig_param_dtype, handle._fwd_bwd_param_dtype
    is_moved = bool(fsdp_module.cpu_offload.offload_params) and not is_on_cpu
    has_all_reduce = unit.replicas > 1 or (not is_sharded and unit.shards > 1)
    unsharded_nbytes = layout.padded_numel * param_dtype.itemsize
    reduce_itemsize = handle._reduce_dtype.itemsize * unit.is_trainable
    return replace(
        unit,
        names=tuple(map(clean_name, handle.flat_param._fqns)),
        tied=tuple(
            f"{clean_name(joined(info.module_name, info.param_name))} = "
            f"{clean_name(joined(info.prim_module_name, info.prim_param_name))}"
            for info in handle.flat_param._shared_param_infos
        ),
        numel=sum(layout.param_numels),
        padded_numel=layout.padded_numel,
        shard_numel=layout.shard_numel,
        dtype=dtype,
        param_dtype=param_dtype,
        reduce_dtype=handle._reduce_dtype,
        sharded_nbytes=layout.shard_numel * dtype.itemsize,
        unsharded_nbytes=unsharded_nbytes * (is_sharded or is_moved or dtype != param_dtype),
        all_gather_nbytes=unsharded_nbytes * is_sharded,
        reduce_scatter_nbytes=layout.padded_numel * reduce_itemsize * is_sharded,
        all_reduce_nbytes=layout.shard_numel * reduce_itemsize * has_all_reduce,
    )


def log_units(root: ShardedModule) -> None:
    """Log the units of a tree once, on its first rank, at level INFO (``TORCH_LOGS=fsdp_c``)."""
    replicas = root._replicate_group
    if root.rank == 0 and (replicas is None or replicas.rank() == 0):
        operator_kernels.warn_if_used(root.compute_device.type)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", summary(root))


# ---- text


def describe_unit(fsdp_module: ShardedModule, is_root: bool) -> str:
    """Return the lines of a unit in ``print(model)``, after torch's own."""
    units = [_of_unit(part, fsdp_module) for part in parts_of(fsdp_module) if part._handle is not None]
    lines = ["; ".join(f"{name} {cell}" for name, cell in _cells(unit).items()) for unit in units]
    if is_root and (whole := summary(fsdp_module)).numel:
        lines.append(_memory(whole))
    return "\n".join(lines)


def _memory(whole: Summary) -> str:
    return (
        f"per rank: {_size(whole.sharded_nbytes)} of parameters all the time, and about "
        f"{_size(whole.peak_unsharded_nbytes)} unsharded at the peak of a training step"
    )


def _cells(unit: UnitSummary) -> dict[str, str]:
    """Return the cells of a unit's row in the table, and the names of its parameters."""
    collectives = {
        "all-gather": unit.all_gather_nbytes,
        "reduce-scatter": unit.reduce_scatter_nbytes,
        "all-reduce": unit.all_reduce_nbytes,
    }
    is_frozen = bool(unit.numel) and not unit.is_trainable
    kinds = {"frozen": is_frozen, "segment": unit.is_segment, "optional": unit.is_optional}
    marks = [kind for kind, is_so in kinds.items() if is_so]
    replicas = f" x {unit.replicas}" if unit.replicas > 1 else ""
    dtypes = [str(it).removeprefix("torch.") for it in (unit.dtype, unit.param_dtype, unit.reduce_dtype)]
    sent = ", ".join(f"{name} {_size(size)}" for name, size in collectives.items() if size)
    return {
        "module": ", ".join([unit.module, *marks]),
        "strategy": f"{unit.sharding_strategy.name} over {unit.shards}{replicas}",
        "parameters": f"{unit.numel:,}",
        "padding": f"{unit.padded_numel - unit.numel:,}",
        "numel in / out": f"{unit.shard_numel:,} / {unit.padded_numel:,}",
        "dtype": ">".join(dtypes if len(set(dtypes)) > 1 else dtypes[:1]),
        "sharded": _size(unit.sharded_nbytes),
        "unsharded": _size(unit.unsharded_nbytes),
        "collectives": sent or "none",
        "holds": ", ".join((*unit.names, *unit.tied)) or "no parameters",
    }


def _size(nbytes: int) -> str:
    exponent = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    return f"{nbytes / 1024**exponent:.1f} {'KMGT'[exponent - 1]}iB" if exponent else f"{nbytes} B"
