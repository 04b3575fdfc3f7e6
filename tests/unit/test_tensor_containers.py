"""Finding, moving and casting tensors in the inputs and outputs of a module."""

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from fsdp_c.training import tensor_containers


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
        self.module = nn.Linear(1, 1)  # parameters of a module inside an output are not outputs


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Odd(dict):
    """A dict subclass with its own constructor."""

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
    slotted = collections.OrderedDict(a=Slotted(Record(one)))
    nested = [
        (1, [one]),
        {"a": {"b": one}},
        Record(one),
        Pair(None, one),
        {1, one},
        odd,
        Opaque([one]),
        slotted,
    ]
    for output in (one, *nested):
        assert ids(tensor_containers.tensors_of(output)) == [id(one)], type(output)
    assert ids(tensor_containers.tensors_of(packed)) == [id(packed.data)]
    others = [torch.ones(1), "text", 3, None, Opaque(torch.ones(1)), nn.Linear(1, 1), len]
    assert tensor_containers.tensors_of(others) == []


def test_a_tensor_seen_twice_is_found_once_and_cycles_end():
    one = leaf()
    loop = Opaque(one)
    loop.again = loop
    assert ids(tensor_containers.tensors_of([one, one, loop])) == [id(one)]


def shared_after(version, dtype, monkeypatch):
    """Return True for each container of the inputs that is still the caller's: a list, a dict in a tuple, an
    empty list, an object.
    """
    monkeypatch.setattr(torch, "__version__", version)
    one, empty, record = [torch.ones(1), Pair(1, {"x": [3]})], [], Record(torch.ones(1, dtype=torch.int64))
    (new, other), kwargs = tensor_containers.convert_inputs(
        (one, empty), {"record": record}, torch.device("cpu"), dtype
    )
    assert new == one and other == empty and new[0] is one[0]
    return new is one, new[1].second is one[1].second, other is empty, kwargs["record"] is record


def test_module_gets_containers_of_its_own_until_torch_2_13_and_for_casts_of_inputs(monkeypatch):
    assert shared_after("2.13.0+cpu", None, monkeypatch) == (False, False, True, True)
    assert shared_after("2.14.0+cpu", None, monkeypatch) == (True, True, True, True)
    for version in ("2.13.0", "2.15.1"):
        assert shared_after(version, torch.float32, monkeypatch) == (False, False, False, True)


def test_copied_containers_keep_their_class(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    odd, default = Odd(3), collections.defaultdict(list, x=[1])
    odd["x"] = 1
    new_odd, new_default = tensor_containers.convert_inputs((odd, default), {}, torch.device("cpu"), None)[0]
    assert new_odd is not odd and isinstance(new_odd, Odd) and new_odd.size == 3 and new_odd == odd
    assert new_default is not default and new_default["y"] == [] and new_default["x"] is not default["x"]


def test_floating_inputs_are_cast_and_containers_keep_their_types():
    odd = Odd(3)
    odd["x"] = torch.ones(1)
    packed = pack_sequence([torch.ones(2, 1)])
    args = (Pair(torch.ones(1), torch.ones(1, dtype=torch.int64)), Record(torch.ones(1), "kept"), odd, packed)
    (pair, record, new_odd, new_packed), _ = tensor_containers.convert_inputs(args, {}, None, torch.bfloat16)
    assert isinstance(pair, Pair) and pair.first.dtype == torch.bfloat16 and pair.second.dtype == torch.int64
    assert isinstance(record, Record) and record.tensor.dtype == torch.bfloat16 and record.note == "kept"
    assert isinstance(new_odd, Odd) and new_odd.size == 3
    assert new_odd["x"].dtype == torch.bfloat16 and odd["x"].dtype == torch.float32
    assert new_packed.data.dtype == torch.bfloat16 and torch.equal(new_packed.batch_sizes, packed.batch_sizes)
