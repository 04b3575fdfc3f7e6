"""The typed contract of the C side: read it first.

Three owners nest: a ``FlatLayout`` (immutable integers) in a ``Handle`` (one flat parameter: storage and two
enums) in a ``Unit`` (one FullyShardedDataParallel instance), and the units of one tree in a ``Runtime`` (one
per root). Python checks arguments once, names FQNs and holds context managers; every decision about sharding
state is made here.

Attributes are read-only unless they are said to be writable. Modules and handles that are handed out are
those that were given: a FullyShardedDataParallel, a FlatParamHandle.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import disjoint_base

_AnyHandle = TypeVar("_AnyHandle", bound=Handle)

# Handle.param_state: what the storage holds
PARAM_SHARDED: int
PARAM_UNSHARDING: int
PARAM_UNSHARDED: int

# Handle.training_state and Unit.training_state: who is using it, in the order of torch's HandleTrainingState
USE_IDLE: int
USE_FORWARD: int
USE_BACKWARD_PRE: int
USE_BACKWARD_POST: int
USE_SUMMON_FULL_PARAMS: int

# Handle.__init__(param_views=...): how a module is made to show something else
SET_DIRECTLY: int  # in its dicts
SET_BY_SETATTR: int  # by delattr and setattr, in every forward
SET_BYPASSING: int  # in its dicts, in __dict__ always

PHASES: tuple[str, ...]  # one phrase a phase; the name of a unit follows those of a step
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

    ``aligned_numel`` 0 packs the parameters without padding. ValueError for no parameters, a negative size or
    alignment, or a rank outside the world; OverflowError when the total exceeds 64 bits.
    """

    def __new__(
        cls, param_numels: Sequence[int], aligned_numel: int, world_size: int, rank: int, sharded: bool
    ) -> FlatLayout: ...
    num_params: int
    numel: int  # alignment and divisibility padding included, right padding not
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
        """Per parameter (in_shard, offset_in_shard, numel_in_shard, offset_in_param); this rank's if None."""

def partition_bounds(partition: tuple[int, int, int], rank: int, /) -> tuple[int, int]:
    """The (start, end) that ``rank`` holds of a partition (numel, step, offset); (0, 0) for nothing.

    Rank r holds [r * step - offset, (r + 1) * step - offset), cut to [0, numel). ValueError unless step >= 1
    and the others >= 0.
    """

def partition_overlaps(
    mine: tuple[int, int, int], theirs: tuple[int, int, int], rank: int, /
) -> tuple[tuple[int, int, int], ...]:
    """What ``rank`` holds under ``mine``, cut by ``theirs``, in order: (rank there, offset held, numel).

    ValueError for partitions of different numels.
    """

def exchange_plan(
    tensors: Iterable[tuple[tuple[int, int, int], tuple[int, int, int], int]],
    rank: int,
    world_size: int,
    gathered: bool,
    /,
) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int], list[int]]:
    """What ``rank`` sends and receives to bring tensors, each (source, target, element_nbytes), elsewhere.

    Returns (held, made, sent, sent_nbytes, received_nbytes, parts, part_counts), in bytes: this rank's piece
    of each tensor before and after; the ranges that it sends, peer by peer, each (tensor, start, nbytes) of
    its piece; what goes to each peer and comes from it; the ranges that its new pieces are joined of, each
    (source, start, nbytes), and how many each has. Source 0 is what was received, peer by peer; source i + 1
    this rank's piece of tensor i, which is not sent. ``gathered``: every rank's piece is received, in rows as
    long as the longest, and none is sent. Ranges lie one behind the other in one list, as
    ``fsdp_c::join_ranges`` takes them. ValueError for partitions of different numels, and for elements behind
    the last rank.
    """

def prefer_large_pages(tensor: torch.Tensor, /) -> None:
    """Ask the system for large pages under a fresh tensor on the CPU, before its first write. Only a hint."""

def flat_range_boxes(
    shape: Sequence[int], start: int, end: int, /
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The at most 2n - 1 boxes (offsets, sizes) of a contiguous n-D tensor with elements [start, end).

    In flat order: each box lies in one piece, behind the one before. ValueError for a range outside the
    tensor.
    """

@disjoint_base
class Handle:
    """One flat parameter: its storages, sharded and not, views and gradients. Base of FlatParamHandle."""

    def __init__(
        self,
        config: tuple[Any, ...],  # a UnitConfig of fsdp_c/sharding/configuration.py
        *,
        layout: FlatLayout,
        flat_param: nn.Parameter,  # holds this rank's shard
        params: list[nn.Parameter] | None,  # the original parameters, None unless use_orig_params
        shapes: tuple[torch.Size, ...],
        strides: tuple[tuple[int, ...] | None, ...],  # None for a contiguous parameter
        # (parameter, module, name, SET_...): each parameter once in order, then shared
        param_views: list[tuple[int, nn.Module, str, int]],
        flat_param_owner: dict[str, nn.Parameter | None] | None,  # the ``_parameters`` where it is registered
        flat_param_name: str,  # by which it is registered there
        # makes what the modules show from the views
        wrap_views: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None,
        name: str,
    ) -> None:
        """Nothing is moved or shown before ``show_sharded``. RuntimeError when called twice on one object."""
    name: str  # writable: what errors call the unit
    # writable: ``step_in_backward`` is called once the unit's gradients are reduced
    optimizer_in_backward: bool
    op_id: int  # by which the operators under torch.ops.fsdp_c find the handle
    flat_param: nn.Parameter
    layout: FlatLayout
    param_state: int
    training_state: int
    shows_sharded: bool  # a layer that is called now computes with sharded parameters
    unsharded_nbytes: int  # bytes of unsharded parameter storage alive now
    # 1-D, original dtype, the sharded flat_param's storage; None before show_sharded
    local_shard: Tensor | None
    # 1-D, compute dtype; its storage is there only while unsharded
    padded_unsharded_flat_param: Tensor | None
    # what the optimizer will see: the reduced shard in a backward, else flat_param.grad
    sharded_grad: Tensor | None
    def publish(self) -> None:
        """Give ``flat_param`` torch's names of what storage there is (``_local_shard``,
        ``_full_param_padded``, ``_full_prec_full_param_padded``, ``_mp_shard``), from now on also when that
        changes."""
    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """``flat_param.data`` becomes what ``flat_param.data.to(*args, **kwargs)`` returns, and all that
        shows it follows. Away from the device that computes, gathering raises AssertionError until it is
        moved back. AssertionError amid a step or in summon_full_params. On an error nothing has moved."""
    def leave_shard(self) -> None:
        """Before ``.to()`` and its kin replace the data of ``flat_param`` and its ``.grad``: between steps it
        shows the shard then, and what the user did to gradients is taken over."""
    def show_sharded(self) -> None:
        """Set up the storage after ``flat_param`` as it is now, and show the shard on the modules: at
        construction, and after ``flat_param.data`` was replaced (``.to()``) while no Runtime is bound.
        Gradients follow."""
    def writeback(self) -> None:
        """Take over parameters and data that the user replaced. RuntimeError for one that does not fit the
        shard, NotImplementedError for an untied shared parameter."""
    def hide_views(self) -> None:
        """Original parameters that a forward has left whole for its backward are shown sharded from now on;
        what was written to them in place goes into the shard. A no-op else, and amid a step."""
    def note_assigned(self) -> None:
        """Without original parameters: a Parameter was assigned to the place of a view; the next forward looks."""
    def unshard(self) -> None:
        """Gather the parameters in compute dtype and wait; a no-op unless sharded. Collective. The modules'
        parameters stay as they are."""
    def needs_unshard(self) -> bool:
        """Whether the strategy shards, and nothing is gathered or being gathered."""
    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        """First step of an ``unshard`` that outside code does: take over the user's edits, allocate."""
    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """Second: gather into what the first has returned. Collective. ValueError for another tensor."""
    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Third: wait, and let ``flat_param`` show the whole. A no-op when it does. Under NO_SHARD the only
        step."""
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """``flat_param`` shows the shard again; the unsharded storage is freed if wanted. Or a no-op."""
    def set_comm_hook(
        self, function: Callable[..., None], state: object, low_precision_dtype: torch.dtype | None, /
    ) -> None:
        """Reduce by ``function(state, padded_full_gradient, empty_shard)``, NO_SHARD by ``function(state,
        gradient)``. With a dtype, which says that ``function`` is torch's low-precision hook for it: in that
        dtype, with the group and factors of ``state``, without a call. RuntimeError for a second hook, or
        inside a backward."""
    def fake_all_gather(self, group: ProcessGroup, /) -> None:
        """Send the all-gathers to ``group``, of the same rank and size, which does not send them."""
    def fake_reduce_scatter(self, group: ProcessGroup, /) -> None:
        """The same for reduce-scatters; all-reduces stay."""
    def summon_enter(self, writeback: bool, /) -> None:
        """IDLE -> SUMMON_FULL_PARAMS: take over the user's edits, gather in full precision, and put
        full-shape Parameters on the modules. Collective over the unit's group. AssertionError when the handle
        is not IDLE."""
    def summon_exit(self) -> None:
        """Copy this rank's part back if ``writeback`` was asked for; restore sharded views and storage."""
    def summon_free(self) -> None:
        """Inside summon: free the full parameters; the caller shows copies of them in their place."""
    def summon_hide(self) -> None:
        """Inside summon: free full parameters, show sharded ones (on ranks but 0 under rank0_only)."""
    def summon_grads(self) -> None:
        """Inside summon: gather gradients, put full ones on parameters. Collective. use_orig_params only."""
    def summon_grads_exit(self, writeback: bool, /) -> None:
        """Copy this rank's part of gradients back if ``writeback``; parameters show sharded ones again."""
    def sharded_grads(self) -> list[Tensor]:
        """Gradients of this rank's shard that clip_grad_norm_ counts: the flat one, or the original ones."""
    def collect_user_grads(self) -> None:
        """Take over gradients that the user zeroed, replaced or set to None between steps."""

@final
class Unit:
    """One FullyShardedDataParallel instance: the entry points of the step."""

    def __init__(
        self,
        module: nn.Module,  # which owns the unit, and which callbacks are given
        handle: Handle | None,  # None when the unit has no parameters of its own
        config: tuple[Any, ...],  # a UnitConfig of fsdp_c/sharding/configuration.py
        name: str,
        # of further flat parameters of ``module``; ValueError for units that can be none
        segments: tuple[Unit, ...],
    ) -> None:
        """RuntimeError when called twice on one object."""
    handle: Handle | None
    runtime: Runtime | None
    is_root: bool | None  # None before lazy init
    training_state: int  # USE_IDLE, USE_FORWARD (= FORWARD_BACKWARD) or USE_SUMMON_FULL_PARAMS
    name_index: int  # writable; what add_unit_name() returned, -1 where the unit has no name
    sync_gradients: bool  # writable: no_sync() sets it
    def forward(self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Root pre-forward, pre-forward, ``wrapped(*args, **kwargs)``, post-forward. An exception resets the
        unit and propagates. Inside summon_full_params ``wrapped`` alone, on what is shown; RuntimeError
        unless gradients are disabled."""
    def unshard(self) -> None:
        """Start the all-gather ahead of the forward that will use it, and show the whole parameters.
        Collective. A no-op before lazy init; RuntimeError inside summon_full_params."""
    def wait_unsharded(self) -> None:
        """Wait for ``unshard``."""
    def post_backward_reshard(self) -> None:
        """In a backward, when the unit's gradients have been packed: reshard, and prefetch the next. For code
        that takes the place of ``_runtime_utils._post_backward_reshard``."""
    def register_pre_backward_hooks(self, outputs: object, /) -> None:
        """After a forward: gather again when a gradient comes to a tensor in ``outputs``."""
    def register_post_backward_hook(self) -> None:
        """In a forward, once gathered: shown parameters pass gradients on to the unit, if any needs one."""
    def handle_to_prefetch(self, training_state: int, /) -> Handle | None:
        """The handle that is prefetched while this unit's is in ``training_state``, or None."""
    def set_summoning(self, summoning: bool, /) -> None:
        """Enter or leave USE_SUMMON_FULL_PARAMS; for a unit without a handle, which would say it itself."""

@final
class Runtime:
    """One root and its units, in traversal order, the root first: order, prefetch, final callback."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Bind the units: units[0] becomes the root, every handle gets its lazy attributes."""
    units: tuple[Unit, ...]
    iteration: int
    callback_queued: bool  # a backward is running, or has raised
    # writable: check_backward is called at the end of the next backward, which sets it to False
    unchecked: bool
    handles_with_views: list[Handle]  # whose original parameters a forward has left whole for its backward
    _backward_prefetch_limit: int  # writable, for the clients that write them: units prefetched
    _forward_prefetch_limit: int
    def check_order(self, validate: Callable[[int, int], None], /) -> None:
        """Call ``validate`` in training mode with a unit's index and the iteration, before the unit's all-gather."""
    def set_optional(self, pairs: list[tuple[Unit, Unit]], /) -> None:
        """Units that a rank need not run in a step, each with the unit around it, which every rank runs and
        with which it is gathered and reduced; both are of this root. In traversal order, once, before the
        first step."""
    def final_callback(self) -> None:
        """End of backward: wait for reductions, reshard, hand gradients over. Legal on a root at any time."""
    def release(self) -> None:
        """Reshard and unbind the units, as before lazy init. RuntimeError amid a forward or backward."""
    def recover(self) -> None:
        """Drop what a backward that raised has left; does nothing otherwise. Every forward does so first.
        RuntimeError where another thread is amid a step or a state dict."""
    def hold(self) -> bool:
        """Until ``let_go`` no other thread begins a step. False within another ``hold`` of this thread.
        RuntimeError as of ``recover``."""
    def let_go(self) -> None: ...
    def await_failed_backward(self) -> None:
        """On a GPU, where a backward has raised: wait until autograd's thread has let go of it, and with that
        everything is as before the step. Amid a backward of another thread it waits 50 ms in vain."""
    def begin_walk(self) -> None:
        """``await_failed_backward``, for a script that walks over the parameters: what it writes to views of
        parameters through ``.data`` is noticed from now on."""
    def reset_grad_info(self) -> None:
        """``Handle.collect_user_grads`` on every handle."""

def bind_callbacks(
    *,
    lazy_init: Callable[[Any], None],
    convert_inputs: Callable[
        [tuple[Any, ...], dict[str, Any], torch.device | None, torch.dtype | None],
        tuple[tuple[Any, ...], dict[str, Any]],
    ],
    hook_inputs: Callable[[tuple[Any, ...], dict[str, Any], Callable[[], None]], RemovableHandle | None],
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
    """All that C asks of fsdp_c, from now on. ``Any`` is the Unit's module, and the handle of
    ``step_in_backward`` and ``explain_failed_collective``.

    Called in a forward: ``lazy_init`` in the first one, which must bind the unit to a Runtime;
    ``convert_inputs`` where inputs are not on the device or not of the dtype, and leaves be what is None;
    ``hook_inputs`` for a frozen unit: the hook is called once all inputs that require a gradient have theirs;
    ``tensors_of`` for outputs that are no tensor, list, tuple or dict; ``check_ddp`` before a root's first forward
    inside a DistributedDataParallel; ``cast_buffers_for_mode`` with
    full_precision_in_eval, before a forward of the root; ``warn_of_units_without_gradient`` once for each root,
    with the names of units to which the backward before has not come; ``explain_error`` with what one has raised.

    Called in a backward: ``step_in_backward`` once the unit's gradients are reduced, where
    ``optimizer_in_backward`` is set, on the stream that has reduced them; ``log_post_backward`` when they have
    come, where the handle is ``verbose``; ``check_backward`` at its end, where the Runtime is unchecked.

    ``explain_failed_collective(error, phase, iteration, handle, enqueued)``: a collective of the unit has
    raised, after or while being enqueued, or what it reads and writes has found no memory; ``phase`` is an
    index of PHASES.
    """

def replace(name: str, function: Callable[..., Any] | None, /) -> None:
    """Call ``function`` on the way of a step in the place of ``FlatParamHandle.unshard`` (name "unshard"), or
    of what ``fsdp_c._runtime_utils`` has under that name; None gives it back. ValueError for a name that is
    not called."""

def release_process_groups() -> None:
    """At the end of a process: no unit refers to its process groups, and its collectives raise RuntimeError.

    A group with collectives that have not ended well, or of the process that this one was forked from, is
    never freed: its destructor would wait for them."""

def live_unsharded_nbytes() -> int:
    """Bytes of unsharded parameter storage alive in this process, over all handles."""

def peak_unsharded_nbytes(reset: bool = False) -> int:
    """The highest value of live_unsharded_nbytes since the last reset."""

def print_progress_on_signal(rank: int, /) -> bool:
    """Print step, phase and unit to stderr on SIGUSR1. False if the process handles that signal already."""

def add_unit_name(name: str, /) -> int:
    """The index under which phases name the unit, or -1 where the table of names is full."""

def enter_phase(phase: int, /) -> int:
    """Enter a phase outside of any unit. Returns the place that was left, for ``leave_phase``."""

def leave_phase(place: int, /) -> None:
    """Return to the place that was left by ``enter_phase``."""

def describe_progress() -> str:
    """Step, phase and unit of this rank: "step 3: waits in the all-gather of layers.0"."""

def why_no_kernels(device_type: str, /) -> str | None:
    """Why torch's operators stand for fsdp_c's kernels on devices of this type, or None, as for "cpu"."""

def bind_operator_kernels(module: ModuleType, /) -> None:
    """Call these functions where torch's operators run: those of ``fsdp_c/operator_kernels.py``."""

def bind_freed_view(type: type[torch.Tensor], /) -> None:
    """The class that views of unsharded parameters are of while their storage is freed."""

def refuse_freed_view(tensor: torch.Tensor, /) -> None:
    """RuntimeError that names unit, parameter and remedy, where ``tensor`` is such a view of a live unit."""

def cpu_capabilities() -> tuple[str, ...]:
    """Instruction sets of kernels for this processor, the widest first: "avx512", "avx2", "default"."""

def use_cpu_capability(name: str | None, /) -> None:
    """Run the kernels of another instruction set from now on; None is the widest, as at import.

    Every one gives the same bits. ValueError for one that this processor does not have.
    """
