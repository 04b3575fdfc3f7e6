"""Type aliases for what users pass in and get back, where no more than the outer type is known."""

from collections.abc import Iterable
from typing import Any

from torch import nn

StateDict = dict[str, Any]  # of a model or an optimizer: tensors, and whatever else they keep
ParamState = dict[str, Any]  # what an optimizer keeps of one parameter
ParamGroup = dict[str, Any]  # of an optimizer: its parameters and its options
Kwargs = dict[str, Any]  # of a constructor of FullyShardedDataParallel or of another wrapper
OptimInput = list[ParamGroup] | Iterable[nn.Parameter] | None  # what an optimizer is made of
