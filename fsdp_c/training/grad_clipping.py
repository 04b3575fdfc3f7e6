"""Gradient clipping over sharded gradients."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_  # install() replaces the name

from fsdp_c import _C
from fsdp_c.compat.errors import first_names
from fsdp_c.sharding import tensor_parallel
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule, handles_in, root_units
from fsdp_c.tools import collective_errors

# tensor parallel groups -> gradients sharded over them
GradsByGroups = dict[tuple[dist.ProcessGroup, ...], list[Tensor]]


@torch.no_grad()
def clip_grad_norm_(root: ShardedModule, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of ``root`` in place so that their total norm is at most ``max_norm``.

    Result and errors: see FullyShardedDataParallel.clip_grad_norm_. The norm is computed in fp32, in fp64 if
    any unit is fp64.
    """
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if not max_norm >= 0:
        raise ValueError(
            f"max_norm must be at least 0, not {max_norm}, which would reverse gradients or make them NaN"
        )
    _check_norm_type(norm_type)
    if not any(map(needs_ranks, _handles(root))):
        return torchs_clip_grad_norm_(root.parameters(), max_norm, norm_type)
    grads, total_norm = _grads_and_norm([root], None, [], norm_type)
    return _clipped(root.rank, grads, max_norm, total_norm)


@torch.no_grad()
def clip_params_(
    params: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor | None:
    """Clip the gradients of ``params``, of units and plain modules. Return the total norm.

    Returns None, without any change, if none is sharded. Collective over the groups of their units.
    """
    wanted = set(map(id, params))
    roots = [root for root in root_units() if not wanted.isdisjoint(map(id, root.parameters()))]
    if not any(needs_ranks(handle) for root in roots for handle in handles_in(root)):
        return None
    known = {id(param) for root in roots for param in root.parameters()}
    plain = [param.grad for param in params if id(param) not in known and param.grad is not None]
    grads, total_norm = _grads_and_norm(roots, wanted, plain, norm_type, error_if_nonfinite)
    return _clipped(roots[0].rank, grads, max_norm, total_norm)


@torch.no_grad()
def total_norm_of(
    owners: Mapping[ShardedModule, set[int]],
    tensors: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Return the norm over all ranks of the gradients ``tensors``; see ``owners_of()`` for ``owners``.

    Collective. Raises RuntimeError if another rank may have none of ``tensors`` and skip the collective.
    """
    for root, own in owners.items():
        if partial := _partial_unit(root, own):
            handle, names = partial
            raise RuntimeError(
                f"rank {root.rank}, unit {handle.name}: torch.nn.utils.get_total_norm() was called with "
                f"gradients of {first_names(names)} without the rest of the unit. Other ranks may hold no "
                "element of these, and not call it, so that this rank would wait for them. Pass the gradients of "
                "whole units; or call torch.nn.utils.clip_grad_norm_(parameters, math.inf) on all ranks, which "
                "takes parameters and returns their norm."
            )
    wanted = set().union(*owners.values())
    known = {_memory(param.grad) for root in owners for param in root.parameters() if id(param) in wanted}
    plain = [tensor for tensor in tensors if tensor.numel() and _memory(tensor) not in known]
    _, total_norm = _grads_and_norm(list(owners), wanted, plain, norm_type, error_if_nonfinite)
    return total_norm.to(functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors]))


def owners_of(tensors: Sequence[Tensor]) -> dict[ShardedModule, set[int]]:
    """Return the roots with sharded gradients among ``tensors``, each with the ids of their parameters.

    Excludes trees inside summon_full_params, whose gradients are unsharded, or a backward, whose gradients
    are not reduced yet.
    """
    wanted = set(map(_memory, tensors))
    owners: dict[ShardedModule, set[int]] = {}
    for root in root_units():
        if root._unit.runtime is None or root._unit.training_state != _C.USE_IDLE:
            continue
        grads = [(id(param), param.grad) for param in root.parameters() if param.grad is not None]
        found = {param for param, grad in grads if _memory(grad) in wanted}
        handles = filter(needs_ranks, handles_in(root)) if found else ()
        if any(found.intersection(map(id, handle.script_params)) for handle in handles):
            owners[root] = found
    return owners


def _memory(grad: Tensor | None) -> object:
    """Return a key of a gradient's memory, equal for views of the whole gradient."""
    if grad is None or grad.layout is not torch.strided or not grad.numel():
        return id(grad)
    grad = tensor_parallel.local(grad)
    return grad.data_ptr(), grad.numel()


def needs_ranks(handle: FlatParamHandle) -> bool:
    """Return True if each rank has only a part of the gradients."""
    return handle.uses_sharded_strategy or handle.is_parallel


def _partial_unit(root: ShardedModule, wanted: Container[int]) -> tuple[FlatParamHandle, list[str]] | None:
    """Return a sharded handle and the FQNs of ``wanted`` gradients that other ranks may lack, or None.

    With ``use_orig_params`` a rank has gradients only of parameters with elements in its shard. Every rank
    has some of the ``wanted`` gradients if they include all of this rank's gradients of each flat parameter
    they touch, and every rank holds elements of one of these.
    """
    first: tuple[FlatParamHandle, list[str]] | None = None
    absent = set(range(root.world_size))
    for handle in filter(needs_ranks, handles_in(root)):
        if id(handle.flat_param) in wanted:
            absent.clear()
            continue
        parts = handle.flat_param._params or []
        present = [i for i, part in enumerate(parts) if (grad := part.grad) is not None and grad.numel()]
        given = [i for i in present if id(parts[i]) in wanted]
        if not given:
            continue
        first = first or (handle, [handle.flat_param._fqns[i] for i in given])
        if given != present:
            return handle, [handle.flat_param._fqns[i] for i in given]
        trained = [i for i, part in enumerate(parts) if part.requires_grad]
        if not handle.layout.sharded:
            absent.clear()
        for rank in list(absent):
            ranges = handle.layout.shard_ranges(rank)
            if any(ranges[index][0] for index in trained):
                absent.remove(rank)
    return first if absent else None


def _grads_and_norm(
    roots: Sequence[ShardedModule],
    wanted: Container[int] | None,
    plain: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients in the trees (of ``wanted`` parameters, if given), plus ``plain``, and their norm."""
    _check_norm_type(norm_type)
    grads: list[Tensor] = []
    norms = []
    for root in roots:
        handles = _handles(root)
        sharded, whole = _grads_of(root, handles, wanted)
        grads += [grad for part in (sharded, whole) for found in part.values() for grad in found]
        # All ranks must use one dtype, including ranks without gradients: derive it from parameters.
        has_float64 = any(handle.flat_param.dtype == torch.float64 for handle in handles)
        dtype = torch.float64 if has_float64 else torch.float32
        norm = _total_norm(root, sharded, whole, norm_type, dtype)
        norms.append(norm.cpu() if root.cpu_offload.offload_params else norm)
    if plain:
        norms.append(_local_norm(plain, norm_type, norms[0].dtype, norms[0].device))
    total_norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped: on some rank a gradient is inf or NaN. Pass error_if_nonfinite=False to "
            "scale by it anyway"
        )
    return grads + plain, total_norm


def _clipped(rank: int, grads: list[Tensor], max_norm: float, total_norm: Tensor) -> Tensor:
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    scale(grads, coefficient)
    if not grads:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {rank} with no gradients -- returning the total norm in "
            f"the default dtype {torch.float32}",
            stacklevel=3,
        )
        return total_norm.float()
    return total_norm.to(functools.reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be a number, not {type(value).__name__} {value!r}") from None


def _check_norm_type(norm_type: float) -> None:
    if not norm_type > 0:
        raise ValueError(
            f"norm_type must be above 0, not {norm_type}: pass 2.0, or math.inf for the largest magnitude"
        )


def _handles(root: ShardedModule) -> list[FlatParamHandle]:
    """Return the handles of the tree. Raises unless ``root`` is a root between steps."""
    if root.check_is_root():  # lazy init of an inner unit would make it a root
        root._lazy_init()
    if not root._unit.is_root:
        raise RuntimeError(
            "`clip_grad_norm_()` should only be called on the root FSDP instance, the outermost one"
        )
    if root._unit.training_state != _C.USE_IDLE:
        raise ValueError(
            "`clip_grad_norm_()` cannot be called during forward, backward or summon_full_params (rank "
            f"{root.rank})"
        )
    assert root._unit.runtime is not None
    found = [unit.handle for unit in root._unit.runtime.units if unit.handle is not None]
    return cast("list[FlatParamHandle]", found)


def _grads_of(
    root: ShardedModule, handles: Sequence[FlatParamHandle], wanted: Container[int] | None
) -> tuple[GradsByGroups, GradsByGroups]:
    """Return the sharded gradients of the tree, and those that every rank of the shard group has in full.

    Both are keyed by the tensor parallel groups that shard them. Keys and their order are equal on all ranks,
    with or without gradients. Parameters that no unit manages count as full.
    """
    sharded: GradsByGroups = {(): []}
    whole: GradsByGroups = {(): []}
    managed: set[int] = set()
    for handle in handles:
        found = sharded if handle.uses_sharded_strategy else whole
        flat_param = handle.flat_param
        managed.update((id(flat_param), *map(id, flat_param._params or ())))
        params: Sequence[Tensor] = handle.script_params
        if not handle.is_parallel:
            if wanted is None:
                found[()] += handle.sharded_grads()
            else:
                grads = [param.grad for param in params if id(param) in wanted]
                found[()] += [grad for grad in grads if grad is not None and grad.numel()]
            continue
        grads = [param.grad for param in params]
        if flat_param._params is None:
            grad, ranges = flat_param.grad, handle.layout.shard_ranges()
            params = [flat_param] * len(ranges)
            grads = [
                grad[start : start + numel] if grad is not None and numel else None
                for _, start, numel, _ in ranges
            ]
        for param, grad, param_extension in zip(params, grads, flat_param._param_extensions, strict=True):
            of_groups = found.setdefault(tensor_parallel.sharding_groups(param_extension), [])
            if grad is not None and (wanted is None or id(param) in wanted):
                of_groups.append(grad)
    for param in root.parameters():
        if id(param) not in managed:
            of_groups = whole.setdefault(tensor_parallel.sharding_groups(getattr(param, "_spec", None)), [])
            if param.grad is not None and (wanted is None or id(param) in wanted):
                of_groups.append(tensor_parallel.local(param.grad))
    return sharded, whole


def _total_norm(
    root: ShardedModule, sharded: GradsByGroups, whole: GradsByGroups, norm_type: float, dtype: torch.dtype
) -> Tensor:
    """Return the norm over all ranks; ``whole`` gradients are equal on all ranks and count once."""
    total_norm = _norm(sharded, norm_type, dtype, root.compute_device)
    whole_norm = _norm(whole, norm_type, dtype, root.compute_device)
    # Add the norm of full gradients after the sum: before it, they would count world_size times.
    if norm_type == math.inf:
        total_norm = torch.maximum(total_norm, whole_norm)
        _all_reduce(total_norm, dist.ReduceOp.MAX, root.process_group)
        return total_norm
    total_norm = total_norm**norm_type
    _all_reduce(total_norm, dist.ReduceOp.SUM, root.process_group)
    if any(whole.values()):
        total_norm += whole_norm**norm_type
    return total_norm ** (1.0 / norm_type)


def _norm(grads: GradsByGroups, norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the norm of ``grads`` over the tensor parallel ranks; replicated gradients count once."""
    total_norm = _local_norm(grads[()], norm_type, dtype, device)
    is_max = norm_type == math.inf
    for groups, parts in grads.items():
        if not groups:
            continue
        norm = _local_norm(parts, norm_type, dtype, device)
        norm = norm if is_max else norm**norm_type
        for group in groups:
            _all_reduce(norm, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
        norm = norm if is_max else norm ** (1.0 / norm_type)
        total_norm = torch.linalg.vector_norm(torch.stack([total_norm, norm]), norm_type)
    return total_norm


def _all_reduce(norm: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    with collective_errors.explained("clipping gradients"):
        dist.all_reduce(norm, op=op, group=group)


def _local_norm(grads: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the norm of ``grads`` as one vector, bitwise that of ``vector_norm`` results; a new 0 without any."""
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    is_on_cpu = grads[0].device.type == "cpu"
    if norm_type == math.inf and is_on_cpu:  # vector_norm is slow for a maximum
        bounds = torch.stack([bound for grad in grads for bound in torch.aminmax(grad)])
        norms: Tensor = torch.linalg.vector_norm(bounds.view(-1, 2), norm_type, dim=1, dtype=dtype)
    elif norm_type == math.inf or is_on_cpu:
        norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype))
    else:  # _foreach_norm sums in another order on CUDA
        norms = torch.stack([torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in grads])
    total: Tensor = torch.linalg.vector_norm(norms, norm_type, dtype=dtype)
    return total.to(device=device)


def scale(grads: list[Tensor], coefficient: Tensor) -> None:
    """Multiply ``grads`` by ``coefficient`` in place.

    Unconditional: a factor of 1 is harmless, and reading the coefficient would synchronize with the device.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), group in groups.items():
        torch._foreach_mul_(group, coefficient.to(device, dtype))
