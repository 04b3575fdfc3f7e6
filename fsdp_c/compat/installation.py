"""Replacement of torch's FSDP1 in a process: ``install()`` and ``uninstall()``.

[Note: Names that stand for FSDP1]
Libraries bind FSDP1's class at import time (``from torch.distributed.fsdp import FullyShardedDataParallel``)
and compare types with the bound class. ``install()`` therefore replaces torch's objects in every module that
holds one: torch's own modules (for later imports), libraries, and the script. Enums, configurations and wrap
policies are torch's own classes in fsdp_c too, and stay. References outside of modules (a local variable, a
default argument, a dictionary) still hold torch's class. Calling it constructs fsdp_c units, and its
static methods are fsdp_c's. A torch without FSDP1 gets FSDP1's names.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch import nn

from fsdp_c.compat import _runtime_utils
from fsdp_c.compat.standins.finder import FSDP as _FSDP
from fsdp_c.compat.standins.finder import put_public_names
from fsdp_c.compat.upstream import HAS_FSDP1
from fsdp_c.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_c.sharded_grad_scaler import ShardedGradScaler
from fsdp_c.sharding.flat_param import FlatParameter, FlatParamHandle
from fsdp_c.sharding.traversal import is_unit
from fsdp_c.training import rank_local, replacements
from fsdp_c.training.forward_methods import register_forward_method

# ----------------------------------------------------------------- replacements


def _register_fsdp_forward_method(
    original: Callable[[nn.Module, str], None], module: nn.Module, method_name: str
) -> None:
    """Use ``fsdp_c.register_forward_method`` for fsdp_c units: torch's function ignores FSDP1 modules."""
    if is_unit(module):
        register_forward_method(module, method_name)
    else:
        original(module, method_name)


def _warning(fully_shard: Callable[..., Any]) -> Callable[..., Any]:
    """Return FSDP2's ``fully_shard`` with a warning that fsdp_c does not replace it."""

    @functools.wraps(fully_shard)
    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            "fsdp_c is installed, but FSDP2 is used: fully_shard() stays torch's. Choose FSDP1: `--fsdp_version 1` of "
            'accelerate launch, `fsdp_config={"version": 1}` of transformers\' TrainingArguments, or '
            "torch.distributed.fsdp.FullyShardedDataParallel.",
            stacklevel=2,
        )
        return fully_shard(*args, **kwargs)

    return warned


_OURS: dict[tuple[str, str], object] = {
    ("fully_sharded_data_parallel", "FullyShardedDataParallel"): FullyShardedDataParallel,
    ("_flat_param", "FlatParameter"): FlatParameter,
    ("_flat_param", "FlatParamHandle"): FlatParamHandle,
    ("sharded_grad_scaler", "ShardedGradScaler"): ShardedGradScaler,
    ("_runtime_utils", "_lazy_init"): _runtime_utils._lazy_init,
    ("_runtime_utils", "_root_pre_forward"): _runtime_utils._root_pre_forward,
    **{("_runtime_utils", name): function for name, function in _runtime_utils.ORIGINALS.items()},
    ("_runtime_utils", "_post_backward_final_callback"): _runtime_utils._post_backward_final_callback,
}


@functools.cache
def _replacements() -> dict[int, tuple[object, object]]:
    """Return {id of torch's object: (torch's object, fsdp_c's)}. The reference keeps the id valid."""
    pairs = [
        (getattr(importlib.import_module(f"{_FSDP}.{name}"), attr), ours)
        for (name, attr), ours in _OURS.items()
        if HAS_FSDP1
    ]
    package = importlib.import_module(_FSDP)
    if forward_method := getattr(package, "register_fsdp_forward_method", None):
        pairs.append((forward_method, functools.partial(_register_fsdp_forward_method, forward_method)))
    if fully_shard := getattr(package, "fully_shard", None):
        pairs.append((fully_shard, _warning(fully_shard)))
    pairs.append((replacements.torchs_clip_grad_norm_, replacements.clip_grad_norm_))
    pairs.append((rank_local.torchs_get_total_norm, replacements.get_total_norm))
    return {id(theirs): (theirs, ours) for theirs, ours in pairs}


# ----------------------------------------------------------------- install and uninstall


_undo: ExitStack | None = None  # reverses the changes of ``install()``; None without it


def is_installed() -> bool:
    """Return True between ``install()`` and ``uninstall()``."""
    return _undo is not None


def install() -> None:
    """Replace torch's FSDP1 with fsdp_c, in all imported modules and for all later imports.

    ``torch.distributed.fsdp.FullyShardedDataParallel`` becomes fsdp_c's class under all its imported names, so
    that ``isinstance`` and ``type(model) is`` hold in libraries and scripts. Call it before the first model
    is wrapped. Further calls have no effect. ``uninstall()`` reverts it. See [Note: Names that stand for
    FSDP1].

    Raises RuntimeError, without any change, while units of torch's FSDP1 are alive.
    """
    global _undo
    if _undo is not None:
        return
    pairs, undo = _replacements(), ExitStack()
    if HAS_FSDP1:
        _refuse_live_units()
    written = [each for each in _names_of_modules() if id(each[2]) in pairs]
    for module, name, value in written:
        setattr(module, name, pairs[id(value)][1])
    undo.callback(_restore_names, written, frozenset(sys.modules))
    if HAS_FSDP1:
        _forward_class_attributes(undo)
        # watch torch's _runtime_utils: tests of torch and composer patch its functions
        torchs = importlib.import_module(f"{_FSDP}._runtime_utils")
        torchs.__class__ = _runtime_utils.Watched
        undo.callback(setattr, torchs, "__class__", ModuleType)
    else:
        package = importlib.import_module(_FSDP)
        for name in put_public_names(package):
            undo.callback(delattr, package, name)
    replacements.apply()
    undo.callback(replacements.revert)
    rank_local.reduces_over_ranks = True
    undo.callback(setattr, rank_local, "reduces_over_ranks", False)
    _undo = undo


def uninstall() -> None:
    """Revert ``install()``: all names refer to torch's objects again, also in modules imported since.

    A module imported since whose source mentions fsdp_c keeps its imports. Existing units keep their class.
    No-op if fsdp_c is not installed.
    """
    global _undo
    if _undo is None:
        return
    _undo.close()
    # functions patched in torch's module must no longer affect the runtime
    for name in _runtime_utils.ORIGINALS:
        _runtime_utils.replace(name, getattr(_runtime_utils, name))
    _undo = None


def _restore_names(written: list[tuple[ModuleType, str, object]], seen: frozenset[str]) -> None:
    """Revert ``written`` names (module, name, original), and names of modules imported since ``seen``."""
    theirs = {id(ours): original for original, ours in _replacements().values()}
    for module, name, original in written:
        if id(vars(module).get(name)) in theirs:
            setattr(module, name, original)
    for module, name, value in _names_of_modules():
        if id(value) in theirs and module.__name__ not in seen and not _mentions_us(module):
            setattr(module, name, theirs[id(value)])


def _torchs_class() -> Any:
    return next(theirs for theirs, ours in _replacements().values() if ours is FullyShardedDataParallel)


def _forward_class_attributes(undo: ExitStack) -> None:
    """Make torch's class construct fsdp_c units, with their static methods, until ``undo`` is closed."""
    theirs, ours = _torchs_class(), vars(FullyShardedDataParallel)
    new: dict[str, object] = {
        name: ours[name] for name in vars(theirs) if isinstance(ours.get(name), staticmethod)
    }
    for name, value in {**new, "__init__": _init_as_ours(theirs)}.items():
        undo.callback(setattr, theirs, name, vars(theirs)[name])
        setattr(theirs, name, value)


def _init_as_ours(theirs: Any) -> Callable[..., None]:
    @functools.wraps(theirs.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not theirs:
            raise RuntimeError(
                f"{type(self).__qualname__} was derived from torch's FullyShardedDataParallel before "
                "fsdp_c.install(), and would train with torch's: call fsdp_c.install() before the "
                "class is defined"
            )
        self.__class__ = FullyShardedDataParallel
        self.__init__(*args, **kwargs)

    return construct


def _names_of_modules() -> list[tuple[ModuleType, str, object]]:
    return [
        (module, name, value)
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and key.partition(".")[0] != "fsdp_c"
        for name, value in list(vars(module).items())
    ]


def _mentions_us(module: ModuleType) -> bool:
    try:
        return "fsdp_c" in inspect.getsource(module)
    except (OSError, TypeError):
        return False


def _refuse_live_units() -> None:
    foreign = _torchs_class()
    if not _alive(foreign):
        return
    gc.collect()  # free models kept alive only by reference cycles
    count = _alive(foreign)
    if count:
        raise RuntimeError(
            f"cannot install fsdp_c: {count} unit(s) of torch's FullyShardedDataParallel are alive, and the "
            "two cannot be mixed. Call fsdp_c.install() before the first model is wrapped, or start the "
            "script with `torchrun -m fsdp_c script.py`"
        )


def _alive(kind: type) -> int:
    return sum(issubclass(type(found), kind) for found in gc.get_objects())
