"""Objects other than tensors in a checkpoint: converted to plain types for a save, and read without code execution.

[Note: Names in a pickle]
Objects are read by ``torch.load(weights_only=True)``, which calls only allowlisted functions. ``_known()``
extends the list during a read: paths, times and frozensets, whose classes only hold their arguments, and
replacements for numpy's functions, which trust any size and flag. Users add names by
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import datetime
import functools
import io
import math
import pathlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import get_safe_globals, safe_globals


class _EmptyDict:
    """Placeholder for {} during the flattening of a state dict, which drops empty dicts; pickled as {}."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a tuple of the same type with ``items``; ``value`` itself if they are identical."""
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def plain(value: object) -> Any:
    """Return ``value`` in its saved form: numpy scalars in nested dicts, lists and tuples become Python numbers."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()} or _EmptyDict()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return _rebuilt(value, [plain(one) for one in value])
    numpy = sys.modules.get("numpy")  # None if not imported: then no value has numpy's types
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return value.item()  # item() of a long double remains a long double
    return value


def pickled(value: object) -> io.BytesIO:
    """Return ``value`` as written by ``torch.save``. Raise TypeError for a value that ``load`` could not read."""
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
    """An object pickled ahead of the write, so that the script may modify the original meanwhile."""

    def __init__(self, value: object) -> None:
        self.content = pickled(value)


def load(content: bytes) -> Any:
    """Return the object that ``torch.save`` wrote as ``content``. See [Note: Names in a pickle]."""
    with names_known():
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)
    return _plain_arrays(value, {})


def reason(error: Exception) -> str:
    """Return a one-line cause for the refusal of ``load``, with a remedy."""
    text = (str(error) or repr(error)).strip()
    name = re.search(r"Unsupported global: GLOBAL (\S+)", text)
    if name is None:
        last = text.split("WeightsUnpickler error: ")[-1].strip()
        return (last or text).splitlines()[0]
    if name[1] == "getattr":
        return "it calls getattr, which might run code: save it as text or numbers"
    return (
        f"it names {name[1]}, which might run code: who trusts it calls "
        f"torch.serialization.add_safe_globals([{name[1]}]) before saving and loading"
    )


_lock = threading.RLock()  # torch's list is shared by all threads


@contextmanager
def names_known() -> Iterator[None]:
    """Extend torch's allowlist during a read."""
    with _lock:
        theirs = {each[1] if isinstance(each, tuple) else _name(each) for each in get_safe_globals()}
        # a user who allows numpy's names trusts numpy; its functions do not accept the results of the
        # replacements
        of_numpy = _numpys_own() if any(name.startswith("numpy.") for name in theirs) else _stand_ins()
        known = _known() | of_numpy
        with safe_globals([(each, name) for name, each in known.items() if name not in theirs]):
            yield


# ----------------------------------------------------------------- allowed names


@functools.cache
def _known() -> dict[str, Any]:
    """Return the allowed classes and functions, by name in a pickle."""
    times = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
    known: dict[str, Any] = {_name(cls): cls for cls in (*times, frozenset, dict)}
    known["builtins.bytes"] = lambda: b""  # bytes() of a number would allocate that many
    for path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        # module name in Python 3.13: pathlib._local
        known |= {f"{module}.{path.__name__}": path for module in ("pathlib", "pathlib._local")}
    return known


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


# ----------------------------------------------------------------- numpy


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise UnpicklingError(problem)


def _in_numpy(**functions: Any) -> dict[str, Any]:
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # names in numpy 1 and 2
    return {f"{module}.{name}": function for module in modules for name, function in functions.items()}


@functools.cache
def _numpys_own() -> dict[str, Any]:
    import numpy

    dtypes = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    known = {_name(cls): cls for cls in (numpy.ndarray, numpy.dtype, *dtypes)}
    return known | _in_numpy(
        _reconstruct=numpy.ones(1).__reduce__()[0], scalar=numpy.ones(1)[0].__reduce__()[0]
    )


@functools.cache
def _stand_ins() -> dict[str, Any]:
    """Return replacements for numpy's classes and functions, restricted to numbers, text and times."""
    import numpy

    class DType:
        def __init__(self, kind: str, *_: object) -> None:
            _require(type(kind) is str and re.fullmatch("[biufcmMSU][0-9]{1,9}", kind), f"arrays of {kind!r}")
            self.dtype = numpy.dtype(kind)

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            _, order, *structure = state[:5]
            _require(structure == [None] * 3 and order in ("<", ">", "|", "="), "arrays of structures")
            self.dtype = self.dtype.newbyteorder(order)
            if self.dtype.kind in "mM":
                name, count, *rest = state[8][1]
                _require(type(count) is int and rest == [1, 1], "arrays of times in an odd unit")
                unit = "" if name == b"generic" else f"[{count}{name.decode()}]"
                self.dtype = numpy.dtype(f"{self.dtype.str[:3]}{unit}")

    class Array(numpy.ndarray[Any, Any]):
        """Array during a read."""

        def __new__(cls) -> Any:
            return super().__new__(cls, (0,), "i1")

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            _, shape, kind, is_fortran, data = state
            _require(all(type(size) is int and size >= 0 for size in shape), "an array without a shape")
            nbytes = math.prod(shape) * kind.dtype.itemsize
            _require(type(data) is bytes and len(data) == nbytes, f"an array of other than {nbytes} bytes")
            checked: Any = (1, shape, kind.dtype, bool(is_fortran), data)
            super().__setstate__(checked)

    def scalar(kind: DType, content: bytes) -> Any:
        _require(type(content) is bytes and len(content) == kind.dtype.itemsize, "a scalar of another size")
        return numpy.ndarray((1,), kind.dtype, content)[0]

    known = {"numpy.dtype": DType, "numpy.ndarray": Array}
    return known | _in_numpy(_reconstruct=lambda *_: Array(), scalar=scalar)


def _plain_arrays(value: Any, made: dict[int, Any]) -> Any:
    """Return ``value`` with numpy's own arrays. ``made``: results by ``id()``, for values in several places."""
    if id(value) in made:
        return made[id(value)]
    if type(value) is _stand_ins()["numpy.ndarray"]:
        made[id(value)] = value.view(_numpys_own()["numpy.ndarray"])
    elif isinstance(value, dict):
        made[id(value)] = value
        for key, one in value.items():
            value[key] = _plain_arrays(one, made)
    elif isinstance(value, list):
        made[id(value)] = value
        value[:] = [_plain_arrays(one, made) for one in value]
    elif isinstance(value, tuple):
        made[id(value)] = _rebuilt(value, [_plain_arrays(one, made) for one in value])
    return made.get(id(value), value)
