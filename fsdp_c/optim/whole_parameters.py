"""Optimizers that need full parameters, over shards: each parameter is stepped on one rank, its owner.

[Note: Owners]
Ownership is a pure function of shapes and layouts, so ranks agree on it without communication. Ranks with the
same shards (the replicas of a hybrid strategy, all ranks under NO_SHARD) have the same gradients: they split
the work too, and broadcast their results to each other.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_c.compat.aliases import ParamGroup, ParamState, StateDict
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.agreement import values_if_different
from fsdp_c.sharding.process_groups import all_gather_objects, multi_rank_groups
from fsdp_c.sharding.sharded_module import ShardedModule, handle_of
from fsdp_c.state.optim_params import OptimParam, OptimParams
from fsdp_c.state.quantized_state import dequantized, quantized, quantizes
from fsdp_c.state.redistribution import BATCH_NBYTES, rank_partition, redistribute
from fsdp_c.state.sharded_values import from_memory_order, to_memory_order
from fsdp_c.state.whole_state import WholeState, has_tensors

BUCKET_NBYTES = 256 * 2**20
_PARTLY_DONE = (
    "The step is done for some parameters and their state, but not for others: resume from a checkpoint"
)


class _Ranks(NamedTuple):
    """Candidate owners of parameters: the ranks that share a shard, in each group of replicas.

    Without groups for a parameter that no unit manages: every rank steps it.
    """

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, module: ShardedModule) -> _Ranks:
        if handle_of(module).layout.sharded:
            return cls(module.process_group, module._replicate_group, module.compute_device)
        return cls(None, module._replicate_group or module.process_group, module.compute_device)

    @property
    def own_place(self) -> tuple[int, int]:
        return self.shards.rank() if self.shards else 0, self.replicas.rank() if self.replicas else 0

    @property
    def places(self) -> list[tuple[int, int]]:
        replicas, shards = (group.size() if group else 1 for group in (self.replicas, self.shards))
        return [(shard, replica) for replica in range(replicas) for shard in range(shards)]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all places."""
        return multi_rank_groups(self.shards, self.replicas)


class _Whole:
    """One parameter: this rank's shard (``param``) and the inner optimizer's full parameter (``held``)."""

    def __init__(self, param: nn.Parameter, known: OptimParam) -> None:
        self.param, self.name = param, known.name
        if known.module is None:
            self.ranks = _Ranks(None, None, param.device)
            shape, self.order = param.shape, None
            self.shard = rank_partition(param.numel(), 0)
        else:
            self.ranks = _Ranks.of(known.module)
            shape, self.order, self.shard, *_ = known.layout
        self.is_managed = known.module is not None
        self.owner = (0, 0)  # place in ``ranks``
        self.numel = shape.numel()
        # full shape without memory
        self._empty = torch.zeros((), dtype=param.dtype, device=self.ranks.device).expand(shape)
        self.held = nn.Parameter(self._empty, param.requires_grad)

    @property
    def is_own(self) -> bool:
        return self.owner == self.ranks.own_place

    @property
    def nbytes(self) -> int:
        return self.numel * self.param.itemsize

    @property
    def cost(self) -> int:
        """Multiplications of a step: for a matrix X those of X @ X.T, of its square, and of the square times X."""
        rows = self.held.shape[0] if self.held.dim() > 1 else 0
        least = min(rows, self.numel // rows) if rows else 0
        return least * (2 * self.numel + least**2) if least else self.numel

    def flat(self, value: Tensor) -> Tensor:
        """Return a 1-D view or copy of a tensor with the shape of ``param`` or ``held``, in memory order."""
        return value if value.dim() == 1 else to_memory_order(value, self.order)

    def shaped(self, flat: Tensor) -> Tensor:
        """Reshape all elements, in memory order, to the full parameter."""
        return from_memory_order(flat, self.held.shape, self.order)

    def release(self) -> None:
        self.held.data, self.held.grad = self._empty, None


class _NonEmptyState(collections.defaultdict[Tensor, ParamState]):
    """Non-empty ``state``, true even if this rank owns no state.

    torch.distributed.checkpoint runs a step without gradients for an optimizer whose ``state`` is false.
    """

    def __bool__(self) -> bool:
        return True


class WholeParameters(Optimizer):
    """Any optimizer that needs full parameters (Muon, Shampoo, Adafactor), over a wrapped model.

    Each parameter has an owner rank. ``step()`` moves gradients and parameters from the shards to the owners,
    runs the optimizer of ``factory`` there on tensors of the shapes before wrapping, and moves the parameters
    back. Results are bitwise those of that optimizer on the unsharded model, given the same gradients. Work
    is balanced over all ranks, replicas of hybrid strategies included: a matrix counts as an iteration of
    Newton and Schulz, other parameters by their elements. ``print(optimizer)`` shows each rank's share.

    Args:
        model: a unit, or a module that contains units.
        factory: an optimizer class, called with the full parameters and ``options``. Or a function, called with a
            list of (name, parameter), with names as before wrapping, and ``options``, that returns one or several
            optimizers over some of them. Called on every rank with all parameters; shapes and dtypes are valid,
            values only during ``step()``.
        bucket_nbytes: bytes of parameters moved at once, over all ranks; None for all parameters. Transfers
            of the next and the last bucket overlap with the current one's computation on a GPU.
        options: keyword arguments for ``factory``.

    ``param_groups`` are the factory's, over the model's own parameters: schedulers and gradient scalers work
    as usual. Memory: the state of the parameters that this rank owns, and during a step its part of two
    buckets, values and gradients.

    ``state_dict()`` returns this rank's shards of the state, and is collective: ``FSDP.optim_state_dict`` and
    ``fsdp_c.checkpoint`` save it under FQNs, for any wrapping and number of ranks, and for the same optimizer
    over an unwrapped model. State whose shape differs from its parameter's (Adafactor's, Shampoo's and SOAP's
    factors), also in lists and dicts, is saved unsharded by the owner.

    An optimizer that combines parameters into one number, such as D-adaptation, sees those of one rank and
    bucket. Raises ValueError for a model wrapped without ``use_orig_params`` or with tensor parallelism
    inside, for parameters that ``factory`` was not given, and for LBFGS; IndexError for a model without units.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: Callable[..., Optimizer | Iterable[Optimizer]],
        *,
        bucket_nbytes: int | None = BUCKET_NBYTES,
        **options: Any,
    ) -> None:
        if bucket_nbytes is not None and bucket_nbytes < 1:
            raise ValueError(
                f"bucket_nbytes must be at least 1, or None for a single bucket, not {bucket_nbytes}"
            )
        self._bucket_nbytes = bucket_nbytes
        self._wholes = _wholes_of_model(model)
        _choose_owners(self._wholes)
        self._inner = _build_inner(factory, self._wholes, options)
        self._inner_of = {
            held: inner for inner in self._inner for group in inner.param_groups for held in group["params"]
        }
        by_held = {whole.held: whole for whole in self._wholes}
        groups = self._inner_groups()
        self._stepped = [by_held[held] for group in groups for held in group["params"]]
        self._side_stream = _SideStream([whole.ranks.device for whole in self._wholes])
        outer = [{**group, "params": [by_held[held].param for held in group["params"]]} for group in groups]
        super().__init__(outer, {})
        self._is_complete = True

    _is_complete = False  # true after the constructor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: groups cannot be added to a complete optimizer."""
        if self._is_complete:
            raise RuntimeError(
                "WholeParameters assigns parameters to ranks at construction only: construct it "
                "again, with a factory that creates all groups"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        """Return the shares of ranks, in bytes and work, and torch's text."""
        return "\n".join([*self.shares(), super().__repr__()])

    def shares(self) -> tuple[str, ...]:
        """Return a line per set of ranks with the parameters, bytes and work that each rank owns."""
        lines = []
        for ranks, members in _by_ranks(whole for whole in self._wholes if whole.is_managed).items():
            count, nbytes, cost = (dict.fromkeys(ranks.places, 0) for _ in range(3))
            for whole in members:
                count[whole.owner] += 1
                nbytes[whole.owner] += whole.nbytes
                cost[whole.owner] += whole.cost
            own = ranks.own_place
            share = max(cost.values()) * len(cost) / max(sum(cost.values()), 1)
            lines.append(
                f"{len(cost)} ranks own {len(members)} parameters of {sum(nbytes.values()) / 2**20:.2f} MiB: each "
                f"{min(count.values())} to {max(count.values())}, {min(nbytes.values()) / 2**20:.2f} to "
                f"{max(nbytes.values()) / 2**20:.2f} MiB, at most {share:.2f} of an equal share of the work; this "
                f"one {count[own]}, {nbytes[own] / 2**20:.2f} MiB"
            )
        return tuple(lines)

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient on any rank. Collective. Return the result of ``closure``.

        ``closure`` is called once, before the update, with gradients enabled. Raises RuntimeError on all
        ranks, naming the parameter, for gradients left unreduced by ``no_sync`` on one; and, naming the rank,
        if its optimizer raises: the step is then done for some parameters and not for others.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._side_stream.moving():
            having, state_is_loaded = _agree_on_gradients(self._stepped, len(self.state) > 0)
        if state_is_loaded:
            self._take_loaded_state()
        outer = [_options(group) for group in self.param_groups]
        buckets = list(self._buckets(having))
        try:
            self._step_buckets(buckets, outer)
        finally:
            self._side_stream.wait()
            for bucket in buckets:
                for whole in bucket:
                    whole.release()
        for group, inner_group in zip(self.param_groups, self._inner_groups(), strict=True):
            group.update(_options(inner_group))
        self.state = _NonEmptyState(dict)
        return loss

    def _step_buckets(self, buckets: Sequence[list[_Whole]], outer: Sequence[ParamGroup]) -> None:
        """Step all buckets. Collective. See [Note: Transfers beside the computation]."""
        side_stream, error = self._side_stream, None
        with side_stream.moving(after_computation=True):
            full = _bucket_on_owners(buckets[0])
            event = side_stream.event()
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            side_stream.wait(event)
            while full:  # pop, so that no reference to a returned bucket remains
                whole, value, grad = full.pop()
                whole.held.data, whole.held.grad = value, grad
                del value, grad
            if following is not None:
                with side_stream.moving():
                    full = _bucket_on_owners(following)
                    event = side_stream.event()
            try:
                if error is None:
                    self._step_inner(outer)
            except Exception as raised:
                error = raised
            if following is None:
                with side_stream.moving():
                    _raise_everywhere(self._stepped, error, _PARTLY_DONE)
            with side_stream.moving(after_computation=True):
                _return_to_shards(bucket)
            for whole in bucket:
                whole.release()

    def _step_inner(self, outer: Sequence[ParamGroup]) -> None:
        for group, options in zip(self._inner_groups(), outer, strict=True):
            # restored per bucket: a counter in a group advances once per step, not once per bucket
            held = group["params"]
            group.clear()
            group.update(options, params=held)
        for inner in self._inner:
            inner.step()

    def _buckets(self, wholes: list[_Whole]) -> Iterator[list[_Whole]]:
        """Yield buckets with equally balanced work on all ranks, as far as single parameters permit."""
        for members in _by_ranks(wholes).values():
            by_owner: dict[tuple[int, int], list[_Whole]] = {}
            for whole in members:
                by_owner.setdefault(whole.owner, []).append(whole)
            count = _bucket_count(list(by_owner.values()), self._bucket_nbytes)
            buckets: list[list[_Whole]] = [[] for _ in range(count)]
            for queue in by_owner.values():
                cost = sum(whole.cost for whole in queue) or 1
                nbytes = sum(whole.nbytes for whole in queue) or 1
                # fraction of the queue's work and bytes before the parameter
                before = 0.0
                for whole in queue:
                    part = (whole.cost / cost + whole.nbytes / nbytes) / 2
                    buckets[int(min(before + part / 2, 1 - 1e-9) * count)].append(whole)
                    before += part
            yield from filter(None, buckets)
        if not wholes:
            yield []  # optimizers step even without gradients: they may count steps

    # ---- state

    def sharded_state(self) -> dict[Tensor, ParamState]:
        """Return the state as of an optimizer over the shards. Collective.

        State whose shape differs from its parameter's is a ``WholeState``.
        """
        if _LOADED in _descriptions_of_all(self._stepped, {_LOADED: {}} if len(self.state) else {}):
            self._take_loaded_state()
        own_states = {whole: self._state_of(whole) for whole in self._stepped}
        kinds = {
            whole.name: _description(own_states[whole], whole.held.shape)
            for whole in self._stepped
            if whole.is_managed and whole.is_own and own_states[whole]
        }
        described = _descriptions_of_all(self._stepped, kinds)
        state: dict[Tensor, ParamState] = {}
        moving: list[tuple[_Whole, str, Tensor | None, torch.dtype]] = []
        for whole in self._stepped:
            own = own_states[whole]
            if not whole.is_managed:
                state[whole.param] = own
                continue
            kept = state[whole.param] = {}
            for key, kind in described.get(whole.name, {}).items():
                if isinstance(kind, torch.dtype):
                    moving.append((whole, key, own.get(key) if whole.is_own else None, kind))
                    kept[key] = None  # placeholder that keeps the optimizer's order
                elif isinstance(kind, _PlainValue):
                    kept[key] = copy.deepcopy(kind.value)
                else:
                    kept[key] = WholeState(own[key] if whole.is_own else kind.value, kind.holder)
        parts = _moved_to_shards([(whole, value, dtype) for whole, _, value, dtype in moving])
        for (whole, key, *_), part in zip(moving, parts, strict=True):
            state[whole.param][key] = part.to(whole.param.device)
        # scalars of parameters without elements here are saved by ranks that have elements
        for param, own in state.items():
            if not param.numel():
                state[param] = {key: value for key, value in own.items() if isinstance(value, WholeState)}
        return {param: own for param, own in state.items() if own}

    def owned_names(self) -> frozenset[str]:
        """Return the names of parameters that this rank steps for all."""
        return frozenset(whole.name for whole in self._wholes if whole.is_own)

    def _state_of(self, whole: _Whole) -> ParamState:
        """Return the inner optimizer's state, dequantized; empty on ranks other than the owner."""
        inner = self._inner_of[whole.held]
        return dequantized(inner, inner.state[whole.held]) if whole.held in inner.state else {}

    def state_dict(self) -> StateDict:
        """Return the state dict of this rank's shards. Collective. See ``sharded_state``."""
        sharded = self.sharded_state()
        own, self.state = self.state, sharded  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = own

    def _take_loaded_state(self) -> None:
        """Move loaded state to the owners. Collective."""
        described = _descriptions_of_all(
            self._stepped,
            {w.name: _description(self.state[w.param]) for w in self._stepped if w.param in self.state},
        )
        moving: dict[_Ranks, list[tuple[_Whole, str, Tensor]]] = {}
        missing: list[str] = []
        group_of = {held: group for group in self._inner_groups() for held in group["params"]}
        for inner in self._inner:
            inner.state.clear()
        for whole in self._stepped:
            own = self.state.get(whole.param, {})
            if not whole.is_managed:
                if own:
                    self._inner_of[whole.held].state[whole.held] = own
                continue
            for key, kind in described.get(whole.name, {}).items():
                if isinstance(kind, torch.dtype):
                    nothing = torch.empty(0, dtype=kind, device=whole.param.device)
                    moving.setdefault(whole.ranks, []).append((whole, key, own.get(key, nothing)))
                if whole.is_own:  # saved order of keys
                    value = kind.value if isinstance(kind, _PlainValue) else None
                    group = group_of[whole.held]
                    # single numbers stay on the CPU, as in torch's Optimizer.load_state_dict
                    stays = key == "step" and not (group.get("capturable") or group.get("fused"))
                    if isinstance(value, Tensor) and not stays:
                        value = value.to(whole.ranks.device)
                    if isinstance(kind, WholeState):
                        given = own.get(key, kind)
                        if given.is_here:
                            value = given.own(whole.ranks.device)
                        else:
                            missing.append(f"{key!r} of {whole.name}")
                    self._inner_of[whole.held].state[whole.held][key] = value
        lacking = ValueError(
            f"its state dict lacks {first_names(missing)}, because another rank owned it when it was saved"
        )
        remedy = "Load a result of FSDP.optim_state_dict() with FSDP.optim_state_dict_to_load()"
        _raise_everywhere(self._stepped, lacking if missing else None, remedy)
        for members in moving.values():
            values = _moved_to_owners([(whole, part) for whole, _, part in members])
            for (whole, key, _), value in zip(members, values, strict=True):
                if value is not None:
                    self._inner_of[whole.held].state[whole.held][key] = value
        for inner in filter(quantizes, self._inner):
            inner.state.update({held: quantized(inner, held, own) for held, own in [*inner.state.items()]})
        self.state = _NonEmptyState(dict)


def _options(group: ParamGroup) -> ParamGroup:
    return {name: value for name, value in group.items() if name != "params"}


# ----------------------------------------------------------------- parameters and owners


def _wholes_of_model(model: nn.Module) -> list[_Whole]:
    known = OptimParams(model)
    if not known.use_orig_params:
        raise ValueError(
            "WholeParameters steps original parameters, and this model has flat ones: wrap it with "
            "FullyShardedDataParallel(..., use_orig_params=True)"
        )
    for module in known.units:
        if module._fsdp_extension is not None:
            raise ValueError(
                f"{type(module.module).__name__} has tensor parallelism inside: no rank of the unit "
                "has its parameters whole. Use a separate optimizer for them"
            )
    return [_Whole(param, one) for param, one in known.by_param.items()]


def _by_ranks(wholes: Iterable[_Whole]) -> dict[_Ranks, list[_Whole]]:
    """Return the parameters by their candidate owners."""
    found: dict[_Ranks, list[_Whole]] = {}
    for whole in wholes:
        found.setdefault(whole.ranks, []).append(whole)
    return found


def _choose_owners(wholes: Sequence[_Whole]) -> None:
    """Assign owners, costliest parameters first.

    A parameter is assigned to the rank that holds most of it, among those that stay below an equal share of
    the work; otherwise to the rank with the least work.
    """
    for ranks, members in _by_ranks(wholes).items():
        load = dict.fromkeys(ranks.places, 0)
        share = sum(whole.cost for whole in members) / len(load)
        for whole in sorted(members, key=lambda whole: -whole.cost):
            room = [place for place, cost in load.items() if cost + whole.cost <= share]
            held = {place: whole.shard.numel_on(place[0]) for place in room}
            whole.owner = (
                max(room, key=lambda place: (held[place], -load[place]))
                if room
                else min(load, key=load.__getitem__)
            )
            load[whole.owner] += whole.cost


def _bucket_count(queues: Sequence[Sequence[_Whole]], bucket_nbytes: int | None) -> int:
    """Return the number of buckets for ``bucket_nbytes``.

    Limited so that each rank has a parameter in each bucket, because a rank without one would only wait for
    transfers; but at least as many as the largest parameter on each rank permits.
    """
    if bucket_nbytes is None:
        return 1
    sizes = [whole.nbytes for queue in queues for whole in queue]
    largest = max(sizes) * len(queues)
    least = sum(sizes) // max(largest, 1)
    return max(1, min(-(-sum(sizes) // bucket_nbytes), max(least, min(map(len, queues)))))


def _build_inner(
    factory: Callable[..., Optimizer | Iterable[Optimizer]], wholes: Sequence[_Whole], options: dict[str, Any]
) -> list[Optimizer]:
    named = [(whole.name, whole.held) for whole in wholes]
    result = factory([held for _, held in named] if isinstance(factory, type) else named, **options)
    inner = [result] if isinstance(result, Optimizer) else list(result)
    given = {held for _, held in named}
    for one in inner:
        if isinstance(one, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS takes all parameters as one vector, and evaluates the loss many times in a step: it "
                "cannot step over parameters one by one"
            )
        held = [param for group in one.param_groups for param in group["params"]]
        if strangers := [tuple(param.shape) for param in held if param not in given]:
            raise ValueError(
                f"{type(one).__name__} holds parameters that the function was not given, of shapes "
                f"{first_names(strangers)}: take them from its argument, not from the model"
            )
        for whole in wholes:  # state made by a constructor for parameters of other ranks
            if not whole.is_own:
                one.state.pop(whole.held, None)
    return inner


# ----------------------------------------------------------------- transfers


class _SideStream:
    """Side stream for transfers. Transfers and computation alternate on the CPU.

    [Note: Transfers beside the computation]
    A bucket is gathered during the computation of the previous one, and returned during that of the next.
    Order on the stream: gather 0, gather 1, return 0, gather 2, return 1. Each return waits for its bucket's
    computation, so the memory of a returned bucket is free for the following gather: two buckets of memory.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.device = next((device for device in devices if device.type != "cpu"), None)
        self.module = torch.get_device_module(self.device) if self.device else None
        self.stream = self.module.Stream(self.device) if self.module else None

    @contextlib.contextmanager
    def moving(self, after_computation: bool = False) -> Iterator[None]:
        if self.module is None or self.stream is None:
            yield
            return
        if after_computation:
            self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            yield

    def event(self) -> Any:
        return self.stream.record_event() if self.stream else None

    def wait(self, event: Any = None) -> None:
        """Let the compute stream wait for transfers before ``event``; by default for all."""
        if self.module is not None:
            (event or self.event()).wait(self.module.current_stream(self.device))


def _groups_of(wholes: Iterable[_Whole]) -> list[dist.ProcessGroup]:
    """Return the groups that connect all ranks of these parameters."""
    return [group for ranks in dict.fromkeys(whole.ranks for whole in wholes) for group in ranks.groups]


def _raise_everywhere(wholes: Sequence[_Whole], error: Exception | None, remedy: str) -> None:
    """Raise RuntimeError on all ranks if one has an error. Collective."""
    own = dist.get_rank(), None if error is None else f"{type(error).__name__}: {error}"
    everyone = [own]
    if groups := _groups_of(wholes):
        device = next(whole.ranks.device for whole in wholes if whole.is_managed)
        everyone += values_if_different(own, own[1], groups, device)
    if failed := sorted({(rank, text) for rank, text in everyone if text is not None}):
        causes = [f"the optimizer of rank {rank} raised {text}" for rank, text in failed]
        raise RuntimeError("\n".join([*causes, remedy])) from error


def _agree_on_gradients(wholes: Sequence[_Whole], state_is_loaded: bool) -> tuple[list[_Whole], bool]:
    """Return the parameters with a gradient on any rank, and True if any rank has loaded state. Collective."""
    found: list[_Whole] = []
    for ranks, members in _by_ranks(wholes).items():
        grads = [(whole.param, whole.param.grad) for whole in members]
        # 0: no gradient; 1: a gradient; 2: one that no_sync has left unreduced
        kinds = [0 if grad is None else 1 + (grad.shape != param.shape) for param, grad in grads]
        flags = torch.tensor([int(state_is_loaded), *kinds], dtype=torch.uint8, device=ranks.device)
        for group in ranks.groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        is_loaded, *agreed = flags.tolist()
        state_is_loaded = state_is_loaded or bool(is_loaded)
        if unreduced := [whole.name for whole, kind in zip(members, agreed, strict=True) if kind == 2]:
            raise RuntimeError(
                f"the gradient of {first_names(unreduced)} does not have the size of its shard on "
                "some rank: run a backward outside of no_sync before step()"
            )
        found += [whole for whole, kind in zip(members, agreed, strict=True) if kind]
    return found, state_is_loaded


def _bucket_on_owners(bucket: Sequence[_Whole]) -> list[tuple[_Whole, Tensor, Tensor]]:
    """Return (parameter, value, gradient) of the parameters of a bucket that this rank steps. Collective."""
    parts: list[tuple[_Whole, Tensor]] = []
    for whole in bucket:
        param, grad = whole.param.detach(), whole.param.grad
        grad = torch.zeros_like(param) if grad is None else grad.to(param.dtype)
        parts += [(whole, param), (whole, grad)]
    moved = _moved_to_owners(parts)
    return [
        (whole, value, grad)
        for whole, value, grad in zip(bucket, moved, moved, strict=True)
        if value is not None and grad is not None
    ]


def _moved_to_owners(parts: Sequence[tuple[_Whole, Tensor]]) -> Iterator[Tensor | None]:
    """Yield each full parameter on its owner, else None, from the parts on one set of ranks. Collective."""
    if not parts:
        return
    ranks = parts[0][0].ranks
    if ranks.shards is None:
        for whole, part in parts:
            # new memory: the last bits of matrix products depend on alignment
            yield part.to(ranks.device, copy=True) if whole.is_own else None
        return
    of_replica = [(whole, part) for whole, part in parts if whole.owner[1] == ranks.own_place[1]]
    flat = (whole.flat(part) for whole, part in of_replica)
    made = _redistributed([whole for whole, _ in of_replica], flat, to_owners=True)
    for whole, _ in parts:
        value = next(made) if whole.owner[1] == ranks.own_place[1] else None
        yield whole.shaped(value) if value is not None and whole.is_own else None


def _redistributed(wholes: Sequence[_Whole], values: Iterable[Tensor], to_owners: bool) -> Iterator[Tensor]:
    """Move 1-D values of divided parameters, of one set of ranks, from the shards to the owners or back. Collective."""
    if not wholes:
        return
    ranks = wholes[0].ranks
    assert ranks.shards is not None
    shards = [whole.shard for whole in wholes]
    owners = [rank_partition(whole.numel, whole.owner[0]) for whole in wholes]
    yield from redistribute(
        values,
        *((shards, owners) if to_owners else (owners, shards)),
        ranks.shards,
        device=ranks.device,
        batch_nbytes=BATCH_NBYTES * ranks.shards.size(),  # per rank: latency would dominate with many ranks
    )


def _return_to_shards(wholes: Sequence[_Whole]) -> None:
    """Copy the owners' parameters into the shards. Collective."""
    values = [whole.held.detach() for whole in wholes]
    for value in values:
        if not value.is_cpu:  # an optimizer may have replaced the memory by some of its own stream
            value.record_stream(torch.get_device_module(value.device).current_stream(value.device))
    given = [(w, v if w.is_own else None, v.dtype) for w, v in zip(wholes, values, strict=True)]
    if wholes:
        torch._foreach_copy_([whole.param for whole in wholes], _moved_to_shards(given))


def _moved_to_shards(values: Sequence[tuple[_Whole, Tensor | None, torch.dtype]]) -> list[Tensor]:
    """Return this rank's part of each tensor, full on its owner, on the compute device. Collective."""
    same_owners: dict[tuple[_Ranks, int], list[int]] = {}  # indices by candidate owners and owning replica
    for index, (whole, *_) in enumerate(values):
        same_owners.setdefault((whole.ranks, whole.owner[1]), []).append(index)
    parts: dict[int, Tensor] = {}
    for (ranks, replica), indices in same_owners.items():
        own_shard, own_replica = ranks.own_place
        made = []
        for whole, value, dtype in (values[index] for index in indices):
            if value is None:
                # the owner's replica receives by _redistributed
                numel = 0 if replica == own_replica else whole.shard.numel_on(own_shard)
                made.append(torch.empty(numel, dtype=dtype, device=ranks.device))
            else:
                made.append(whole.flat(value).to(ranks.device))
        if replica == own_replica and ranks.shards is not None:
            made = list(_redistributed([values[index][0] for index in indices], made, to_owners=False))
        if ranks.replicas is not None and ranks.replicas.size() > 1:
            dist._broadcast_coalesced(ranks.replicas, made, BUCKET_NBYTES, replica)
        for index, flat in zip(indices, made, strict=True):
            parts[index] = values[index][0].shaped(flat) if ranks.shards is None else flat
    return [parts[index] for index in range(len(values))]


# ----------------------------------------------------------------- description of state


class _PlainValue(NamedTuple):
    """State that is not a tensor with elements to divide."""

    value: object


_Description = dict[str, torch.dtype | _PlainValue | WholeState]
_LOADED = ""  # key by which a rank reports loaded state


def _description(state: ParamState, shape: torch.Size | None = None) -> _Description:
    """Return a description of state. ``shape``: shape of tensors that are divided like the parameter; None for any."""
    kinds: _Description = {}
    for key, value in state.items():
        if isinstance(value, WholeState):
            kinds[key] = value.described()
        elif has_tensors(value) or (
            isinstance(value, Tensor) and value.dim() and shape not in (None, value.shape)
        ):
            kinds[key] = WholeState(value, dist.get_rank()).described()
        elif not isinstance(value, Tensor) or value.dim() == 0:
            kinds[key] = _PlainValue(value.cpu() if isinstance(value, Tensor) else value)
        else:
            kinds[key] = value.dtype
    return kinds


def _descriptions_of_all(wholes: Sequence[_Whole], mine: dict[str, _Description]) -> dict[str, _Description]:
    """Return the merged descriptions of all ranks that have these parameters. Collective."""
    found = {name: dict(kinds) for name, kinds in mine.items()}
    for group in _groups_of(wholes):
        for one in all_gather_objects(found, group):
            for name, kinds in one.items():
                found.setdefault(name, {}).update(kinds)
    return found
