"""The flat parameter of a unit and the Python face of its handle: names and metadata; storage is the business of C."""

import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from fsdp_c import _C

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "SharedParamInfo",
]

_logger = logging.getLogger(__name__)

logger = logging.getLogger(__name__)

ALIGNMENT_NBYTES = 16
PADDING_VALUE = 42.0  # shows up in a debugger; never in a user's tensor


class ParamInfo(NamedTuple):
    """One parameter: its name in ``module``, and that module's name in the wrapped module."""

    param_name: str
    module: nn.Module
    module_name: str


class SharedParamInfo(NamedTuple):
    """One more occurrence of a parameter, and its first (primary) one."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class ShardParamInfo(NamedTuple):
    """The part of a parameter that this rank's shard holds; all None when there is none. The end index is inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class FlatParamShardMetadata(NamedTuple):
    """What this rank's shard holds: per parameter in it, with inclusive (start, end) offsets in the parameter."""

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and bool(getattr(instance, "_is_flat_param", False))


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """A plain ``nn.Parameter`` that holds the parameters of a unit one after the other, or this rank's shard of them.

    ``isinstance(x, FlatParameter)`` is true for what this constructs. Its attributes have the names torch gives them:
    ``_fqns``, ``_shapes``, ``_numels``, ``_param_infos``, ``_shard_param_infos`` and so on.
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> "FlatParameter":
        if cls is not FlatParameter:
            raise AssertionError("subclasses FlatParameter not supported")
        param = nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
        param._is_flat_param = True  # type: ignore[attr-defined]
        return cast("FlatParameter", param)


def _is_truly_contiguous(tensor: torch.Tensor) -> bool:
    """Contiguous, and not only because a dimension of size 1 makes any stride count as such (C-020)."""
    return (tensor.dim() == 0 or tensor.stride(-1) == 1) and tensor.is_contiguous()


def _memory_order(param: torch.Tensor) -> torch.Tensor:
    """The elements of ``param`` in the order they have in memory, 1-D, without a copy."""
    data = param.detach()
    return data.view(-1) if _is_truly_contiguous(data) else data.as_strided((data.numel(),), (1,))


class _Occurrences:
    """Every place in the module where one of the parameters stands, in flatten order (C-010)."""

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        wanted = {id(param) for param in params}
        first: dict[int, tuple[int, ParamInfo]] = {}
        self.params: list[nn.Parameter] = []
        self.infos: list[ParamInfo] = []
        self.shared: list[tuple[int, SharedParamInfo]] = []
        for module_name, submodule in module.named_modules(remove_duplicate=False):
            for name, param in submodule._parameters.items():
                if param is None or id(param) not in wanted:
                    continue
                if id(param) in first:
                    index, info = first[id(param)]
                    shared = SharedParamInfo(
                        name, submodule, module_name, info.param_name, info.module, info.module_name
                    )
                    self.shared.append((index, shared))
                    continue
                info = ParamInfo(name, submodule, module_name)
                first[id(param)] = (len(self.params), info)
                self.params.append(param)
                self.infos.append(info)
        if not self.params:
            raise ValueError(f"none of the {len(params)} `params` was found in the tree of {type(module).__name__}")

    def slots(self) -> list[tuple[int, nn.Module, str]]:
        own = [(index, info.module, info.param_name) for index, info in enumerate(self.infos)]
        return own + [(index, info.module, info.param_name) for index, info in self.shared]


def _check_params(params: Sequence[nn.Parameter], infos: Sequence[ParamInfo], use_orig_params: bool) -> None:
    """Raise ValueError, naming the parameters, unless they can live in one flat parameter (C-011)."""
    fqns = [_fqn(info) for info in infos]
    first = params[0]
    for fqn, param in zip(fqns, params, strict=True):
        if getattr(param, "_is_flat_param", False):
            raise ValueError(f"Cannot flatten a `FlatParameter`: {fqn}")
        if not param.is_floating_point():
            raise ValueError(
                f"Cannot flatten integer dtype tensors: {fqn} is {param.dtype}. Pass it in ignored_states."
            )
        if param.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} ({fqns[0]}) and {param.dtype} ({fqn}). "
                "Cast the module to one dtype, or wrap the modules of the other dtype as units of their own."
            )
        if param.device != first.device:
            raise ValueError(
                f"Must flatten tensors on the same device but got {first.device} ({fqns[0]}) and {param.device} ({fqn})"
            )
        if not use_orig_params and param.requires_grad != first.requires_grad:
            trainable = [name for name, p in zip(fqns, params, strict=True) if p.requires_grad]
            frozen = [name for name, p in zip(fqns, params, strict=True) if not p.requires_grad]
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: trainable are "
                f"{trainable}, frozen are {frozen}. Pass use_orig_params=True, or wrap the frozen modules on their own."
            )


def _fqn(info: ParamInfo) -> str:
    return f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name


class FlatParamHandle(_C.Handle):
    """One flat parameter: built here, run in C.

    Args are those of torch's FlatParamHandle; ``params`` must lie in ``fully_sharded_module``. ``replicate_group`` is
    the group over which a hybrid strategy reduces its shards' gradients. Raises ValueError for parameters that do not
    fit into one flat parameter.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        fully_sharded_module: nn.Module,
        device: torch.device,
        sharding_strategy: Any,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: dist.ProcessGroup,
        use_orig_params: bool,
        *,
        fsdp_extension: Any = None,
        replicate_group: dist.ProcessGroup | None = None,
    ) -> None:
        params = list(params)
        if not params:
            raise ValueError(f"Cannot construct a {type(self).__name__} with an empty parameter list")
        found = _Occurrences(fully_sharded_module, params)
        _check_params(found.params, found.infos, use_orig_params)
        self._fully_sharded_module = fully_sharded_module
        self._sharding_strategy = HandleShardingStrategy(sharding_strategy.value)
        self.uses_sharded_strategy = self._sharding_strategy != HandleShardingStrategy.NO_SHARD
        self._use_orig_params = use_orig_params
        self._offload_params = offload_params
        self._keep_low_precision_grads = keep_low_precision_grads
        self._fsdp_extension = fsdp_extension
        self.device = device
        self.process_group = process_group
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self._skip_writeback_check = _switched_on("FSDP_SKIP_WRITEBACK_CHECK")
        self._use_fake_all_gather = _switched_on("FSDP_USE_FAKE_ALL_GATHER")
        self._use_fake_reduce = _switched_on("FSDP_USE_FAKE_REDUCE")
        self._orig_param_dtype = found.params[0].dtype
        self._fwd_bwd_param_dtype = mp_param_dtype or self._orig_param_dtype
        self._reduce_dtype = mp_reduce_dtype or self._fwd_bwd_param_dtype
        self._aligned_numel = ALIGNMENT_NBYTES // self._fwd_bwd_param_dtype.itemsize if use_orig_params else 0
        layout = _C.FlatLayout(
            [param.numel() for param in found.params],
            self._aligned_numel,
            self.world_size,
            self.rank,
            self.uses_sharded_strategy,
        )
        contiguities = [_is_truly_contiguous(param) for param in found.params]
        shapes = [param.shape for param in found.params]
        strides = [param.stride() for param in found.params]
        requires_grad = any(param.requires_grad for param in found.params)
        with torch.no_grad():
            flat_param = FlatParameter(_own_part(found.params, layout), requires_grad)
        _describe(flat_param, found, layout, shapes, strides, contiguities, use_orig_params)
        owner = getattr(fully_sharded_module, _CHECKPOINT_WRAPPED_MODULE, fully_sharded_module)
        data_parallel_size = self.world_size * (1 if replicate_group is None else replicate_group.size())
        predivide = _predivide_factor(data_parallel_size)
        super().__init__(
            layout=layout,
            flat_param=flat_param,
            params=flat_param._params,
            shapes=tuple(shapes),
            strides=tuple(
                None if contiguous else stride for stride, contiguous in zip(strides, contiguities, strict=True)
            ),
            slots=found.slots(),
            process_group=process_group,
            replicate_group=replicate_group,
            device=device,
            param_dtype=mp_param_dtype,
            reduce_dtype=mp_reduce_dtype or mp_param_dtype,
            name=type(fully_sharded_module).__name__,
            flat_param_owner=owner._parameters,
            strategy=self._sharding_strategy.value,
            use_orig_params=use_orig_params,
            keep_low_precision_grads=keep_low_precision_grads,
            skip_writeback_check=self._skip_writeback_check,
            predivide=predivide,
            postdivide=data_parallel_size / predivide,
        )
        if self._use_fake_all_gather:
            self.fake_all_gather(_fake_group(process_group))
        if self._use_fake_reduce:
            self.fake_reduce_scatter(_fake_group(process_group))

    def shard(self) -> None:
        """Let the modules show this rank's shard. The parameters' own storage is released here."""
        with torch.no_grad():
            self.show_sharded()

    def describe_storage(self) -> None:
        """Give the flat parameter the attributes that exist from lazy initialisation on (B-011, B-023, B-024)."""
        flat_param = self.flat_param
        flat_param._local_shard = self.local_shard
        if self.uses_sharded_strategy:
            flat_param._full_param_padded = self.padded_unsharded_flat_param
            flat_param._padded_unsharded_size = torch.Size((self.layout.padded_numel,))

    def point_params_at_shard(self) -> None:
        """Follow the flat parameter to new data, another dtype or another device."""
        self.shard()

    @property
    def _fqns_in_shard(self) -> list[str]:
        flat_param = self.flat_param
        infos = zip(flat_param._fqns, flat_param._shard_param_infos, strict=True)
        return [fqn for fqn, info in infos if info.in_shard]

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        return self.padded_unsharded_flat_param

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank's shard holds."""
        flat_param = self.flat_param
        rows = [
            (fqn, shape, stride, contiguous, numel, (info.intra_param_start_idx, info.intra_param_end_idx))
            for fqn, shape, stride, contiguous, numel, info in zip(
                flat_param._fqns,
                flat_param._shapes,
                flat_param._strides,
                flat_param._contiguities,
                flat_param._numels,
                flat_param._shard_param_infos,
                strict=True,
            )
            if info.in_shard
        ]
        if not rows:
            return FlatParamShardMetadata((), (), (), (), (), ())
        return FlatParamShardMetadata(*(tuple(column) for column in zip(*rows, strict=True)))

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """(parameter name, module name) of every occurrence, shared ones last."""
        infos = itertools.chain(self.flat_param._param_infos, self.flat_param._shared_param_infos)
        return ((info.param_name, info.module_name) for info in infos)

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """(parameter name, module name) of the further occurrences of shared parameters."""
        return ((info.param_name, info.module_name) for info in self.flat_param._shared_param_infos)

    def __repr__(self) -> str:
        return f"FlatParamHandle({', '.join(self.flat_param._fqns)})"


_WARNINGS = {
    "FSDP_SKIP_WRITEBACK_CHECK": "replaced parameters and gradients are not noticed: training may silently be wrong.",
    "FSDP_USE_FAKE_ALL_GATHER": "parameters are not gathered: results are wrong, the time shows what gathering costs.",
    "FSDP_USE_FAKE_REDUCE": "gradients are not reduced: results are wrong, the time shows what reducing costs.",
}


def _switched_on(name: str) -> bool:
    """Whether the environment sets ``name`` to 1, which is logged once per process (C-002, C-003)."""
    if os.environ.get(name, "") != "1":
        return False
    _warn_once(name)
    return True


@functools.cache
def _warn_once(name: str) -> None:
    _logger.warning("Since %s=1, %s", name, _WARNINGS[name])


def _fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same rank and size that sends nothing (C-004)."""
    from torch._C._distributed_c10d import FakeProcessGroup

    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return make(rank=group.rank(), world_size=group.size())


def _skips_writeback_check() -> bool:
    skips = os.environ.get("FSDP_SKIP_WRITEBACK_CHECK", "") == "1"
    if skips:
        _warn_skip_writeback_check()
    return skips


@functools.cache
def _warn_skip_writeback_check() -> None:
    """Once per process."""
    logger.warning(
        "FSDP_SKIP_WRITEBACK_CHECK=1: parameters and gradients that are replaced between steps are not looked for; "
        "with use_orig_params=True such changes are lost"
    )


def _predivide_factor(world_size: int) -> float:
    """About the square root of the world size, a power of two: part before, part after the reduction (D-082)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def _own_part(params: Sequence[nn.Parameter], layout: _C.FlatLayout) -> torch.Tensor:
    """This rank's part of the flattened parameters: only it is ever written, never the whole."""
    shard = torch.empty(layout.shard_numel, dtype=params[0].dtype, device=params[0].device)
    if shard.device.type == "meta":
        return shard
    ranges = layout.shard_ranges() if layout.sharded else _whole_ranges(layout)
    end = 0
    for param, (in_shard, offset, numel, offset_in_param) in zip(params, ranges, strict=True):
        if not in_shard or numel == 0:
            continue
        shard[end:offset].fill_(PADDING_VALUE)
        shard[offset : offset + numel].copy_(_memory_order(param)[offset_in_param : offset_in_param + numel])
        end = offset + numel
    shard[end : layout.shard_numel_valid].fill_(PADDING_VALUE)
    shard[layout.shard_numel_valid :].zero_()
    return shard


def _whole_ranges(layout: _C.FlatLayout) -> list[tuple[bool, int, int, int]]:
    return [(True, offset, numel, 0) for offset, numel in zip(layout.param_offsets, layout.param_numels, strict=True)]


def _shard_param_info(in_shard: bool, offset: int, numel: int, offset_in_param: int) -> ShardParamInfo:
    if not in_shard:
        return ShardParamInfo(False, None, None, None, None)
    return ShardParamInfo(True, offset, numel, offset_in_param, offset_in_param + numel - 1)


def _describe(
    flat_param: Any,
    found: _Occurrences,
    layout: _C.FlatLayout,
    shapes: list[torch.Size],
    strides: list[tuple[int, ...]],
    contiguities: list[bool],
    use_orig_params: bool,
) -> None:
    """Give ``flat_param`` the attributes outside code reads (B-010 to B-034)."""
    flat_param._num_params = len(found.params)
    flat_param._param_infos = found.infos
    flat_param._shapes = shapes
    flat_param._strides = strides
    flat_param._contiguities = contiguities
    flat_param._fqns = [_fqn(info) for info in found.infos]
    flat_param._param_extensions = [None] * len(found.params)
    flat_param._numels = layout.param_numels
    flat_param._numels_with_padding = layout.numels_with_padding
    flat_param._is_padding_mask = list(layout.is_padding_mask)
    flat_param._shared_param_infos = tuple(info for _, info in found.shared)
    flat_param._modules = {info.module for info in (*found.infos, *flat_param._shared_param_infos)}
    flat_param._unpadded_unsharded_size = torch.Size((layout.numel,))
    flat_param._sharded_size = torch.Size((layout.shard_numel,))
    flat_param._shard_numel_padded = layout.shard_numel_padded
    flat_param._shard_param_infos = tuple(_shard_param_info(*entry) for entry in layout.shard_ranges())
    flat_param._params = found.params if use_orig_params else None
    flat_param._shared_params = [found.params[index] for index, _ in found.shared] if use_orig_params else None
    flat_param._is_grad_none_mask = [False] * len(found.params) if use_orig_params else None
    flat_param._post_backward_called = False
    flat_param._fsdp_flattened = True
    for param in found.params if use_orig_params else ():
        param._fsdp_flattened = True  # type: ignore[attr-defined]
