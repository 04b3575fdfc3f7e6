"""PyTorch's FullyShardedDataParallel (FSDP1) with its runtime in C: the API of torch.distributed.fsdp."""

__version__ = "0.1.0"

import importlib
import importlib.util
import sys
from types import ModuleType

import torch  # isort: skip  # noqa: F401  # first: the extension resolves libtorch's symbols in the process

if importlib.util.find_spec("fsdp_c._C") is None:
    raise ImportError(
        f"fsdp_c is imported from {__path__[0]}, where its extension module is not built: run `make build` "
        "or `pip install -e .` there, or start Python in another folder, from which an installed fsdp_c is "
        "found"
    )

from fsdp_c import _C, api  # noqa: F401  # _C raises an ImportError that names missing symbols
from fsdp_c import operator_kernels as operator_kernels
from fsdp_c import wrap as wrap
from fsdp_c.api import *  # noqa: F403  # re-exported, as in torch
from fsdp_c.compat import _flat_param, _init_utils, _runtime_utils, _traversal_utils, upstream
from fsdp_c.compat.installation import install as install
from fsdp_c.compat.installation import is_installed as is_installed
from fsdp_c.compat.installation import uninstall as uninstall
from fsdp_c.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_c.sharded_grad_scaler import ShardedGradScaler as ShardedGradScaler
from fsdp_c.sharding.flat_param import FlatParameter as FlatParameter
from fsdp_c.sharding.optional import optional as optional
from fsdp_c.state.full_params import iter_full_params as iter_full_params
from fsdp_c.tools.summary import summary as summary
from fsdp_c.training.forward_methods import register_forward_method as register_forward_method

__all__ = ["FullyShardedDataParallel"]
__all__ += api.__all__

_BESIDE_TORCHS = (  # further public names; submodules appear after their first use
    "FlatParameter ShardedGradScaler register_forward_method iter_full_params install is_installed uninstall "
    "optional summary api checkpoint optim wrap"
).split()

_HELPERS = ("_common_utils", "_fsdp_extensions", "_shard_utils", "_wrap_utils")
_ALIASES = {  # FSDP1's module names, for libraries and pickles
    "_flat_param": _flat_param,
    "_init_utils": _init_utils,
    "_runtime_utils": _runtime_utils,
    "_traversal_utils": _traversal_utils,
    **{name: upstream.helpers(name) for name in _HELPERS},
}
globals().update(_ALIASES)
sys.modules.update({f"{__name__}.{name}": module for name, module in _ALIASES.items()})


def __getattr__(name: str) -> ModuleType:
    if name in ("checkpoint", "optim"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__")]
    return sorted({*own, *__all__, *(name for name in _BESIDE_TORCHS if name in globals())})
