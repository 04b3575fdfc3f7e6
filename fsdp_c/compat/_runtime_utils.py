"""FSDP1's private runtime functions, as targets for monkey-patching.

The runtime in C does not call the functions defined here. If one of these names is assigned another function,
here or (after ``install()``) in ``torch.distributed.fsdp._runtime_utils``, the runtime calls the replacement
where FSDP1 would, with FSDP1's arguments. A replacement may call the original, i.e. the function defined
here.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from torch import nn

from fsdp_c import _C
from fsdp_c.compat.upstream import HandleTrainingState
from fsdp_c.sharding.flat_param import FlatParamHandle
from fsdp_c.sharding.sharded_module import ShardedModule

T = TypeVar("T")
U = TypeVar("U")


def _lazy_init(state: ShardedModule, root_module: nn.Module) -> ShardedModule:
    """Make ``state`` a root unless its tree has one."""
    state._lazy_init()
    return state


def _root_pre_forward(state: ShardedModule, module: nn.Module, args: T, kwargs: U) -> tuple[T, U]:
    """Make ``state`` a root unless its tree has one. Further preparation is done by the forward in C."""
    state._lazy_init()
    return args, kwargs


def _post_backward_final_callback(state: ShardedModule, module: nn.Module) -> None:
    """Finalize a backward, including one that raised."""
    if state._unit.runtime is not None:
        state._unit.runtime.recover()
        state._unit.runtime.final_callback()


def _reshard(state: ShardedModule, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    """Reshard; free the unsharded storage if ``free_unsharded_flat_param``."""
    handle.reshard(free_unsharded_flat_param)


def _post_backward_reshard(state: ShardedModule, handle: FlatParamHandle, *unused: object) -> None:
    """Reshard and prefetch the next unit. Called in backward after the gradients were packed."""
    state._unit.post_backward_reshard()


def _register_pre_backward_hooks(
    state: ShardedModule, module: nn.Module, outputs: T, handle: FlatParamHandle
) -> T:
    """Register hooks that unshard on the gradient of ``outputs``. Called after a forward."""
    state._unit.register_pre_backward_hooks(outputs)
    return outputs


def _register_post_backward_hook(state: ShardedModule, handle: FlatParamHandle) -> None:
    """Register the hook that reduces the unit's gradients. Called in a forward, after unshard."""
    state._unit.register_post_backward_hook()


def _get_training_state(handle: FlatParamHandle) -> HandleTrainingState:
    """Return the handle's state, which selects the next handle to prefetch."""
    return handle._training_state


def _get_handle_to_prefetch(state: ShardedModule, current_handle: FlatParamHandle) -> FlatParamHandle | None:
    """Return the handle to prefetch while ``current_handle`` computes, or None."""
    training_state = _current["_get_training_state"](current_handle)
    found = state._unit.handle_to_prefetch(list(HandleTrainingState).index(training_state))
    return cast("FlatParamHandle | None", found)


ORIGINALS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        _reshard,
        _post_backward_reshard,
        _register_pre_backward_hooks,
        _register_post_backward_hook,
        _get_training_state,
        _get_handle_to_prefetch,
    )
}
_current: dict[str, Callable[..., Any]] = dict(ORIGINALS)


def replace(name: str, function: Callable[..., Any]) -> None:
    """Make the runtime call ``function`` in place of ``name``; passing the original reverts it."""
    _current[name] = function
    if name == "_get_training_state":  # called by the runtime only through _get_handle_to_prefetch
        name = "_get_handle_to_prefetch"
    called = {name, "_get_training_state"} if name == "_get_handle_to_prefetch" else {name}
    is_replaced = any(_current[each] is not ORIGINALS[each] for each in called)
    _C.replace(name, _current[name] if is_replaced else None)


class Watched(ModuleType):
    """A module that notifies the runtime when one of its functions is replaced."""

    def __setattr__(self, name: str, value: Callable[..., Any]) -> None:
        super().__setattr__(name, value)
        if name in ORIGINALS:
            replace(name, value)


sys.modules[__name__].__class__ = Watched
