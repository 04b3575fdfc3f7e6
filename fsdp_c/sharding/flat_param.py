"""The flat parameter of a unit and the Python side of its handle: names and metadata. C owns its storage."""

import functools
import logging
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_c import _C
from fsdp_c.compat.errors import IGNORED_AND_TRAINED
from fsdp_c.compat.handle_names import NOT_IN_SHARD, HandleNames
from fsdp_c.compat.upstream import (
    FSDPExtensions,
    HandleShardingStrategy,
    MixedPrecision,
    ShardingStrategy,
    _ShardParamInfo,
)
from fsdp_c.sharding import param_views, tensor_parallel
from fsdp_c.sharding.configuration import UnitConfig, configure, is_set
from fsdp_c.sharding.flattening import (
    check_uniform,
    is_truly_contiguous,
    own_shard,
    without_gaps,
)
from fsdp_c.sharding.traversal import FLAT_PARAM, ParamInfo, Subtree, clean_name, joined, unwrapped

logger = logging.getLogger(__name__)

_C.bind_freed_view(param_views.FreedView)


class SharedParamInfo(NamedTuple):
    """A further occurrence of a shared parameter, and its first (primary) occurrence."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class ManagedParam(NamedTuple):
    """One original parameter under one of its names."""

    module: nn.Module
    name: str  # attribute of ``module``
    fqn: str  # relative to the unit, wrapper segments removed
    shape: torch.Size  # unsharded, also over the tensor parallel mesh
    place: int  # index in the flat parameter, equal for all names of a shared parameter


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]  # torch gives its metaclass no public name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and bool(getattr(instance, "_is_flat_param", False))


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """A plain ``nn.Parameter``: the concatenated parameters of a unit, or this rank's shard of them.

    ``isinstance(x, FlatParameter)`` is True for objects constructed here. Attributes are named as in FSDP1:
    ``_fqns``, ``_shapes``, ``_numels``, ``_param_infos``, ``_shard_param_infos`` and so on.
    """

    _is_flat_param: bool
    _fsdp_flattened: bool

    # per parameter
    _num_params: int
    _param_infos: list[ParamInfo]
    _shapes: list[torch.Size]
    _strides: list[tuple[int, ...]]
    _contiguities: list[bool]
    _fqns: list[str]
    _param_extensions: list[tensor_parallel.ParamExtension]
    _numels: tuple[int, ...]
    _shard_param_infos: tuple[_ShardParamInfo, ...]
    _params: list[nn.Parameter] | None  # None unless use_orig_params, as the next two fields
    _shared_params: list[nn.Parameter] | None
    _is_grad_none_mask: list[bool] | None

    # per parameter or padding range
    _numels_with_padding: tuple[int, ...]
    _is_padding_mask: list[bool]

    _shared_param_infos: tuple[SharedParamInfo, ...]
    _modules: set[nn.Module]
    _unpadded_unsharded_size: torch.Size
    _padded_unsharded_size: torch.Size  # set by lazy initialization, if sharded
    _sharded_size: torch.Size
    _shard_numel_padded: int
    _post_backward_called: bool

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> "FlatParameter":
        if cls is not FlatParameter:
            raise AssertionError("subclasses FlatParameter not supported")
        param = cast(
            FlatParameter, nn.Parameter(torch.empty(0, device="cpu") if data is None else data, requires_grad)
        )
        param._is_flat_param = True
        return param


class _Watched(type):
    """Detects monkey-patching of the handle.

    A replaced ``unshard`` is reported to the runtime, which calls the replacement. Replacing another method
    of the runtime warns the user, because C would not call the replacement.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        is_step = not name.startswith("__") and name != "unshard" and callable(getattr(_C.Handle, name, None))
        if is_step and value is not getattr(_C.Handle, name):
            warnings.warn(
                f"the replacement of FlatParamHandle.{name} is not called in a step, because the "
                "runtime does its work in C. Replacements of FlatParamHandle.unshard and of the "
                "collectives of torch.distributed are called",
                stacklevel=2,
            )
        super().__setattr__(name, value)
        cls._note(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._note(name)

    def _note(cls, name: str) -> None:
        if name == "unshard" and cls.__base__ is HandleNames:
            unshard = getattr(cls, name)
            _C.replace(name, None if unshard is _C.Handle.unshard else unshard)


class FlatParamHandle(HandleNames, metaclass=_Watched):
    """The handle of one flat parameter: constructed in Python, run in C.

    ``FlatParamHandle(...)`` takes the arguments of FSDP1's class; HandleNames has FSDP1's other names.
    ``params`` must be in the module tree of ``fully_sharded_module``. Raises ValueError for parameters that
    cannot share a flat parameter.
    """

    flat_param: FlatParameter
    # each original parameter at its place, then further names of shared ones
    managed_params: list[ManagedParam]

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        fully_sharded_module: nn.Module,
        device: torch.device,
        sharding_strategy: ShardingStrategy | HandleShardingStrategy,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: dist.ProcessGroup,
        use_orig_params: bool,
        *,
        fsdp_extension: FSDPExtensions | None = None,
    ) -> None:
        if not params:
            raise ValueError(f"Cannot construct a {type(self).__name__} with an empty parameter list")
        config = configure(
            process_group,
            None,
            device,
            ShardingStrategy(sharding_strategy.value),
            use_orig_params=use_orig_params,
            offload_params=offload_params,
            mixed_precision=MixedPrecision(
                mp_param_dtype, mp_reduce_dtype, keep_low_precision_grads=keep_low_precision_grads
            ),
            extension=fsdp_extension,
        )
        self._build(config, params, Subtree(fully_sharded_module))

    @classmethod
    def of_unit(
        cls, config: UnitConfig, params: Sequence[nn.Parameter], tree: Subtree, flat_param_name: str
    ) -> "FlatParamHandle":
        """Return the handle of ``params`` (integers allowed); ``tree.root`` registers the flat parameter."""
        if not params[0].dtype.is_floating_point:  # mixed precision does not apply to integers
            config = config._replace(param_dtype=None, reduce_dtype=None)
        handle = cls.__new__(cls)
        handle._build(config, params, tree, flat_param_name, floating=False)
        return handle

    def _build(
        self,
        config: UnitConfig,
        params: Sequence[nn.Parameter],
        tree: Subtree,
        flat_param_name: str = FLAT_PARAM,
        floating: bool = True,
    ) -> None:
        wanted = set(map(id, params))
        places = {param: info for param, info in tree.params.items() if id(param) in wanted}
        if not places:
            raise ValueError(
                f"`params` were not found in `module`'s tree: {type(tree.root).__name__} has none of the "
                f"{len(params)}"
            )
        params, infos = list(places), list(places.values())
        fqns = [joined(info.module_name, info.param_name) for info in infos]
        index_of = {id(param): index for index, param in enumerate(params)}
        shared = [
            (index_of[id(param)], SharedParamInfo(*info, *places[param]))
            for param, info in tree.shared_params
            if id(param) in wanted
        ]
        for fqn, info in zip(fqns, infos, strict=True):
            if isinstance(info.module, torch.jit.ScriptModule):  # its parameters cannot be deregistered
                raise RuntimeError(
                    f"cannot delete methods or parameters of a script module: {fqn} is one's. Wrap the "
                    f"module that it was scripted from, or pass it in ignored_modules. {IGNORED_AND_TRAINED}."
                )
        check_uniform(params, fqns, config.use_orig_params, floating)
        extensions = tensor_parallel.flatten(params, fqns, config.extension)
        self._config = config
        self._fully_sharded_module = tree.root
        self._fsdp_extension = config.extension
        self.uses_sharded_strategy = config.strategy != ShardingStrategy.NO_SHARD
        self.device = config.device
        self.process_group = config.shard_group
        self.rank = config.shard_group.rank()
        self.world_size = config.shard_group.size()
        self._follow_dtype(params[0].dtype)
        layout = _C.FlatLayout(
            [param.numel() for param in params],
            self._aligned_numel,
            self.world_size,
            self.rank,
            self.uses_sharded_strategy,
        )
        dense = [without_gaps(param) for param in params]
        shard = own_shard(dense, layout)
        if config.offload_params and self.device.type != "cpu" and shard.device.type != "meta":
            shard = shard.cpu().pin_memory()
        flat_param = FlatParameter(shard, any(param.requires_grad for param in params))
        flat_param._param_infos = infos
        flat_param._fqns = fqns
        flat_param._param_extensions = extensions
        flat_param._shared_param_infos = tuple(info for _, info in shared)
        _describe(flat_param, layout, dense)
        if config.use_orig_params:
            flat_param._params = params
            flat_param._shared_params = [params[index] for index, _ in shared]
            flat_param._is_grad_none_mask = [False] * len(params)
            for param in params:
                param._fsdp_flattened = True  # type: ignore[attr-defined]  # mark on the user's parameter
        self._subclass_states = [param_views.subclass_state(param) for param in params]
        self._wrap_views = tensor_parallel.views_wrapper(
            extensions, config.extension
        ) or param_views.views_wrapper(self._subclass_states)
        occurrences: list[tuple[int, ParamInfo | SharedParamInfo]] = [*enumerate(infos), *shared]
        self.managed_params = [
            ManagedParam(
                info.module,
                info.param_name,
                clean_name(joined(info.module_name, info.param_name)),
                tensor_parallel.full_shape(extensions[place], flat_param._shapes[place]),
                place,
            )
            for place, info in occurrences
        ]
        bypass = is_set("FSDP_USE_UNSAFE_SETATTR")
        views = [
            (place, module, name, _C.SET_BYPASSING if bypass else param_views.way_to_set(module))
            for module, name, _, _, place in self.managed_params
        ]
        strides = zip(flat_param._strides, flat_param._contiguities, strict=True)
        _C.Handle.__init__(
            self,
            config,
            layout=layout,
            flat_param=flat_param,
            params=flat_param._params,
            shapes=tuple(flat_param._shapes),
            strides=tuple(None if contiguous else stride for stride, contiguous in strides),
            param_views=views,
            flat_param_owner=unwrapped(tree.root)._parameters,
            flat_param_name=flat_param_name,
            wrap_views=self._wrap_views,
            name=type(tree.root).__name__,
        )
        if config.use_orig_params:  # registered last: order of parameters(), and optimizer ids, as in FSDP1
            for info in infos:
                info.module._parameters[info.param_name] = info.module._parameters.pop(info.param_name)
        param_views.watch_registrations((view[1:3] for view in views), self)
        for variable in filter(is_set, _WARNINGS):
            _warn_once(variable)
        self._use_fake_all_gather = is_set("FSDP_USE_FAKE_ALL_GATHER")
        self._use_fake_reduce = is_set("FSDP_USE_FAKE_REDUCE")
        if self._use_fake_all_gather:
            self.fake_all_gather(_fake_group(self.process_group))
        if self._use_fake_reduce:
            self.fake_reduce_scatter(_fake_group(self.process_group))

    @property
    def is_parallel(self) -> bool:
        """True if an extension flattened any of the parameters."""
        return any(extension is not None for extension in self.flat_param._param_extensions)

    def as_param(self, place: int, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """Return ``tensor`` as a parameter with the class and attributes of the original one at ``place``."""
        state = self._subclass_states[place]
        return nn.Parameter(tensor, requires_grad=requires_grad) if state is None else state.wrap(tensor)

    def shard(self) -> None:
        """Register views of this rank's shard: at construction, and after the parameter's data was replaced."""
        with torch.no_grad():
            self.end_move()

    def init_flat_param_attributes(self) -> None:
        """Set the attributes that the flat parameter has after lazy initialization."""
        self._follow_dtype(self.flat_param.dtype)
        self.publish()
        if self.uses_sharded_strategy:
            self.flat_param._padded_unsharded_size = torch.Size((self.layout.padded_numel,))

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the flat parameter in place between steps. Takes the arguments of ``torch.Tensor.to``.

        The original parameters and the handle follow. Away from the compute device the parameters cannot be
        all-gathered until they are moved back; ``torch.cuda.empty_cache()`` then releases all memory that the
        units held there. Raises AssertionError during a step or inside summon_full_params.
        """
        with torch.inference_mode(False), torch.no_grad():
            super().flat_param_to(*args, **kwargs)
        self._follow_dtype(self.flat_param.dtype)
        if self.flat_param.device != self.device and not self._config.offload_params:
            # dropped gradients were used on another stream: synchronize before freeing them
            self._device_handle.synchronize(self.device)
            self.collect_user_grads()

    def _follow_dtype(self, dtype: torch.dtype) -> None:
        """Derive dtypes that mixed precision leaves open from the parameters' current dtype."""
        param_dtype, reduce_dtype = self._config.param_dtype, self._config.reduce_dtype
        self._orig_param_dtype = dtype
        self._fwd_bwd_param_dtype = param_dtype or dtype
        self._reduce_dtype = reduce_dtype or self._fwd_bwd_param_dtype

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` has the size of a shard; always False under NO_SHARD."""
        return self.uses_sharded_strategy and tensor.size() == self.flat_param._sharded_size

    def step_in_backward(self) -> None:
        """Step the attached optimizers and drop the consumed gradients.

        Called on the post-backward stream once the unit's gradients are reduced. An optimizer attached to
        several parameters steps once, because afterwards none of them has a gradient.
        """
        if self._config.offload_params and self.device.type != "cpu":
            self._device_handle.current_stream(self.device).synchronize()  # wait for the D2H copy
        for param in self.flat_param._params or ():
            optimizers = getattr(param, "_in_backward_optimizers", None)
            if param.grad is None or not optimizers:
                continue
            for optimizer in optimizers:
                optimizer.step()
            optimizers[-1].zero_grad(set_to_none=True)
            param.grad = None
        self.collect_user_grads()

    @property
    def script_params(self) -> Sequence[nn.Parameter]:
        """The parameters visible to the script: the original ones, or the flat parameter."""
        return self.flat_param._params or [self.flat_param]

    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"


_WARNINGS = {
    "FSDP_SKIP_WRITEBACK_CHECK": "FSDP will not check for replaced parameters and gradients: training may be wrong.",
    "FSDP_USE_FAKE_ALL_GATHER": "FSDP will not execute all-gather: results are wrong. Use this only "
    "to measure its cost.",
    "FSDP_USE_FAKE_REDUCE": "FSDP will not execute reduce-scatter: results are wrong. Use this only "
    "to measure its cost.",
}


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning("Since %s=1, %s", name, _WARNINGS[name])


def _fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same rank and size that does not communicate."""
    from torch._C._distributed_c10d import FakeProcessGroup

    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    made: dist.ProcessGroup = make(rank=group.rank(), world_size=group.size())
    return made


def _describe(flat_param: FlatParameter, layout: _C.FlatLayout, dense: list[torch.Tensor]) -> None:
    """Set FSDP1's metadata attributes that follow from the layout and the parameters ``dense``."""
    flat_param._num_params = len(dense)
    flat_param._shapes = [param.shape for param in dense]
    flat_param._strides = [param.stride() for param in dense]
    flat_param._contiguities = list(map(is_truly_contiguous, dense))
    flat_param._numels = layout.param_numels
    flat_param._numels_with_padding = layout.numels_with_padding
    flat_param._is_padding_mask = list(layout.is_padding_mask)
    flat_param._modules = {info.module for info in flat_param._param_infos}
    flat_param._modules |= {info.module for info in flat_param._shared_param_infos}
    flat_param._unpadded_unsharded_size = torch.Size((layout.numel,))
    flat_param._sharded_size = torch.Size((layout.shard_numel,))
    flat_param._shard_numel_padded = layout.shard_numel_padded
    flat_param._shard_param_infos = tuple(
        _ShardParamInfo(True, offset, numel, start, start + numel - 1) if is_held else NOT_IN_SHARD
        for is_held, offset, numel, start in layout.shard_ranges()
    )
    flat_param._params = flat_param._shared_params = flat_param._is_grad_none_mask = None
    flat_param._post_backward_called = False
    flat_param._fsdp_flattened = True
