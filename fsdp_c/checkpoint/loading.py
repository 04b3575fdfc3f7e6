"""``load``: reads a checkpoint into a model and its optimizers, after all checks that need no tensors' data."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_c import _C
from fsdp_c.checkpoint import background
from fsdp_c.checkpoint.contents import Checkpoint, Entry, PathInDict, TensorEntry
from fsdp_c.checkpoint.folder import CheckpointError, StrPath, check_path, retry_if_replaced
from fsdp_c.checkpoint.model_state import (
    EXTRA,
    EXTRA_STATE,
    extra_state_setters,
    model_state,
    uncompiled,
)
from fsdp_c.checkpoint.optim_state import Optimizers, OptimTarget, as_list
from fsdp_c.checkpoint.rank_group import RankGroup
from fsdp_c.checkpoint.storage import Item, items_of, read_checkpoint, read_items, read_nested
from fsdp_c.checkpoint.values import RangeTensor
from fsdp_c.compat.aliases import StateDict
from fsdp_c.sharding.holders import group_of_model
from fsdp_c.sharding.sharded_module import units_of
from fsdp_c.tools import phases

_TRIES = 100  # attempts to agree on one checkpoint on all ranks, during other saves


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
    background.finish(raises=False)
    ranks = RankGroup(process_group or group_of_model(model))
    what = f"loading {os.fspath(path)}"

    def prepare() -> _Loading:
        check_path(path)
        return retry_if_replaced(
            Path(path),
            lambda: _Loading(model, optimizer, Path(path), ranks.is_first, model_key, optim_key, strict),
        )

    for _ in range(_TRIES):
        loading, found = ranks.agree(what, prepare, lambda loading: loading.checkpoint.identity)
        if len({*found}) == 1:
            break
        loading.checkpoint.close()
    else:
        raise CheckpointError(f"{what} failed: ranks found different checkpoints there, {_TRIES} times")
    with closing(loading.checkpoint):
        ranks.agree(what, loading.read_tensors)
    ranks.agree(what, loading.apply_to_modules)
    return loading.apply_to_optimizers()


class _Loading:
    """One ``load``. Its construction reads and checks everything except tensors of the model and the optimizer."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None,
        path: Path,
        compare: bool,
        model_key: str,
        optim_key: str,
        strict: bool,
    ) -> None:
        self.model = model
        prefix = f"{model_key}." if model_key else ""
        own = {prefix + name: value for name, value in model_state(model).items()}
        self.checkpoint = read_checkpoint(path, compare=compare)
        _rename_uncompiled(self.checkpoint)
        self.setters = {prefix + name: module for name, module in extra_state_setters(model).items()}
        self.targets: dict[str, Tensor] = {}  # memory to read into, by key
        self.extra_state_keys: list[str] = []  # keys of modules' extra state to read
        self._add_model(own, prefix, set() if prefix else {EXTRA, optim_key}, strict)
        self.optims: list[OptimTarget] = []
        for each in [] if optimizer is None else as_list(optimizer):
            first_group = sum(len(optim.groups) for optim in self.optims)
            self.optims.append(OptimTarget(model, each, self.checkpoint, optim_key, first_group))
            self.targets.update(self.optims[-1].tensors)
        if strict:
            self._check_unknown_fqns()
        self.items = {key: self._read_items(key, target) for key, target in self.targets.items()}
        self.checkpoint.keep_open(item.chunk.file for items in self.items.values() for item in items)
        for optim in self.optims:
            optim.check()
        self.extra_states = {key: read_nested(self.checkpoint, key) for key in self.extra_state_keys}
        self.extra: StateDict = read_nested(self.checkpoint, EXTRA) or {}

    def _add_model(self, expected: StateDict, prefix: str, others: set[str], strict: bool) -> None:
        entries = self.checkpoint.entries
        own = {key: expected.pop(key) for key in [*expected] if key.rpartition(".")[2] == EXTRA_STATE}
        missing, errors = [], []
        for key, value in expected.items():
            entry, shape = entries.get(key), tuple(value.shape)
            if entry is None:
                missing.append(key)
            elif not isinstance(entry, TensorEntry):
                errors.append(f"{key} is not a tensor in the checkpoint")
            elif entry.shape != shape:
                errors.append(f"{key} has shape {entry.shape} in the checkpoint, {shape} in the model")
            else:
                self.targets[key] = value
        for key in dict.fromkeys([*own, *self.setters]):
            if any(each == key or each.startswith(f"{key}.") for each in entries):
                if key in self.setters:
                    self.extra_state_keys.append(key)
                elif strict:
                    errors.append(f"{key} is unexpected: its module has no set_extra_state()")
            elif key in self.setters and flatten_state_dict({key: own.get(key)})[0]:  # {} is saved as nothing
                missing.append(key)
        if strict:
            errors += [f"{key} is missing" for key in missing]
            known = {*expected, *own, *self.setters}
            below = tuple(f"{key}." for key in {*own, *self.setters, *others})
            errors += [
                f"{key} is unexpected"
                for key in entries
                if key.startswith(prefix) and key not in known and not key.startswith(below)
            ]
        if errors:
            shown = errors if len(errors) <= 16 else [*errors[:16], f"and {len(errors) - 16} more"]
            raise CheckpointError("\n\t".join([f"{self.checkpoint.folder} does not fit the model:", *shown]))

    def _check_unknown_fqns(self) -> None:
        strangers = [optim.unknown_fqns() for optim in self.optims]
        if unclaimed := sorted(set.intersection(*strangers) if strangers else ()):
            optimizers = "this optimizer does" if len(strangers) == 1 else "these optimizers do"
            raise CheckpointError(
                f"{self.checkpoint.folder} has optimizer state of {unclaimed[:8]}, which {optimizers} not hold"
            )

    def _read_items(self, key: str, target: Tensor) -> list[Item]:
        entry = self.checkpoint.tensor(key)
        boxes = target.boxes if isinstance(target, RangeTensor) else {(0,) * target.dim(): target.detach()}
        boxes = {offsets: box for offsets, box in boxes.items() if box.numel()}
        items = [item for offsets, box in boxes.items() for item in items_of(key, entry, offsets, box)]
        found, numel = sum(item.target.numel() for item in items), sum(map(Tensor.numel, boxes.values()))
        if found != numel:
            raise CheckpointError(
                f"{self.checkpoint.folder}: has only {found} of the {numel} elements of {key} to load"
            )
        return items

    @torch.no_grad()
    def read_tensors(self) -> None:
        """Read into the model's and the optimizer's own memory, which changes from here on."""
        read_items(self.checkpoint, (item for each in self.items.values() for item in each))

    @torch.no_grad()
    def apply_to_modules(self) -> None:
        """Free unsharded parameters, which have earlier values, and pass extra state to its modules."""
        for unit in units_of(self.model):
            if unit._handle is not None:
                unit._handle.reshard(True)
        for key, module in self.setters.items():
            if key in self.extra_states:
                module.set_extra_state(self.extra_states[key])

    @torch.no_grad()
    def apply_to_optimizers(self) -> StateDict:
        """Apply optimizer state, once no rank can fail any more."""
        for optim in self.optims:
            optim.apply()
        return self.extra


def _rename_uncompiled(checkpoint: Checkpoint) -> None:
    """Rename entries, unless two would have one name, to the names of an uncompiled model."""
    entries: dict[str, Entry] = {}
    paths: dict[str, PathInDict] = {}
    for key, entry in checkpoint.entries.items():
        new, path = uncompiled(key), checkpoint.paths[key]
        if key.startswith(f"{EXTRA}.") or new in checkpoint.entries or new in entries:
            new = key
        else:
            names = next((at + 1 for at, each in enumerate(path) if EXTRA_STATE in str(each)), len(path))
            renamed = [uncompiled(each) if isinstance(each, str) else each for each in path[:names]]
            path = (*renamed, *path[names:])
        entries[new], paths[new] = entry, path
    checkpoint.entries, checkpoint.paths = entries, paths
