"""The flat parameter of a unit and the Python face of its handle: names and metadata; C has the storage."""

import functools
import logging
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_c import _C
from fsdp_c.compat.errors import IGNORED_AND_TRAINED
from fsdp_c.compat.handle_names import HandleNames
from fsdp_c.compat.upstream import (
    FSDPExtensions,
    HandleShardingStrategy,
    MixedPrecision,
    ShardingStrategy,
    _ShardParamInfo,
)
from fsdp_c.sharding import registrations, subclasses, tensor_parallel
from fsdp_c.sharding.configuration import UnitConfig, configure, is_set
from fsdp_c.sharding.flattening import (
    check_uniform,
    is_truly_contiguous,
    own_part,
    shard_param_infos,
    without_gaps,
)
from fsdp_c.sharding.freed_views import FreedView
from fsdp_c.sharding.traversal import FLAT_PARAM, ParamInfo, Subtree, clean_name, joined, unwrapped

logger = logging.getLogger(__name__)

_C.bind_freed_view(FreedView)


class SharedParamInfo(NamedTuple):
    """One more occurrence of a parameter, and its first (primary) one."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class ManagedParam(NamedTuple):
    """One original parameter under one of its names."""

    module: nn.Module  # the module that owns it
    name: str  # its attribute there
    fqn: str  # relative to the unit, wrapper segments removed
    shape: torch.Size  # unsharded, over the tensor parallel mesh too
    place: int  # index in the flat parameter; names of a shared parameter have the same


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]  # torch gives its metaclass no public name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and bool(getattr(instance, "_is_flat_param", False))


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """A plain ``nn.Parameter`` of a unit's parameters one after the other, or of this rank's shard of them.

    ``isinstance(x, FlatParameter)`` is true for what this constructs. Its attributes have the names torch
    gives them: ``_fqns``, ``_shapes``, ``_numels``, ``_param_infos``, ``_shard_param_infos`` and so on.
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
    _params: list[nn.Parameter] | None  # None unless use_orig_params; so are the next two
    _shared_params: list[nn.Parameter] | None
    _is_grad_none_mask: list[bool] | None

    # per piece, padding included
    _numels_with_padding: tuple[int, ...]
    _is_padding_mask: list[bool]

    _shared_param_infos: tuple[SharedParamInfo, ...]
    _modules: set[nn.Module]
    _unpadded_unsharded_size: torch.Size
    _padded_unsharded_size: torch.Size  # set by lazy initialisation, if the parameters are sharded
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


<<<<<<< HEAD
=======
def _is_truly_contiguous(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether ``tensor`` is contiguous, with a last stride of 1 even if that size is 1."""
    return (not stride or stride[-1] == 1) and tensor.is_contiguous()


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a contiguous copy where it has gaps in memory, as a slice of a larger one has, or
    elements that share memory."""
    is_whole = are_dense(tensor.shape, tensor.stride()) or not tensor.numel()
    return tensor if is_whole else tensor.detach().contiguous()


def are_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these fills one piece of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda each: (each[1], each[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _memory_order(dense: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps in the order they have in memory, 1-D, without a copy."""
    data = dense.detach()
    return (
        data.view(-1) if _is_truly_contiguous(data, data.stride()) else data.as_strided((data.numel(),), (1,))
    )


def aligned_numel(compute_dtype: torch.dtype, use_orig_params: bool) -> int:
    """The alignment of a unit's parameters in elements; 0 for none."""
    return ALIGNMENT_NBYTES // compute_dtype.itemsize if use_orig_params else 0


>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
class Occurrences:
    """Every place in the tree where one of the parameters stands, in flatten order."""

    def __init__(self, tree: Subtree, params: Sequence[nn.Parameter]) -> None:
        wanted = {id(param) for param in params}
        places = tree.params
        self.params = [param for param in places if id(param) in wanted]
        if not self.params:
            raise ValueError(
                f"`params` were not found in `module`'s tree: {type(tree.root).__name__} has none of the "
                f"{len(params)}"
            )
        self.infos: list[ParamInfo] = [places[param] for param in self.params]
        self.fqns = [joined(info.module_name, info.param_name) for info in self.infos]
        index_of = {id(param): index for index, param in enumerate(self.params)}
        self.shared: list[tuple[int, SharedParamInfo]] = []
        for param, info in tree.shared_params:
            if id(param) in wanted:
                self.shared.append((index_of[id(param)], SharedParamInfo(*info, *places[param])))

    def check_modules(self) -> None:
        """Raise RuntimeError for a module whose parameters cannot be taken from it."""
        for fqn, info in zip(self.fqns, self.infos, strict=True):
            if isinstance(info.module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"cannot delete methods or parameters of a script module: {fqn} is one's. Wrap the "
                    f"module that it was scripted from, or pass it in ignored_modules. {IGNORED_AND_TRAINED}."
                )

    def move_params_to_end(self) -> None:
        """Register the parameters behind others of their modules, as torch does: optimizers number them so."""
        for info in self.infos:
            info.module._parameters[info.param_name] = info.module._parameters.pop(info.param_name)

    def param_views(self) -> list[tuple[int, nn.Module, str, int]]:
        bypass = is_set("FSDP_USE_UNSAFE_SETATTR")
        places: list[tuple[int, ParamInfo | SharedParamInfo]] = [*enumerate(self.infos), *self.shared]
        return [
            (index, info.module, info.param_name, _C.SET_BYPASSING if bypass else _way_to_set(info.module))
            for index, info in places
        ]


# the methods by which a class can notice that a parameter is set or deleted
_SETTERS = ("__setattr__", "__delattr__", "register_parameter")


def _way_to_set(module: nn.Module) -> int:
    """``setattr`` where the module's class, or others' hook on registrations, would notice; else directly."""
    hooks = getattr(nn.modules.module, "_global_parameter_registration_hooks", {}).values()
    are_ours = all(getattr(hook, "__module__", "").partition(".")[0] == "fsdp_c" for hook in hooks)
    methods = [getattr(type(module), name) for name in _SETTERS]
    is_plain = all(getattr(each, "__module__", None) == nn.Module.__module__ for each in methods)
    is_wrapped = any(hasattr(each, "__wrapped__") for each in methods)
    return _C.SET_DIRECTLY if are_ours and is_plain and not is_wrapped else _C.SET_BY_SETATTR


<<<<<<< HEAD
=======
def check_uniform(
    params: Sequence[torch.Tensor], fqns: Sequence[str], use_orig_params: bool, floating: bool = True
) -> None:
    """Raise ValueError, naming the parameters, unless they can live in one flat parameter."""
    dtype, device, requires_grad = params[0].dtype, params[0].device, params[0].requires_grad
    for fqn, param in zip(fqns, params, strict=True):
        if getattr(param, "_is_flat_param", False):
            raise ValueError(f"Cannot flatten a `FlatParameter`: {fqn}")
        if param.is_complex() or (floating and not param.is_floating_point()):
            kind = "complex" if param.is_complex() else "integer"
            raise ValueError(
                f"Cannot flatten {kind} dtype tensors: {fqn} is {param.dtype}. Pass it in ignored_states. "
                f"{IGNORED_AND_TRAINED}."
            )
        if param.dtype != dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {dtype} ({fqns[0]}) and {param.dtype} "
                f"({fqn}). Cast the module to one dtype, or wrap the modules of the other dtype as units of "
                "their own."
            )
        if param.device != device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {device} ({fqns[0]}) and "
                f"{param.device} ({fqn}). Move the module to one device."
            )
        if not use_orig_params and param.requires_grad != requires_grad:
            trainable = [name for name, p in zip(fqns, params, strict=True) if p.requires_grad]
            frozen = [name for name, p in zip(fqns, params, strict=True) if not p.requires_grad]
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: trainable "
                f"are {first_names(trainable)}, frozen are {first_names(frozen)}. Pass use_orig_params=True, "
                "or wrap the frozen modules on their own."
            )


>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
class _Watched(type):
    """Tells the runtime when ``unshard`` is replaced, so that it calls the replacement, and the user when
    another method of the runtime's is, which it would not call."""

    def __setattr__(cls, name: str, value: object) -> None:
        is_step = not name.startswith("__") and name != "unshard" and callable(getattr(_C.Handle, name, None))
        if is_step and value is not getattr(_C.Handle, name):
            warnings.warn(
                f"what was put in the place of FlatParamHandle.{name} is not called in a step: the runtime does in C "
                "what that does. It calls what stands for FlatParamHandle.unshard, and for the collectives of "
                "torch.distributed",
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
    """One flat parameter: built here, run in C. Its base in fsdp_c/compat/ has further names of torch's.

    ``FlatParamHandle(...)`` takes the arguments of torch's; ``params`` must lie in ``fully_sharded_module``.
    ValueError for parameters that cannot share a flat one.
    """

    flat_param: FlatParameter
    _ranges: Sequence["weakref.ref[nn.Parameter]"] = ()  # FlatRanges that an optimizer holds

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
        """The handle of ``params``, which may be integers; the root of ``tree`` registers its flat parameter."""
        if not params[0].dtype.is_floating_point:  # mixed precision leaves integers alone
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
        found = Occurrences(tree, params)
        found.check_modules()
        check_uniform(found.params, found.fqns, config.use_orig_params, floating)
        extensions = tensor_parallel.flatten(found.params, found.fqns, config.extension)
        self._config = config
        self._fully_sharded_module = tree.root
        self._fsdp_extension = config.extension
        self.uses_sharded_strategy = config.strategy != ShardingStrategy.NO_SHARD
        self.device = config.device
        self.process_group = config.shard_group
        self.rank = config.shard_group.rank()
        self.world_size = config.shard_group.size()
        self._follow_dtype(found.params[0].dtype)
        layout = _C.FlatLayout(
            [param.numel() for param in found.params],
            self._aligned_numel,
            self.world_size,
            self.rank,
            self.uses_sharded_strategy,
        )
        dense = [without_gaps(param) for param in found.params]
        shard = own_part(dense, layout)
        if config.offload_params and self.device.type != "cpu" and shard.device.type != "meta":
            shard = shard.cpu().pin_memory()
        flat_param = FlatParameter(shard, any(param.requires_grad for param in found.params))
        _describe(flat_param, found, layout, dense, extensions, config.use_orig_params)
        self._guises = [subclasses.guise_of(param) for param in found.params]
        self._wrap_views = tensor_parallel.views_wrapper(
            extensions, config.extension
        ) or subclasses.views_wrapper(self._guises)
        param_views = found.param_views()
        strides = zip(flat_param._strides, flat_param._contiguities, strict=True)
        _C.Handle.__init__(
            self,
            config,
            layout=layout,
            flat_param=flat_param,
            params=flat_param._params,
            shapes=tuple(flat_param._shapes),
            strides=tuple(None if contiguous else stride for stride, contiguous in strides),
            param_views=param_views,
            flat_param_owner=unwrapped(tree.root)._parameters,
            flat_param_name=flat_param_name,
            wrap_views=self._wrap_views,
            name=type(tree.root).__name__,
        )
        if config.use_orig_params:
            found.move_params_to_end()
        registrations.watch((view[1:3] for view in param_views), self)
        self._use_fake_all_gather = _switched_on("FSDP_USE_FAKE_ALL_GATHER")
        self._use_fake_reduce = _switched_on("FSDP_USE_FAKE_REDUCE")
        if self._use_fake_all_gather:
            self.fake_all_gather(_fake_group(self.process_group))
        if self._use_fake_reduce:
            self.fake_reduce_scatter(_fake_group(self.process_group))
        if config.skip_writeback_check:
            _warn_once("FSDP_SKIP_WRITEBACK_CHECK")

    @property
    def is_parallel(self) -> bool:
        """True if an extension flattened any of the parameters."""
        return any(extension is not None for extension in self.flat_param._param_extensions)

    @functools.cached_property
    def managed_params(self) -> list[ManagedParam]:
        """The original parameters, then the further names of shared ones."""
        flat_param = self.flat_param
        rows = zip(flat_param._param_infos, flat_param._shapes, flat_param._param_extensions, strict=True)
        params = [
            ManagedParam(
                info.module,
                info.param_name,
                _clean_fqn(info),
                tensor_parallel.full_shape(extension, shape),
                place,
            )
            for place, (info, shape, extension) in enumerate(rows)
        ]
        primary = {(param.module, param.name): param for param in params}
        for info in flat_param._shared_param_infos:
            first = primary[info.prim_module, info.prim_param_name]
            params.append(
                ManagedParam(info.module, info.param_name, _clean_fqn(info), first.shape, first.place)
            )
        return params

    def as_param(self, place: int, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """``tensor`` as the parameter at ``place`` is shown: of its class and with its attributes."""
        guise = self._guises[place]
        return nn.Parameter(tensor, requires_grad=requires_grad) if guise is None else guise.wrap(tensor)

    def shard(self) -> None:
        """Let the modules show this rank's shard: at construction, where the parameters' own storage is
        released, and after the flat parameter got new data."""
        with torch.no_grad():
            self.show_sharded()

    def init_flat_param_attributes(self) -> None:
        """Give the flat parameter the attributes it has from lazy initialisation on."""
        self._follow_dtype(self.flat_param.dtype)
        self.publish()
        if self.uses_sharded_strategy:
            self.flat_param._padded_unsharded_size = torch.Size((self.layout.padded_numel,))

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the flat parameter between steps: ``.to()`` in place, with ``torch.Tensor.to``'s arguments.

        The original parameters and the handle follow. Away from the device that computes nothing can be
        gathered until it is moved back; ``torch.cuda.empty_cache()`` then gives all that the units held there
        to the driver. Raises AssertionError amid a step or inside summon_full_params.
        """
        with torch.inference_mode(False), torch.no_grad():
            super().flat_param_to(*args, **kwargs)
        self._follow_dtype(self.flat_param.dtype)
        if self.flat_param.device != self.device and not self._config.offload_params:
            # the gradients that were set to None, and go now, are another stream's memory
            self._device_handle.synchronize(self.device)
            self.collect_user_grads()

    def _follow_dtype(self, dtype: torch.dtype) -> None:
<<<<<<< HEAD
        """Take dtypes that mixed precision leaves open from the parameters, which ``.to(dtype)`` changes."""
        param_dtype, reduce_dtype = self._config.param_dtype, self._config.reduce_dtype
=======
        """What mixed precision leaves open follows the parameters, which ``.to(dtype)`` changes."""
        param_dtype, reduce_dtype = self._mixed_precision_dtypes
>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
        self._orig_param_dtype = dtype
        self._fwd_bwd_param_dtype = param_dtype or dtype
        self._reduce_dtype = reduce_dtype or self._fwd_bwd_param_dtype

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has the size of a shard; never under NO_SHARD."""
        return self.uses_sharded_strategy and tensor.size() == self.flat_param._sharded_size

<<<<<<< HEAD
    def step_in_backward(self) -> None:
        """Step the attached optimizers and drop the gradients they used; called when the unit's are reduced
        , on the device's stream for that.
=======
    @property
    def _skipped_use_sharded_views(self) -> bool:
        """True between forward and backward where the strategy keeps the modules' views meanwhile."""
        flat_param = self.flat_param
        if not self._use_orig_params or not self.uses_sharded_strategy or self.training_state != _C.USE_IDLE:
            return False
        info = flat_param._param_infos[0]
        shown = info.module._parameters.get(info.param_name)
        return shown is not None and not isinstance(shown, nn.Parameter)

    @property
    def _training_state(self) -> HandleTrainingState:
        return list(HandleTrainingState)[self.training_state]

    @_training_state.setter
    def _training_state(self, state: HandleTrainingState) -> None:
        refuse_torchs_functions(self.name)

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        """Torch's ``optim_state_dict`` calls it. Nothing is left to do: every step follows gradients."""

    @property
    def _uses_param_mixed_precision(self) -> bool:
        return self._fwd_bwd_param_dtype != self._orig_param_dtype

    @property
    def _uses_reduce_mixed_precision(self) -> bool:
        return self._reduce_dtype != self._orig_param_dtype

    @property
    def _force_full_precision(self) -> bool:
        """True while mixed precision is set aside: inside summon_full_params, and in eval mode where that is
        asked for by FSDP_USE_FULL_PREC_IN_EVAL."""
        if not self._uses_param_mixed_precision and not self._uses_reduce_mixed_precision:
            return False
        in_eval = self._use_full_prec_in_eval and not self._fully_sharded_module.training
        return in_eval or self.training_state == _C.USE_SUMMON_FULL_PARAMS

    @property
    def _has_optim_in_backward(self) -> bool:
        """True when the user has attached an optimizer to an original parameter
        (_apply_optimizer_in_backward)."""
        return any(hasattr(param, "_in_backward_optimizers") for param in self.flat_param._params or ())

    @_has_optim_in_backward.setter
    def _has_optim_in_backward(self, value: bool) -> None:
        refuse_torchs_functions(self.name)

    def step_in_backward(self) -> None:
        """Step the attached optimizers and drop the gradients they used; called when the unit's are reduced,
        on the device's stream for that.
>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)

         One that several parameters share steps once: afterwards none of those has a gradient.
        """
        if self._config.offload_params and self.device.type != "cpu":
            self._device_handle.current_stream(self.device).synchronize()  # the gradients are there then
        for param in self.flat_param._params or ():
            optimizers = getattr(param, "_in_backward_optimizers", None)
            if param.grad is None or not optimizers:
                continue
            for optimizer in optimizers:
                optimizer.step()
            optimizers[-1].zero_grad(set_to_none=True)
            param.grad = None
        self.collect_user_grads()

    def shard_bounds(self) -> list[tuple[int, int]]:
        """(start, end) of each parameter in this rank's shard; (0, 0) for one of which that has no element."""
        if self.layout.sharded:
            ranges = self.layout.shard_ranges()
            return [(start, start + numel) if held else (0, 0) for held, start, numel, _ in ranges]
        places = zip(self.layout.param_offsets, self.layout.param_numels, strict=True)
        return [(start, start + numel) for start, numel in places]

    @property
    def script_params(self) -> Sequence[nn.Parameter]:
        """The parameters that the script has of the unit: the original ones, or the flat one."""
        return self.flat_param._params or [self.flat_param]

<<<<<<< HEAD
=======
    @property
    def _fqns_in_shard(self) -> list[str]:
        flat_param = self.flat_param
        infos = zip(flat_param._fqns, flat_param._shard_param_infos, strict=True)
        return [fqn for fqn, info in infos if info.in_shard]

    def flatten_tensors(self, tensors: Sequence[torch.Tensor], aligned_numel: int) -> torch.Tensor:
        """One 1-D tensor of ``tensors``, of one dtype, in memory order; padded as parameters are.

        ``aligned_numel`` is the alignment in elements, 0 for none. ValueError for tensors that do not fit.
        """
        if not tensors:
            raise ValueError("Expects non-empty `tensors`")
        if aligned_numel < 0:
            raise ValueError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
        check_uniform(tensors, [f"tensor {index}" for index in range(len(tensors))], use_orig_params=True)
        numels = [tensor.numel() for tensor in tensors]
        return _own_part(tensors, _C.FlatLayout(numels, aligned_numel, self.world_size, self.rank, False))

    def flatten_tensors_into_flat_param(
        self, tensors: Sequence[torch.Tensor], aligned_numel: int, requires_grad: bool
    ) -> FlatParameter:
        """``flatten_tensors`` as a new flat parameter, without metadata."""
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel), requires_grad)

    if not TYPE_CHECKING:  # which would find any attribute

        def __getattr__(self, name: str) -> NoReturn:
            left_out.explain("FlatParamHandle", name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _device_handle(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(self.device)
        return module

    @property
    def _low_prec_param_dtype_specified(self) -> bool:
        return self._mixed_precision_dtypes[0] is not None

    @property
    def _low_prec_reduce_dtype_specified(self) -> bool:
        return self._mixed_precision_dtypes[1] is not None

    def _get_modules(self) -> set[nn.Module]:
        return set(self.flat_param._modules)

    def _get_flat_param_offsets(self) -> list[tuple[int, int]]:
        """(first, last) element of each piece of the unsharded flat parameter, with padding, as in torch."""
        ends = list(itertools.accumulate(self.layout.numels_with_padding))
        return [
            (end - numel, end - 1) for end, numel in zip(ends, self.layout.numels_with_padding, strict=True)
        ]

    def _get_shard_metadata(
        self, unsharded_start_idx: int, unsharded_end_idx: int
    ) -> tuple[_ShardParamInfo, ...]:
        """What a shard of these elements of the unsharded flat parameter, both included, has of each one."""
        first, last = unsharded_start_idx, unsharded_end_idx
        starts = zip(self.layout.param_offsets, self.layout.param_numels, strict=True)
        return tuple(_part_in_range(start, start + numel - 1, first, last) for start, numel in starts)

    def _get_unflat_views_aligned(self, tensor: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The parameters as views of ``tensor``, an unsharded flat one; by default of the flat parameter."""
        whole = self.flat_param if tensor is None else tensor
        layout, flat_param = self.layout, self.flat_param
        places = zip(
            layout.param_offsets, layout.param_numels, flat_param._shapes, flat_param._strides, strict=True
        )
        views = tuple(
            whole.narrow(0, offset, numel).as_strided(shape, strides)
            for offset, numel, shape, strides in places
        )
        return list(views if self._wrap_views is None else self._wrap_views(views))

    def _get_unflat_views_unaligned(self, tensor: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """The same, as an iterator."""
        return iter(self._get_unflat_views_aligned(tensor))

    @property
    def _get_unflat_views(self) -> Callable[[torch.Tensor | None], Iterable[torch.Tensor]]:
        """The first of the two with use_orig_params, else the second, as in torch."""
        return self._get_unflat_views_aligned if self._use_orig_params else self._get_unflat_views_unaligned

    @staticmethod
    def _get_unpadded_shard(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[torch.Tensor, int]:
        """What ``rank`` holds of ``tensor``, a 1-D view, and how many elements of padding follow."""
        flat = _memory_order(_without_gaps(tensor))
        step = -(-flat.numel() // world_size)
        start = min(rank * step, flat.numel())
        part = flat.narrow(0, start, min(step, flat.numel() - start))
        return part, step - part.numel()

    @staticmethod
    def _get_shard(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[torch.Tensor, int]:
        """A copy of what ``rank`` holds of ``tensor``, padded with zeros, and how many they are."""
        part, padding = FlatParamHandle._get_unpadded_shard(tensor, rank, world_size)
        return torch.cat([part, part.new_zeros(padding)]), padding

    @staticmethod
    def _get_sharded_size(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Size:
        """Of the shard of a 1-D ``tensor``, padding included. AssertionError for another shape."""
        if tensor.dim() != 1:
            raise AssertionError(f"expected a 1-D tensor, got one of shape {tuple(tensor.shape)}")
        return torch.Size((-(-tensor.numel() // world_size),))

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor | None:
        return self.padded_unsharded_flat_param

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank's shard holds."""
        of, infos = self.flat_param, self.flat_param._shard_param_infos
        bounds = [(info.intra_param_start_idx, info.intra_param_end_idx) for info in infos]
        columns = (of._fqns, of._shapes, of._strides, of._contiguities, of._numels, bounds)
        held: list[tuple[Any, ...]] = [
            tuple(one for one, info in zip(column, infos, strict=True) if info.in_shard) for column in columns
        ]
        return FlatParamShardMetadata(*held)

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """(parameter name, module name) of every occurrence, shared ones last."""
        infos: list[ParamInfo | SharedParamInfo] = [
            *self.flat_param._param_infos,
            *self.flat_param._shared_param_infos,
        ]
        return ((info.param_name, info.module_name) for info in infos)

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """(parameter name, module name) of the further occurrences of shared parameters."""
        return ((info.param_name, info.module_name) for info in self.flat_param._shared_param_infos)

>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"


def _clean_fqn(info: ParamInfo | SharedParamInfo) -> str:
    return clean_name(joined(info.module_name, info.param_name))


<<<<<<< HEAD
=======
def predivide_factor(data_parallel_size: int) -> float:
    """The power of two near the square root by which gradients are divided before they are summed."""
    factor = 1
    while data_parallel_size % factor == 0 and data_parallel_size / factor > factor:
        factor *= 2
    return float(factor)


>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
_WARNINGS = {
    "FSDP_SKIP_WRITEBACK_CHECK": "FSDP will not check for replaced parameters and gradients: training may be wrong.",
    "FSDP_USE_FAKE_ALL_GATHER": "FSDP will not execute all-gather: results are wrong, the time shows what it costs.",
    "FSDP_USE_FAKE_REDUCE": "FSDP will not execute reduce-scatter: results are wrong, the time shows what it costs.",
}


def _switched_on(name: str) -> bool:
<<<<<<< HEAD
    """``is_set(name)``, which is logged once per process."""
    if not is_set(name):
=======
    """Whether the environment sets ``name`` to 1, which is logged once per process."""
    if os.environ.get(name, "") != "1":
>>>>>>> 0e5e77ec (Drop ids of removed pages from comments of the package)
        return False
    _warn_once(name)
    return True


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning("Since %s=1, %s", name, _WARNINGS[name])


def _fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same rank and size that sends nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup

    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    made: dist.ProcessGroup = make(rank=group.rank(), world_size=group.size())
    return made


def _describe(
    flat_param: FlatParameter,
    found: Occurrences,
    layout: _C.FlatLayout,
    dense: list[torch.Tensor],
    extensions: list[tensor_parallel.ParamExtension],
    use_orig_params: bool,
) -> None:
    """Give ``flat_param`` the attributes outside code reads."""
    num_params = len(found.params)
    shared_infos = tuple(info for _, info in found.shared)
    flat_param._num_params = num_params
    flat_param._param_infos = found.infos
    flat_param._shapes = [param.shape for param in found.params]
    flat_param._strides = [param.stride() for param in dense]
    contiguities = zip(dense, flat_param._strides, strict=True)
    flat_param._contiguities = [is_truly_contiguous(*each) for each in contiguities]
    flat_param._fqns = found.fqns
    flat_param._param_extensions = extensions
    flat_param._numels = layout.param_numels
    flat_param._numels_with_padding = layout.numels_with_padding
    flat_param._is_padding_mask = list(layout.is_padding_mask)
    flat_param._shared_param_infos = shared_infos
    flat_param._modules = {info.module for info in found.infos} | {info.module for info in shared_infos}
    flat_param._unpadded_unsharded_size = torch.Size((layout.numel,))
    flat_param._sharded_size = torch.Size((layout.shard_numel,))
    flat_param._shard_numel_padded = layout.shard_numel_padded
    flat_param._shard_param_infos = shard_param_infos(layout)
    flat_param._params = found.params if use_orig_params else None
    flat_param._shared_params = (
        [found.params[index] for index, _ in found.shared] if use_orig_params else None
    )
    flat_param._is_grad_none_mask = [False] * num_params if use_orig_params else None
    flat_param._post_backward_called = False
    flat_param._fsdp_flattened = True
    for param in found.params if use_orig_params else ():
        param._fsdp_flattened = True  # type: ignore[attr-defined]  # a mark on the user's own parameter
