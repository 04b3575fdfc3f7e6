"""Looking for where numbers go wrong: gradients that are not finite, lost updates, replicas that differ."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import _C
from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding import tensor_parallel
from fsdp_c.sharding.common import of_several, tell
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import units_with_paths
from fsdp_c.sharding.traversal import clean_name, joined
from fsdp_c.training.grad_clipping import param_grad

_NOTHING = torch.iinfo(torch.int64).max


class _Detector:
    """Notes per unit the first parameter that got NaN or inf here, and asks other ranks at the reduction.

    First is the last in the unit's order: backward passes from last to first, and so do wrong values.
    """

    def __init__(self) -> None:
        self.noted: dict[_C.Handle, int] = {}

    def __call__(self, handle: FlatParamHandle, gradients: tuple[Any, ...] | None) -> None:
        if gradients is None:
            self.ask_others(handle)
        elif handle not in self.noted:
            for index in reversed(range(len(gradients) - 1)):
                gradient = gradients[index + 1]
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    self.noted[handle] = 2 * index + int(bool(torch.isnan(gradient).any()))
                    break

    def ask_others(self, handle: FlatParamHandle) -> None:
        fqns = handle.flat_param._fqns
        here = self.noted.pop(handle, None)
        code = _NOTHING if here is None else 2 * len(fqns) * dist.get_rank() + here
        first = torch.tensor(code, device=handle.device)
        for group in of_several(handle.process_group, handle.replicate_group):
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
        if int(first) == _NOTHING:
            return
        rank, rest = divmod(int(first), 2 * len(fqns))
        raise FloatingPointError(
            f"rank {rank}, unit {handle.name}: the gradient of {clean_name(fqns[rest // 2])} holds "
            f"{'NaN' if rest % 2 else 'inf'}, before it was reduced with those of other ranks. Look at what "
            f"this parameter's module computes from rank {rank}'s batch, for instance under "
            "torch.autograd.detect_anomaly()."
        )


@contextlib.contextmanager
def detect_anomalies() -> Iterator[None]:
    """In the body, every backward raises when a gradient is NaN or inf, before the reduction spreads it.

    FloatingPointError on every rank of the unit's groups, naming the lowest rank that has one, the unit and
    its parameter: the first unit in the order of the backward, and in it the parameter registered last, which
    backward reaches first as a rule. Costs a pass over all gradients and one all-reduce of 8 bytes per unit,
    and waits for both: for looking, not for training. Collective: all ranks are in the body, or none.
    Gradients of ``no_sync`` are noted, and raise at the reduction. Losses of a grad scaler overflow on
    purpose: leave the scaler out. RuntimeError inside another ``detect_anomalies``.
    """
    global _watching
    if _watching:
        raise RuntimeError("detect_anomalies() is on already: leave it before it is entered again")
    _watching = True
    _C.watch_gradients(_Detector())
    try:
        yield
    finally:
        _C.watch_gradients(None)
        _watching = False


_watching = False


# ----------------------------------------------------------------- updates


class Updates:
    """What ``updates`` has counted over all ranks, of the elements whose gradient is not zero."""

    def __init__(self) -> None:
        self.by_parameter: dict[str, tuple[int, int]] = {}  # how many have changed, and how many there are

    @property
    def changed(self) -> int:
        """How many elements the step has changed."""
        return sum(changed for changed, _ in self.by_parameter.values())

    @property
    def total(self) -> int:
        """How many elements had a gradient that is not zero."""
        return sum(total for _, total in self.by_parameter.values())

    def __str__(self) -> str:
        lost = {name: total - changed for name, (changed, total) in self.by_parameter.items()}
        text = f"{self.changed:,} of {self.total:,} elements with a gradient changed"
        most = [name for name in sorted(lost, key=lambda name: -lost[name]) if lost[name]][:3]
        told = ", ".join(f"{name} ({lost[name]:,} of {self.by_parameter[name][1]:,})" for name in most)
        return f"{text}; most of those that did not are in {told}" if told else text


@contextlib.contextmanager
def updates(model: nn.Module) -> Iterator[Updates]:
    """Count which elements of the parameters an optimizer's step in the body changes.

    ``with fsdp_c.debug.updates(model) as found: optimizer.step()``, then ``print(found)``. An element with a
    gradient that stays as it is has lost its update, mostly for being of 16 bits and the learning rate small:
    wrap the model in float32, with ``MixedPrecision(param_dtype=torch.bfloat16)``. A step that a grad scaler
    skips changes none.

    Costs a copy of this rank's shards while the body runs. Collective over the groups of all units, between
    steps; replicas count once.
    """
    found = Updates()
    before = [
        (handle, path, [(value.clone(), value, had) for value, had in _with_gradients(handle)])
        for path, module in units_with_paths(model)
        if (handle := module._handle) is not None
    ]
    yield found
    for handle, path, values in before:
        names = [clean_name(joined(path, fqn)) for fqn in handle.flat_param._fqns]
        counts = [[int((had & (old != new)).sum()), int(had.sum())] for old, new, had in values]
        summed = torch.tensor(counts, device=handle.device)
        if handle.uses_sharded_strategy:
            dist.all_reduce(summed, group=handle.process_group)
        counted = zip(names, summed.tolist(), strict=True)
        found.by_parameter |= {name: (changed, total) for name, (changed, total) in counted if total}


def _with_gradients(handle: FlatParamHandle) -> Iterator[tuple[Tensor, Tensor]]:
    """What this rank holds of each parameter, and where its gradient is not zero."""
    held = _held(handle)
    for index in range(len(handle.flat_param._fqns)):
        value, grad = held[index], param_grad(handle, index)
        if grad is None:
            yield value, torch.zeros_like(value, dtype=torch.bool)
        else:
            yield value, tensor_parallel.local(grad).flatten() != 0


# ----------------------------------------------------------------- replicas


def checksum(model: nn.Module, *, buffers: bool = True) -> None:
    """Raise unless replicas hold the same bits: NO_SHARD's and hybrid units' parameters, the model's buffers.

    RuntimeError on every rank, naming the first parameter or buffer that differs and which ranks agree with
    each other. Sharded parameters have no replicas. Buffers that ranks compute from their own batch, like the
    running statistics of a batch norm, differ by right: ``buffers=False`` leaves them out. Collective over
    the groups of all units, between steps; sends 8 bytes per parameter and buffer.
    """
    modules = units_with_paths(model)
    found: list[tuple[int, str]] = []
    groups: dict[dist.ProcessGroup, None] = {}
    for order, (path, module) in enumerate(modules):
        handle = module._handle
        groups |= dict.fromkeys(
            group for group in (module.process_group, module._replicate_group) if group is not None
        )
        group = None if handle is None else _group_of_replicas(handle)
        if handle is not None and group is not None:
            found += _drift(order, _parameters(path, handle), group, module.compute_device)
    if buffers and groups:
        named = {clean_name(name): buffer for name, buffer in model.named_buffers()}
        found += _drift(len(modules), named, next(iter(groups)), modules[0][1].compute_device)
    _raise_first(found, list(groups))


def _group_of_replicas(handle: FlatParamHandle) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard, where there are several."""
    # under NO_SHARD too there may be both: of a hybrid strategy over shard groups of one rank
    own = None if handle.uses_sharded_strategy else handle.process_group
    return next(iter(of_several(own, handle.replicate_group)), None)


def _parameters(path: str, handle: FlatParamHandle) -> dict[str, Tensor]:
    """What this rank holds of each parameter, by its name in the user's model."""
    named = zip(handle.flat_param._fqns, _held(handle), strict=True)
    return {clean_name(joined(path, fqn)): value for fqn, value in named if value.numel()}


def _held(handle: FlatParamHandle) -> list[Tensor]:
    """What this rank holds of each parameter, 1-D; nothing of some."""
    shard = handle.local_shard
    shard = handle.flat_param.detach() if shard is None else shard
    ranges = handle.layout.shard_ranges()
    return [shard[start : start + numel] if held else shard[:0] for held, start, numel, _ in ranges]


def _drift(
    order: int, tensors: dict[str, Tensor], group: dist.ProcessGroup, sender: torch.device
) -> list[tuple[int, str]]:
    """The first of ``tensors`` of which the ranks of ``group`` hold different bits, as a list of one or none.

    ``sender``: the device whose memory the group sends from, which need not be where the tensors lie.
    """
    if not tensors:
        return []
    device = next(iter(tensors.values())).device
    where = device if _C.why_no_kernels(device.type) is None else "cpu"
    own = torch.ops.fsdp_c.checksums(
        [tensor.detach().to(where).contiguous() for tensor in tensors.values()]
    ).to(sender)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    sums = torch.stack(everyone).tolist()
    for index, name in enumerate(tensors):
        holders: dict[int, list[int]] = defaultdict(list)
        for rank, row in zip(dist.get_process_group_ranks(group), sums, strict=True):
            holders[row[index]].append(rank)
        if len(holders) > 1:
            return [(order, f"{name} is one on {' and another on '.join(map(ranks_text, holders.values()))}")]
    return []


def _raise_first(found: list[tuple[int, str]], groups: list[dist.ProcessGroup]) -> None:
    for group in groups:  # each passes on what it heard, so that all ranks raise the same
        found = sorted({one for part in tell(found, group) for one in part})[:1]
    if found:
        raise RuntimeError(
            f"replicas have drifted apart: {found[0][1]}. Load a checkpoint, or broadcast what is right; "
            "look for code that changes parameters or buffers on some ranks only."
        )
