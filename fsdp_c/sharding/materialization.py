"""Preparation of a module's tensors before flattening: checks, meta initialization, device moves, broadcasts."""

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_params_and_buffers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c.compat.errors import IGNORED_AND_TRAINED
from fsdp_c.sharding.construction import CPU, IgnoredStates, is_flattened, own_params
from fsdp_c.sharding.traversal import Subtree, clean_name, is_unit, named_buffers

BROADCAST_BUCKET_NBYTES = 250 * 1024 * 1024


def materialize(
    tree: Subtree,
    params: list[nn.Parameter],
    unit: str,
    rank: int,
    ignored: IgnoredStates,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    device_id: int | torch.device | None,
) -> tuple[Subtree, list[nn.Parameter], torch.device]:
    """Initialize modules on the meta device; move CPU tensors to ``device`` if ``device_id`` was passed.

    Returns the new subtree, the unit's own parameters, ``params`` before, and the compute device. Raises
    ValueError or RuntimeError for parameters that no unit can own, or on several devices.
    """
    _check_params(tree, params, unit)
    _check_single_device(tree, params, device_id, unit, rank)
    if any(tensor.is_meta for tensor in (*params, *_own_buffers(tree, ignored.modules))):
        _initialize_modules(tree.root, ignored.modules, param_init_fn, device)
        tree = Subtree(tree.root, homes=tree.homes)
        params = own_params(tree, ignored.params)
        for param in params:
            if param.is_meta:
                raise ValueError(
                    f"{tree.param_name(param)!r} is still on the meta device after its initialisation: have "
                    "param_init_fn, or the module's reset_parameters(), allocate it, as "
                    "module.to_empty(device=..., recurse=False) does"
                )
    if device_id is not None:
        _move_to_device(tree, params, ignored.modules, device)
    else:
        if device != CPU and any(param.device == CPU for param in params):
            warnings.warn(
                "The passed-in `module` is on CPU and is sharded there, which may be slower than on "
                f"{device}; pass device_id to have it moved first, or move it before the first forward",
                stacklevel=3,
            )
        device = next((param.device for param in params if param.device.type != "cpu"), device)
    _check_compute_device(tree, params, device, unit, rank)
    return tree, params, device


def _check_params(tree: Subtree, params: Collection[nn.Parameter], unit: str) -> None:
    """Raise ValueError for a lazy parameter, or one that another unit owns."""
    for param in params:
        if nn.parameter.is_lazy(param):
            raise ValueError(
                f"Attempted to use an uninitialized parameter: {tree.param_name(param)!r} of {unit} has no "
                "shape yet. Call `forward` with a dummy batch on the module before wrapping it"
            )
        owner: tuple[str, str] | None = getattr(param, "_fsdp_owner", None)
        if owner is not None or is_flattened(param):
            where = "the flat parameter of another unit"
            if owner is not None:
                fqn, other = owner
                where = f"{clean_name(fqn)!r} of {other}"
            raise ValueError(
                f"{tree.param_name(param)!r} of {unit} is the same parameter as {where}, and one parameter "
                "belongs to one unit: wrap the module that contains both and neither of the two, or pass one "
                f"of them in ignored_states. {IGNORED_AND_TRAINED}."
            )


def _check_single_device(
    tree: Subtree,
    params: Collection[nn.Parameter],
    device_id: int | torch.device | None,
    unit: str,
    rank: int,
) -> None:
    """Raise RuntimeError unless ``params`` are on one device, or some on the CPU and ``device_id`` is given."""
    devices = {param.device for param in params}
    if len(devices) < 2 or (len(devices) == 2 and CPU in devices and device_id is not None):
        return
    examples = {str(param.device): tree.param_name(param) for param in params}
    found = ", ".join(f"{name!r} on {device}" for device, name in sorted(examples.items()))
    if len(devices) == 2 and CPU in devices:
        raise RuntimeError(
            "To support a module with both CPU and GPU params, please pass in device_id: "
            f"{unit} on rank {rank} has {found}"
        )
    raise RuntimeError(
        f"FSDP only supports single device modules but got params on several: {unit} on rank {rank} has "
        f"{found}; move it to one of them"
    )


def _check_compute_device(
    tree: Subtree, params: Collection[nn.Parameter], compute_device: torch.device, unit: str, rank: int
) -> None:
    """Raise ValueError if parameters are on another accelerator than ``compute_device``."""
    for param in params:
        if param.device not in (compute_device, CPU):
            raise ValueError(
                f"Inconsistent compute device and `device_id` on rank {rank}: {param.device} vs "
                f"{compute_device}, by {tree.param_name(param)!r} of {unit}; move the module or pass its "
                "device"
            )


def _own_buffers(tree: Subtree, ignored_modules: set[nn.Module]) -> list[torch.Tensor]:
    """Return the buffers outside inner units and ignored modules."""
    ignored = {buffer for module in ignored_modules for buffer in module.buffers(recurse=False)}
    return [buffer for buffer in tree.buffers if buffer not in ignored]


def _initialize_modules(
    root: nn.Module,
    ignored_modules: set[nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Allocate and initialize modules breadth-first, except units and ignored ones with their subtrees.

    By ``param_init_fn``, or by ``reset_parameters()`` of each module with tensors of its own.
    """
    modules, visited = [root], {root}
    for module in modules:  # grows by the children
        for child in module.children():
            if child not in visited and not is_unit(child) and child not in ignored_modules:
                visited.add(child)
                modules.append(child)
    if param_init_fn is not None:
        for module in modules:
            param_init_fn(module)
        return
    with torch.no_grad():
        for module in modules:
            if all(own is None for own in (*module._parameters.values(), *module._buffers.values())):
                continue
            try:
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()  # type: ignore[operator]  # a missing method is reported by the warning below
            except Exception as error:
                warnings.warn(
                    f"Unable to call `reset_parameters()` for module on meta device with error {error}: give "
                    f"{type(module).__name__} this method, or pass param_init_fn",
                    stacklevel=4,
                )
                raise


def _move_to_device(
    tree: Subtree, params: Iterable[nn.Parameter], ignored_modules: set[nn.Module], device: torch.device
) -> None:
    """Move parameters (with gradients) and non-ignored buffers from the CPU to ``device``."""
    if device == CPU:
        return
    with torch.no_grad():
        for param in params:
            if param.device == CPU:
                param.data = param.to(device)
                if param.grad is not None:
                    param.grad.data = param.grad.to(device)
        for buffer in _own_buffers(tree, ignored_modules):
            if buffer.device == CPU:
                buffer.data = buffer.to(device)


def sync_states(
    module: nn.Module, params: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup], where: str
) -> None:
    """Broadcast ``params`` and unsynchronized buffers from rank 0. Collective over ``groups``, in order.

    The replicas' group must be first: then rank 0 of every shard group has the right values. Raises
    ValueError, naming ``where``, for CPU tensors that a group's backend cannot send.
    """
    tensors: list[torch.Tensor] = []
    buffers = [
        buffer
        for buffer in dict.fromkeys(buffer for _, buffer in named_buffers(module))
        if not getattr(buffer, "_fsdp_synced", False)
    ]
    _check_sendable(module, [*params, *buffers], groups, where)
    for buffer in buffers:
        buffer._fsdp_synced = True  # type: ignore[attr-defined]  # mark on the user's buffer
        tensors += _plain_tensors(buffer.detach())
    for param in params:
        tensors += _plain_tensors(param.detach())
    for group in groups:
        _sync_params_and_buffers(group, tensors, BROADCAST_BUCKET_NBYTES, src=0)


def _check_sendable(
    module: nn.Module, tensors: Iterable[torch.Tensor], groups: Iterable[dist.ProcessGroup], where: str
) -> None:
    on_cpu = next((tensor for tensor in tensors if tensor.device == CPU), None)
    if on_cpu is None:
        return
    for group in groups:
        types = {device.type for device in group._device_types}  # empty for third-party groups
        if types and CPU.type not in types:
            named = itertools.chain(module.named_buffers(), module.named_parameters())
            name = next((clean_name(name) for name, tensor in named if tensor is on_cpu), "one of them")
            raise ValueError(
                f"The module has CPU parameters or buffers when `sync_module_states=True`: {name!r} of "
                f"{where}, whose process group sends tensors on {', '.join(sorted(types))} alone. Pass "
                "device_id, or move the module "
                'there before it is wrapped, or make the group with the backend "cpu:gloo,cuda:nccl"'
            )


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor`` itself, or the inner tensors of a wrapper subclass."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local()]
    if not is_traceable_wrapper_subclass(tensor):
        # Broadcast dense integers as uint8, which every backend supports.
        is_sent = tensor.is_floating_point() or not tensor.dim() or not tensor.is_contiguous()
        return [tensor if is_sent else tensor.view(torch.uint8)]
    plain: list[torch.Tensor] = []
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if not isinstance(inner, torch.Tensor):
            raise AssertionError(
                f"expected Tensor or OpaqueBase, got {type(inner)}: {name!r} of {type(tensor).__name__} is "
                "to be broadcast"
            )
        plain += _plain_tensors(inner)
    return plain
