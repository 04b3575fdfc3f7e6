"""The public class: checks arguments and builds flat parameters. Steps run in the unit in C."""

import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_c import _C, api
from fsdp_c.api import *  # noqa: F403  # re-exported, as in torch
from fsdp_c.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import with_note
from fsdp_c.compat.execution_order import ExecutionOrder
from fsdp_c.compat.mixed_use import refuse_torchs_checkpoint, refuse_torchs_functions
from fsdp_c.compat.upstream import HYBRID_SHARDING_STRATEGIES, HandleShardingStrategy, TrainingState
from fsdp_c.compat.upstream import HandleTrainingState as HandleTrainingState  # torch's module has it too
from fsdp_c.sharding import agreement, buffers, compiling, construction, flattening, materialization
from fsdp_c.sharding.configuration import configure
from fsdp_c.sharding.flat_param import FlatParameter, FlatParamHandle
from fsdp_c.sharding.optional import is_marked, optional_units
from fsdp_c.sharding.sharded_module import (
    Segment,
    ShardedModule,
    handle_of,
    handles_in,
    is_sharded_module,
    parts_of,
    place_of,
    register_unit,
    units_of,
    units_with_paths,
)
from fsdp_c.sharding.traversal import (
    FLAT_PARAM,
    WRAPPED_MODULE,
    WRAPPED_PREFIX,
    Subtree,
    check_module,
    clean_path,
    current_auto_wrapping,
    flat_param_name,
    named_params,
    unwrapped,
)
from fsdp_c.sharding.wrap import Policy, auto_wrap, check_policy, unit_name
from fsdp_c.state import optim_state_dict as optim_states
from fsdp_c.state import state_dict as state_dicts
from fsdp_c.tools import collective_errors, phases
from fsdp_c.tools.summary import describe_unit, log_units
from fsdp_c.training import (
    grad_clipping,
    hints,
    misuse_checks,
    optimizer_steps,
    tensor_containers,
    unshard_params,
)
from fsdp_c.training.ddp_checks import check_ddp
from fsdp_c.training.order_validation import OrderValidation

__all__ = ["FLAT_PARAM", "FlatParameter", "FullyShardedDataParallel"]
__all__ += api.__all__

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
logger = logging.getLogger(__name__)


class UnshardWork:
    """Handle of an all-gather started by ``_unshard(async_op=True)``."""

    def __init__(self, unit: _C.Unit) -> None:
        self._unit: _C.Unit | None = unit

    def wait(self) -> None:
        """Make the current stream wait for the parameters. Further calls have no effect."""
        if self._unit is not None:
            self._unit.wait_unsharded()
            self._unit = None


class FullyShardedDataParallel(ShardedModule):
    """Wraps ``module`` and shards its parameters, gradients and optimizer state over ranks.

    Parameters that no inner unit owns are flattened into a 1-D flat parameter, sharded evenly over the
    ranks. The forward unshards it, computes and reshards; the backward unshards it again, and leaves each
    rank the averaged gradient of its shard. ``module`` is modified in place. Create the optimizer after
    wrapping, with ``parameters()`` of the result.

    Construction, forward, backward, and methods documented as collective must run in the same order on all
    ranks.

    Args:
        module: module to wrap. Parameters of different dtypes, or (without ``use_orig_params``) frozen and
            trainable ones, get separate flat parameters.
        process_group: group to shard over (default: all ranks); for hybrid strategies a pair (shard group,
            replicate group).
        sharding_strategy: FULL_SHARD by default; always NO_SHARD in a group of one rank.
        cpu_offload: keep shards and their gradients in CPU memory, where the optimizer runs too.
        auto_wrap_policy: selects submodules that become units, with the same arguments: a policy object of
            ``fsdp_c.wrap``, or a callable ``(module, recurse, nonwrapped_numel) -> bool``.
        backward_prefetch: prefetch the next unit before this unit's gradient computation (BACKWARD_PRE),
            after it (BACKWARD_POST), or not at all (None).
        mixed_precision: dtypes of computation, reduction and buffers; shards and checkpoints keep the
            parameters' dtype.
        ignored_modules: modules to ignore, with their subtrees. Excludes ``ignored_states``.
        param_init_fn: called on every submodule if tensors are on the meta device, to allocate and initialize
            them (default: ``reset_parameters()``).
        device_id: device to move the module to and to compute on (default: the parameters' device, else the
            current accelerator, else the CPU).
        sync_module_states: broadcast parameters and buffers from the group's rank 0 first.
        forward_prefetch: prefetch the next unit, in the order of the first forward, while this one computes.
        limit_all_gathers: rate limiter: the host runs at most two all-gathers ahead of the device.
        use_orig_params: expose the original parameters (1-D views of the shard) instead of the flat
            parameter.
        ignored_states: modules or parameters to ignore, all of one kind.
        device_mesh: replaces ``process_group``: 1-D to shard over, 2-D (replicate, shard) for a hybrid
            strategy. With a slice of a larger mesh (``mesh["dp"]``), parameters may be DTensors on another
            dimension of it (``parallelize_module(module, mesh["tp"], plan)``): their local tensors are
            sharded, and exposed as DTensors.

    Raises ValueError for arguments that exclude each other or do not fit the module, RuntimeError for
    parameters on several devices. A unit cannot be copied or pickled.
    """

    _names_from_root: list[str]  # FQNs for the log under TORCH_DISTRIBUTED_DEBUG=INFO

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = dict(locals()) if auto_wrap_policy is not None else {}
        super().__init__()
        check_module(module)
        if isinstance(sharding_strategy, HandleShardingStrategy):  # accepted by torch for groups of one rank
            sharding_strategy = ShardingStrategy[sharding_strategy.name]
        construction.check_settings(sharding_strategy, mixed_precision, backward_prefetch, cpu_offload)
        construction.check_places(process_group, device_mesh, device_id, param_init_fn)
        if auto_wrap_policy is not None:
            check_policy(auto_wrap_policy)
        tree = Subtree(module)
        construction.refuse_foreign_units(tree)
        construction.warn_of_useless_unit(module)
        ignored = construction.resolve_ignored_states(tree, ignored_modules, ignored_states)
        device = construction.resolve_device(tree, ignored.params, device_id)
        compiling.annotate(tree, ignored.modules, use_orig_params)
        groups = construction.resolve_process_groups(
            process_group, sharding_strategy, device_mesh, auto_wrap_policy is not None, device
        )
        name, rank = unit_name(module), groups.shard.rank()
        if sync_module_states and current_auto_wrapping.get() is None:
            with phases.enter(_C.PROGRESS_WRAP):
                agreement.agree_to_sync(name, groups, device)

        # inner units
        if auto_wrap_policy is not None:
            own = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules")
            inherited = {name: value for name, value in arguments.items() if name not in own}
            inherited |= {"sharding_strategy": sharding_strategy, "ignored_states": ignored.params}
            if groups.replicate and device_mesh is None:
                inherited["process_group"] = tuple(groups)
            homes = auto_wrap(
                tree, auto_wrap_policy, ignored.modules, ignored.params, inherited, FullyShardedDataParallel
            )
            tree = Subtree(module, homes=homes)  # without the modules of the new units

        # the tensors of this unit
        sharding_strategy = construction.resolve_strategy(sharding_strategy, groups.shard.size())
        buffer_dtypes = buffers.original_dtypes(tree)
        before = construction.own_params(tree, ignored.params)
        tree, params, device = materialization.materialize(
            tree, before, name, rank, ignored, param_init_fn, device, device_id
        )
        if sync_module_states:
            senders = [group for group in (groups.replicate, groups.shard) if group is not None]
            materialization.sync_states(module, params, senders, where=f"unit {name!r} on rank {rank}")

        # attributes that follow from the arguments
        mixed_precision = mixed_precision or MixedPrecision()
        cpu_offload = cpu_offload or CPUOffload()
        config = configure(
            groups.shard,
            groups.replicate,
            device,
            sharding_strategy,
            use_orig_params=bool(use_orig_params),
            offload_params=cpu_offload.offload_params,
            mixed_precision=mixed_precision,
            backward_prefetch=backward_prefetch,
            forward_prefetch=bool(forward_prefetch),
            limit_all_gathers=bool(limit_all_gathers),
            extension=construction.tensor_parallel_extension(device_mesh, device),
        )
        construction.record_groups(config)
        self._init_state(config, mixed_precision, cpu_offload, buffer_dtypes)
        self._device_mesh = device_mesh
        self._ignored_modules = ignored.modules
        self._ignored_params = ignored.params
        self._ignored_buffer_names = ignored.buffer_names
        self._exec_order_data = ExecutionOrder()  # replaced by the root's at lazy initialization
        self._device_handle = torch.get_device_module(device)
        self._debug_level = dist.get_debug_level()
        self._use_full_prec_in_eval = config.full_precision_in_eval
        # True after a forward in eval mode cast buffers back
        self._needs_buffer_dtype_restore_check = False

        # flat parameters
        self._flatten(tree, name, params)
        self._params_before = [weakref.ref(param) for param in before if not construction.is_flattened(param)]
        for inner in filter(is_sharded_module, tree.units):
            inner._enclosing = weakref.ref(self)
        self._fsdp_wrapped_module = module
        register_unit(unwrapped(module), self)
        hints.explain_optimizers()
        if self._handle is not None:
            self._fully_sharded_module_to_handle[module] = self._handle
        if not use_orig_params:
            construction.check_all_flattened(tree, ignored.params, name)
            for part in parts_of(self):
                _register_flat_param(part)
        state_dicts.register_hooks(self)

    def _flatten(self, tree: Subtree, name: str, params: list[nn.Parameter]) -> None:
        """Create the unit in C over ``params``, with a segment for each further flat parameter."""
        groups = flattening.groups_of(params, self._use_orig_params)
        handles = []
        for number, group in enumerate(groups):
            handle = FlatParamHandle.of_unit(self._config, group, tree, flat_param_name(number))
            handle.name = name
            handle.shard()
            for param, fqn in zip(group, handle.flat_param._fqns, strict=True):
                param._fsdp_owner = (fqn, name)  # type: ignore[attr-defined]  # reported if another unit wraps the parameter
            handles.append(handle)
        self._segments = [Segment(self, number, handle) for number, handle in enumerate(handles[1:], 1)]
        inner = tuple(segment._unit for segment in self._segments)
        self._unit = _C.Unit(self, handles[0] if handles else None, self._config, name, inner)

    # ---- the step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with unsharded parameters and return its result. Collective.

        An exception propagates after all units are resharded. Raises RuntimeError inside this unit's own
        forward, and inside ``summon_full_params`` with gradients enabled.
        """
        return self._unit.forward(self._modules["_fsdp_wrapped_module"], args, kwargs)  # type: ignore[arg-type]  # never None

    def _lazy_init(self, alone: bool = False) -> None:
        """Make this unit the root of its tree unless the tree has one. Called by C in the first forward.

        Collective unless ``alone``: ranks check that they wrap the same model. Raises AssertionError if an
        inner unit is a root already. Raises ValueError or RuntimeError if units do not fit each other, were
        moved off their device, or differ from other ranks'.
        """
        if self._unit.runtime is None:
            # Later steps write to the tensors created here: they are neither inference tensors nor of a
            # transformation of torch.func.
            with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
                compiling.eager(FullyShardedDataParallel._init_tree)(self, alone)

    def _init_tree(self, alone: bool) -> None:
        modules = cast("list[tuple[str, FullyShardedDataParallel]]", units_with_paths(self))
        if isinstance(torch.empty(0, device="cpu"), FakeTensor):  # would remain in a real model
            for _, module in modules:
                if module._flat_param is not None and not is_fake(module._flat_param):
                    raise RuntimeError(
                        f"{place_of(module)}: its parameters are real, but its first forward runs under "
                        "FakeTensorMode. Create the model under that mode too, or run a real forward first"
                    )
        error = None
        try:
            _check_tree(self, modules)
        except (AssertionError, RuntimeError, ValueError) as found:
            if alone:
                raise
            error = found  # raised by agree() after the other ranks were informed
        if not alone:
            agreement.agree(self, modules, error)
        members = [module for _, module in modules]
        buffers.cast_for_computation(members, self.compute_device)
        for path, module in modules:  # inner units may belong to another runtime
            module._reset_lazy_init()
            if module._handle is not None:
                module._handle.name = unit_name(module._fsdp_wrapped_module, clean_path(path))
                module._handle.optimizer_in_backward = module._handle._has_optim_in_backward
            if module._unit.name_index < 0:
                module._unit.name_index = _C.add_unit_name(clean_path(path) or "the root")
        if dist.is_initialized():
            phases.show()
        runtime = _C.Runtime([module._unit for module in members])
        runtime.set_optional(optional_units(modules))
        self._exec_order_data.bind(self, runtime)
        optimizer_steps.watch(self)
        misuse_checks.watch(self)
        if self._debug_level == dist.DebugLevel.DETAIL:
            names = [_param_names(*module) for module in modules]
            runtime.check_order(OrderValidation(names, self.process_group, self.compute_device))
        for path, module in modules:
            module._exec_order_data = self._exec_order_data
            if module._debug_level == dist.DebugLevel.INFO:
                module._names_from_root = _param_names(path, module)
            if module._handle is not None:
                with collective_errors.of_first_gather(module._handle):
                    module._handle.init_flat_param_attributes()
        log_units(self)

    def _cast_buffers_for_mode(self) -> None:
        """Cast buffers for train or eval mode.

        Called by the unit in C before a forward of the root, only under FSDP_USE_FULL_PREC_IN_EVAL.
        """
        own = self._handle
        handles = [own] if own is not None else self._all_handles
        if any(handle._force_full_precision for handle in handles):
            buffers.cast_back(units_of(self))
            self._needs_buffer_dtype_restore_check = True
        elif self._needs_buffer_dtype_restore_check:
            buffers.cast_for_computation(units_of(self), self.compute_device)
            self._needs_buffer_dtype_restore_check = False

    def _log_post_backward(self) -> None:
        """Log the unit's post-backward. Called by the unit in C under TORCH_DISTRIBUTED_DEBUG=INFO."""
        logger.warning("FSDP firing post-backward hooks for parameters %s", self._names_from_root)

    def _unshard(self, async_op: bool = False) -> UnshardWork | None:
        """Unshard this unit's parameters before its forward. Collective.

        With ``async_op`` returns a handle; call its ``wait()`` before reading the parameters. Run that
        forward before the next optimizer step: the forward does not unshard again.
        """
        if self._unit.runtime is None:
            (self._enclosing_unit or self)._lazy_init()
        self._unit.unshard()
        work = UnshardWork(self._unit)
        if async_op:
            return work
        work.wait()
        return None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients locally in the body; the first backward after it reduces their sum.

        No communication by itself; all ranks must use it for the same backwards. Unsharded gradients in the
        compute dtype stay allocated from the first backward in the body to the reduction.

        Raises RuntimeError on an instance that is not the root, ValueError inside a step, AssertionError if
        ``_sync_gradients`` was set to True inside the body.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported: call it on the root, the outermost one"
            )
        self._lazy_init()
        self._assert_state(TrainingState.IDLE)
        assert self._unit.runtime is not None
        saved = [(unit, unit.sync_gradients) for unit in self._unit.runtime.units]
        for unit, _ in saved:
            unit.sync_gradients = False
        try:
            yield
        finally:
            switched_on = any(unit.sync_gradients for unit, _ in saved)
            for unit, flag in saved:
                unit.sync_gradients = flag
            if switched_on:
                raise AssertionError(
                    "`_sync_gradients` was incorrectly set to `True` while in the `no_sync()` "
                    f"context manager: do not set it on units in {unit_name(self.module)} (rank "
                    f"{self.rank})"
                )

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients in place so that their total norm is at most ``max_norm``.

        ``norm_type`` is the order of the norm, ``math.inf`` for the maximum magnitude. Collective: every rank
        must call it. Returns the 0-dim total norm before clipping on the compute device, or on the CPU with
        CPU offload, in the promoted dtype of the gradients. A rank without gradients warns and returns it in
        fp32.

        Raises RuntimeError on an instance that is not the root, ValueError inside a step or for an invalid
        norm.
        """
        return grad_clipping.clip_grad_norm_(self, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Use ``hook`` to reduce the gradients of all units of this tree.

        A sharded unit calls ``hook(state, gradient, shard)`` with its padded unsharded gradient and an empty
        output tensor for this rank's shard. A NO_SHARD unit calls ``hook(state, gradient)`` for an in-place
        reduction. Hooks must do the averaging. torch's fp16_compress_hook and bf16_compress_hook run
        natively, on the CPU too.

        Raises AssertionError on a unit that is not the root, for hybrid strategies, and for a second hook.
        Raises ValueError unless ``hook`` is callable, RuntimeError inside a backward.
        """
        if not self.check_is_root():
            raise with_note(
                AssertionError("register_comm_hook can only be called on a root instance."),
                f"{unit_name(self.module)} is inside another unit: call it on the outermost one",
            )
        modules = units_of(self)
        for module in modules:
            if module.sharding_strategy in HYBRID_SHARDING_STRATEGIES:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {module.sharding_strategy} "
                    f"of {unit_name(module.module)}"
                )
            if module._comm_hook is not None:
                raise with_note(
                    AssertionError("A communication hook is already registered"),
                    f"for {unit_name(module.module)}: a hook cannot be replaced while its model exists",
                )
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        for module in modules:
            if module._handle is not None:
                module._handle.set_comm_hook(hook, state, _low_precision_dtype(hook))
            module._comm_hook = hook
            module._comm_hook_state = state

    @contextlib.contextmanager
    def _deregister_orig_params_ctx(self) -> Iterator[None]:
        """Register the flat parameters of this tree instead of the original ones, with use_orig_params."""
        modules = units_of(self)
        for module in modules:
            module._assert_state(TrainingState.IDLE)
            if not module._use_orig_params:
                raise AssertionError(
                    "`_deregister_orig_params_ctx()` should only be called when `_use_orig_params=True`: "
                    f"{unit_name(module.module)} shows its flat parameter in any case"
                )
        with contextlib.ExitStack() as stack:
            for module in modules:
                if module._has_params:
                    stack.enter_context(_orig_params_hidden(module))
            yield

    # ---- queries, and names of FSDP1 that other libraries use

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """Return the units in ``module`` in pre-order, including itself; only roots with ``root_only``.

        Not collective, no side effects.
        """
        found = [one for one in units_of(module) if isinstance(one, FullyShardedDataParallel)]
        return [one for one in found if one.check_is_root()] if root_only else found

    @property
    def _all_fsdp_states(self) -> list["FullyShardedDataParallel"]:
        """The units of this root's tree. Computed: a stored list would keep the root alive."""
        return self.fsdp_modules(self)

    @_all_fsdp_states.setter
    def _all_fsdp_states(self, states: object) -> None:
        refuse_torchs_functions(unit_name(self.module))

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        return handles_in(self)

    @property
    def _post_backward_callback_queued(self) -> bool:
        """True during a backward, and after one that raised."""
        return self._unit.runtime is not None and self._unit.runtime.callback_queued

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """True if torch.compile treats the wrapped module as sharded."""
        marked: bool = getattr(self._fsdp_wrapped_module, "_is_fsdp_managed_module", False)
        return marked

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        refuse_torchs_functions(unit_name(self.module))

    def _low_precision_hook_enabled(self) -> bool:
        return _low_precision_dtype(self._comm_hook) is not None

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Make the current stream wait for the all-gathers started by ``_unshard`` in this tree."""
        for unit in units_of(self):
            unit._unit.wait_unsharded()

    # ---- nn.Module

    def __getattr__(self, name: str) -> Any:
        """Forward missing attributes to the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(WRAPPED_MODULE)
            if wrapped is None:
                raise
            if name == "_zero_scalar":  # read by torch's clip_grad_norm_
                refuse_torchs_functions(unit_name(wrapped))
            if name == "_fqn_modifiers":  # read by torch.distributed.checkpoint
                refuse_torchs_checkpoint(unit_name(wrapped), FullyShardedDataParallel)
            found = getattr(wrapped, name)
            is_own_method = type(found) is types.MethodType and found.__self__ in (
                wrapped,
                unwrapped(wrapped),
            )
            return hints.with_hint(self, found) if is_own_method else found

    def extra_repr(self) -> str:
        """Return the unit's size, and for a root the memory of its tree: see ``fsdp_c.summary``."""
        return describe_unit(self, self.check_is_root()) if "_unit" in self.__dict__ else ""

    def __getitem__(self, key: object) -> Any:
        """Index the wrapped module, e.g. an nn.Sequential."""
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]  # AttributeError if undefined

    def __copy__(self) -> "Self":
        """Return a shallow copy, which shares module, parameters and unit."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo_or_protocol: object) -> NoReturn:
        raise TypeError(
            f"a FullyShardedDataParallel ({unit_name(self.module)}) cannot be copied or pickled: copy the "
            "plain module and wrap the copy, as for a frozen teacher; to save a model, save its "
            "state_dict(). An average of the weights, as of AveragedModel, needs no copy: keep "
            "one of this rank's model.parameters(), as examples/ema.py does"
        )

    __reduce_ex__ = __deepcopy__

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield as nn.Module does; inside summon_full_params with FQNs of the unwrapped module."""
        for runtime in self._runtimes():
            runtime.begin_walk()
        return self._cleaned_in_summon(super().named_parameters(*args, **kwargs))

    def _runtimes(self) -> list[_C.Runtime]:
        """Return the runtimes of the units below: one, unless another root has taken a unit from this one."""
        if self._unit.runtime is not None:
            return [self._unit.runtime]
        found = dict.fromkeys(unit._unit.runtime for unit in units_of(self))
        return [runtime for runtime in found if runtime is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as nn.Module does, including parameters with unsharded views after a forward."""
        for param in self._own_parameters():
            if set_to_none:
                param.grad = None
            elif (grad := param.grad) is not None:
                (grad.requires_grad_(False) if grad.grad_fn is None else grad.detach_()).zero_()

    def requires_grad_(self, requires_grad: bool = True) -> "Self":
        """Set requires_grad as nn.Module does, including parameters with unsharded views after a forward."""
        for param in self._own_parameters():
            param.requires_grad_(requires_grad)
        return self

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters below this module as an optimizer has them."""
        for runtime in self._runtimes():
            runtime.await_failed_backward()
        originals = [param for handle in handles_in(self) for param in handle.flat_param._params or ()]
        yield from originals
        held = set(map(id, originals))
        others = (param for param in named_params(self).values() if id(param) not in held)
        yield from (param for param in others if isinstance(param, nn.Parameter))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as nn.Module does; inside summon_full_params with FQNs of the unwrapped module."""
        return self._cleaned_in_summon(super().named_buffers(*args, **kwargs))

    def _cleaned_in_summon(self, named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        if self.training_state != TrainingState.SUMMON_FULL_PARAMS:
            return named
        return ((name.replace(WRAPPED_PREFIX, ""), tensor) for name, tensor in named)

    def apply(self, fn: Callable[[nn.Module], None]) -> "Self":
        """Call ``fn`` on every submodule and itself, with full parameters; writes are kept. Collective.

        Raises ValueError inside a step.
        """
        self._assert_state(TrainingState.IDLE)
        with unshard_params.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def _apply(self, *args: Any, **kwargs: Any) -> "Self":
        """Apply ``.to()`` and the like to flat parameters only, and update their views.

        Inner units do the same.
        """
        for flag in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
            if getattr(torch.__future__, f"get_{flag}")():
                raise RuntimeError(
                    f"{place_of(self)}: torch.__future__.set_{flag}(True) makes a conversion replace the sharded "
                    "parameters. Convert the module before it is wrapped, or set the flag to False "
                    "during the conversion"
                )
        # inside summon_full_params the full parameters are moved
        is_summoned = self.training_state == TrainingState.SUMMON_FULL_PARAMS
        with contextlib.ExitStack() as stack:
            for part in parts_of(self):
                if part._has_params and not is_summoned:
                    stack.enter_context(_flat_param_shown(part))
            super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
            return self

    # ---- full parameters and state dicts

    summon_full_params = staticmethod(unshard_params.summon_full_params)
    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    state_dict_type = staticmethod(state_dicts.state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.get_state_dict_type)
    optim_state_dict = staticmethod(optim_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_states.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_states.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_states.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_states.rekey_optim_state_dict)

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:  # type: ignore[override]  # torch has a deprecated overload
        """Return the state dict of the selected type, with FQNs of the unwrapped module. Collective.

        Takes the arguments of ``nn.Module.state_dict``. FULL_STATE_DICT has full tensors. SHARDED_STATE_DICT
        has this rank's rows of each tensor, as ShardedTensor, or DTensor with a device mesh. LOCAL_STATE_DICT
        has the flat parameters. Values have the parameters' original dtype. Tensors of FULL and SHARDED state
        dicts are copies; those of a LOCAL one are views of the shard unless they are moved.

        Raises AssertionError inside a forward or backward.
        """
        with phases.enter(_C.PROGRESS_STATE_DICT), state_dicts.saving(self):
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> _IncompatibleKeys:
        """Load a state dict of the selected type, with FQNs of the unwrapped module. Collective.

        Takes the arguments and returns the result of ``nn.Module.load_state_dict``. An exception leaves no
        unit unsharded.
        """
        with phases.enter(_C.PROGRESS_LOAD_STATE_DICT), state_dicts.held(self):
            state_dict = state_dicts.with_wrapped_metadata(self, state_dict)
            keys: _IncompatibleKeys = super().load_state_dict(state_dict, *args, **kwargs)
            return keys


def _low_precision_dtype(hook: object) -> torch.dtype | None:
    """Return the dtype of torch's fp16/bf16 compression hooks (by identity), or None."""
    if hook is fp16_compress_hook:
        return torch.float16
    return torch.bfloat16 if hook is bf16_compress_hook else None


# ---- lazy initialization


def _check_tree(root: FullyShardedDataParallel, modules: list[tuple[str, FullyShardedDataParallel]]) -> None:
    """Raise unless ``modules`` can run now as the tree of ``root`` on this rank."""
    for path, module in modules:
        where = f"FSDP unit {clean_path(path) or type(root.module).__name__!r} on rank {module.rank}"
        if module is not root and module._decided_is_root:
            raise AssertionError(
                f"Non-root FSDP instance's `_is_root` should not have been set yet: {where} is already the root "
                "of a tree of its own. Run the outermost unit first, or wrap before the first forward"
            )
        module._assert_state(TrainingState.IDLE)
        if module._flat_param is None:
            continue
        device = module._flat_param.device
        if not module._device_handle.is_available():
            raise RuntimeError(
                f"FSDP does not support CPU only execution of a module for {module.compute_device}, which is not "
                f"available here: {where}"
            )
        if hasattr(module._flat_param, "_in_backward_optimizers"):
            raise RuntimeError(
                f"FSDP optimizer in backward only supported with use_orig_params=True! {where} has one"
            )
        if module.cpu_offload.offload_params and device.type != "cpu":
            raise RuntimeError(
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{device}. Make sure to not move the module from CPU when offloading parameters: {where}"
            )
        if not module.cpu_offload.offload_params and device != module.compute_device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move "
                f"the module to {module.compute_device} before training: {where}"
            )
    if is_marked(root.module):
        raise ValueError(
            f"the outermost unit, {type(root.module).__name__} on rank {root.rank}, is marked by "
            "fsdp_c.optional(), but no unit encloses it to unshard it. Mark modules inside it instead"
        )
    for setting in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        values = {getattr(module, setting): clean_path(path) for path, module in reversed(modules)}
        if len(values) > 1:
            found = ", ".join(f"{value} in {path or 'the root'!r}" for value, path in values.items())
            raise ValueError(f"Expects one homogeneous value for {setting} but got {found}")


def _param_names(path: str, module: ShardedModule) -> list[str]:
    """Return the FQNs of the unit's parameters from the root; ``path`` is the unit's."""
    prefix = f"{clean_path(path)}." if clean_path(path) else ""
    return [] if module._handle is None else [prefix + fqn for fqn in module._handle.flat_param._fqns]


# ---- registration of the flat parameter


def _register_flat_param(module: ShardedModule) -> None:
    """Register the flat parameter without register_parameter(), which the user may have overridden."""
    if module._flat_param is not None:
        module.module._parameters[module._flat_param_name] = module._flat_param


@contextlib.contextmanager
def _flat_param_shown(module: ShardedModule) -> Iterator[None]:
    """Register the flat parameter instead of the original ones.

    At exit the handle follows a new dtype, device or storage of the flat parameter.
    """
    handle = handle_of(module)
    flat_param = handle.flat_param
    with torch.no_grad():
        handle.begin_move()
    before = (flat_param.dtype, flat_param.device, flat_param.data_ptr())
    with _orig_params_hidden(module) if module._use_orig_params else contextlib.nullcontext():
        yield
    if before != (flat_param.dtype, flat_param.device, flat_param.data_ptr()):
        module._reset_lazy_init()
        if module._use_orig_params:
            handle.shard()


@contextlib.contextmanager
def _orig_params_hidden(module: ShardedModule) -> Iterator[None]:
    params = handle_of(module).managed_params
    shown = {param.module: dict(param.module._parameters) for param in params}
    for param in params:
        param.module._parameters.pop(param.name, None)
    _register_flat_param(module)
    try:
        yield
    finally:
        del module.module._parameters[module._flat_param_name]
        for owner, parameters in shown.items():  # restore all parameters, to keep the order of names
            owner._parameters.clear()
            owner._parameters.update(parameters)


_C.bind_callbacks(
    lazy_init=FullyShardedDataParallel._lazy_init,
    convert_inputs=tensor_containers.convert_inputs,
    hook_inputs=tensor_containers.hook_inputs,
    tensors_of=tensor_containers.tensors_of,
    check_ddp=check_ddp,
    cast_buffers_for_mode=FullyShardedDataParallel._cast_buffers_for_mode,
    step_in_backward=FlatParamHandle.step_in_backward,
    log_post_backward=FullyShardedDataParallel._log_post_backward,
    warn_of_units_without_gradient=misuse_checks.warn_of_units_without_gradient,
    check_backward=misuse_checks.check_backward,
    explain_error=hints.explain_forward_error,
    explain_failed_collective=collective_errors.explain,
)
