"""Bringing a module's tensors to life before they are flattened: meta initialisation, moves, broadcasts."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.utils import _sync_params_and_buffers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c.construction import CPU, own_params
from fsdp_c.traversal import is_unit

BROADCAST_BUCKET_NBYTES = 250 * 1024 * 1024


def materialize(
    module: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give values to a module on the meta device: by ``param_init_fn`` on each submodule, or ``reset_parameters()``."""
    if not _has_meta_tensors(module, ignored_modules, ignored_params):
        return
    targets = list(_modules_to_materialize(module, ignored_modules))
    if param_init_fn is None:
        _reset_parameters(targets, device)
    elif callable(param_init_fn):
        for target in targets:
            param_init_fn(target)
    else:
        raise ValueError(f"expected param_init_fn to be callable but got {type(param_init_fn).__name__}")
    for param, name in own_params(module, ignored_params).items():
        if param.is_meta:
            raise ValueError(f"{name!r} is still on the meta device after its initialisation")


def _has_meta_tensors(module: nn.Module, ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]) -> bool:
    if any(param.is_meta for param in own_params(module, ignored_params)):
        return True
    kept = (submodule for submodule in module.modules() if submodule not in ignored_modules)
    return any(buffer.is_meta for submodule in kept for buffer in submodule.buffers(recurse=False))


def _modules_to_materialize(root: nn.Module, ignored_modules: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules breadth first; neither units nor ignored modules are entered."""
    pending, visited = deque([root]), {root}
    while pending:
        module = pending.popleft()
        yield module
        for child in module.children():
            if child not in visited and not is_unit(child) and child not in ignored_modules:
                visited.add(child)
                pending.append(child)


@torch.no_grad()
def _reset_parameters(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Allocate and initialise the modules that have tensors of their own; each is taken to initialise only those."""
    for module in modules:
        if not any(True for _ in module.parameters(recurse=False)) and not any(
            True for _ in module.buffers(recurse=False)
        ):
            continue
        try:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
        except Exception as error:
            warnings.warn(
                f"cannot initialise a module of type {type(module).__name__} from the meta device ({error}): give it a "
                "reset_parameters() method, or pass param_init_fn",
                stacklevel=6,
            )
            raise


def move_to_device(
    module: nn.Module, ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter], device: torch.device
) -> None:
    """Move what is on the CPU, gradients and buffers with it; neither ignored states nor the units inside are moved."""
    ignored_buffers = {buffer for ignored in ignored_modules for buffer in ignored.buffers()}
    pending, visited = deque([module]), {module}
    with torch.no_grad():
        while pending:
            current = pending.popleft()
            for param in current.parameters(recurse=False):
                if param.device == CPU and param not in ignored_params:
                    _move_param(param, device)
            for buffer in current.buffers(recurse=False):
                if buffer.device == CPU and buffer not in ignored_buffers:
                    buffer.data = buffer.to(device)
            inner = [child for child in current.children() if not is_unit(child) and child not in visited]
            visited.update(inner)
            pending.extend(inner)


def _move_param(param: nn.Parameter, device: torch.device) -> None:
    param.data = param.to(device)
    if param.grad is not None:
        param.grad.data = param.grad.to(device)


def warn_of_cpu_initialization(params: Iterable[nn.Parameter], compute_device: torch.device) -> None:
    """UserWarning when a module that an accelerator will compute is sharded on the CPU."""
    if compute_device != CPU and any(param.device == CPU for param in params):
        warnings.warn(
            f"the module is on CPU and is sharded there, which may be slower than on {compute_device}; pass device_id "
            "to have it "
            "moved first, or move it before the first forward",
            stacklevel=4,
        )


def sync_states(module: nn.Module, params: Iterable[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> None:
    """Give every rank the values of rank 0: ``params`` and each buffer not yet sent. Collective over ``groups``.

    With the group of the replicas first, every shard group's rank 0 has the right values when its turn comes.
    """
    tensors: list[torch.Tensor] = []
    for buffer in module.buffers():
        if not getattr(buffer, "_fsdp_synced", False):
            buffer._fsdp_synced = True
            tensors += _plain_tensors(buffer.detach())
    for param in params:
        tensors += _plain_tensors(param.detach())
    for group in groups:
        _sync_params_and_buffers(group, tensors, BROADCAST_BUCKET_NBYTES, src=0)


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor`` itself, or the tensors inside a wrapper subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [plain for value in inner if isinstance(value, torch.Tensor) for plain in _plain_tensors(value)]
