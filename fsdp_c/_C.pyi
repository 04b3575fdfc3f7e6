"""Typed contract of the C extension: the starting point for readers.

Ownership nests: a ``FlatLayout`` (immutable integers) in a ``Handle`` (one flat parameter: storage and two
enums) in a ``Unit`` (one FullyShardedDataParallel instance), and the units of one tree in a ``Runtime`` (one
per root). Python checks arguments once, manages FQNs and context managers; all decisions about sharding state
are made in C.

Attributes are read-only unless documented as writable. Modules and handles in results are the objects that
were passed in: a FullyShardedDataParallel, a FlatParamHandle.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import disjoint_base

_AnyHandle = TypeVar("_AnyHandle", bound=Handle)

# Handle.param_state: contents of the storage
PARAM_SHARDED: int
PARAM_UNSHARDING: int
PARAM_UNSHARDED: int

# Handle.training_state and Unit.training_state: current user, in the order of torch's HandleTrainingState
USE_IDLE: int
USE_FORWARD: int
USE_BACKWARD_PRE: int
USE_BACKWARD_POST: int
USE_SUMMON_FULL_PARAMS: int

# Handle.__init__(param_views=...): method of replacing a module's parameter
SET_DIRECTLY: int  # plain entries of the module's dicts, as in nn.Module
SET_BY_SETATTR: int  # delattr and setattr in every forward, for classes that override them
SET_BYPASSING: int  # entries of the module's dicts, always in __dict__ too

PHASES: tuple[str, ...]  # one phrase per phase; phases of a step are followed by the name of a unit
# phases outside of units, for enter_phase()
PROGRESS_SAVE: int
PROGRESS_LOAD: int
PROGRESS_STATE_DICT: int
PROGRESS_LOAD_STATE_DICT: int
PROGRESS_OPTIM_STATE_DICT: int
PROGRESS_SUMMON: int
PROGRESS_WRAP: int

@final
class FlatLayout:
    """Offsets, padding and shards of one flat parameter; element counts only. Immutable.

    ``aligned_numel`` 0 packs the parameters without padding. Raises ValueError for no parameters, a negative
    size or alignment, or a rank outside the world; OverflowError if the total exceeds 64 bits.
    """

    def __new__(
        cls, param_numels: Sequence[int], aligned_numel: int, world_size: int, rank: int, sharded: bool
    ) -> FlatLayout: ...
    num_params: int
    numel: int  # alignment and divisibility padding included, right padding excluded
    shard_numel: int
    padded_numel: int  # shard_numel * world_size
    shard_start: int
    shard_numel_valid: int
    shard_numel_padded: int  # right padding of this rank's shard
    world_size: int
    rank: int
    sharded: bool
    param_numels: tuple[int, ...]
    param_offsets: tuple[int, ...]
    numels_with_padding: tuple[int, ...]
    is_padding_mask: tuple[bool, ...]
    def shard_ranges(self, rank: int | None = None) -> tuple[tuple[bool, int, int, int], ...]:
        """Return (in_shard, offset_in_shard, numel_in_shard, offset_in_param) per parameter; of this rank if None."""

def partition_bounds(partition: tuple[int, int, int], rank: int, /) -> tuple[int, int]:
    """Return the range (start, end) of ``rank`` in a partition (numel, step, offset); (0, 0) if empty.

    Rank r holds [r * step - offset, (r + 1) * step - offset), clipped to [0, numel). Raises ValueError unless
    step >= 1 and the others >= 0.
    """

def partition_overlaps(
    mine: tuple[int, int, int], theirs: tuple[int, int, int], rank: int, /
) -> tuple[tuple[int, int, int], ...]:
    """Return the elements of ``rank`` under ``mine``, cut by ``theirs``, in order.

    Each is (rank in ``theirs``, offset in the rank's part, numel). Raises ValueError for partitions of
    different numels.
    """

def exchange_plan(
    tensors: Iterable[tuple[tuple[int, int, int], tuple[int, int, int], int]],
    rank: int,
    world_size: int,
    gathered: bool,
    /,
) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int], list[int]]:
    """Return the transfers of ``rank`` that redistribute tensors, each (source, target, element_nbytes).

    The result is (held, made, sent, sent_nbytes, received_nbytes, parts, part_counts), in bytes: size of this
    rank's piece of each tensor before and after; the ranges sent, peer by peer, each (tensor, start, nbytes)
    of its piece; bytes sent to and received from each peer; the ranges that form the new pieces, each
    (source, start, nbytes), and their number per piece. Source 0 is the receive buffer, peer by peer; source
    i + 1 is this rank's piece of tensor i, which is not sent. ``gathered``: every rank's piece is received,
    in rows as long as the longest, and no ranges are sent. Ranges are concatenated in one list, as
    ``fsdp_c::join_ranges`` expects. Raises ValueError for partitions of different numels, and for elements
    beyond the last rank.
    """

def prefer_large_pages(tensor: torch.Tensor, /) -> None:
    """Request large pages for a fresh CPU tensor, before its first write. Only a hint."""

def flat_range_boxes(
    shape: Sequence[int], start: int, end: int, /
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return the at most 2n - 1 boxes (offsets, sizes) of a contiguous n-D tensor with elements [start, end).

    Boxes are in flat order, each contiguous in memory. Raises ValueError for a range outside the tensor.
    """

@disjoint_base
class Handle:
    """One flat parameter: sharded and unsharded storage, views and gradients. Base class of FlatParamHandle."""

    def __init__(
        self,
        config: tuple[Any, ...],  # a UnitConfig of fsdp_c/sharding/configuration.py
        *,
        layout: FlatLayout,
        flat_param: nn.Parameter,  # holds this rank's shard
        params: list[nn.Parameter] | None,  # original parameters, None unless use_orig_params
        shapes: tuple[torch.Size, ...],
        strides: tuple[tuple[int, ...] | None, ...],  # None for a contiguous parameter
        # (parameter, module, name, SET_...): each parameter once in order, then shared ones
        param_views: list[tuple[int, nn.Module, str, int]],
        flat_param_owner: dict[str, nn.Parameter | None] | None,  # the ``_parameters`` where it is registered
        flat_param_name: str,  # name under which it is registered
        # converts views into the tensors registered on modules
        wrap_views: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None,
        name: str,
    ) -> None:
        """Raise RuntimeError if called twice on one object. No data or module is changed before ``end_move``."""
    name: str  # writable: name of the unit in errors
    # writable: true if ``step_in_backward`` is called once the unit's gradients are reduced
    optimizer_in_backward: bool
    registration_id: int  # never reused; marks Parameters that the user registers in modules of the unit
    flat_param: nn.Parameter
    layout: FlatLayout
    param_state: int
    training_state: int
    shows_sharded: bool  # true if a layer called now computes with sharded parameters
    unsharded_nbytes: int  # bytes of live unsharded parameter storage
    # 1-D, original dtype, storage of the sharded flat_param; None before end_move
    local_shard: Tensor | None
    # 1-D, compute dtype; allocated only while unsharded
    padded_unsharded_flat_param: Tensor | None
    # gradient for the optimizer: the reduced shard in a backward, else flat_param.grad
    sharded_grad: Tensor | None
    def publish(self) -> None:
        """Set torch's names of the existing storage on ``flat_param``, and keep them current from now on.

        Names are ``_local_shard``, ``_full_param_padded``, ``_full_prec_full_param_padded`` and
        ``_mp_shard``.
        """
    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Set ``flat_param.data`` to ``flat_param.data.to(*args, **kwargs)``, and update all its views.

        Unsharding away from the compute device raises AssertionError until the parameter is moved back.
        Raises AssertionError during a step or summon_full_params. Data and views are unchanged after an
        error.
        """
    def begin_move(self) -> None:
        """Expose the shard between steps, and write back user edits of gradients.

        Called before ``.to()`` and similar methods replace the data of ``flat_param`` and its ``.grad``.
        """
    def end_move(self) -> None:
        """Set up the storage from the current ``flat_param``, and expose the shard on the modules.

        Called at construction, and after ``flat_param.data`` was replaced (``.to()``) while no Runtime is
        bound. Gradients follow.
        """
    def writeback(self) -> None:
        """Write back parameters and data that the user replaced.

        Raises RuntimeError for a size other than the shard's, NotImplementedError for an untied shared
        parameter.
        """
    def unexpose_views(self) -> None:
        """Expose sharded views of original parameters left unsharded by a forward; write in-place edits to the shard.

        A no-op otherwise, and during a step.
        """
    def mark_assigned(self) -> None:
        """Record that a Parameter was assigned in place of a view, for writeback in the next forward.

        Called without original parameters only.
        """
    def unshard(self) -> None:
        """All-gather the parameters in compute dtype and wait; a no-op unless sharded. Collective.

        The modules' parameters are unchanged.
        """
    def needs_unshard(self) -> bool:
        """Return True if the strategy shards, and no unsharded parameters exist or are being all-gathered."""
    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        """First step of an ``unshard`` in outside code: write back user edits, and allocate the result."""
    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """Second step: all-gather into the result of the first. Collective. Raises ValueError for another tensor."""
    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Third step: wait, and point ``flat_param`` to the unsharded data; a no-op if done already.

        The only step under NO_SHARD.
        """
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Point ``flat_param`` to the shard, and free the unsharded storage if requested; a no-op if sharded."""
    def set_comm_hook(
        self, function: Callable[..., None], state: object, low_precision_dtype: torch.dtype | None, /
    ) -> None:
        """Reduce by ``function(state, padded_full_gradient, empty_shard)``; under NO_SHARD by
        ``function(state, gradient)``.

        A dtype declares ``function`` to be torch's low-precision hook for it: gradients are then reduced in
        that dtype, with the group and factors of ``state``, without a call. Raises RuntimeError inside
        a backward.
        """
    def fake_all_gather(self, group: ProcessGroup, /) -> None:
        """Redirect all-gathers to ``group``, of the same rank and size, which does not transfer data."""
    def fake_reduce_scatter(self, group: ProcessGroup, /) -> None:
        """Redirect reduce-scatters to ``group``; all-reduces are unchanged."""
    def summon_enter(self, writeback: bool, /) -> None:
        """IDLE -> SUMMON_FULL_PARAMS: unshard in full precision, and register full Parameters on the modules.

        User edits are written back first. Collective over the unit's group. Raises AssertionError if the
        handle is not IDLE.
        """
    def summon_exit(self) -> None:
        """Copy this rank's part back if ``writeback`` was requested; restore sharded views and storage."""
    def summon_free(self) -> None:
        """Free the full parameters inside summon; the caller registers copies of them instead."""
    def summon_reshard(self) -> None:
        """Free full parameters inside summon, and expose sharded ones (on ranks but 0 under rank0_only)."""
    def summon_grads(self) -> None:
        """All-gather gradients inside summon, and set full ones on parameters. Collective. use_orig_params only."""
    def summon_grads_exit(self, writeback: bool, /) -> None:
        """Copy this rank's part of gradients back if ``writeback``; restore sharded gradients."""
    def sharded_grads(self) -> list[Tensor]:
        """Return this rank's sharded gradients for clip_grad_norm_: the flat one, or the original ones."""
    def collect_user_grads(self) -> None:
        """Write back gradients that the user zeroed, replaced or set to None between steps."""

@final
class Unit:
    """One FullyShardedDataParallel instance: the entry points of a step."""

    def __init__(
        self,
        module: nn.Module,  # owner of the unit, and argument of callbacks
        handle: Handle | None,  # None if the unit has no parameters of its own
        config: tuple[Any, ...],  # a UnitConfig of fsdp_c/sharding/configuration.py
        name: str,
        # further flat parameters of ``module``; ValueError for units that cannot be segments
        segments: tuple[Unit, ...],
    ) -> None:
        """Raise RuntimeError if called twice on one object."""
    handle: Handle | None
    runtime: Runtime | None
    is_root: bool | None  # None before lazy init
    training_state: int  # USE_IDLE, USE_FORWARD (= FORWARD_BACKWARD) or USE_SUMMON_FULL_PARAMS
    name_index: int  # writable; result of add_unit_name(), -1 for a unit without a name
    sync_gradients: bool  # writable; set by no_sync()
    def forward(self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Run root pre-forward, pre-forward, ``wrapped(*args, **kwargs)`` and post-forward.

        An exception resets the unit and propagates. Inside summon_full_params only ``wrapped`` runs, on the
        full parameters; raises RuntimeError there unless gradients are disabled.
        """
    def unshard(self) -> None:
        """Start the all-gather ahead of the next forward, and expose the unsharded parameters. Collective.

        A no-op before lazy init. Raises RuntimeError inside summon_full_params.
        """
    def wait_unsharded(self) -> None:
        """Wait for ``unshard``."""
    def post_backward_reshard(self) -> None:
        """Reshard in a backward, once the unit's gradients are packed, and prefetch the next unit.

        Called by replacements of ``_runtime_utils._post_backward_reshard``.
        """
    def register_pre_backward_hooks(self, outputs: object, /) -> None:
        """Register hooks after a forward that unshard the unit before the first gradient of a tensor in ``outputs``."""
    def register_post_backward_hook(self) -> None:
        """Register the post-backward hook on unsharded parameters in a forward, if any requires a gradient."""
    def handle_to_prefetch(self, training_state: int, /) -> Handle | None:
        """Return the handle that is prefetched while this unit's is in ``training_state``, or None."""
    def set_summoning(self, summoning: bool, /) -> None:
        """Enter or leave USE_SUMMON_FULL_PARAMS, for a unit without a handle to record it."""

@final
class Runtime:
    """One root and its units, in traversal order, the root first: order, prefetch, final callback."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Bind the units: units[0] becomes the root, and every handle gets its lazy attributes."""
    units: tuple[Unit, ...]
    iteration: int
    callback_queued: bool  # true while a backward runs, or after it has raised
    # writable: true if check_backward is called at the end of the next backward, which sets it to False
    unchecked: bool
    # handles with original parameters left unsharded by a forward for its backward
    handles_with_views: list[Handle]
    _backward_prefetch_limit: int  # writable, for clients that set it: number of units prefetched
    _forward_prefetch_limit: int
    def check_order(self, validate: Callable[[int, int], None], /) -> None:
        """Call ``validate`` in training mode with a unit's index and the iteration, before the unit's all-gather."""
    def set_optional(self, pairs: list[tuple[Unit, Unit]], /) -> None:
        """Set the units that a rank need not run in a step, each with the enclosing unit that every rank runs.

        An optional unit is all-gathered and reduced with its enclosing unit. Both belong to this root. Called
        in traversal order, once, before the first step.
        """
    def final_callback(self) -> None:
        """End a backward: wait for reductions, reshard, expose gradients. Legal on a root at any time."""
    def release(self) -> None:
        """Reshard and unbind the units, as before lazy init. Raise RuntimeError during a forward or backward."""
    def recover(self) -> None:
        """Clean up after a backward that raised; otherwise a no-op. Called by every forward.

        Raises RuntimeError if another thread is in a step or a state dict.
        """
    def begin_state_dict(self) -> bool:
        """Prevent steps in other threads until ``end_state_dict``. Return False if this thread has begun one already.

        Raises RuntimeError like ``recover``.
        """
    def end_state_dict(self) -> None: ...
    def await_failed_backward(self) -> None:
        """Wait on a GPU until autograd's thread has released a failed backward.

        The release restores the state before the step. During a backward of another thread the wait ends
        after 50 ms without effect.
        """
    def begin_walk(self) -> None:
        """Call ``await_failed_backward`` for a script that iterates over parameters.

        Writes to views of parameters through ``.data`` are detected from now on.
        """
    def reset_grad_info(self) -> None:
        """Call ``Handle.collect_user_grads`` on every handle."""

def bind_callbacks(
    *,
    lazy_init: Callable[[Any], None],
    convert_inputs: Callable[
        [tuple[Any, ...], dict[str, Any], torch.device | None, torch.dtype | None],
        tuple[tuple[Any, ...], dict[str, Any]],
    ],
    hook_inputs: Callable[
        [tuple[Any, ...], dict[str, Any], Callable[[], None], bool], Callable[[], None] | None
    ],
    tensors_of: Callable[[object], list[Tensor]],
    check_ddp: Callable[[Any, DistributedDataParallel], None],
    cast_buffers_for_mode: Callable[[Any], None],
    step_in_backward: Callable[[Any], None],
    log_post_backward: Callable[[Any], None],
    warn_of_units_without_gradient: Callable[[Any, list[str]], None],
    check_backward: Callable[[Any], None],
    explain_error: Callable[[BaseException, Any], None],
    explain_failed_collective: Callable[[BaseException, int, int, Any, bool], None],
) -> None:
    """Register all Python functions that C calls.

    ``Any`` is the Unit's module; the handle in ``step_in_backward`` and ``explain_failed_collective``.

    Called in a forward: ``lazy_init`` in the first one, which must bind the unit to a Runtime;
    ``convert_inputs`` if inputs are on another device or of another dtype (None: unchanged); ``hook_inputs``
    for a frozen unit, and for any unit before its first gradient: with a hook to be called once all inputs
    that require a gradient have theirs, returns a function that removes it. A hook with ``keeps_graph``, that
    of a frozen unit, is also called if a backward reaches only some of the inputs;
    ``tensors_of`` for outputs other than tensors, lists, tuples and dicts; ``check_ddp`` before a root's
    first forward inside a DistributedDataParallel; ``cast_buffers_for_mode`` with full_precision_in_eval,
    before a forward of the root; ``warn_of_units_without_gradient`` once per root, with the names of units
    that the last backward did not reach; ``explain_error`` with an exception raised by a forward.

    Called in a backward: ``step_in_backward`` once the unit's gradients are reduced, if
    ``optimizer_in_backward`` is set, on the stream of the reduction; ``log_post_backward`` once gradients
    exist, if the handle is ``verbose``; ``check_backward`` at the end, if the Runtime is unchecked.

    ``explain_failed_collective(error, phase, iteration, handle, enqueued)``: a collective of the unit has
    raised, after or during its enqueue, or memory for its buffers has run out; ``phase`` is an index of
    PHASES.
    """

def replace(name: str, function: Callable[..., Any] | None, /) -> None:
    """Replace a function of a step by ``function``; None restores the original.

    ``name`` is "unshard" for ``FlatParamHandle.unshard``, or a name in ``fsdp_c._runtime_utils``. Raises
    ValueError for a name that is never called.
    """

def release_process_groups() -> None:
    """Release the process groups of all units at the end of a process. Later collectives raise RuntimeError.

    A group with collectives that failed or still run, or of the process that this one was forked from, is
    never freed: its destructor would wait for them.
    """

def live_unsharded_nbytes() -> int:
    """Return the bytes of live unsharded parameter storage in this process, over all handles."""

def peak_unsharded_nbytes(reset: bool = False) -> int:
    """Return the highest value of live_unsharded_nbytes since the last reset."""

def print_progress_on_signal(rank: int, /) -> bool:
    """Print step, phase and unit to stderr on SIGUSR1. Return False if the process handles that signal already."""

def add_unit_name(name: str, /) -> int:
    """Return the index of the unit's name in phases, or -1 if the table of names is full."""

def enter_phase(phase: int, /) -> int:
    """Enter a phase outside of any unit. Return the previous place, for ``leave_phase``."""

def leave_phase(place: int, /) -> None:
    """Return to the place before ``enter_phase``."""

def describe_progress() -> str:
    """Return step, phase and unit of this rank: "step 3: waits in the all-gather of layers.0"."""

def why_no_kernels(device_type: str, /) -> str | None:
    """Return the reason for using torch's operators instead of fsdp_c's kernels on this device type, or None."""

def bind_operator_kernels(module: ModuleType, /) -> None:
    """Set the functions called in place of kernels: those of ``fsdp_c/operator_kernels.py``."""

def bind_freed_view(type: type[torch.Tensor], /) -> None:
    """Set the class of views of unsharded parameters while their storage is freed."""

def refuse_freed_view(tensor: torch.Tensor, /) -> None:
    """Raise RuntimeError that names unit, parameter and remedy, if ``tensor`` is a freed view of a live unit."""

def cpu_capabilities() -> tuple[str, ...]:
    """Return the instruction sets of kernels for this processor, the widest first: "avx512", "avx2", "default"."""

def use_cpu_capability(name: str | None, /) -> None:
    """Select the kernels of another instruction set; None for the widest, the default at import.

    All give the same bits. Raises ValueError for an instruction set that this processor lacks.
    """
