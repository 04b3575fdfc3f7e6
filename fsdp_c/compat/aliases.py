"""Type aliases for arguments and results whose element types are unknown."""

from collections.abc import Iterable
from typing import Any

from torch import nn

StateDict = dict[str, Any]  # state dict of a model or an optimizer
ParamState = dict[str, Any]  # optimizer state of one parameter
ParamGroup = dict[str, Any]  # one param group of an optimizer
Kwargs = dict[str, Any]  # keyword arguments of FullyShardedDataParallel or another wrapper
OptimInput = list[ParamGroup] | Iterable[nn.Parameter] | None  # first argument of an optimizer
