"""What a checkpoint holds besides tensors: made plain before it is saved, and read without running anything.

[Note: Names in a pickle]
A pickle may call whatever it names, with any arguments, and set attributes of what comes out. torch's
weights_only reader has a short list of names that may stand there. While it reads for us it knows those of
``_known()`` as well. Each stands for a function or a class of ours that checks what it is given, or for an
immutable class of the interpreter that is made of numbers and text. None of them imports a module, opens a
file or leaves anything changed but what it returns. What a user has put on torch's list, by
``torch.serialization.add_safe_globals``, stays as it is.
"""

from __future__ import annotations

import datetime
import decimal
import difflib
import enum
import functools
import io
import math
import pathlib
import re
import resource
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.serialization import get_safe_globals, safe_globals

from fsdp_c.checkpoint.pickles import rebuilt
from fsdp_c.compat.upstream import BackwardPrefetch, ShardingStrategy, StateDictType


class _EmptyDict:
    """Stands for {} while a state dict is flattened, which would leave it out; pickled it is one."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def plain(value: object) -> Any:
    """``value`` as it is saved: numpy's scalars in nested dicts, lists and tuples become Python's."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()} or _EmptyDict()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return rebuilt(value, [plain(one) for one in value])
    numpy = sys.modules.get("numpy")  # where it is not imported, nothing is of its types
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return value.item()  # of a long double it is a long double
    return value


def pickled(value: object) -> io.BytesIO:
    """``value`` as ``torch.save`` writes it. Raises TypeError for what ``load`` could not read back."""
    if isinstance(value, Pickled):
        return value.content
    content = io.BytesIO()
    try:
        torch.save(value, content)
        load(content.getvalue())
    except Exception as error:
        kind = _name(type(value)).removeprefix("builtins.")
        raise TypeError(f"{kind} cannot be saved so that it can be read: {reason(error)}") from error
    return content


class Pickled:
    """An object that has been pickled before it is written, so that the script may change it meanwhile."""

    def __init__(self, value: object) -> None:
        self.content = pickled(value)


def load(content: bytes) -> Any:
    """What ``torch.save`` made ``content`` of. See [Note: Names in a pickle]."""
    with names_known():
        return plain_arrays(
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)
        )


def reason(error: Exception) -> str:
    """Why ``load`` refused, in one line, and what to do."""
    text = (str(error) or repr(error)).strip()
    name = re.search(r"Unsupported global: GLOBAL (\S+)", text)
    if name is None:
        last = text.split("WeightsUnpickler error: ")[-1].strip()
        return (last or text).splitlines()[0]
    return (
        f"it names {name[1]}, which might run code: who trusts it calls "
        f"torch.serialization.add_safe_globals([{name[1]}]) before saving and loading"
    )


_lock = threading.RLock()  # torch's list is one for all threads


@contextmanager
def names_known() -> Iterator[None]:
    """While torch's weights_only reader reads for us. numpy's arrays come as ours: see plain_arrays()."""
    with _lock:
        theirs = {each[1] if isinstance(each, tuple) else _name(each) for each in get_safe_globals()}
        ours = [(stand_in, name) for name, stand_in in _known().items() if name not in theirs]
        # numpy's own functions are trusted then, which need the classes of all dtypes
        if "numpy.dtype" in theirs:
            ours += [(cls, name) for name, cls in _dtype_classes().items() if name not in theirs]
        with safe_globals(ours):  # type: ignore[arg-type]  # a name may stand for anything that is called
            yield


# ----------------------------------------------------------------- names that may stand in a pickle


@functools.cache
def _known() -> dict[str, Any]:
    """By its name in a pickle, what it stands for."""
    immutable = [
        # C classes of numbers: there is no attribute to set
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        frozenset,  # of what the pickle itself has made
        # named tuples without a __dict__, whose classes only put names to what they are given
        *(time.struct_time, resource.struct_rusage, decimal.DecimalTuple, difflib.Match),
        *(urllib.parse.DefragResult, urllib.parse.ParseResult, urllib.parse.SplitResult),
    ]
    known: dict[str, Any] = {_name(cls): cls for cls in immutable}
    # as pickled by Python 2
    known |= {name.replace("urllib.parse", "urlparse"): cls for name, cls in known.items()}
    # a pickle of b"" calls bytes; with a number that would be as many bytes
    known |= {"builtins.bytes": _nothing(bytes), "builtins.dict": _nothing(dict)}
    for path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        # of text alone; pathlib._local is its module in Python 3.13
        known |= {f"{module}.{path.__name__}": _path(path) for module in ("pathlib", "pathlib._local")}
    members = [_Members(each) for each in (ShardingStrategy, BackwardPrefetch, StateDictType, CheckpointImpl)]
    known |= {_name(each.enum): each for each in members}
    known["builtins.getattr"] = _member  # which CPython 3.11.0 to 3.11.3 pickle a member by
    return known | _known_of_numpy()


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise UnpicklingError(problem)


def _nothing(cls: type) -> Callable[[], object]:
    return lambda: cls()


def _path(cls: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    def path(*parts: str) -> pathlib.PurePath:
        _require(all(type(part) is str for part in parts), f"a {cls.__name__} of {parts!r}")
        return cls(*parts)

    return path


class _Members:
    """Stands for an enum, of which a pickle gets the members; the class itself it could make another of."""

    def __init__(self, cls: type[enum.Enum]) -> None:
        self.enum = cls

    def __call__(self, value: object) -> enum.Enum:
        return self.enum(value)


def _member(members: object, name: object) -> enum.Enum:
    if not isinstance(members, _Members) or name not in members.enum.__members__:
        raise UnpicklingError(f"it asks for the attribute {name!r} of something")
    return members.enum.__members__[str(name)]


# ----------------------------------------------------------------- numpy


class _DType:
    """Stands for ``numpy.dtype``, of numbers, text and times: numpy's believes any size and flag."""

    def __init__(self, kind: str, *_: object) -> None:
        _require(type(kind) is str and re.fullmatch(r"[biufcmMSU][0-9]{1,9}", kind), f"arrays of {kind!r}")
        self.kind, self.order, self.unit = kind, "=", ""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *structure = state[:5]
        _require(structure == [None] * 3 and order in ("<", ">", "|", "="), "arrays of structures")
        self.order = order
        if self.kind[0] in "mM":
            name, count, *rest = state[8][1]
            _require(
                type(count) is int and rest == [1, 1] and name.isalpha(), "arrays of times in an odd unit"
            )
            self.unit = "" if name == b"generic" else f"[{count}{name.decode()}]"

    @property
    def dtype(self) -> Any:
        import numpy

        return numpy.dtype(f"{self.order}{self.kind}{self.unit}")


@functools.cache
def _known_of_numpy() -> dict[str, Any]:
    try:
        import numpy
    except ImportError:
        return {}

    class Array(numpy.ndarray[Any, Any]):
        """An array while it is read: numpy's own are not told a shape and data that do not fit each other."""

        def __new__(cls) -> Any:
            return super().__new__(cls, (0,), "i1")

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            _, shape, dtype, is_fortran, data = state
            if isinstance(dtype, _DType):
                dtype = dtype.dtype
                _require(type(data) is bytes, "arrays of objects")
                _require(all(type(size) is int and size >= 0 for size in shape), "an array without a shape")
                nbytes = math.prod(shape) * dtype.itemsize
                _require(nbytes == len(data), f"an array of {nbytes} bytes with {len(data)}")
            checked: Any = (1, shape, dtype, bool(is_fortran), data)
            super().__setstate__(checked)

    def reconstruct(cls: type, *_: object) -> Any:
        _require(cls in (Array, numpy.ndarray), "a kind of array")
        return Array() if cls is Array else numpy.ndarray((0,), "i1")

    def scalar(dtype: Any, content: bytes) -> Any:
        dtype = dtype.dtype if isinstance(dtype, _DType) else dtype
        _require(type(content) is bytes and len(content) == dtype.itemsize, "a scalar of another size")
        return numpy.ndarray((1,), dtype, content)[0]

    known: dict[str, Any] = {"numpy.dtype": _DType, "numpy.ndarray": Array}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # of numpy 1 and 2
        known |= {f"{module}._reconstruct": reconstruct, f"{module}.scalar": scalar}
    return known


@functools.cache
def _dtype_classes() -> dict[str, Any]:
    import numpy

    classes = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    return {_name(cls): cls for cls in classes}


def _has_its_elements(tensor: Tensor) -> bool:
    """Whether each has a place of its own, so that who works with them needs no more memory than was read."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout != torch.strided:
        return True
    return tensor.is_meta or tensor.nbytes <= tensor.untyped_storage().nbytes()


def plain_arrays(value: Any, made: dict[int, Any] | None = None) -> Any:
    """``value`` with numpy's own arrays for those that were read. ``made``: of what stands in several places."""
    made = {} if made is None else made
    if id(value) in made or isinstance(value, Tensor):
        _require(
            not isinstance(value, Tensor) or _has_its_elements(value),
            "a tensor of more elements than are there",
        )
        return made.get(id(value), value)
    if type(value) is _known_of_numpy().get("numpy.ndarray"):
        import numpy

        made[id(value)] = value.view(numpy.ndarray)
    elif isinstance(value, dict):
        made[id(value)] = value
        for key, one in value.items():
            value[key] = plain_arrays(one, made)
    elif isinstance(value, list):
        made[id(value)] = value
        value[:] = [plain_arrays(one, made) for one in value]
    elif isinstance(value, tuple):
        made[id(value)] = rebuilt(value, [plain_arrays(one, made) for one in value])
    return made.get(id(value), value)
