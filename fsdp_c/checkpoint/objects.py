"""Objects other than tensors in a checkpoint: converted to plain types for a save, and read without code execution.

[Note: Names in a pickle]
Objects are read by ``torch.load(weights_only=True)``, which calls only allowlisted functions. ``load()``
extends the list during a read: paths, times and frozensets, whose classes only hold their arguments, and a
replacement for numpy's function that reads a scalar. Users add names by
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import datetime
import functools
import io
import pathlib
import re
import sys
import threading
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import get_safe_globals, safe_globals


class _EmptyDict:
    """Placeholder for {} during the flattening of a state dict, which drops empty dicts; pickled as {}."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def to_plain(value: Any) -> Any:
    """Return ``value`` in its saved form: numpy scalars in nested dicts, lists and tuples become Python numbers."""
    if isinstance(value, dict):
        return {key: to_plain(one) for key, one in value.items()} or _EmptyDict()
    if isinstance(value, list):
        return [to_plain(one) for one in value]
    if isinstance(value, tuple):
        items = [to_plain(one) for one in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    numpy = sys.modules.get("numpy")  # None if not imported: then no value has numpy's types
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return value.item()  # item() of a long double remains a long double
    return value


class PickledObject(io.BytesIO):
    """An object as written by ``torch.save``, ahead of a save's write if the script may modify it meanwhile."""


def pickle_object(value: object) -> PickledObject:
    """Return ``value`` pickled, itself if it is. Raise TypeError for a value that ``load`` could not read."""
    if isinstance(value, PickledObject):
        return value
    content = PickledObject()
    try:
        torch.save(value, content)
        load(content.getvalue())
    except Exception as error:
        kind = _name(type(value)).removeprefix("builtins.")
        raise TypeError(f"{kind} cannot be saved so that it can be read: {reason(error)}") from error
    return content


def reason(error: Exception) -> str:
    """Return a one-line cause for the refusal of ``load``, with a remedy."""
    text = (str(error) or repr(error)).strip()
    name = re.search(r"Unsupported global: GLOBAL (\S+)", text)
    if name is None:
        last = text.split("WeightsUnpickler error: ")[-1].strip()
        return (last or text).splitlines()[0]
    if name[1] == "getattr":
        return "it calls getattr, which might run code: save it as text or numbers"
    if re.fullmatch(r"numpy\._?core\.multiarray\._reconstruct", name[1]):
        return "it is a numpy array: save torch.from_numpy(array)"
    return (
        f"it names {name[1]}, which might run code. If you trust it, call "
        f"torch.serialization.add_safe_globals([{name[1]}]) before saving and loading"
    )


_lock = threading.RLock()  # torch's list is shared by all threads


def load(content: bytes) -> Any:
    """Return the object that ``torch.save`` wrote as ``content``. See [Note: Names in a pickle]."""
    with _lock:
        theirs = {each[1] if isinstance(each, tuple) else _name(each) for each in get_safe_globals()}
        # numpy's own functions do not accept the results of the replacements
        is_numpy_allowed = any(name.startswith("numpy.") for name in theirs)
        known = _known() if is_numpy_allowed else _known() | _numpy_scalars()
        with safe_globals([(each, name) for name, each in known.items() if name not in theirs]):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)


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


@functools.cache
def _numpy_scalars() -> dict[str, Any]:
    """Return replacements for numpy's functions that read one number or text, by name in a pickle."""
    import numpy

    class DType:
        def __init__(self, kind: str, *_: object) -> None:
            if not re.fullmatch("[biufcSU][0-9]{1,9}", kind):
                raise UnpicklingError(f"it has a numpy scalar of type {kind!r}")
            self.dtype = numpy.dtype(kind)

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            _, order, *structure = state[:5]
            if order not in ("<", "|") or structure != [None] * 3:
                raise UnpicklingError("it has a numpy scalar in another byte order, or a structure")

    def scalar(kind: DType, content: bytes) -> Any:
        if type(content) is not bytes or len(content) != kind.dtype.itemsize:
            raise UnpicklingError("it has a numpy scalar of the wrong size")
        return numpy.ndarray((1,), kind.dtype, content)[0]

    # module names in numpy 1 and 2
    scalars = dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), scalar)
    return {"numpy.dtype": DType, **scalars}
