"""What wrapping makes of a model, or would: units, sizes, collectives, memory (``summary``, ``plan``)."""

from __future__ import annotations

import functools
import logging
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fsdp_c import _C
from fsdp_c.compat.aliases import Kwargs
from fsdp_c.compat.errors import first_names
from fsdp_c.compat.upstream import (
    HYBRID_SHARDING_STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fsdp_c.sharding import construction, node_groups, tensor_parallel
from fsdp_c.sharding.buffers import LOWERED, lowered_frequencies
from fsdp_c.sharding.flat_param import (
    Occurrences,
    SharedParamInfo,
    aligned_numel,
    check_uniform,
)
from fsdp_c.sharding.grouping import groups_of, precision_for
from fsdp_c.sharding.optional import OptionalPaths
from fsdp_c.sharding.sharded_module import PrefetchLimits, ShardedModule, parts_of, units_with_paths
from fsdp_c.sharding.traversal import Homes, Subtree, check_module, clean_name, clean_path, joined
from fsdp_c.sharding.wrap import Policy, chosen_modules, homes_of_shared_params
from fsdp_c.tools import host_bound, step_memory
from fsdp_c.tools.unit_summary import UnitSummary

__all__ = ["Summary", "UnitSummary", "plan", "summary"]

_LOW_DTYPES = (torch.bfloat16, torch.float16)
SMALL_NUMEL = 2**25  # about where an all-gather comes to its full bandwidth
LONG_NBYTES = 2**26  # a millisecond and more for a GPU that has 400 Gbit/s
TEXT_WIDTH = 120
MAX_NAMES = 4  # in the one line that print(model) has for a unit

logger = logging.getLogger("fsdp_c")


@dataclass(frozen=True)
class Summary:
    """The units of a model, an outer one before its inner ones. ``str()`` and ``print()`` show a table."""

    units: tuple[UnitSummary, ...]
    # by ``summary``: names, of rotary embeddings in lower precision
    lowered_frequencies: tuple[str, ...] = ()
    # by ``summary``: why torch's operators run in place of fsdp_c's kernels, by type of device. It is this
    # machine's, and no part of what ``plan`` says without one
    without_kernels: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    # by ``summary``, of WholeParameters: what its ranks own, in words
    owners: tuple[str, ...] = field(default=(), compare=False)

    @property
    def numel(self) -> int:
        """Elements of all parameters that units hold."""
        return sum(unit.numel for unit in self.units)

    @property
    def sharded_nbytes(self) -> int:
        """Bytes of parameters that each rank keeps."""
        return sum(unit.sharded_nbytes for unit in self.units)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that all units together would take unsharded."""
        return sum(unit.unsharded_nbytes for unit in self.units)

    @property
    def background_save_nbytes(self) -> int:
        """Bytes of the host's memory that a save in the background keeps on each rank, with an optimizer of
        two states of its parameters' shape and dtype, as Adam is. Buffers are not counted."""
        return sum(unit.sharded_nbytes * (3 if unit.is_trainable else 1) for unit in self.units)

    @property
    def peak_unsharded_nbytes(self) -> int:
        """The most bytes of unsharded parameters that a rank holds at once in a training step.

        The step is taken to be this: each unit runs once, computes with its own parameters, then runs the
        units inside in the order in which their modules are registered, and returns what the last of them
        returned; nothing is recomputed, and the backward passes through all of it. It is not the first step,
        which has no order to follow.

        Counted is the storage that is filled by all-gathers, or by casts and uploads under NO_SHARD: not the
        shards, and nothing of activations, gradients or optimizers.
        """
        return self._step.peak_nbytes

    @property
    def peak_allocated_nbytes(self) -> int:
        """The same in blocks of torch's allocator on CUDA, which ``torch.cuda.memory_allocated`` counts; else
        in bytes.

        The blocks are those of the allocator with its default settings, in a process that does not run out of
        memory; others may make larger ones. With ``backend:cudaMallocAsync`` or
        ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` there are none: ``peak_unsharded_nbytes`` is what is taken.
        """
        return self._step.peak_allocated_nbytes

    @property
    def no_sync_peak_allocated_nbytes(self) -> int:
        """The same where gradients are accumulated: two steps under ``no_sync()``, and one that reduces.

        Strategies that keep parameters for the backward keep them until then, from one step to the next.
        """
        return step_memory.of_accumulation(self.units).peak_allocated_nbytes

    @property
    def all_gathers(self) -> tuple[int, ...]:
        """By unit how often a training step gathers it, within a node or over all ranks."""
        step = self._step
        counts = [sum(each) for each in zip(step.gathers, step.node_gathers, strict=True)]
        return tuple(count if unit.is_sharded else 0 for unit, count in zip(self.units, counts, strict=True))

    @property
    def all_gather_nbytes(self) -> int:
        """Bytes that the all-gathers of a training step fill on each rank."""
        return sum(
            count * unit.all_gather_nbytes for unit, count in zip(self.units, self.all_gathers, strict=True)
        )

    @property
    def node_gather_nbytes(self) -> int:
        """Bytes among them that are gathered within a node."""
        counts = self._step.node_gathers
        return sum(count * unit.all_gather_nbytes for unit, count in zip(self.units, counts, strict=True))

    @property
    def hint(self) -> str | None:
        """Advice on wrapping, if there is any."""
        hints = (
            self._hint_of_small_units(),
            self._hint_of_a_long_start(),
            self._hint_of_low_masters(),
            f"{first_names(self.lowered_frequencies)} are frequencies, {LOWERED}"
            if self.lowered_frequencies
            else None,
        )
        return "; ".join(hint for hint in hints if hint) or None

    def _hint_of_low_masters(self) -> str | None:
        """An update that is smaller than half of a parameter's last bit leaves it as it is."""
        low = [unit.dtype for unit in self.units if unit.is_trainable and unit.dtype in _LOW_DTYPES]
        if not low or low[0] is None:
            return None
        return (
            f"what {_count(len(low), 'unit')} train is kept in {low[0]}: updates below about a "
            f"{round(2 / torch.finfo(low[0]).eps)}th of a parameter are lost. Wrap the model in float32, and "
            f"compute by MixedPrecision(param_dtype={low[0]})"
        )

    def _hint_of_a_long_start(self) -> str | None:
        """A step begins with the outermost unit's gather and ends with its reduction: nothing hides them."""
        first, others = (
            self.units[0],
            [unit.all_gather_nbytes for unit in self.units[1:] if unit.all_gather_nbytes],
        )
        if not others or first.all_gather_nbytes < max(LONG_NBYTES, 2 * sorted(others)[len(others) // 2]):
            return None
        names = ", ".join(_joint_names(first.names))
        return (
            f"{_size(first.all_gather_nbytes)} are in the outermost unit ({names}): a step waits for their "
            "all-gather at its start and for their reduction at its end, with nothing to compute meanwhile; "
            "wrap the largest layers among them as units of their own"
        )

    def _hint_of_small_units(self) -> str | None:
        numels: dict[int, int] = {}  # by unit, with its segments: they are gathered together
        for index, unit in enumerate(self.units):
            if unit.is_sharded:
                whole = unit.parent if unit.is_segment and unit.parent is not None else index
                numels[whole] = numels.get(whole, 0) + unit.padded_numel
        small = [numel for numel in numels.values() if 0 < numel < SMALL_NUMEL]
        if len(small) < 2:
            return None
        usual = sorted(small)[len(small) // 2]
        together = min(len(small), math.ceil(SMALL_NUMEL / usual))
        return (
            f"{len(small)} of {len(self.units) - _segments(self.units)} units have fewer than "
            f"{SMALL_NUMEL:,} elements, below which an all-gather loses bandwidth: "
            f"on a network, wrap about {together} of them as one unit where memory allows"
        )

    def host_bound(self, cost: host_bound.HostCost, *, tokens: int, flops: float) -> host_bound.HostBound:
        """Which units leave the device waiting for the host, and from which size on they do not.

        ``cost``: what ``fsdp_c.host_cost.measure()`` returns on the machine that will train. ``tokens``: of a
        rank's batch; each meets each parameter once. ``flops``: floating-point operations that the device
        does per second, which is less than its data sheet says. ``fsdp_c.tools.host_bound`` says what else is
        assumed. ``str()`` of the result is a sentence. ValueError for numbers that are not more than 0.
        """
        units: dict[int, host_bound.HostUnit] = {}  # segments are gathered with their unit
        for index, unit in enumerate(self.units):
            whole = unit.parent if unit.is_segment and unit.parent is not None else index
            numel, num_params, is_trainable = units.get(whole, (0, 0, False))
            units[whole] = host_bound.HostUnit(
                numel + unit.numel, num_params + len(unit.names), is_trainable or unit.is_trainable
            )
        with_params = [unit for unit in units.values() if unit.num_params]
        return host_bound.host_bound(with_params, cost, tokens=tokens, flops=flops)

    @functools.cached_property
    def _step(self) -> step_memory.StepMemory:
        return step_memory.of_step(self.units)

    def __str__(self) -> str:
        return "\n".join(_text(self))


def _segments(units: Sequence[UnitSummary]) -> int:
    return sum(unit.is_segment for unit in units)


# ----------------------------------------------------------------- of a wrapped model


def summary(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Summary:
    """The units in ``module``, itself included: their names, sizes, dtypes, and the memory they take. Of an
    ``optimizer`` that is ``fsdp_c.optim.WholeParameters`` also which ranks own how much, of bytes and work.

    Not collective, and at any time. Raises TypeError for what is no module, ValueError for one without units.
    """
    check_module(module)
    found = units_with_paths(module)
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no FullyShardedDataParallel in it: wrap it first, or ask "
            "fsdp_c.plan() what wrapping would make of it"
        )
    units = tuple(_of_units(module, found))
    whys = {unit.device_type: _C.why_no_kernels(unit.device_type) for unit in units}
    without_kernels = tuple((device_type, why) for device_type, why in whys.items() if why)
    shares = getattr(optimizer, "shares", tuple)  # WholeParameters'
    return Summary(units, tuple(lowered_frequencies(found)), without_kernels, shares())


def _of_units(module: nn.Module, found: Sequence[tuple[str, ShardedModule]]) -> Iterator[UnitSummary]:
    places = {fsdp_module: index for index, (_, fsdp_module) in enumerate(found)}
    optional_paths = OptionalPaths(module)
    roots: list[ShardedModule] = []
    for path, fsdp_module in found:
        enclosing = fsdp_module._enclosing_unit
        parent = None if enclosing is None else places.get(enclosing)
        roots.append(fsdp_module if parent is None else roots[parent])
        unit = _of_unit(fsdp_module, clean_path(path), parent, roots[-1]._exec_order_data)
        yield replace(unit, is_optional=path in optional_paths)


def _of_unit(
    fsdp_module: ShardedModule, path: str, parent: int | None, limits: PrefetchLimits
) -> UnitSummary:
    handle = fsdp_module._handle
    group = fsdp_module._replicate_group
    layout = None if handle is None else handle.layout
    return UnitSummary(
        path=path,
        module=type(fsdp_module.module).__name__,
        names=() if handle is None else tuple(map(clean_name, handle.flat_param._fqns)),
        numel=0 if layout is None else sum(layout.param_numels),
        padded_numel=0 if layout is None else layout.padded_numel,
        shard_numel=0 if layout is None else layout.shard_numel,
        dtype=None if handle is None else handle._orig_param_dtype,
        param_dtype=None if handle is None else handle._fwd_bwd_param_dtype,
        reduce_dtype=None if handle is None else handle._reduce_dtype,
        sharding_strategy=fsdp_module.sharding_strategy,
        shards=fsdp_module.world_size,
        replicas=1 if group is None else group.size(),
        is_trainable=handle is not None and any(param.requires_grad for param in handle.script_params),
        backward_prefetch=fsdp_module.backward_prefetch,
        forward_prefetch=fsdp_module.forward_prefetch,
        device_type=fsdp_module.compute_device.type,
        parent=parent,
        offload_params=fsdp_module.cpu_offload.offload_params,
        backward_prefetch_limit=limits._backward_prefetch_limit,
        forward_prefetch_limit=limits._forward_prefetch_limit,
        tied=() if handle is None else _tied(handle.flat_param._shared_param_infos),
        is_segment=fsdp_module._whole is not fsdp_module,
        node_ranks=None if fsdp_module._node_group is None else fsdp_module._node_group.size(),
    )


def _tied(infos: Iterable[SharedParamInfo]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            clean_name(joined(info.module_name, info.param_name)),
            clean_name(joined(info.prim_module_name, info.prim_param_name)),
        )
        for info in infos
    )


# ----------------------------------------------------------------- of a model that is not wrapped


def plan(
    module: nn.Module,
    *,
    world_size: int,
    strategy: ShardingStrategy | None = None,
    auto_wrap_policy: Policy | None = None,
    mixed_precision: MixedPrecision | None = None,
    use_orig_params: bool = False,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    cpu_offload: CPUOffload | None = None,
    ranks_per_node: int | None = None,
    device_type: str | None = None,
    backward_prefetch_limit: int = 1,
    forward_prefetch_limit: int = 1,
    reshard_after_forward: int | None = None,
) -> Summary:
    """What FullyShardedDataParallel with these arguments would make of ``module`` on ``world_size`` ranks.

    Needs no ranks, no process group and no memory: ``module`` may be on the meta device, and stays as it is.
    A hybrid strategy shards over ``ranks_per_node`` ranks and replicates over the rest. ``device_type`` is
    where the ranks will compute, by default where ``module`` would here: on "cuda" forwards hold one unit
    more. The limits say how many units are prefetched, as
    ``model._exec_order_data._backward_prefetch_limit`` does for a wrapped model. ``reshard_after_forward``:
    how many ranks gather for a backward, as under ``fsdp_c.wrap.reshard_after_forward()``.

    Raises what wrapping would raise: TypeError or ValueError for arguments that do not fit each other or
    ``module``.
    """
    check_module(module)
    construction.check_settings(strategy, mixed_precision, backward_prefetch, cpu_offload)
    shards, replicas = _split_ranks(world_size, strategy, ranks_per_node)
    tree = Subtree(module)
    construction.refuse_foreign_units(tree)
    if tree.units:
        raise ValueError(
            f"{type(module).__name__} is wrapped already: ask fsdp_c.summary() what it is, and plan the "
            "plain module"
        )
    ignored = construction.resolve_ignored_states(tree, ignored_modules, ignored_states)
    kwargs = {
        "sharding_strategy": strategy,
        "mixed_precision": mixed_precision,
        "use_orig_params": use_orig_params,
        "backward_prefetch": backward_prefetch,
        "forward_prefetch": forward_prefetch,
        "cpu_offload": cpu_offload,
        "ignored_states": ignored.params,
    }
    chosen: dict[nn.Module, Kwargs] = {}
    if auto_wrap_policy is not None:
        chosen = chosen_modules(tree, auto_wrap_policy, ignored.modules, ignored.params, kwargs)
    device_type = device_type or construction.resolve_device(tree, ignored.params, None).type
    homes = homes_of_shared_params(tree, chosen)
    limits = {
        "backward_prefetch_limit": backward_prefetch_limit,
        "forward_prefetch_limit": forward_prefetch_limit,
    }
    for name, limit in limits.items():
        _check_count(name, limit, "units", 0)
    everywhere = {"shards": shards, "replicas": replicas, "device_type": device_type, **limits}
    planner = _Planner(
        OptionalPaths(module),
        {**chosen, module: kwargs},
        homes,
        ignored.params,
        reshard_after_forward,
        everywhere,
    )
    planner.add(module, "", None)
    return Summary(tuple(planner.units))


def _check_count(name: str, value: object, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a number of {what}, not {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def _split_ranks(
    world_size: int, strategy: ShardingStrategy | None, ranks_per_node: int | None
) -> tuple[int, int]:
    """How many ranks share a unit, and how many replicas there are."""
    _check_count("world_size", world_size, "ranks", 1)
    if ranks_per_node is not None:
        _check_count("ranks_per_node", ranks_per_node, "ranks", 1)
    if strategy not in HYBRID_SHARDING_STRATEGIES:
        return world_size, 1
    if ranks_per_node is None:
        raise ValueError(f"{strategy} shards inside a node: pass ranks_per_node")
    if world_size % ranks_per_node:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {ranks_per_node}: pass a multiple as world_size"
        )
    return ranks_per_node, world_size // ranks_per_node


@dataclass
class _Planner:
    """Makes a UnitSummary of each module that would be wrapped, and of no tensor more than its shape."""

    optional_paths: OptionalPaths
    chosen: dict[nn.Module, Kwargs]
    homes: Homes
    ignored: set[nn.Parameter]
    reshard_after_forward: int | None
    everywhere: Kwargs  # what all units have alike
    units: list[UnitSummary] = field(default_factory=list)
    added: set[nn.Module] = field(default_factory=set)

    def add(self, module: nn.Module, path: str, parent: int | None) -> None:
        """The unit around ``module``, and those inside it."""
        self.added.add(module)
        tree = Subtree(module, inner=self.chosen, homes=self.homes)
        index = len(self.units)
        self.units += self._parts(tree, path, parent, index)
        for inner, inner_path in tree.units.items():
            if inner not in self.added:
                self.add(inner, joined(path, inner_path), index)

    def _parts(self, tree: Subtree, path: str, parent: int | None, index: int) -> list[UnitSummary]:
        """The unit around the tree's root, which is to be at ``index`` of all, and its segments."""
        name = f"{type(tree.root).__name__} at {clean_path(path)!r}" if path else type(tree.root).__name__
        params = construction.own_params(tree, self.ignored)
        construction.check_params(tree, params, name)
        own, *further = groups_of(params, self.chosen[tree.root]["use_orig_params"]) or [[]]
        unit = self._part(tree, own, path, parent)
        return [unit, *(replace(self._part(tree, group, path, index), is_segment=True) for group in further)]

    def _part(self, tree: Subtree, params: list[nn.Parameter], path: str, parent: int | None) -> UnitSummary:
        kwargs = self.chosen[tree.root]
        found = Occurrences(tree, params) if params else None
        shards = self.everywhere["shards"]
        strategy = construction.effective_strategy(kwargs["sharding_strategy"], shards)
        return UnitSummary(
            path=clean_path(path),
            module=type(tree.root).__name__,
            sharding_strategy=strategy,
            is_trainable=any(param.requires_grad for param in params),
            backward_prefetch=kwargs["backward_prefetch"],
            forward_prefetch=kwargs["forward_prefetch"],
            parent=parent,
            offload_params=(kwargs["cpu_offload"] or CPUOffload()).offload_params,
            tied=() if found is None else _tied(info for _, info in found.shared),
            is_optional=path in self.optional_paths,
            node_ranks=node_groups.planned_ranks(self.reshard_after_forward, shards, strategy),
            **self.everywhere,
            **self._sizes(found, kwargs, strategy is not ShardingStrategy.NO_SHARD),
        )

    def _sizes(self, found: Occurrences | None, kwargs: Kwargs, is_sharded: bool) -> Kwargs:
        if found is None:
            nothing = dict.fromkeys(("numel", "padded_numel", "shard_numel"), 0)
            return {"names": (), **nothing, **dict.fromkeys(("dtype", "param_dtype", "reduce_dtype"))}
        check_uniform(found.params, found.fqns, kwargs["use_orig_params"], floating=False)
        dtype = found.params[0].dtype
        computed, reduced = precision_for(dtype, kwargs["mixed_precision"] or MixedPrecision())
        param_dtype = computed or dtype
        numels = [tensor_parallel.local(param).numel() for param in found.params]
        alignment = aligned_numel(param_dtype, kwargs["use_orig_params"])
        layout = _C.FlatLayout(numels, alignment, self.everywhere["shards"], 0, is_sharded)
        return {
            "names": tuple(map(clean_name, found.fqns)),
            "numel": sum(numels),
            "padded_numel": layout.padded_numel,
            "shard_numel": layout.shard_numel,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "reduce_dtype": reduced or param_dtype,
        }


# ----------------------------------------------------------------- text


def describe_unit(fsdp_module: ShardedModule, is_root: bool) -> str:
    """The lines that ``print(model)`` has for a unit, after what torch prints."""
    limits = fsdp_module._exec_order_data
    lines = []
    for own in (
        _of_unit(part, "", None, limits) for part in parts_of(fsdp_module) if part._handle is not None
    ):
        names = (
            own.names if len(own.names) <= MAX_NAMES else (*own.names[: MAX_NAMES - 1], "...", own.names[-1])
        )
        lines.append(
            f"{_ranks(own)}: {own.numel:,} elements and {own.padding:,} of padding in {_dtypes(own)}; "
            f"{_size(own.sharded_nbytes)} per rank, {_size(own.unsharded_nbytes)} unsharded"
        )
        lines.append(f"holds {', '.join((*names, *map(' = '.join, own.tied)))}")
    if is_root:
        whole = summary(fsdp_module)
        if whole.numel:
            lines.append(_memory(whole))
    return "\n".join(lines)


def log_units(root: ShardedModule) -> None:
    """Log the units of a tree, once and on its first rank, for ``TORCH_LOGS=fsdp_c`` or who listens.

    That torch's operators compute in place of fsdp_c's kernels is a warning, once in a process.
    """
    replicas = root._replicate_group
    if root.rank != 0 or (replicas is not None and replicas.rank() != 0):
        return
    _warn_of_operators(root.compute_device.type)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", summary(root))


@functools.cache
def _warn_of_operators(device_type: str) -> None:
    if why := _C.why_no_kernels(device_type):
        logger.warning("%s", _with_operators(device_type, why))


def _with_operators(device_type: str, why: str) -> str:
    return (
        f"on {device_type} torch's operators compute what fsdp_c's kernels would: the same values, with more "
        f"work for the host. {why}"
    )


def _text(whole: Summary) -> Iterator[str]:
    groups = _alike(whole.units)
    segments = _segments(whole.units)
    with_segments = f" and {_count(segments, 'segment')}" if segments else ""
    ranks = {_ranks(unit) for unit in whole.units}
    everywhere = f", {ranks.pop()}" if len(ranks) == 1 else ""
    units = _count(len(whole.units) - segments, "unit")
    yield f"{units}{with_segments}, {whole.numel:,} parameters{everywhere}"
    yield ""
    yield from _table([(label, _cells(unit, with_ranks=not everywhere)) for label, unit in groups])
    yield ""
    for label, unit in groups:
        names = ", ".join((*_joint_names(unit.names), *map(" = ".join, unit.tied))) or "no parameters"
        yield from textwrap.wrap(f"{label}: {names}", TEXT_WIDTH, subsequent_indent="    ")
    yield ""
    yield _memory(whole)
    yield (
        f"a save in the background holds {_size(whole.background_save_nbytes)} of host memory per rank, with "
        "Adam's state"
    )
    if sum(whole.all_gathers):
        within = (
            f", {_size(whole.node_gather_nbytes)} of them within a node" if whole.node_gather_nbytes else ""
        )
        gathers = _count(sum(whole.all_gathers), "all-gather")
        yield f"per step: {gathers}, {_size(whole.all_gather_nbytes)} on each rank{within}"
    for owners in whole.owners:
        yield from textwrap.wrap(f"optimizer: {owners}", TEXT_WIDTH)
    for device_type, why in whole.without_kernels:
        yield from textwrap.wrap(_with_operators(device_type, why), TEXT_WIDTH)
    if whole.hint is not None:
        yield from textwrap.wrap(f"hint: {whole.hint}", TEXT_WIDTH)


def _memory(whole: Summary) -> str:
    usual, without_sync = whole.peak_allocated_nbytes, whole.no_sync_peak_allocated_nbytes
    more = (
        f", or {_size(without_sync)} where gradients are accumulated under no_sync()"
        if without_sync > usual
        else ""
    )
    return (
        f"per rank: {_size(whole.sharded_nbytes)} of parameters all the time, "
        f"and at most {_size(usual)} unsharded in a training step{more}"
    )


def _alike(units: Sequence[UnitSummary]) -> list[tuple[str, UnitSummary]]:
    """One label and one unit for those that are alike but for numbers in their paths."""
    found: dict[tuple[object, ...], list[UnitSummary]] = {}
    for unit in units:
        key = (
            _without_numbers(unit.path),
            unit.is_segment,
            unit.names,
            unit.tied,
            tuple(_cells(unit, with_ranks=True).values()),
        )
        found.setdefault(key, []).append(unit)
    return [(_label(group), group[0]) for group in found.values()]


def _label(alike: Sequence[UnitSummary]) -> str:
    name = _joint_name([unit.path for unit in alike]) or "(root)"
    return (
        f"{name}, {'trained' if alike[0].is_trainable else 'frozen'} segment" if alike[0].is_segment else name
    )


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _joint_names(names: Sequence[str]) -> list[str]:
    """``names``, those that differ in numbers only as one."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_without_numbers(name), []).append(name)
    return [_joint_name(group) for group in found.values()]


def _joint_name(names: Sequence[str]) -> str:
    """For example blocks.*.weight (x12), for names that differ in numbers only."""
    if len(names) == 1:
        return names[0]
    places = zip(*(name.split(".") for name in names), strict=True)
    parts = [parts[0] if len(set(parts)) == 1 else _without_numbers(parts[0]) for parts in places]
    return f"{'.'.join(parts)} (x{len(names)})"


def _cells(unit: UnitSummary, with_ranks: bool) -> dict[str, str]:
    """The cells of a unit's row in the table."""
    collectives = {
        "gather": unit.all_gather_nbytes,
        "scatter": unit.reduce_scatter_nbytes,
        "all-reduce": unit.all_reduce_nbytes,
    }
    cells = {
        "module": f"{unit.module}, optional" if unit.is_optional else unit.module,
        "parameters": f"{unit.numel:,}",
        "padding": f"{unit.padding:,}",
        "dtype": _dtypes(unit),
        "sharded": _size(unit.sharded_nbytes),
        "unsharded": _size(unit.unsharded_nbytes),
        "collectives": ", ".join(f"{name} {_size(size)}" for name, size in collectives.items() if size)
        or "none",
    }
    return cells | {"strategy": _ranks(unit)} if with_ranks else cells


def _table(rows: Sequence[tuple[str, dict[str, str]]]) -> Iterator[str]:
    lines = [{"unit": "unit"} | {column: column for column in rows[0][1]}]
    lines += [{"unit": label} | cells for label, cells in rows]
    if any(">" in line["dtype"] for line in lines):
        lines[0]["dtype"] = "kept>computed>reduced"
    widths = {column: max(len(line[column]) for line in lines) for column in lines[0]}
    numbers = ("parameters", "padding", "sharded", "unsharded")
    for line in lines:
        padded = [
            cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])
            for column, cell in line.items()
        ]
        yield "  ".join(padded).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _ranks(unit: UnitSummary) -> str:
    replicas = f", {unit.replicas} replicas" if unit.replicas > 1 else ""
    within = f", within {unit.node_ranks} for its backward" if unit.node_ranks else ""
    return f"{unit.sharding_strategy.name} over {_count(unit.shards, 'rank')}{within}{replicas}"


def _dtypes(unit: UnitSummary) -> str:
    """For example float32, or float32>bfloat16>float32 where a unit computes and reduces in others."""
    if unit.dtype is None:
        return "-"
    dtypes = [
        str(dtype).removeprefix("torch.") for dtype in (unit.dtype, unit.param_dtype, unit.reduce_dtype)
    ]
    return dtypes[0] if len(set(dtypes)) == 1 else ">".join(dtypes)


def _size(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} B"
    exponent = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**exponent:.1f} {'KMGT'[exponent - 1]}iB"
