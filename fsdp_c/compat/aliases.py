"""Type aliases for what users pass in and get back, where no more than the outer type is known."""

from collections.abc import Iterable
from typing import Any

from torch import nn

StateDict = dict[str, Any]  # tensors and other values of a model or an optimizer
ParamState = dict[str, Any]  # an optimizer's state of one parameter
ParamGroup = dict[str, Any]  # parameters and options of an optimizer
Kwargs = dict[str, Any]  # arguments of FullyShardedDataParallel or of another wrapper
OptimInput = list[ParamGroup] | Iterable[nn.Parameter] | None  # the first argument of an optimizer
