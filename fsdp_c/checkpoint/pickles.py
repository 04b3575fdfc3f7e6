"""Pickles from strangers: what is looked at before one is read, and classes that stand in for those named.

[Note: A pickle from a stranger]
A pickle can call anything that it names, so while one is read names stand for empty classes and functions of
ours, and other names for nothing. A few bytes can also take all memory or time without any name: by the size
of a memo, by tuples within tuples whose hash visits each of 2**60 ways to their leaves, by lists whose text
does. The first is seen in the bytes. Of ``.metadata``, which may be large, tuples become ones that cannot be
keys. Of archives of torch.save it is drawn which value holds which, before anything is made of it.
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Iterator
from typing import Any

import torch

_MAX_DEPTH = 1000  # of values within values; pickle itself writes no deeper ones
_MAX_WRITTEN = 10_000  # values, where the same ones stand in several places; more in a larger pickle


class Value:
    """Stands in for the objects that were pickled."""

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
        return None  # every attribute is optional here: what is needed is checked later


# ----------------------------------------------------------------- the bytes

_SIZED = ("PUT", "LONG_BINPUT")  # of the memo, which is made as long as they say
_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_FRAME = 0x95
_FIXED_NBYTES = {
    code: op.arg.n if op.arg else 0
    for code, op in _OPCODES.items()
    if op.name not in (*_SIZED, "STOP", "FRAME")
}
_TUPLES = {code for code, op in _OPCODES.items() if op.name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")}


def _fixed_opcodes(without: set[int]) -> bytes:
    """A pattern of one opcode whose argument has a fixed length, or is an integer of up to eight bytes."""
    # sizes and offsets are such integers, several for each piece
    parts = [b"\\x8a(?:%s)" % b"|".join(b"\\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(1, 9))]
    for nbytes in sorted({*_FIXED_NBYTES.values()} - {each for each in _FIXED_NBYTES.values() if each < 0}):
        codes = [code for code, each in _FIXED_NBYTES.items() if each == nbytes and code not in without]
        parts.append(b"[%s].{%d}" % (b"".join(b"\\x%02x" % code for code in codes), nbytes))
    return b"(?:%s)" % b"|".join(parts)


_FIXED = re.compile(_fixed_opcodes(set()) + b"{0,4096}", re.DOTALL)
_TO_TUPLE = re.compile(_fixed_opcodes(_TUPLES) + b"*[t\\x85\\x86\\x87]", re.DOTALL)


def _runs(content: bytes) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of what follows each other: opcodes of fixed length (True), others one by one (False).

    ValueError for one that would have the pickle's reader allocate more than a few times the pickle's size.
    """
    file, at = io.BytesIO(content), 0
    while at < len(content):
        start, at = at, _FIXED.match(content, at).end()  # type: ignore[union-attr]  # it matches nothing at least
        if at > start:
            yield start, at, True
            continue
        op = _OPCODES.get(content[at])
        if op is None or op.name == "STOP":
            yield start, at + 1, False
            return
        file.seek(at + 1)
        assert op.arg is not None
        argument = op.arg.reader(file)  # which sees that as many bytes are there as it says
        if op.name in _SIZED and argument > at:
            raise ValueError(f"its memo would have {argument} places")
        at = file.tell()
        yield start, at, False


def check_pickle(content: bytes) -> int:
    """The length of the first pickle in ``content``. ValueError where it takes far more memory than that."""
    return max((end for _, end, _ in _runs(content)), default=0)


def with_marked_tuples(content: bytes) -> bytes:
    """``content``, checked as by ``check_pickle``, whose tuples go to ``persistent_load`` when made."""
    parts = []
    for start, end, is_fixed in _runs(content):
        while is_fixed and (found := _TO_TUPLE.match(content, start, end)):
            parts.append(found[0] + b"Q")
            start = found.end()
        if is_fixed or content[start] != _FRAME:  # which says how many bytes follow, as they were
            parts.append(content[start:end])
    return b"".join(parts)


class Tuple(tuple[Any, ...]):
    """A tuple that is no key, and whose text is short: either may never end."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # Python's way to say so

    def __repr__(self) -> str:
        return f"a tuple of {len(self)}"


def rebuilt(value: Any, items: list[Any]) -> Any:
    """A tuple, named or not, with ``items`` in place of its own; itself where they are the same."""
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


# ----------------------------------------------------------------- who holds whom

_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_EMPTY = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX")
_LITERALS = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "FROZENSET")
_HASHES = ("OBJ", "INST", "FROZENSET", "DICT")
# they walk through what they are given: a tensor of 2**40 elements, all of them one in memory, has no end
_WALKING = {"set", "frozenset", "Counter", "OrderedDict", "Size", "struct_time", "struct_rusage"}


class _Made(list[Any]):
    """What was called, with its arguments: it stands for what came out, which may be of any size."""


class _Graph:
    """The values of a pickle: one that holds others is a list of them; anything else is a leaf."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.hashed: list[Any] = []  # what is hashed while the pickle is read

    def step(self, op: Any, argument: Any) -> None:
        stack, name = self.stack, op.name
        if name in _GETS:
            stack.append(self.memo[argument])
        elif name in _PUTS or name == "MEMOIZE":
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(pickletools.markobject)
        elif name in _EMPTY:
            stack.append([])
        elif name == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(f"{module} {name}")
        elif name == "BUILD":
            self.hashed.append(stack.pop())  # attributes are not walked with what has them
        elif name in _FILLS:
            self._fill(name)
        else:
            taken = self._take(op)
            if name in _CALLS:
                _check_call(taken)
            if name in (*_CALLS, *_HASHES):
                self.hashed.extend(taken)
            if op.stack_after:
                value = taken if name in _LITERALS else _Made(taken)
                stack.append(value if op.stack_before else argument)

    def _take(self, op: Any) -> list[Any]:
        if pickletools.markobject not in op.stack_before:
            return [self.stack.pop() for _ in op.stack_before][::-1]
        taken = []
        while (value := self.stack.pop()) is not pickletools.markobject:
            taken.append(value)
        return taken[::-1]

    def _fill(self, name: str) -> None:
        count = {"APPEND": 1, "SETITEM": 2}.get(name)
        taken = [self.stack.pop() for _ in range(count)][::-1] if count else self._take(_OPCODES[ord("t")])
        self.stack[-1].extend(taken)
        if name in ("SETITEM", "SETITEMS"):
            self.hashed.extend(taken[::2])
        elif name == "ADDITEMS":
            self.hashed.extend(taken)


def _check_call(taken: list[Any]) -> None:
    """ValueError for what torch's own list of names would let take as much memory or time as it likes."""
    callee, *arguments = taken
    if any(isinstance(each, _Made) for each in arguments):
        raise ValueError("it calls something with arguments that another call gave")
    leaves = [one for each in arguments if isinstance(each, list) for one in each]
    module, _, name = callee.partition(" ") if isinstance(callee, str) else ("", "", "")
    if name == "_rebuild_from_type_v2" and len(leaves) > 2:
        _check_call([leaves[0], leaves[2]])  # which it calls
    if callee == "_codecs encode" and leaves[1:] != ["latin1"]:
        raise ValueError("it encodes text in another way than pickle does")
    if name in _WALKING and any(isinstance(one, _Made) for one in leaves):
        raise ValueError(f"it makes a {name} of what another call gave")
    bare = module.startswith("torch") and name.endswith(("Tensor", "Storage")) and leaves
    if bare or (name == "bytearray" and not all(map(_is_text, leaves))):
        raise ValueError(f"it makes a {name} by its size alone")


def _is_text(value: Any) -> bool:
    """Whether it is text or bytes, which protocol 2 writes as a call."""
    return isinstance(value, (str, bytes)) or (isinstance(value, _Made) and value[:1] == ["_codecs encode"])


def check_values(content: bytes) -> None:
    """ValueError for a pickle whose values, each written wherever it stands, are far more than the pickle.

    What passes can be hashed, compared and walked in a time that follows from its size.
    """
    graph = _Graph()
    try:
        for op, argument, _ in pickletools.genops(content):
            if op.name != "STOP":
                graph.step(op, argument)
    except (IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError("its pickle is damaged") from error
    limit = _MAX_WRITTEN + 16 * len(content)
    sizes: dict[int, tuple[int, int]] = {}
    written = 0
    for value in (*graph.stack, *graph.hashed):
        written += _extent(value, sizes)[0]
        if written > limit:
            raise ValueError(
                f"its {len(content)} bytes hold one another so often that they make {written:.3g} values"
            )


def _extent(value: Any, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many values it is with those within, and how deep. ``sizes``: of known ones, by ``id()``."""
    path = [value] if isinstance(value, list) and id(value) not in sizes else []
    while path:
        inner = path[-1]
        sizes.setdefault(id(inner), (0, 0))  # until it is known
        new = [one for one in inner if isinstance(one, list) and id(one) not in sizes]
        if new:
            path.extend(new)
            continue
        path.pop()
        if sizes[id(inner)] != (0, 0):
            continue  # it stood there twice
        below = [sizes[id(one)] for one in inner if isinstance(one, list)]
        if (0, 0) in below:
            raise ValueError("a value holds itself")
        depth = 1 + max((each for _, each in below), default=0)
        if depth > _MAX_DEPTH:
            raise ValueError(f"values stand within values {depth} deep")
        sizes[id(inner)] = 1 + len(inner) - len(below) + sum(size for size, _ in below), depth
    return sizes.get(id(value), (1, 1)) if isinstance(value, list) else (1, 1)


# ----------------------------------------------------------------- names


def dtype_named(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def is_getattr(module: str, name: str) -> bool:
    """The name by which CPython 3.11.0 to 3.11.3 pickle members of enums: ``getattr(class, name)``."""
    return name == "getattr" and module in ("builtins", "__builtin__")
