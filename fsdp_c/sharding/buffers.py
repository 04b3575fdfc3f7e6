"""Buffers are not sharded; with buffer mixed precision they are cast once, at lazy initialisation.

With FSDP_USE_FULL_PREC_IN_EVAL they are cast back for a forward in eval mode, and again for the next one in
training.
"""

from collections.abc import Iterable, Iterator

import torch

from fsdp_c.sharding.sharded_module import ShardedModule, is_sharded_module
from fsdp_c.sharding.traversal import Subtree, clean_name, clean_path, joined, named_buffers


def original_dtypes(tree: Subtree) -> dict[str, torch.dtype]:
    """The dtype of every buffer under its name in the user's own model, to which checkpoints cast back."""
    dtypes = {clean_name(name): buffer.dtype for buffer, name in tree.buffers.items()}
    for module in filter(is_sharded_module, tree.units):
        path, inner = tree.units[module], module._buffer_name_to_orig_dtype.items()
        dtypes.update((joined(clean_path(path), name), dtype) for name, dtype in inner)
    return dtypes


def cast_for_computation(modules: Iterable[ShardedModule], device: torch.device) -> None:
    """Cast floating buffers to the ``buffer_dtype`` of the innermost unit around; move all to ``device``.

    ``modules`` in traversal order. Ignored buffers stay as they are. Record the original dtype of buffers
    registered since the module was wrapped.
    """
    for module, name, buffer in _own_buffers(modules):
        if name not in module._buffer_names:
            module._buffer_names.add(name)
            module._buffer_name_to_orig_dtype[name] = buffer.dtype
        dtype = module.mixed_precision.buffer_dtype
        buffer.data = buffer.to(
            device=device, dtype=dtype if dtype is not None and buffer.is_floating_point() else None
        )


def _own_buffers(modules: Iterable[ShardedModule]) -> Iterator[tuple[ShardedModule, str, torch.Tensor]]:
    """The buffers that are not ignored, with the innermost unit around each and the name from there."""
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
    """Give buffers their original dtypes; values rounded by an earlier cast stay so. See
    ``cast_for_computation``."""
    for module, name, buffer in _own_buffers(modules):
        buffer.data = buffer.to(dtype=module._buffer_name_to_orig_dtype.get(name))
