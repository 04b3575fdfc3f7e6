"""The interface of a checkpoint that can be read tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_c.checkpoint.metadata import PathInDict


class Info(NamedTuple):
    """What an entry is: a tensor, or an object, which has neither shape nor dtype."""

    path: PathInDict  # in the nested dict that was saved
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, path: PathInDict, value: Any) -> Info:
        """Of a value, or what stands for it until it is read."""
        is_tensor = isinstance(getattr(value, "dtype", None), torch.dtype) and hasattr(value, "shape")
        return cls(path, tuple(value.shape), value.dtype) if is_tensor else cls(path)

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape or ()) * self.dtype.itemsize if self.dtype is not None else 0


class Source(Protocol):
    """A checkpoint to read."""

    kind: str  # as readable text
    entries: dict[str, Info]

    def read(self, key: str) -> Any:
        """The tensor, contiguous or not, or the object."""

    def problems(self) -> Iterator[str]:
        """Lists what is wrong with it, after reading everything."""
