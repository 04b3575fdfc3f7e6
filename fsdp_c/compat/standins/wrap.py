"""Stand-in for ``torch.distributed.fsdp.wrap``: auto wrap policies and module traversal."""

from __future__ import annotations

import contextlib
import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.nn as nn

from fsdp_c.compat.aliases import Kwargs

# ----------------------------------------------------------------- policies


class _Policy(ABC):
    """Selects submodules and their keyword arguments for wrapping."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        """Return the selected modules in ``modules()`` order, each with its arguments."""


class ModuleWrapPolicy(_Policy):
    """Selects instances of the given classes, with the root's arguments."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)
        self._module_classes_str = str(self._module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        classes = tuple(self._module_classes)
        return {
            module: copy.copy(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"{super().__repr__()}({self._module_classes_str})"


class CustomPolicy(_Policy):
    """Selects submodules by a function that returns False, True, or overrides of the root's arguments."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        chosen = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it "
                    f"returned {answer} for a {type(module).__name__}"
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Select every submodule."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Select submodules for which ``lambda_fn`` returns True."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Select instances of the transformer layer classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Select submodules with at least ``min_num_params`` elements outside of inner units.

    Submodules of ``force_leaf_modules`` (default: FORCE_LEAF_MODULES of this function) are not visited;
    instances of ``exclude_wrap_modules`` (default: EXCLUDE_WRAP_MODULES) are not wrapped.
    """
    if nonwrapped_numel < min_num_params:
        return False
    given, defaults = exclude_wrap_modules, "EXCLUDE_WRAP_MODULES"
    if recurse:
        given, defaults = force_leaf_modules, "FORCE_LEAF_MODULES"
    unwanted: set[type[nn.Module]] = (
        getattr(size_based_auto_wrap_policy, defaults) if given is None else given
    )
    return not isinstance(module, tuple(unwanted))


vars(size_based_auto_wrap_policy).update(
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict}, FORCE_LEAF_MODULES={nn.MultiheadAttention}
)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Select modules that any of ``policies`` selects."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies
    )


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Select instances of ``module_classes``, as a callable policy."""
    return recurse or isinstance(module, tuple(module_classes))


# ----------------------------------------------------------------- traversal


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` once per module, children first; a returned module replaces the original."""
    visited = {root_module}

    def visit(module: nn.Module, name: str, parent: nn.Module | None) -> None:
        for child_name, child in module.named_children():
            if child not in visited:
                visited.add(child)
                visit(child, child_name, module)
        replacement = fn(module)
        if replacement is None:
            return
        if parent is None:
            raise AssertionError(
                f"Non-root modules should have their parent module set but got None for {module}: the root "
                "stays"
            )
        if not isinstance(replacement, nn.Module):
            raise AssertionError(f"fn should return None or an nn.Module but got {replacement} for {name!r}")
        setattr(parent, name, replacement)

    visit(root_module, "", None)


def _construct_wrap_fn(
    root_module: nn.Module,
    target_module_to_kwargs: dict[nn.Module, Kwargs],
    fsdp_fn: Callable[..., nn.Module],
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function for ``_post_order_apply`` that wraps the targets except the root."""

    def wrap_target(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrap_target


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """Wrap one module; its ``_wrap_overrides`` take precedence over ``kwargs``."""
    return wrapper_cls(module, **{**kwargs, **getattr(module, "_wrap_overrides", {})})


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the submodules selected by a callable policy, innermost first, then ``module`` itself.

    The policy is called twice per module: pre-order with ``recurse=True`` (visit children?), and post-order
    with ``recurse=False`` (wrap?) and the number of elements outside of units. Returns the module or its
    wrapper, and the number of elements in units.
    """
    if isinstance(wrapper_cls, type):
        for child in module.modules():
            if child not in ignored_modules and isinstance(child, wrapper_cls):
                raise AssertionError(
                    f"Child module {child} is already wrapped: it is in a {type(module).__name__}"
                )
    numel = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    if not auto_wrap_policy(module=module, recurse=True, nonwrapped_numel=numel):
        return module, 0
    wrapped_numel = 0
    for name, child in module.named_children():
        if child in ignored_modules:
            continue
        replacement, numel_of_child = _recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, replacement)
        wrapped_numel += numel_of_child
    if only_wrap_children or not auto_wrap_policy(
        module=module, recurse=False, nonwrapped_numel=numel - wrapped_numel
    ):
        return module, wrapped_numel
    return _wrap(module, wrapper_cls, **kwargs), numel


# ----------------------------------------------------------------- wrapping while a model is built


_active: tuple[Callable[..., nn.Module], Kwargs] | None = None  # wrapper and arguments of ``enable_wrap``


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap`` use ``wrapper_cls`` with these arguments in the block. Cannot be nested."""
    global _active
    if _active is not None:
        raise NotImplementedError(
            "You are already within an autowrap context: leave the outer enable_wrap first"
        )
    _active = wrapper_cls, wrapper_kwargs
    try:
        yield
    finally:
        _active = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return the module wrapped by the active ``enable_wrap``, with overrides; unchanged outside of one."""
    if _active is None:
        return module
    wrapper_cls, kwargs = _active
    return _wrap(module, wrapper_cls, **{**kwargs, **wrap_overrides})


for _value in list(vars().values()):
    if getattr(_value, "__module__", None) == __name__:
        _value.__module__ = sys.intern("torch.distributed.fsdp.wrap")
