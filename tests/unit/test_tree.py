"""Finding, moving and casting tensors in what a module takes and returns."""

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fsdp_c import tree


@dataclasses.dataclass
class Record:
    tensor: Any
    note: str = ""


class Pair(NamedTuple):
    first: Any
    second: Any


class Opaque:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.module = nn.Linear(1, 1)  # its parameters are not outputs


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Odd(dict):
    """A dict subclass with a constructor of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def ids(tensors: list[torch.Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def test_tensors_are_found_in_every_kind_of_container():
    one = leaf()
    odd = Odd(3)
    odd["x"] = one
    packed = pack_sequence([one * 2])
    for output in (one, (1, [one]), {"a": {"b": one}}, Record(one), Pair(None, one), {1, one}, odd, Opaque([one])):
        assert ids(tree.tensors_of(output)) == [id(one)], type(output)
    assert ids(tree.tensors_of(collections.OrderedDict(a=Slotted(Record(one))))) == [id(one)]
    assert ids(tree.tensors_of(packed)) == [id(packed.data)]


def test_tensors_without_gradient_and_parameters_of_modules_are_not_outputs():
    assert tree.tensors_of([torch.ones(1), "text", 3, None, Opaque(torch.ones(1)), nn.Linear(1, 1), len]) == []


def test_a_tensor_seen_twice_is_found_once_and_cycles_end():
    one = leaf()
    loop = Opaque(one)
    loop.again = loop
    assert ids(tree.tensors_of([one, one, loop])) == [id(one)]


def test_inputs_that_need_nothing_are_returned_as_they_are():
    args, kwargs = (torch.ones(1), [1, torch.ones(1)]), {"x": Record(torch.ones(1))}
    new_args, new_kwargs = tree.convert_inputs(args, kwargs, torch.device("cpu"), torch.float32)
    assert new_args is args and new_kwargs is kwargs


def test_floating_inputs_are_cast_and_containers_keep_their_types():
    odd = Odd(3)
    odd["x"] = torch.ones(1)
    packed = pack_sequence([torch.ones(2, 1)])
    args = (Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), Record(torch.ones(1), "kept"), odd, packed)
    (pair, record, new_odd, new_packed), _ = tree.convert_inputs(args, {}, None, torch.bfloat16)
    assert isinstance(pair, Pair) and pair.first.dtype == torch.bfloat16 and pair.second.dtype == torch.int64
    assert isinstance(record, Record) and record.tensor.dtype == torch.bfloat16 and record.note == "kept"
    assert isinstance(new_odd, Odd) and new_odd.size == 3
    assert new_odd["x"].dtype == torch.bfloat16 and odd["x"].dtype == torch.float32
    assert new_packed.data.dtype == torch.bfloat16 and torch.equal(new_packed.batch_sizes, packed.batch_sizes)
