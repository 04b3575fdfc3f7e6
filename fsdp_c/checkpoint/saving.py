"""``save`` and ``load``: the entry points for training scripts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from fsdp_c import _C
from fsdp_c.checkpoint import background as in_background
from fsdp_c.checkpoint.background import BackgroundSave
from fsdp_c.checkpoint.folder import (
    CheckpointError,
    StrPath,
    absolute,
    check_keep,
    check_path,
    check_target,
    new_data,
    remove_older,
    unless_replaced,
)
from fsdp_c.checkpoint.host_copies import EXTRA, HostCopies
from fsdp_c.checkpoint.metadata import Checkpoint, PathInDict, TensorEntry
from fsdp_c.checkpoint.model_state import (
    EXTRA_STATE,
    _model_state,
    extra_state_takers,
    is_extra_state,
    model_state,
    params_of_script,
    set_extra_state,
    show_loaded,
    uncompiled,
)
from fsdp_c.checkpoint.objects import plain
from fsdp_c.checkpoint.optim_state import Optimizers, OptimTarget, as_list, optim_state
from fsdp_c.checkpoint.storage import Item, items_of, read_checkpoint, read_entries, read_items, read_nested
from fsdp_c.checkpoint.values import TOO_DEEP, mapped_tensors, whole_value
from fsdp_c.checkpoint.writing import HeldUnit, Writer, contested, units_of_some
from fsdp_c.compat.aliases import StateDict
from fsdp_c.compat.errors import ranks_text
from fsdp_c.sharding.common import tell
from fsdp_c.sharding.holders import group_of_model, ranks_of
from fsdp_c.tools import collective_errors, phases

T = TypeVar("T")
_TRIES = 100  # attempts to agree on one checkpoint on all ranks, during other saves


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
    target, ranks = absolute(path), _Ranks(own_group)
    check_keep(target, keep)
    count = dist.get_world_size(own_group) if ranks.is_distributed else 1
    if count > 1 and dist.get_backend(own_group) == "fake":
        raise CheckpointError(
            f"saving {target}: of the {count} ranks of torch's fake process group only rank "
            f"{dist.get_rank(own_group)} is there, and a checkpoint has the shards of all: save on real ranks"
        )

    def state() -> _State:
        if process_group is None and own_group is not None and ranks.is_first:
            _claim(target, own_group)
        own = extra if ranks.is_first else None
        return _saved_state(model, optimizer, own, model_key, optim_key, count, waits=not background)

    if not background:
        _write(path, target, state, ranks, keep)
        return BackgroundSave(f"saving {target}")
    beside = _Ranks(in_background.gloo_group(own_group) if ranks.is_distributed else None)
    copies = _copies(state, model)
    return in_background.start(f"saving {target}", lambda: _write(path, target, copies, beside, keep))


def _write(path: StrPath, target: Path, made: Callable[[], _State], ranks: _Ranks, keep: int | None) -> None:
    what = f"saving {target}"
    with ExitStack() as stack:

        def prepare() -> tuple[_State, Path | None]:
            check_target(path)
            return made(), stack.enter_context(new_data(target)) if ranks.is_first else None

        (state, _), told = ranks.agree(what, prepare, lambda prepared: (prepared[1], prepared[0].units))
        found = contested(state.units, (units for _, units in told))
        writer = Writer(state.values, state.paths, told[0][0], found)
        _, plans = ranks.agree(what, writer.plan, lambda plan: (plan, writer.contents), is_callers=False)
        own, _ = ranks.agree(what, lambda: writer.write(ranks.rank, plans), is_callers=False)
        results = ranks.gather(what, own)

        def finish() -> None:
            if results is not None:
                writer.finish(results)
                if keep is not None:
                    remove_older(target, keep)

        ranks.agree(what, finish, is_callers=False)


@phases.enter(_C.PROGRESS_LOAD)
def load(
    model: nn.Module,
    optimizer: Optimizers | None,
    path: StrPath,
    *,
    strict: bool = True,
    model_key: str = "model",
    optim_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Load a checkpoint written by ``save``, or by torch's DCP, from ``path``. Return ``extra``.

    Each rank reads the parts that it holds into its shards, for any number of ranks, wrapping and strategy of
    the saved model. State that the optimizer lacks is created, without a step. All data read is verified by
    its checksum if fsdp_c wrote the checkpoint. Names that only the model or only the checkpoint has are
    ignored without ``strict``. The model's names are at the top level for an empty ``model_key``.

    Collective over ``process_group`` (default: the ranks that hold the model's units). Raises CheckpointError
    on every rank, naming the failed rank. Model, optimizer and its groups are then unchanged on every rank,
    unless the error was in the data of tensors, which are read into place, or in a module's
    set_extra_state(): docs/checkpoints.md lists the resulting states.
    """
    in_background.finish(raises=False)
    ranks = _Ranks(process_group or group_of_model(model))
    what = f"loading {os.fspath(path)}"

    def prepare() -> _Loading:
        check_path(path)
        read = functools.partial(read_checkpoint, Path(path), compare=ranks.is_first)
        make = functools.partial(_Loading, model, optimizer, read, model_key, optim_key, strict)
        return unless_replaced(Path(path), make)

    for _ in range(_TRIES):
        loading, found = ranks.agree(what, prepare, lambda loading: loading.checkpoint.identity)
        if len({*found}) == 1:
            break
        loading.checkpoint.close()
    else:
        raise CheckpointError(f"{what} failed: ranks found different checkpoints there, {_TRIES} times")
    with closing(loading.checkpoint):
        ranks.agree(what, loading.read_tensors)
    ranks.agree(what, loading.show)
    return loading.finish()


# ----------------------------------------------------------------- agreement of ranks


class _Ranks:
    """The ranks that save or load together; one without a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.group = (group or _get_default_group()) if self.is_distributed else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.is_first = self.rank == 0

    def agree(
        self,
        what: str,
        work: Callable[[], T],
        share: Callable[[T], Any] = lambda _: None,
        *,
        is_callers: bool = True,
    ) -> tuple[T, list[Any]]:
        """Run ``work``. Return its result and all ranks' shared values. An exception on one rank is raised on all.

        ``is_callers``: raise an exception of one type on all ranks, the caller's mistake, unchanged.
        """
        result, error, shared = None, None, None
        try:
            result = work()
            shared = share(result)
        except Exception as caught:
            error = caught
        with collective_errors.explained(what):
            own = (type(error).__name__, _text(error)) if error else None, shared
            everything = [own] if self.group is None else tell(own, self.group)
        kinds = {failed[0] if failed else None for failed, _ in everything}
        if error is not None and is_callers and len(kinds) == 1:
            raise error
        ranks: dict[str, int] = {}  # first rank with an error, by its text
        for rank, (failed, _) in enumerate(everything):
            if failed:
                ranks.setdefault(failed[1], rank)
        if ranks:
            lines = [f"{what} failed on rank {rank}: {text}" for text, rank in ranks.items()]
            raise CheckpointError("\n".join(lines)) from error
        return result, [one for _, one in everything]  # type: ignore[return-value]  # set if no rank has an error

    def gather(self, what: str, value: T) -> list[T] | None:
        """Return the values of all ranks on the first one, None on others."""
        if self.group is None:
            return [value]
        told = [value] * self.group.size() if self.is_first else None
        with collective_errors.explained(what):
            dist.gather_object(value, told, group=self.group, group_dst=0)
        return told


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# ----------------------------------------------------------------- saving


class _State(NamedTuple):
    values: StateDict  # values to save, by key
    paths: dict[str, PathInDict]  # path of each key in nested dicts and lists
    units: list[HeldUnit]  # see [Note: Replicas or experts]


_host_copies = HostCopies()


def _saved_state(
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: StateDict | None,
    model_key: str,
    optim_key: str,
    world_size: int,
    waits: bool,
) -> _State:
    """Return the values to save. ``world_size``: number of ranks that save."""
    own = _plain_values(_model_state(model, as_saved=True, waits=waits))
    state: StateDict = {model_key: own} if model_key else own
    if optimizer is not None:
        of_optimizer = optim_state(model, optimizer)
        state[optim_key] = {
            "state": {fqn: _plain_values(values) for fqn, values in of_optimizer["state"].items()},
            "param_groups": [_plain_values(group) for group in of_optimizer["param_groups"]],
        }
    if extra is not None:
        if not isinstance(extra, dict):
            raise TypeError(f"extra: expected a dict, got {type(extra).__name__}")
        state[EXTRA] = _plain_values(mapped_tensors(EXTRA, extra, whole_value))
    return _State(*flatten_state_dict(state), units_of_some(model, world_size))


_claimed: set[Path] = set()


def _claim(target: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError if other ranks of this job, with a model over another group, save to ``target``."""
    if target not in _claimed and _get_default_store().add(f"fsdp_c.checkpoint {target}", 1) > 1:
        raise CheckpointError(
            f"{target}: {ranks_text(ranks_of(group))} hold this model, and other ranks of the job, with a model over "
            "another process group, have saved to the same path by themselves. Give each model a path of its own, "
            "or pass process_group=torch.distributed.group.WORLD on all ranks to save one model together"
        )
    _claimed.add(target)


def _copies(made: Callable[[], _State], model: nn.Module) -> Callable[[], _State]:
    """Start the copies. Return a function that waits for them, or raises their error, in another thread."""
    begun: Future[_State] = Future()
    try:
        state = made()
        copies = _host_copies.copied(state.values, state.paths, params_of_script(model))
        begun.set_result(state._replace(values=copies))
    except Exception as error:
        begun.set_exception(error)

    def finished() -> _State:
        copied = begun.result()
        _host_copies.wait()
        return copied

    return finished


def _plain_values(values: StateDict) -> StateDict:
    made = {}
    for name, value in values.items():
        try:
            made[name] = plain(value)
        except RecursionError:
            raise ValueError(f"{name} {TOO_DEEP}") from None
    return made


# ----------------------------------------------------------------- loading


class _Loading:
    """One ``load``. Its construction reads and checks everything except tensors of the model and the optimizer."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None,
        read: Callable[[], Checkpoint],
        model_key: str,
        optim_key: str,
        strict: bool,
    ) -> None:
        self.model = model
        self.own = model_state(model)
        self.checkpoint = read()
        _rename_uncompiled(self.checkpoint)
        self.targets: dict[str, Tensor] = {}  # memory to read into, by key
        self.nested: dict[str, str] = {}  # keys of modules' extra state, by its name
        prefix = f"{model_key}." if model_key else ""
        self._add_model(model, prefix, set() if prefix else {EXTRA, optim_key}, strict)
        self.optims: list[OptimTarget] = []
        for each in [] if optimizer is None else as_list(optimizer):
            first_group = sum(len(optim.groups) for optim in self.optims)
            self.optims.append(OptimTarget(model, each, self.checkpoint, optim_key, first_group))
            self.targets.update(self.optims[-1].tensors)
        if strict:
            self._check_strangers()
        self.items = {key: self._read_items(key, target) for key, target in self.targets.items()}
        self.checkpoint.hold(item.chunk.file for items in self.items.values() for item in items)
        for optim in self.optims:
            optim.values |= read_entries(self.checkpoint, optim.early_keys)
            optim.check()
        self.own_state = {name: read_nested(self.checkpoint, key) for name, key in self.nested.items()}
        self.extra: StateDict = read_nested(self.checkpoint, EXTRA) or {}

    def _add_model(self, model: nn.Module, prefix: str, others: set[str], strict: bool) -> None:
        expected = {prefix + name: value for name, value in self.own.items()}
        entries = self.checkpoint.entries
        own = {key: expected.pop(key) for key in [*expected] if is_extra_state(key)}
        takers = {prefix + name for name in extra_state_takers(model)}
        missing, errors = [], []
        for key, value in expected.items():
            entry, shape = entries.get(key), tuple(value.shape)
            if entry is None:
                missing.append(key)
            elif not isinstance(entry, TensorEntry):
                errors.append(f"{key} is no tensor in the checkpoint")
            elif entry.shape != shape:
                errors.append(f"{key} has shape {entry.shape} in the checkpoint, {shape} in the model")
            else:
                self.targets[key] = value
        for key in dict.fromkeys([*own, *takers]):
            if any(each == key or each.startswith(f"{key}.") for each in entries):
                if key in takers:
                    self.nested[key.removeprefix(prefix)] = key
                elif strict:
                    errors.append(f"{key} is unexpected: the module that has it has no set_extra_state()")
            elif key in takers and flatten_state_dict({key: own.get(key)})[0]:  # {} is saved as nothing
                missing.append(key)
        if strict:
            errors += [f"{key} is missing" for key in missing]
            known = {*expected, *own, *takers}
            below = tuple(f"{key}." for key in {*own, *takers, *others})
            errors += [
                f"{key} is unexpected"
                for key in entries
                if key.startswith(prefix) and key not in known and not key.startswith(below)
            ]
        if errors:
            shown = errors if len(errors) <= 16 else [*errors[:16], f"and {len(errors) - 16} more"]
            raise CheckpointError("\n\t".join([f"{self.checkpoint.folder} does not fit the model:", *shown]))

    def _check_strangers(self) -> None:
        strangers = [optim.strangers() for optim in self.optims]
        if of_none := sorted(set.intersection(*strangers) if strangers else ()):
            optimizers = "this optimizer does" if len(strangers) == 1 else "these optimizers do"
            raise CheckpointError(
                f"{self.checkpoint.folder} has optimizer state of {of_none[:8]}, which {optimizers} not hold"
            )

    def _read_items(self, key: str, target: Tensor) -> list[Item]:
        items: list[Item] = []
        numel = 0
        for box in _create_chunk_list(target):
            if box.sizes.numel():
                numel += box.sizes.numel()
                memory = find_tensor_shard(target, MetadataIndex(key, box.offsets)).detach()
                items += items_of(key, self.checkpoint.tensor(key), box.offsets, memory)
        found = sum(item.target.numel() for item in items)
        if found != numel:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {found} of {numel} elements wanted of {key} are there"
            )
        return items

    @torch.no_grad()
    def read_tensors(self) -> None:
        """Read into the model's and the optimizer's own memory, which changes from here on."""
        read_items(self.checkpoint, (item for each in self.items.values() for item in each))

    @torch.no_grad()
    def show(self) -> None:
        """Make the modules use the loaded values, also by their set_extra_state()."""
        show_loaded(self.model)
        set_extra_state(self.model, self.own_state)

    @torch.no_grad()
    def finish(self) -> StateDict:
        """Apply optimizer state, once no rank can fail any more."""
        for optim in self.optims:
            optim.apply()
        return self.extra


def _rename_uncompiled(checkpoint: Checkpoint) -> None:
    """Rename entries, unless two would have one name, to the names of an uncompiled model."""
    renamed: dict[str, str] = {}
    for key in checkpoint.entries:
        new = key if key.startswith(f"{EXTRA}.") else uncompiled(key)
        if new not in checkpoint.entries and new not in renamed.values():
            renamed[key] = new

    def path_of(key: str, path: PathInDict) -> PathInDict:
        if key not in renamed:
            return path
        names = next((index + 1 for index, each in enumerate(path) if EXTRA_STATE in str(each)), len(path))
        renamed_part = (uncompiled(each) if isinstance(each, str) else each for each in path[:names])
        return (*renamed_part, *path[names:])

    if renamed:
        checkpoint.entries = {renamed.get(key, key): entry for key, entry in checkpoint.entries.items()}
        checkpoint.paths = {
            renamed.get(key, key): path_of(key, path) for key, path in checkpoint.paths.items()
        }
