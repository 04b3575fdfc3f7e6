"""What torch's FSDP1 and fsdp_c say when the same thing goes wrong.

A row names an error or warning by its id, the phrase by which torch's is known, and a body that provokes it
in either implementation. Torch's message holds the phrase, ours begins with it: the check reads both.
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
    """Either implementation, under the names that both have."""

    FSDP: Any
    FlatParameter: Any
    flat_param: Any  # the module of the handle
    Scaler: Any
    logger: str
    wrapping: Any  # the module of policies; ours stands in where torch has none

    @property
    def is_torchs(self) -> bool:
        return self.FSDP is TorchFSDP

    def wrap(self, module: nn.Module, **kwargs: Any) -> Any:
        """A unit that computes on the rank's device, which torch's has to be told."""
        return self.FSDP(module, **{"device_id": device(), **kwargs})

    def nested(self, **kwargs: Any) -> Any:
        """A root with one inner unit, ``second``."""
        return self.wrap(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **kwargs)

    def unsharded(self) -> Any:
        """A unit of NO_SHARD; what construction warns of is not said."""
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
    """What one row of the list of errors asks for."""

    id: str  # of the list, and which of several with that id
    kind: type[BaseException] | type[logging.LogRecord]  # an exception, a warning, or a line of the log
    phrase: str
    provoke: Callable[[Implementation], Any]
    also: str = ""  # a regular expression for what programs match besides
    ours: str = ""  # a regular expression for what our message says of its own
    whole: bool = False  # there is no more in torch's than programs match: what is ours stands in a note
    torchs: tuple[type[BaseException], str] | None = (
        None  # where the installed torch raises or says something else
    )


class Said(NamedTuple):
    kind: type
    text: str
    notes: str


def check(row: Row) -> None:
    """Both implementations say it, as the same kind of thing, and ours begins with the phrase."""
    torchs, ours = said(TORCHS, row), said(OURS, row)
    both = f"torch: {torchs}\nours: {ours}"
    torchs_kind, torchs_phrase = row.torchs or (row.kind, row.phrase)
    assert torchs.kind is torchs_kind and ours.kind is row.kind, both
    assert torchs_phrase in torchs.text, both
    assert ours.text.startswith(row.phrase), both
    assert re.search(row.also, torchs.text) and re.search(row.also, ours.text), both
    assert re.search(row.ours, f"{ours.text}\n{ours.notes}", re.DOTALL), both
    # before Python 3.11 a note is in the message
    assert (ours.text.splitlines()[0] == torchs.text) == row.whole, both


def said(implementation: Implementation, row: Row) -> Said:
    """What the body of ``row`` makes ``implementation`` say: its exception, or the first warning with the
    phrase."""
    error = None
    with collected(implementation.logger) as collection:
        try:
            row.provoke(implementation)
        except Exception as caught:
            # of frames, in which this one is: what torch left open in them is closed now, not amid another test
            error = caught.with_traceback(None)
    if not issubclass(row.kind, (Warning, logging.LogRecord)):
        assert error is not None, f"{row.id}: nothing was raised"
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        return Said(type(error), text, "\n".join(getattr(error, "__notes__", [])))
    having = [one for one in collection if row.phrase in one.text]
    if not having:
        raise AssertionError(f"{row.id}: not said, but {[one.text for one in collection]}") from error
    return having[0]


def forget_torchs_units() -> None:
    """Those that ran are never collected; as plain modules they are in no one's way who asks for living
    units."""
    for found in gc.get_objects():
        if type(found) is TorchFSDP:
            found.__class__ = nn.Module


@contextlib.contextmanager
def collected(logger: str) -> Iterator[list[Said]]:
    """The warnings, and the lines of ``logger`` from INFO on; complete at exit."""
    found: list[Said] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(Said(logging.LogRecord, record.getMessage(), ""))  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            yield found
        found += [Said(one.category, str(one.message), "") for one in record]
    finally:
        logging.getLogger(logger).removeHandler(handler)


KINDS = {"LogRecord": logging.LogRecord, **vars(builtins)}


def rows(text: str, provoke: dict[str, Callable[[Implementation], Any]]) -> list[Row]:
    """Of a table with a row on each line that is not indented: id, kind and phrase; ``whole`` stands by the kind,
    ``also`` and ``ours`` on indented lines below."""
    found = []
    for row in re.split(r"\n(?!    )", text.strip()):
        told, *others = (re.sub(r"\n +", " ", part) for part in re.split(r"\n    (?=also: |ours: )", row))
        one, kind, phrase = told.split(" | ", 2)
        name, _, whole = kind.partition(", ")
        more = dict(other.split(": ", 1) for other in others)
        found.append(
            Row(one, KINDS[name.rpartition(".")[2]], phrase, provoke[one], whole=bool(whole), **more)
        )
    assert [row.id for row in found] == list(provoke)
    return found


def of(rows: list[Row]) -> Any:
    """The rows as the parameters of a test, named by their ids."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)
