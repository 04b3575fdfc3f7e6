"""Comparison of errors and warnings of torch's FSDP1 and fsdp_c for the same mistakes.

A row contains an id, a phrase of torch's message, and a function that provokes the error in either
implementation. Torch's message must contain the phrase, and ours must begin with it.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter as TorchFlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

from fsdp_c import FlatParameter, FullyShardedDataParallel
from fsdp_c.compat.standins import wrap as standins_wrap
from fsdp_c.sharded_grad_scaler import ShardedGradScaler
from fsdp_c.sharding import flat_param
from fsdp_c.wrap import ModuleWrapPolicy
from tests.ranks import device

CPU = torch.device("cpu")


class Implementation(NamedTuple):
    """An implementation of FSDP, with the modules and names that both have."""

    FSDP: Any
    FlatParameter: Any
    flat_param: Any  # the module of FlatParamHandle
    Scaler: Any
    logger: str
    wrapping: Any  # the module of wrap policies; ours if torch has none

    @property
    def is_torchs(self) -> bool:
        return self.FSDP is TorchFSDP

    def wrap(self, module: nn.Module, **kwargs: Any) -> Any:
        """Wrap ``module`` as a unit on the rank's device."""
        return self.FSDP(module, **{"device_id": device(), **kwargs})

    def nested(self, **kwargs: Any) -> Any:
        """Return a root with one inner unit, ``second``."""
        return self.wrap(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **kwargs)

    def unsharded(self) -> Any:
        """Return a unit of NO_SHARD. Warnings of its construction are ignored."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.wrap(Net(), sharding_strategy=ShardingStrategy.NO_SHARD)


TORCHS = Implementation(
    TorchFSDP, TorchFlatParameter, torch_flat_param, TorchScaler, "torch.distributed.fsdp", torch_wrap
)
OURS = Implementation(
    FullyShardedDataParallel, FlatParameter, flat_param, ShardedGradScaler, "fsdp_c", standins_wrap
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Row(NamedTuple):
    """One expected error or warning."""

    id: str  # id in the list of errors, with a suffix if several rows share it
    kind: type[BaseException] | type[logging.LogRecord]  # an exception, a warning, or a log record
    phrase: str
    provoke: Callable[[Implementation], Any]
    also: str = ""  # regular expression for other text that programs match
    ours: str = ""  # regular expression for text that only our message has
    whole: bool = False  # torch's whole message is matched by programs: our additions are in a note
    torchs: tuple[type[BaseException], str] | None = (
        None  # None: kind and phrase, if the installed torch raises something else
    )


class Message(NamedTuple):
    kind: type
    text: str
    notes: str


def check(row: Row) -> None:
    """Check that both implementations report the error with the same kind, and that our message begins with
    the phrase.
    """
    torchs, ours = message_of(TORCHS, row), message_of(OURS, row)
    both = f"torch: {torchs}\nours: {ours}"
    torchs_kind, torchs_phrase = row.torchs or (row.kind, row.phrase)
    assert torchs.kind is torchs_kind and ours.kind is row.kind, both
    assert torchs_phrase in torchs.text, both
    assert ours.text.startswith(row.phrase), both
    assert re.search(row.also, torchs.text) and re.search(row.also, ours.text), both
    assert re.search(row.ours, f"{ours.text}\n{ours.notes}", re.DOTALL), both
    # before Python 3.11 notes are part of the message
    assert (ours.text.splitlines()[0] == torchs.text) == row.whole, both


def message_of(implementation: Implementation, row: Row) -> Message:
    """Return the error raised by ``implementation`` for ``row``, or else the first warning with the phrase."""
    error = None
    with collected(implementation.logger) as collection:
        try:
            row.provoke(implementation)
        except Exception as caught:
            # Drop the traceback's frames, this one included: contexts that torch left open in them close now,
            # not inside another test.
            error = caught.with_traceback(None)
    if not issubclass(row.kind, (Warning, logging.LogRecord)):
        assert error is not None, f"{row.id}: nothing was raised"
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        return Message(type(error), text, "\n".join(getattr(error, "__notes__", [])))
    having = [one for one in collection if row.phrase in one.text]
    if not having:
        raise AssertionError(f"{row.id}: no such message, but {[one.text for one in collection]}") from error
    return having[0]


def forget_torchs_units() -> None:
    """Turn torch's units into plain modules: units that ran are never collected, and a search for live units
    would find them.
    """
    for found in gc.get_objects():
        if type(found) is TorchFSDP:
            found.__class__ = nn.Module


@contextlib.contextmanager
def collected(logger: str) -> Iterator[list[Message]]:
    """Collect warnings, and log records of ``logger`` from INFO on. The list is complete at exit."""
    found: list[Message] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(Message(logging.LogRecord, record.getMessage(), ""))  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            yield found
        found += [Message(one.category, str(one.message), "") for one in record]
    finally:
        logging.getLogger(logger).removeHandler(handler)


KINDS = {"LogRecord": logging.LogRecord, **vars(builtins)}


def rows(text: str, provoke: dict[str, Callable[[Implementation], Any]]) -> list[Row]:
    """Parse a table of rows: a line "id | kind | phrase", optionally ", whole" after the kind, and indented
    lines ``also:`` and ``ours:``.
    """
    found = []
    for row in re.split(r"\n(?!    )", text.strip()):
        head, *others = (re.sub(r"\n +", " ", part) for part in re.split(r"\n    (?=also: |ours: )", row))
        one, kind, phrase = head.split(" | ", 2)
        name, _, whole = kind.partition(", ")
        more = dict(other.split(": ", 1) for other in others)
        found.append(
            Row(one, KINDS[name.rpartition(".")[2]], phrase, provoke[one], whole=bool(whole), **more)
        )
    assert [row.id for row in found] == list(provoke)
    return found


def of(rows: list[Row]) -> Any:
    """Parametrize a test with the rows. Test ids are the rows' ids."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)
