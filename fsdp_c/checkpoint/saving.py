"""``save``: writes this rank's part of a model and its optimizers, and publishes the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.distributed_c10d import _get_default_store

from fsdp_c import _C
from fsdp_c.checkpoint import background as in_background
from fsdp_c.checkpoint.background import BackgroundSave
from fsdp_c.checkpoint.contents import PathInDict
from fsdp_c.checkpoint.folder import (
    CheckpointError,
    StrPath,
    absolute_path,
    check_keep,
    check_path,
    check_target,
    new_data_folder,
    remove_older,
)
from fsdp_c.checkpoint.host_copies import HostCopies
from fsdp_c.checkpoint.model_state import EXTRA, _model_state, visible_params
from fsdp_c.checkpoint.objects import to_plain
from fsdp_c.checkpoint.optim_state import Optimizers, optim_state
from fsdp_c.checkpoint.rank_group import RankGroup
from fsdp_c.checkpoint.values import TOO_DEEP, map_tensors, whole_value
from fsdp_c.checkpoint.writing import HeldUnit, Writer, contested_params, partly_held_units
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding.holders import group_of_model, ranks_of
from fsdp_c.tools import phases


@phases.enter(_C.PROGRESS_SAVE)
def save(
    model: nn.Module,
    optimizer: Optimizers | None,
    path: StrPath,
    *,
    extra: StateDict | None = None,
    model_key: str = "model",
    optim_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
    keep: int | None = None,
    background: bool = False,
) -> BackgroundSave:
    """Save the model, its optimizers and rank 0's ``extra`` as the folder ``path``, in DCP's format.

    ``optimizer``: one, a list, or None. Each rank writes its own shards from their memory; parameters are not
    gathered, and one of several replicas is written. An existing checkpoint is replaced once the new one is
    complete and on disk, and other files in its folder are kept: see [Note: In place at once] in
    fsdp_c/checkpoint/folder.py, also for requirements on file systems. ``extra``: nested dicts and lists of
    tensors, numbers, strings and other values that ``torch.load(weights_only=True)`` loads; keys become
    strings.

    Names are those of the uncompiled model. Objects other than tensors, also in extra state of modules and
    groups of the optimizer, are read back before any replacement: see [Note: Names in a pickle] in
    fsdp_c/checkpoint/objects.py. Scalars of numpy are saved as numbers.

    ``background``: return the ``BackgroundSave`` once this rank's part has been copied into host memory, kept
    for the next save, and write it from a thread while training continues: see [Note: Saves in the
    background] in fsdp_c/checkpoint/background.py. The returned save has finished otherwise. The next save
    waits for the previous one. The copy from a GPU overlaps with the next step: no other code may write to
    parameters or to the optimizer's state until an optimizer's step, or ``wait()``. Such a write makes the
    save fail, except through ``.data``, which torch does not track.

    ``keep``: total number of checkpoints to keep. After publication, older siblings whose names differ only
    in the last number (step-100, step-200, ...) are removed; see ``latest``.

    Collective over ``process_group`` (default: the ranks that hold the model's units). Raises CheckpointError
    on every rank, naming the failed rank, also if another job is saving to ``path``, and if ranks hold
    different values of one parameter, in units of one name over several process groups; the old checkpoint is
    then unchanged. Raises ValueError for an address such as "s3://bucket/run", FileExistsError for a file.
    Errors in the background are raised by ``wait()``, by the next save, or at the end of the process.
    """
    in_background.finish()
    own_group = process_group or group_of_model(model)
    target, ranks = absolute_path(path), RankGroup(own_group)
    check_keep(target, keep)
    if ranks.size > 1 and dist.get_backend(ranks.group) == "fake":
        raise CheckpointError(
            f"saving {target}: of the {ranks.size} ranks of torch's fake process group only rank "
            f"{ranks.rank} exists, but a checkpoint needs the shards of all ranks. Save "
            "on real ranks"
        )

    def collect() -> _State:
        own = extra if ranks.is_first else None
        state = _collect_state(model, optimizer, own, model_key, optim_key, ranks.size, waits=not background)
        if process_group is None and own_group is not None and ranks.is_first:
            _claim_path(target, own_group)
        return state

    if not background:
        _write(path, target, collect, ranks, keep)
        return BackgroundSave(f"saving {target}")
    beside = RankGroup(ranks.group and in_background.gloo_group(ranks.group))
    copies = _start_copies(collect, model, None if optimizer is None else optim_key)
    return in_background.start(f"saving {target}", lambda: _write(path, target, copies, beside, keep))


def _write(
    path: StrPath, target: Path, collect: Callable[[], _State], ranks: RankGroup, keep: int | None
) -> None:
    what = f"saving {target}"
    with ExitStack() as stack:

        def prepare() -> tuple[_State, Path | None]:
            state = collect()
            check_path(path)
            check_target(target)  # ``path`` may be relative to a working directory that has changed
            return state, stack.enter_context(new_data_folder(target)) if ranks.is_first else None

        (state, _), prepared = ranks.agree(what, prepare, lambda own: (own[1], own[0].units))
        contested = contested_params(state.units, (units for _, units in prepared))
        writer = Writer(state.values, state.paths, prepared[0][0], contested)
        _, plans = ranks.agree(what, writer.plan, lambda plan: plan, is_callers=False)
        own, _ = ranks.agree(what, lambda: writer.write(ranks.rank, plans), is_callers=False)
        results = ranks.gather(what, own)

        def finish() -> None:
            if results is not None:
                writer.finish(results)
                if keep is not None:
                    remove_older(target, keep)

        ranks.agree(what, finish, is_callers=False)


class _State(NamedTuple):
    values: StateDict  # values to save, by key
    paths: dict[str, PathInDict]  # path of each key in nested dicts and lists
    units: list[HeldUnit]  # see [Note: Replicas or experts]


_host_copies = HostCopies()


def _collect_state(
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: StateDict | None,
    model_key: str,
    optim_key: str,
    world_size: int,
    waits: bool,
) -> _State:
    """Return the values to save. ``world_size``: number of ranks that save."""
    # perhaps collective: before errors that only one rank may have
    of_optimizer = None if optimizer is None else optim_state(model, optimizer)
    own = _plain_values(_model_state(model, as_saved=True, waits=waits))
    state: StateDict = {model_key: own} if model_key else own
    if of_optimizer is not None:
        values = {
            "state": {fqn: _plain_values(values) for fqn, values in of_optimizer["state"].items()},
            "param_groups": [_plain_values(group) for group in of_optimizer["param_groups"]],
        }
        _add(state, optim_key, values)
    if extra is not None:
        if not isinstance(extra, dict):
            raise TypeError(f"extra: expected a dict, got {type(extra).__name__}")
        _add(state, EXTRA, _plain_values(map_tensors(EXTRA, extra, whole_value)))
    return _State(*flatten_state_dict(state), partly_held_units(model, world_size))


def _add(state: StateDict, key: str, values: StateDict) -> None:
    if key in state:
        raise ValueError(
            f"the key {key!r} is used twice in the checkpoint: give the model, the optimizers and extra "
            "different keys, by model_key= and optim_key="
        )
    state[key] = values


_claimed: set[Path] = set()


def _claim_path(target: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError if other ranks of this job, with a model over another group, save to ``target``."""
    if target not in _claimed and _get_default_store().add(f"fsdp_c.checkpoint {target}", 1) > 1:
        raise CheckpointError(
            f"{target}: {ranks_text(ranks_of(group))} hold this model, and other ranks of the job, with a model over "
            "another process group, have saved to the same path by themselves. Give each model a path of its own, "
            "or pass process_group=torch.distributed.group.WORLD on all ranks to save one model together"
        )
    _claimed.add(target)


def _start_copies(
    collect: Callable[[], _State], model: nn.Module, optim_key: str | None
) -> Callable[[], _State]:
    """Start the copies. Return a function that waits for them, or raises their error, in another thread."""
    state_or_error: Future[_State] = Future()
    try:
        state = collect()
        copies = _host_copies.start(state.values, state.paths, visible_params(model), optim_key)
        state_or_error.set_result(state._replace(values=copies))
    except Exception as error:
        state_or_error.set_exception(error)

    def wait_for_copies() -> _State:
        state = state_or_error.result()
        _host_copies.wait()
        return state

    return wait_for_copies


def _plain_values(values: StateDict) -> StateDict:
    plain = {}
    for name, value in values.items():
        try:
            plain[name] = to_plain(value)
        except RecursionError:
            raise ValueError(f"{name} {TOO_DEEP}") from None
    return plain
