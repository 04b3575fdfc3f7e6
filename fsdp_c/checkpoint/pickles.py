"""Unpickling of DCP's ``.metadata`` without trusting it.

[Note: A pickle from a stranger]
A pickle can call every function that it names, and set attributes of every class that it names. So classes of DCP are
replaced by empty classes that are made for one reading, and other names are refused. A few bytes can also ask for all
memory, by the size of a string or of the memo: such a pickle is refused before it is read.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any

import torch

from fsdp_c.checkpoint.folder import require

_PATHS = ("Path", "PosixPath", "PurePosixPath")
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # of Python 3.13
    # CPython 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name): here it gets no attribute
    "builtins": ("getattr",),
    "__builtin__": ("getattr",),
}


class Value:
    """Stands in for an object that was pickled. An attribute that it lacks is None: readers check what they need."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = (state[0] or {}) | state[1]  # of a class with slots
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.classes: dict[str, type[Value]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (dtype := dtype_named(module, name)) is not None:
            return dtype
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata has")
        return self.classes.setdefault(name, type(name, (Value,), {}))


def read_metadata(content: bytes) -> Any:
    """The object that ``.metadata`` is the pickle of, made of ``Value``. Raises what is wrong with it, of any type."""
    _check_sizes(content)
    return _Unpickler(content).load()


def dtype_named(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


# ----------------------------------------------------------------- sizes

_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_PUTS = ("PUT", "LONG_BINPUT")


def _fixed_opcodes() -> re.Pattern[bytes]:
    """Up to 4096 opcodes whose argument has a fixed length, or is an integer of up to eight bytes."""
    each = [b"\\x8a(?:%s)" % b"|".join(b"\\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(1, 9))]
    by_nbytes: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        nbytes = 0 if op.arg is None else op.arg.n
        if nbytes >= 0 and op.name not in (*_PUTS, "STOP"):
            by_nbytes[nbytes] = by_nbytes.get(nbytes, b"") + b"\\x%02x" % code
    each += [b"[%s].{%d}" % (codes, nbytes) for nbytes, codes in by_nbytes.items()]
    return re.compile(b"(?:%s){0,4096}" % b"|".join(each), re.DOTALL)


_FIXED = _fixed_opcodes()


def _check_sizes(content: bytes) -> None:
    """ValueError for a pickle that says it has more bytes than it has, or whose memo is larger than itself."""
    file, at = io.BytesIO(content), 0
    while at < len(content):
        found = _FIXED.match(content, at)
        if found is not None and found.end() > at:
            at = found.end()
            continue
        op = _OPCODES.get(content[at])
        if op is None or op.arg is None:
            return  # the end, or damaged
        file.seek(at + 1)
        argument = op.arg.reader(file)  # raises ValueError where bytes are missing
        require(op.name not in _PUTS or argument <= at, f"its memo would have {argument} places")
        at = file.tell()
