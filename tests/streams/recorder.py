"""Records a step for order.py: streams and memory as the runtime tells, computation as torch dispatches it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_c import _C
from tests.streams.order import COMPUTE, HOST, Entry

UNSHARDED, SHARD, GRADIENTS = OURS = ("a unit's parameters", "a shard on the device", "a gradient buffer")
_TOLD_BY_THE_RUNTIME = ("c10d", "_c10d_functional")


class Recorder:
    """Collects a trace. Blocks are numbered: the memory of a storage between an allocation and its end is one block."""

    def __init__(self) -> None:
        self.trace: list[Entry] = []
        self.role = COMPUTE
        self.nbytes: dict[int, int] = {}  # of each block
        self._blocks: dict[int, int] = {}  # id of the storage -> its block now
        self._watched: dict[int, Any] = {}  # keeps the weak references alive
        self._host: set[int] = set()  # blocks in the host's memory
        self._count = 0

    def __call__(self, what: str, *args: Any) -> None:
        """What the runtime in C tells; see csrc/torch/trace.h."""
        getattr(self, {"host": "_host_memory"}.get(what, "_" + what))(*args)

    # ---- streams

    def _enter(self, role: int) -> None:
        self.role = role

    def _leave(self) -> None:
        self.role = COMPUTE

    def _record(self, role: int, event: int) -> None:
        self.trace.append(("record", role, event))

    def _wait(self, role: int, event: int) -> None:
        self.trace.append(("wait", role, event))

    def _synchronize(self, event: int) -> None:
        self.trace.append(("synchronize", event))

    def _destroy(self, event: int) -> None:
        pass

    # ---- memory

    def _alloc(self, tensor: Tensor) -> None:
        self.trace.append(("alloc", self.role, self._begin(tensor), UNSHARDED))

    def _alloc_shard(self, tensor: Tensor) -> None:
        self.trace.append(("alloc", self.role, self._begin(tensor), SHARD))

    def _free(self, tensor: Tensor) -> None:
        self._end(self._key(tensor))

    def _new(self, tensor: Tensor, name: str = GRADIENTS) -> None:
        if self._key(tensor) not in self._blocks:
            self.trace.append(("alloc", self.role, self._begin(tensor), name))
            if self.role == HOST:
                self._host_memory(tensor)

    def _host_memory(self, tensor: Tensor) -> None:
        self._host.add(self._blocks.get(self._key(tensor)) or self._begin(tensor))

    def is_on_host(self, tensors: list[Tensor]) -> bool:
        """Whether an operation on these is the host's: a copy between it and the device is the device's."""
        blocks = [self._blocks.get(self._key(tensor)) for tensor in tensors]
        return any(block in self._host for block in blocks) and all(
            block in self._host or not block for block in blocks
        )

    def end_copy(self, tensors: list[Tensor]) -> None:
        """The host waits for a copy between its memory and the device's."""
        if len({self._blocks.get(self._key(tensor)) in self._host for tensor in tensors}) == 2:
            self._count += 1
            self.trace += [("record", self.role, -self._count), ("synchronize", -self._count)]

    @contextlib.contextmanager
    def on_host(self, is_on_host: bool) -> Iterator[None]:
        """What is told in the body is the host's, if so."""
        role, self.role = self.role, HOST if is_on_host else self.role
        try:
            yield
        finally:
            self.role = role

    def _read(self, tensor: Tensor, what: str = "the runtime") -> None:
        self._access("read", tensor, what)

    def _write(self, tensor: Tensor, what: str = "the runtime") -> None:
        self._access("write", tensor, what)

    def _access(self, kind: str, tensor: Tensor, what: str) -> None:
        if tensor.untyped_storage().nbytes():
            block = self._blocks.get(self._key(tensor))
            if block is None:  # older than the recording
                block = self._begin(tensor)
            self.trace.append((kind, self.role, block, what))

    def _begin(self, tensor: Tensor) -> int:
        """A new block. Its end is that of the storage, where nobody tells an earlier one."""
        key = self._key(tensor)
        self._count += 1
        self._blocks[key] = self._count
        self.nbytes[self._count] = tensor.untyped_storage().nbytes()
        self._watched[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._end(key))
        return self._count

    def _end(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.trace.append(("free", block))

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


class Computation(TorchDispatchMode):
    """Tells a recorder what each operation of torch reads and writes, on the stream entered last."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func.namespace in _TOLD_BY_THE_RUNTIME or _is_view(schema) or schema.name.startswith("aten::empty"):
            return func(*args, **kwargs)
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        tensors = _tensors(values)
        with self.recorder.on_host(self.recorder.is_on_host(tensors)):
            self._tell_arguments(schema, values)
            result = func(*args, **kwargs)
            self._tell_results(schema, result if isinstance(result, tuple) else (result,))
        if schema.name == "aten::copy_" and not values.get("non_blocking"):
            self.recorder.end_copy(tensors)
        return result

    def _tell_arguments(self, schema: Any, values: dict[str, Any]) -> None:
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(values.get(argument.name)):
                self.recorder._access("write" if written else "read", tensor, schema.name)

    def _tell_results(self, schema: Any, results: tuple[Any, ...]) -> None:
        for returned, value in zip(schema.returns, results, strict=False):
            for tensor in _tensors(value) if returned.alias_info is None else ():
                self.recorder._new(tensor, schema.name)
                self.recorder._write(tensor, schema.name)


def _is_view(schema: Any) -> bool:
    return any(returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record what is initialised and run in the body; the end of models of an earlier recording is no part of it."""
    gc.collect()
    recorder = Recorder()
    _C.record_streams(recorder)
    try:
        with Computation(recorder):
            yield recorder
    finally:
        _C.record_streams(None)
