"""Errors that come of parameters which a unit keeps sharded outside of its forward name the unit, and what to do."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, claimed_units, parts_of, units_of
from fsdp_c.sharding.wrap import unit_name

# what kernels say of 1-D parts, and of parameters of which nothing is there
_OF_SHARDS = (
    "1-D tensor",
    "must be 2-D",
    "same shape as",
    "three dimensions",
    "storage of size 0",
    "not gathered",
)
# what optimizers say of shards, and of a list of the 2-D parameters among them
_OF_2D_PARAMS = re.compile("2D parameters|empty parameter list")


def explaining(fsdp_module: ShardedModule, method: types.MethodType) -> types.MethodType:
    """The same bound method of a wrapped module, whose errors on shards say that it is no forward."""

    @functools.wraps(method.__func__)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _add(
                error,
                f"(rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}: its parameters are sharded now, as "
                f"{method.__name__}() is no forward. To gather them for it call fsdp_c.register_forward_method(module, "
                f"{method.__name__!r}) once, on the unit or the module that it wraps.)",
                parts_of(fsdp_module),
            )
            raise

    return types.MethodType(explained, method.__self__)


def explain_in_forward(error: BaseException, fsdp_module: ShardedModule) -> None:
    """The runtime in C calls it with what the unit's forward has raised."""
    inner = [unit for unit in units_of(fsdp_module) if unit not in parts_of(fsdp_module)]
    names = [unit._handle.name for unit in inner if unit._handle is not None and unit._handle.shows_sharded]
    _add(
        error,
        f"(rank {fsdp_module.rank}, unit {unit_name(fsdp_module.module)}: the parameters of the units "
        f"{first_names(names)} in it are sharded now, outside of their forward. If a layer of theirs was called, call "
        "the unit; or gather for the method that makes the call, by fsdp_c.register_forward_method(module, name); or "
        "wrap the layer as a unit. If they were read without a call, as nn.TransformerEncoderLayer does in eval mode, "
        "wrap the module that reads them, or call torch.backends.mha.set_fastpath_enabled(False).)",
        inner,
    )


def _add(error: BaseException, line: str, units: list[ShardedModule]) -> None:
    """Add ``line`` to a message that is of shards, unless it has such a line, while one of ``units`` has shards."""
    of_shards = any(words in str(error) for words in _OF_SHARDS) and "sharded now" not in str(error)
    are_sharded = any(unit._handle is not None and unit._handle.shows_sharded for unit in units)
    if of_shards and are_sharded and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{line}",)


# ----------------------------------------------------------------- optimizers that need whole parameters


@functools.cache
def explain_optimizers() -> None:
    """From now on optimizers that refuse shards for their shape name WholeParameters."""
    for kind in (torch.optim.Optimizer, torch.optim.Muon):
        kind.__init__ = _explaining_init(kind.__init__)  # type: ignore[method-assign]


def _explaining_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def explained(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            params = [param for group in vars(self).get("param_groups", ()) for param in group["params"]]
            handles = [unit._handle for unit in claimed_units() if unit._handle is not None]
            of_shards = (
                any(map(is_flattened, params)) if params else any(one.layout.sharded for one in handles)
            )
            if of_shards and _OF_2D_PARAMS.search(str(error)) and "WholeParameters" not in str(error):
                error.args = (
                    f"{error.args[0]}\n(A rank has a 1-D part of each parameter of a FullyShardedDataParallel: "
                    f"fsdp_c.optim.WholeParameters(model, {type(self).__name__}, ...) steps each parameter whole.)",
                )
            raise

    return explained
