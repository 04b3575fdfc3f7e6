"""``save`` and ``load``: what a training script calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard

from fsdp_c import _C
from fsdp_c.checkpoint.folder import CheckpointError, check_target, discard, make_temporary
from fsdp_c.checkpoint.metadata import BytesEntry, Entry, TensorEntry, read_checkpoint
from fsdp_c.checkpoint.model_state import EXTRA_STATE, _model_state, model_state, set_extra_state, show_loaded
from fsdp_c.checkpoint.optim_state import OptimTarget, optim_state
from fsdp_c.checkpoint.storage import Reader, Report, Writer, item_nbytes, narrowed, read_nested, read_object
from fsdp_c.checkpoint.values import LocalParts, as_held, mapped_tensors, whole_value
from fsdp_c.compat.aliases import StateDict
from fsdp_c.sharding.common import tell
from fsdp_c.tools import flight_recorder

T = TypeVar("T")
StrPath = str | os.PathLike[str]
EXTRA = "extra"


@flight_recorder.phase(_C.RECORDER_SAVE)
def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: StrPath,
    *,
    extra: StateDict | None = None,
    model_key: str = "model",
    optim_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> None:
    """Save the model, its optimizer and rank 0's ``extra`` as the folder ``path``, which torch's DCP reads too.

    Each rank writes its own shards from their memory; parameters are not gathered, and of replicas one is written. An
    existing checkpoint is replaced once the new one is complete and on disk: see [Note: In place at once] in
    fsdp_c/checkpoint/folder.py, also for what file systems must do. ``extra``: nested dicts and lists of tensors,
    numbers, strings and other values that ``torch.load(weights_only=True)`` loads; keys become strings.

    Plain tensors that hold parts of a larger one, by the attributes of DCP's ``CheckpointableTensor``, are saved and
    loaded as such in the model, its extra state and the optimizer; in ``extra`` rank 0 must have all parts, and
    ``load`` returns the whole. A parameter that is a part and that a unit divides besides is refused by name.

    Collective over ``process_group`` (default: all ranks). Raises CheckpointError on every rank, naming the rank on
    which something failed; the old checkpoint is then as it was.
    """
    path, ranks = Path(os.path.abspath(path)), _Ranks(process_group)
    temporary: Path | None = None

    def prepare() -> StateDict:
        nonlocal temporary
        state = _saved_state(model, optimizer, extra if ranks.is_first else None, model_key, optim_key)
        check_target(path)
        temporary = make_temporary(path) if ranks.is_first else None
        return state

    try:
        state, told = ranks.agree(f"saving {path}", prepare, lambda _: temporary)
        shown = progress and ranks.is_first
        with warnings.catch_warnings(), progress_bar("saving", shown) as (report, set_total):
            writer = Writer(told[0], path, report)
            planner = _SavePlanner(set_total)
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            with flight_recorder.explained(f"saving {path}"):
                dcp.save(
                    state,
                    storage_writer=writer,
                    planner=planner,
                    process_group=process_group,
                    no_dist=not ranks.is_distributed,
                )
    except CheckpointException as failure:
        raise _error(f"saving {path}", {rank: _text(one[0]) for rank, one in failure.failures.items()}) from None
    finally:
        if temporary is not None:
            discard(temporary)  # it is there after a failure only


@flight_recorder.phase(_C.RECORDER_LOAD)
def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: StrPath,
    *,
    strict: bool = True,
    model_key: str = "model",
    optim_key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> StateDict:
    """Load what ``save``, or torch's DCP, wrote into ``path``; returns ``extra``.

    Each rank reads the parts that it holds into its shards, whatever the number of ranks, the wrapping and the strategy
    were. State that the optimizer lacks is made, without a step. Everything read is compared with its checksum, where
    fsdp_c wrote the checkpoint. Without ``strict`` names that only the model or only the checkpoint has are passed
    over. An empty ``model_key`` means that the model's names stand at the top level.

    Collective over ``process_group`` (default: all ranks). Raises CheckpointError on every rank, naming the rank on
    which something failed. Missing and misshapen entries are found before anything is changed; where data turn out to
    be damaged, the model may have been loaded in part.
    """
    path, ranks = Path(path), _Ranks(process_group)
    what = f"loading {path}"
    loading, _ = ranks.agree(what, lambda: _Loading(model, optimizer, path, model_key, optim_key, strict))
    result, _ = ranks.agree(what, lambda: loading.run(progress and ranks.is_first))
    return result


# ----------------------------------------------------------------- agreement


class _Ranks:
    """The ranks that save or load together; one where there is no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.is_first = not self.is_distributed or dist.get_rank(group) == 0

    def agree(self, what: str, work: Callable[[], T], tell: Callable[[T], Any] = lambda _: None) -> tuple[T, list[Any]]:
        """The result of ``work``, and what each rank tells of its own; an exception on one is one on all."""
        result, error, told = None, None, None
        try:
            result = work()
            told = tell(result)
        except Exception as caught:
            error = caught
        with flight_recorder.explained(what):
            everything = self._exchange((error and (type(error).__name__, _text(error)), told))
        errors = {rank: failed[1] for rank, (failed, _) in enumerate(everything) if failed}
        kinds = [failed[0] if failed else None for failed, _ in everything]
        if error is not None and kinds == [type(error).__name__] * len(kinds):
            raise error  # the same mistake on all ranks: it is the caller's
        if errors:
            raise _error(what, errors) from error
        return result, [one for _, one in everything]  # type: ignore[return-value]  # a result, where no rank has an error

    def _exchange(self, told: T) -> list[T]:
        return tell(told, self.group) if self.is_distributed else [told]


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _error(what: str, errors: dict[int, str]) -> CheckpointError:
    return CheckpointError("\n".join(f"{what} failed on rank {rank}: {text}" for rank, text in sorted(errors.items())))


# ----------------------------------------------------------------- saving


def _saved_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: StateDict | None,
    model_key: str,
    optim_key: str,
) -> StateDict:
    own = _model_state(model, as_saved=True)
    state: StateDict = {model_key: own} if model_key else own
    if optimizer is not None:
        state[optim_key] = optim_state(model, optimizer)
    if extra is not None:
        if not isinstance(extra, dict):
            raise TypeError(f"extra: expected a dict, got {type(extra).__name__}")
        state[EXTRA] = mapped_tensors(EXTRA, extra, _whole_on_rank_0)
    return state


def _whole_on_rank_0(name: str, tensor: Tensor) -> Tensor:
    value = whole_value(tensor)
    if isinstance(value, LocalParts) and value.numel_held != value.shape.numel():
        raise ValueError(
            f"{name}: rank 0 holds {value.numel_held} of the {value.shape.numel()} elements of a tensor of shape "
            f"{tuple(value.shape)}, and alone saves what is in extra: make it a buffer of the model, or pass it whole"
        )
    return value


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also reports how much this rank will write."""

    def __init__(self, set_total: Report) -> None:
        super().__init__()
        self.set_total = set_total

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.set_total(sum(item_nbytes(item) for item in new_plan.items))
        return super().finish_plan(new_plan)


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[tuple[Report, Report]]:
    """Two functions to report progress to: one takes the bytes just done, the other the total."""
    if not shown:
        yield (lambda nbytes: None), (lambda nbytes: None)
        return
    from tqdm import tqdm

    with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update, bar.reset


# ----------------------------------------------------------------- loading


class _Loading:
    """One ``load``: made, it has checked everything that can be known without reading tensors."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        path: Path,
        model_key: str,
        optim_key: str,
        strict: bool,
    ) -> None:
        self.checkpoint = read_checkpoint(path)
        self.model = model
        self.targets: dict[str, Tensor] = {}  # to read into, by key
        self.nested: dict[
            str, tuple[str, Any]
        ] = {}  # modules' own state, by name: the key above it, and what it is now
        prefix = f"{model_key}." if model_key else ""
        self._add_model(model, prefix, {prefix + EXTRA, *([f"{prefix}{optim_key}"] if not prefix else [])}, strict)
        self.optim = None
        if optimizer is not None:
            self.optim = OptimTarget(model, optimizer, self.checkpoint, optim_key, strict)
            self.targets.update(self.optim.tensors)
        self.items = {key: self._read_items(key, target) for key, target in self.targets.items()}

    def _add_model(self, model: nn.Module, prefix: str, others: set[str], strict: bool) -> None:
        expected = {prefix + name: value for name, value in model_state(model).items()}
        entries = self.checkpoint.entries
        missing, errors = [], []
        for key, value in expected.items():
            if key.endswith(EXTRA_STATE):
                self.nested[key.removeprefix(prefix)] = (key, value)
            elif key not in entries:
                missing.append(key)
            elif error := _misfit(key, entries[key], value):
                errors.append(error)
            else:
                self.targets[key] = value
        if strict:
            errors += [f"{key} is missing" for key in missing]
            known = [*(f"{key}." for key in [*(key for key, _ in self.nested.values()), *others])]
            errors += [
                f"{key} is unexpected"
                for key in entries
                if key.startswith(prefix) and key not in expected and not key.startswith(tuple(known))
            ]
        if errors:
            shown = errors if len(errors) <= 16 else [*errors[:16], f"and {len(errors) - 16} more"]
            raise CheckpointError("\n\t".join([f"{self.checkpoint.folder} does not fit the model:", *shown]))

    def _read_items(self, key: str, target: Tensor) -> list[ReadItem]:
        entry = self.checkpoint.entries[key]
        assert isinstance(entry, TensorEntry)
        wanted = _create_chunk_list(target)
        items = create_read_items_for_chunk_list(key, self.checkpoint.raw_entry(entry), wanted)
        found, numel = sum(item.lengths.numel() for item in items), sum(chunk.sizes.numel() for chunk in wanted)
        if found != numel:
            raise CheckpointError(f"{self.checkpoint.folder}: {found} of {numel} elements wanted of {key} are there")
        return items

    @torch.no_grad()
    def run(self, progress: bool) -> StateDict:
        if self.optim is not None:
            self.optim.objects = {key: self._object(key) for key in self.optim.object_keys}
            self.optim.check()
        with progress_bar("loading", progress) as (report, set_total):
            items = [item for each in self.items.values() for item in each if item.lengths.numel()]
            set_total(sum(item.lengths.numel() * self.targets[item.dest_index.fqn].itemsize for item in items))
            Reader(self.checkpoint, report).read(items, self._memory)
        if self.optim is not None:
            self.optim.apply()
        show_loaded(self.model)
        own = {name: as_held(read_nested(self.checkpoint, key), held) for name, (key, held) in self.nested.items()}
        set_extra_state(self.model, {name: value for name, value in own.items() if value is not None})
        return read_nested(self.checkpoint, EXTRA) or {}

    def _memory(self, item: ReadItem) -> Tensor:
        target = find_tensor_shard(self.targets[item.dest_index.fqn], item.dest_index).detach()
        return narrowed(target, item.dest_offsets, item.lengths)

    def _object(self, key: str) -> object:
        entry = self.checkpoint.entries[key]
        assert isinstance(entry, BytesEntry)
        return read_object(self.checkpoint, key, entry)


def _misfit(key: str, entry: Entry, value: Tensor) -> str | None:
    if not isinstance(entry, TensorEntry):
        return f"{key} is no tensor in the checkpoint"
    if entry.shape != tuple(value.shape):
        return f"{key} has shape {entry.shape} in the checkpoint, {tuple(value.shape)} in the model"
    return None
