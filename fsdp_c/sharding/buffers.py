"""Buffers of units: never sharded; cast to ``buffer_dtype`` once, at lazy initialization.

With FSDP_USE_FULL_PREC_IN_EVAL, a forward in eval mode casts them back, and the next one in training mode
casts them again.
"""

from collections.abc import Iterable, Iterator

import torch

from fsdp_c.sharding.sharded_module import ShardedModule, is_sharded_module
from fsdp_c.sharding.traversal import Subtree, clean_name, clean_path, joined, named_buffers


def original_dtypes(tree: Subtree) -> dict[str, torch.dtype]:
    """Return the dtype of every buffer by FQN. Checkpoints cast buffers back to it."""
    dtypes = {clean_name(name): buffer.dtype for buffer, name in tree.buffers.items()}
    for module in filter(is_sharded_module, tree.units):
        path, inner = tree.units[module], module._buffer_name_to_orig_dtype.items()
        dtypes.update((joined(clean_path(path), name), dtype) for name, dtype in inner)
    return dtypes


def cast_for_computation(modules: Iterable[ShardedModule], device: torch.device) -> None:
    """Cast floating-point buffers to the innermost unit's ``buffer_dtype``; move all buffers to ``device``.

    ``modules`` are in pre-order. Ignored buffers are unchanged. Original dtypes of buffers registered after
    wrapping are recorded.
    """
    for module, name, buffer in _own_buffers(modules):
        module._buffer_names.add(name)
        module._buffer_name_to_orig_dtype.setdefault(name, buffer.dtype)
        dtype = module.mixed_precision.buffer_dtype
        buffer.data = buffer.to(
            device=device, dtype=dtype if dtype is not None and buffer.is_floating_point() else None
        )


def _own_buffers(modules: Iterable[ShardedModule]) -> Iterator[tuple[ShardedModule, str, torch.Tensor]]:
    """Yield (innermost unit, FQN relative to that unit, buffer) for buffers that are not ignored."""
    visited: set[torch.Tensor] = set()
    inner: set[torch.nn.Module] = set()
    for module in reversed(list(modules)):
        for name, buffer in named_buffers(module, inner.__contains__):
            if buffer not in visited:
                visited.add(buffer)
                if clean_name(name) not in module._ignored_buffer_names:
                    yield module, clean_name(name), buffer
        inner.add(module)


def cast_back(modules: Iterable[ShardedModule]) -> None:
    """Cast buffers to their original dtypes. Values rounded by an earlier cast stay rounded."""
    for module, name, buffer in _own_buffers(modules):
        buffer.data = buffer.to(dtype=module._buffer_name_to_orig_dtype.get(name))
