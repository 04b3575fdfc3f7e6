"""Auto wrapping: replaces the modules selected by a policy with units."""

import functools
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.utils import _apply_to_tensors

from fsdp_c.compat.aliases import Kwargs
from fsdp_c.compat.upstream import (
    _construct_wrap_fn,
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _wrap_module_cls_individually,
)
from fsdp_c.sharding.compiling import modules_by_compiled
from fsdp_c.sharding.flattening import groups_of, splits_frozen
from fsdp_c.sharding.traversal import AutoWrapping, Homes, Subtree, current_auto_wrapping, joined

Policy = _Policy | Callable[..., bool]

# path of each module in the tree that was auto wrapped last
_paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def unit_name(module: nn.Module, path: str = "") -> str:
    """Return the name of the unit around ``module`` for errors: its class, and its path if known."""
    path = path or _paths.get(module, "")
    return f"{type(module).__name__} at {path!r}" if path else type(module).__name__


def auto_wrap(
    tree: Subtree,
    policy: Policy,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: Kwargs,
    unit_class: type[nn.Module],
) -> Homes:
    """Replace submodules selected by ``policy`` with units, innermost first; the root of ``tree`` stays.

    A parameter shared between units belongs to the lowest unit around all of its modules. Returns the homes
    of these parameters, see Subtree.

    ``root_kwargs`` are the keyword arguments of the root's constructor; inner units get the same. Classes in
    ``_module_classes_to_ignore`` of the mixed precision become full-precision units, regardless of the
    policy.

    Raises ValueError if the tree contains a unit already.
    """
    for path in tree.units.values():
        raise ValueError(
            f"FSDP auto wrapping requires modules to not already have FSDP applied but found {path} in "
            f"{type(tree.root).__name__}: leave out auto_wrap_policy, or wrap that module by policy"
        )
    _paths.update(tree.modules)
    classes: tuple[type[nn.Module], ...] = ()  # module classes kept in full precision
    if root_kwargs["mixed_precision"] is not None:
        classes = tuple(root_kwargs["mixed_precision"]._module_classes_to_ignore)
    inside = modules_by_compiled(tree.modules)
    chosen: dict[nn.Module, Kwargs] = {}  # modules that become units, with their arguments
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(tree.root, ignored_modules, {**root_kwargs, "auto_wrap_policy": None})
        for module in tree.modules:
            if module not in ignored_modules and isinstance(module, classes):
                kwargs = chosen.get(module, {**root_kwargs, "auto_wrap_policy": None})
                chosen[module] = {**kwargs, "mixed_precision": None}
        compiled = {module: outer for outer, module in inside.items()}
        chosen = {compiled.get(module, module): kwargs for module, kwargs in chosen.items()}
        wrap = functools.partial(
            _post_order_apply, tree.root, _construct_wrap_fn(tree.root, chosen, unit_class)
        )
    else:
        if classes:
            individually = functools.partial(_wrap_module_cls_individually, module_classes=classes)
            policy = functools.partial(_or_policy, policies=[policy, individually])
        wrap_by = functools.partial(
            _recursive_wrap,
            tree.root,
            _or_inside(policy, inside),
            ignored_modules=ignored_modules,
            ignored_params=ignored_params,
            only_wrap_children=True,
            **root_kwargs,
        )
        wrap = functools.partial(wrap_by, wrapper_cls=unit_class)
        if tree.shared_params:  # their homes follow from the modules that the policy selects

            def record(module: nn.Module, **kwargs: Any) -> nn.Module:
                chosen[module] = kwargs
                return module

            wrap_by(wrapper_cls=record)
    homes = homes_of_shared_params(tree, chosen)
    if isinstance(policy, _Policy) and root_kwargs["use_orig_params"] and not splits_frozen():
        _warn_of_frozen_params(tree, chosen, homes, ignored_params)
    _keep_in_full_precision(tree.modules, classes)
    tree.drop_param_cache()
    token = current_auto_wrapping.set(AutoWrapping(homes, ignored_params))
    try:
        wrap()
    finally:
        current_auto_wrapping.reset(token)
    return homes


def homes_of_shared_params(tree: Subtree, chosen: Container[nn.Module]) -> Homes:
    """Map each parameter shared between units to its home: the lowest unit around all of its modules.

    ``chosen`` are the modules that become units, without the root.
    """
    roots = {path: module for module, path in tree.modules.items() if module in chosen}
    roots[""] = tree.root
    around: dict[nn.Parameter, list[list[str]]] = {}
    for param, info in tree.shared_params:
        first = _roots_around(tree.params[param].module_name, roots)
        around.setdefault(param, [first]).append(_roots_around(info.module_name, roots))
    homes = {}
    for param, places in around.items():
        common = [path for path in places[0] if all(path in others for others in places)]
        if any(place[-1] != common[-1] for place in places):
            homes[param] = roots[common[-1]]
    return homes


def _roots_around(path: str, roots: Container[str]) -> list[str]:
    """Return the ``roots`` along ``path``, outermost first."""
    ends = [index for index, character in enumerate(path) if character == "."]
    return [part for part in dict.fromkeys(["", *(path[:end] for end in ends), path]) if part in roots]


def check_policy(policy: object) -> None:
    """Raise TypeError unless ``policy`` is a policy object or a callable."""
    if isinstance(policy, type) or not (callable(policy) or isinstance(policy, _Policy)):
        got = policy.__name__ if isinstance(policy, type) else f"{type(policy).__name__} {policy!r}"
        raise TypeError(
            f"auto_wrap_policy must be a policy object or a callable, not {got}: pass for instance "
            "fsdp_c.wrap.ModuleWrapPolicy({TransformerBlock})"
        )


def _or_inside(policy: Callable[..., bool], inside: Mapping[nn.Module, nn.Module]) -> Callable[..., bool]:
    """Return a policy that selects a compiled module if ``policy`` selects its inner module.

    A unit around the inner module would never run: the compiled module calls the original directly.
    """
    never = set(inside.values())

    def chooses(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        def ask(one: nn.Module) -> bool:
            return policy(module=one, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

        if recurse:
            return ask(module)
        return module not in never and (ask(module) or (module in inside and ask(inside[module])))

    return chooses if inside else policy


def _keep_in_full_precision(modules: Iterable[nn.Module], classes: tuple[type[nn.Module], ...]) -> None:
    """Register hooks that run instances of ``classes`` in fp32. Warns if there are any."""
    found = [module for module in modules if isinstance(module, classes)]
    for module in found:
        vars(module)["_wrap_overrides"] = {"mixed_precision": None}  # read by torch's _recursive_wrap
        region = _FullPrecisionRegion()
        module.register_forward_pre_hook(region.enter)
        module.register_forward_hook(region.leave)
    if found:
        names = ", ".join(sorted({type(module).__name__ for module in found}))
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, for submodules of type "
            f"{names}. These modules will be wrapped as separate FSDP units without mixed precision "
            "(MixedPrecision._module_classes_to_ignore)",
            stacklevel=4,
        )


class _FullPrecisionRegion:
    """Hooks that cast floating-point inputs to fp32, and outputs to the dtype of the last input cast."""

    def __init__(self) -> None:
        self.input_dtype: torch.dtype | None = None

    def enter(self, module: nn.Module, args: tuple[object, ...]) -> object:
        self.input_dtype = None

        def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.dtype is torch.float32:
                return tensor
            self.input_dtype = tensor.dtype
            return tensor.to(torch.float32)

        return _apply_to_tensors(to_fp32, args)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        dtype = self.input_dtype
        if dtype is None:
            return None
        return _apply_to_tensors(
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output
        )


def _warn_of_frozen_params(
    tree: Subtree, targets: Container[nn.Module], homes: Homes, ignored_params: set[nn.Parameter]
) -> None:
    """Warn about selected modules whose flat parameter would mix frozen and trainable parameters."""
    registered = (
        param for module in tree.modules for param in module._parameters.values() if param is not None
    )
    if len({param.requires_grad for param in registered}) < 2:
        return
    for module, path in reversed(tree.modules.items()):  # inner ones first
        if module not in targets:
            continue
        own = Subtree(module, inner=targets, homes=homes).params.items()
        params = {
            param: joined(path, joined(info.module_name, info.param_name))
            for param, info in own
            if param not in ignored_params
        }
        trainable = [param for param in params if param.requires_grad]
        frozen = [param for param in params if not param.requires_grad]
        if not trainable or not frozen or len(groups_of(params, use_orig_params=True)) > 1:
            continue
        wanted = sum(param.numel() for param in trainable)
        total = wanted + sum(param.numel() for param in frozen)
        warnings.warn(
            f"{path or type(tree.root).__name__} has both parameters with requires_grad=True and False: its "
            f"gradients take {total} numel "
            f"instead of {wanted} numel before they are reduced; wrap under fsdp_c.wrap.split_frozen(), or "
            "wrap the frozen parameters with FSDP separately. "
            f"requires_grad=True: {[params[param] for param in trainable]}; "
            f"requires_grad=False: {[params[param] for param in frozen]}",
            stacklevel=4,
        )
