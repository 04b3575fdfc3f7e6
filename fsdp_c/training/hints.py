"""Hints added to errors of torch's functions about shards."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from fsdp_c.compat.errors import first_names
from fsdp_c.sharding.construction import is_flattened
from fsdp_c.sharding.sharded_module import ShardedModule, live_units, parts_of, place_of, units_of

# kernels' messages for 1-D shards and for freed storage
_OF_SHARDS = re.compile(
    "1-D tensor|must be 2-D|same shape as|three dimensions|storage of size 0|not gathered"
)
# optimizers' messages for shards, and for an empty list of 2-D parameters
_OF_2D_PARAMS = re.compile("2D parameters|empty parameter list")


def with_hint(unit: ShardedModule, method: types.MethodType) -> types.MethodType:
    """Return ``method`` of a wrapped module, with a hint added to errors on sharded parameters."""

    @functools.wraps(method.__func__)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return method.__func__(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            _add_hint(error, unit, parts_of(unit), method.__name__)
            raise

    return types.MethodType(called, method.__self__)


def explain_forward_error(error: BaseException, unit: ShardedModule) -> None:
    """Add a hint to an exception of the unit's forward. Called by the runtime in C."""
    parts = parts_of(unit)
    _add_hint(error, unit, [one for one in units_of(unit) if one not in parts], "name")


def _add_hint(error: BaseException, unit: ShardedModule, read: list[ShardedModule], method: str) -> None:
    """Add a hint to ``error`` of a kernel, unless it has one, if a unit of those that may be ``read`` is sharded."""
    names = [one._handle.name for one in read if one._handle is not None and one._handle.shows_sharded]
    is_of_shards = _OF_SHARDS.search(str(error)) and "sharded now" not in str(error)
    if names and is_of_shards and len(error.args) == 1:
        error.args = (
            f"{error.args[0]}\n({place_of(unit)}: the parameters of {first_names(names)} are sharded now, outside of "
            "the forward of their unit. Call the unit; or call fsdp_c.register_forward_method(module, "
            f"{method!r}) once, for the method that uses them; or wrap the layer that was called, or the module that "
            "reads them without a call, as nn.TransformerEncoderLayer does in eval mode. There "
            "torch.backends.mha.set_fastpath_enabled(False) helps, too.)",
        )


@functools.cache
def explain_optimizers() -> None:
    """Make constructors of optimizers that reject shards for their shape mention WholeParameters."""
    for kind in (torch.optim.Optimizer, torch.optim.Muon):
        kind.__init__ = _explaining_init(kind.__init__)  # type: ignore[method-assign]


def _explaining_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def explained(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            params = [param for group in vars(self).get("param_groups", ()) for param in group["params"]]
            are_shards = any(map(is_flattened, params)) if params else bool(live_units())
            if are_shards and _OF_2D_PARAMS.search(str(error)) and "WholeParameters" not in str(error):
                error.args = (
                    f"{error.args[0]}\n(A rank has a 1-D part of each parameter of a FullyShardedDataParallel: "
                    f"fsdp_c.optim.WholeParameters(model, {type(self).__name__}, ...) steps each parameter whole.)",
                )
            raise

    return explained
