"""Objects in a checkpoint besides tensors are saved and read equal, or refused before any value is replaced."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import io
import math
import pathlib
import pickle
import re
import threading
import types
import zoneinfo
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, objects
from tests.checkpoints import ExtraState, listed


class Point(NamedTuple):
    x: int
    y: float


class Color(enum.Enum):
    RED = 1


class Plain:
    pass


UTC = datetime.timezone.utc
ORDERED = collections.OrderedDict([("b", 1), ("a", 2)])
TO_NUMBERS = [
    *(np.float64(0.1), np.float16(0.1), np.float64("nan"), np.uint64(2**64 - 1), np.int8(-3), np.bool_(True)),
    *(np.complex128(1 + 2j), np.str_("text"), np.bytes_(b"bytes"), np.linspace(0, 1, 5, dtype=np.float32)[1]),
]
COMPLEX = torch.tensor([1 + 2j, 3 + 4j])
KEPT = {
    "plain": [None, True, 3, -(2**200), 0.1, math.inf, 1 + 2j, "text", "\ud800", "", b"\0\xff", b""],
    "None": None,
    "empty str": "",
    "bytearray": bytearray(b"ab"),
    "empty bytearray": bytearray(),
    "empty list": [],
    "list of lists": [[1], []],
    "list of dicts": [{}, {"a": {}}],
    "dict": {"a": {"b": 1}},
    "empty dict": {},
    "dict of empty dicts": {"a": {}, "b": [{}]},
    "tuple": (1, ("a", [2])),
    "empty tuple": (),
    "sets": [{1, 2}, set(), frozenset([1])],
    "set of numpy": {np.float64(1.0), np.str_("a")},
    "OrderedDict in a tuple": (ORDERED,),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "defaultdict in a tuple": (collections.defaultdict(int, a=1),),
    "Counter": collections.Counter("aab"),
    "numpy in a tuple": (np.float64(0.5), [np.int32(1)]),
    "a generator's state": np.random.default_rng(1).bit_generator.state,
    "longdouble": np.longdouble(1) / 3,
    "torch's": [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cuda", 1),
        torch.Size([1, 2]),
        torch.strided,
    ],
    "qscheme": torch.per_tensor_affine,
    "date": datetime.date(2026, 1, 2),
    "aware datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "times": [datetime.time(1, 2, fold=1), datetime.timedelta(days=-1, microseconds=3)],
    "timezone": datetime.timezone(datetime.timedelta(hours=3), "name"),
    "paths": [Path("/a/b"), Path(), pathlib.PureWindowsPath("c:/a")],
    "tensors in a tuple": (torch.ones(2), 1),
    "tensor with gaps": torch.arange(6.0)[::2],
    "expanded tensor": torch.ones(1, 3).expand(2, 3),
    "conjugate tensor": torch.tensor([1 + 2j]).conj(),
    "tensors of one shape with gaps": [*torch.arange(120.0).view(6, 4, 5)[:, :, 1:4]],
    "views of one memory": [COMPLEX, COMPLEX.conj(), COMPLEX.imag, COMPLEX.conj().imag],
    "tensors in a list": [torch.ones(2), None, {"a": torch.zeros(0, 3)}],
    "the scheduler": torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 3
    ).state_dict(),
}
HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["a"] = HOLDS_ITSELF
# keys: names in the error
REFUSED = {
    "fractions.Fraction": fractions.Fraction(1, 2),
    "ShardingStrategy": ShardingStrategy.HYBRID_SHARD,
    "it calls getattr": datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "types.SimpleNamespace": types.SimpleNamespace(a=1),
    "test_checkpoint_objects.Point": Point(1, 2.0),
    "test_checkpoint_objects.Color": Color.RED,
    "test_checkpoint_objects.Plain": [Plain()],
    "int": int,
    "lambda": lambda: None,
    "memoryview": memoryview(b"a"),
    "torch.memory_format": torch.channels_last,
    "torch.return_types.max": torch.max(torch.ones(2, 2), 0),
    "collections.deque": collections.deque([1]),
    "numpy.ma": np.ma.ones(2),
    "torch.from_numpy": np.ones(3),
    "numpy array": {"a": [(np.array(["b"]),)]},
    "a numpy scalar of type 'M8'": np.datetime64("2026-01-01T00:00", "15m"),
    "Unsupported operand": 2**3000,
    "contains itself": HOLDS_ITSELF,
    "Thread": threading.Thread(),
}


def model(own: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = nn.Sequential(nn.Linear(2, 2), ExtraState())
    made[1].own = own
    return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


def same(one: Any, other: Any) -> bool:
    """Return True for equal values of equal types, except subclasses of dict. NaN and NaT equal themselves."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return (type(one) is type(other) or isinstance(one, np.number)) and (
        one == other or (one != one and other != other)
    )


def through(value: Any, path: Path) -> list[Any]:
    """Return ``value`` as loaded from extra, from extra state and from a group of the optimizer."""
    own, optimizer = model(value)
    optimizer.param_groups[0]["note"] = value
    checkpoint.save(own, optimizer, path, extra={"value": value, "list": [value], "dict": {"a": value}})
    again, optimizer = model()
    extra = checkpoint.load(again, optimizer, path)
    group = optimizer.param_groups[0].get("note")
    return [again[1].own, group, extra["value"], extra["list"][0], extra["dict"]["a"]]


@pytest.mark.parametrize("kind", KEPT)
def test_a_value_is_saved_and_read_equal(kind, tmp_path):
    value = KEPT[kind]
    for found in through(value, tmp_path / "a"):
        assert same(value, found)


@pytest.mark.parametrize("value", TO_NUMBERS, ids=repr)
def test_a_scalar_of_numpy_is_saved_as_the_number(value, tmp_path):
    for found in through(value, tmp_path / "a"):
        assert same(value.item(), found) and not isinstance(found, np.generic)


@pytest.mark.parametrize("named", REFUSED)
def test_what_could_not_be_read_is_refused_by_name_and_the_old_checkpoint_stays(named, tmp_path):
    checkpoint.save(*model("old"), tmp_path / "a", extra={"old": 1})
    before, value = listed(tmp_path), REFUSED[named]
    for where, key in (("extra", "extra"), ("own", "1._extra_state"), ("group", "key")):
        own, optimizer = model(value if where == "own" else None)
        if where == "group":
            optimizer.param_groups[0]["key"] = value
        errors = (CheckpointError, ValueError, TypeError, RecursionError)
        with pytest.raises(errors, match=re.escape(named)) as failed:
            extra = {"deep": {"key": value}} if where == "extra" else None
            checkpoint.save(own, optimizer, tmp_path / "a", extra=extra)
        assert key in str(failed.value), (where, str(failed.value))
        assert listed(tmp_path) == before


def test_the_error_names_key_type_and_a_way_out_and_the_way_out_works(tmp_path):
    own, _ = model()
    name = f"{__name__}.Point"
    named = rf"extra\.point: {name} cannot be saved so that it can be read: it names {name}"
    with pytest.raises(CheckpointError, match=rf"{named}(.|\n)*add_safe_globals\(\[{name}\]\)"):
        checkpoint.save(own, None, tmp_path / "a", extra={"point": Point(1, 2.0)})
    with torch.serialization.safe_globals([Point]):
        checkpoint.save(own, None, tmp_path / "a", extra={"point": Point(1, 2.0)})
        assert checkpoint.load(own, None, tmp_path / "a") == {"point": Point(1, 2.0)}
    other, _ = model()
    nn.init.zeros_(other[0].weight)
    with pytest.raises(CheckpointError, match=r"extra.point cannot be read \(it names .*add_safe_globals"):
        checkpoint.load(other, None, tmp_path / "a")
    assert not other[0].weight.any() and own[0].weight.any()  # extra is read before any value is changed


NO_ARRAYS = {
    "sparse": torch.eye(2).to_sparse(),
    "rows": torch.eye(2).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_a_tensor_that_is_no_array_of_numbers_is_refused_by_name(kind, tmp_path):
    with pytest.raises(NotImplementedError, match=r"extra\.list\.0: a sparse, nested or quantized tensor"):
        checkpoint.save(*model(), tmp_path / "a", extra={"list": [NO_ARRAYS[kind]]})
    with pytest.raises(
        NotImplementedError, match=r"1\._extra_state\.a: a sparse, nested or quantized tensor"
    ):
        checkpoint.save(*model({"a": NO_ARRAYS[kind]}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_tensors_is_refused_by_name_and_loaded_into(tmp_path):
    own, two = nn.Linear(2, 2), TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(CheckpointError, match="extra.a: TwoTensor is a tensor of tensors"):
        checkpoint.save(own, None, tmp_path, extra={"a": two})
    own.register_buffer("of_two", two)
    with pytest.raises(CheckpointError, match="model.of_two: TwoTensor is a tensor of tensors"):
        checkpoint.save(own, None, tmp_path, background=True).wait()
    own.of_two = torch.zeros(2)
    checkpoint.save(own, None, tmp_path)
    own.of_two = two
    checkpoint.load(own, None, tmp_path)
    assert not two.a.any() and not two.b.any()


def test_a_group_without_parameters_is_loaded(tmp_path):
    own = nn.Linear(2, 2)
    groups = ([{"params": [*own.parameters()]}, {"params": []}] for _ in range(2))
    one, other = map(torch.optim.SGD, groups, (0.5, 0.1))
    checkpoint.save(own, one, tmp_path)
    checkpoint.load(own, other, tmp_path)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.5]


def test_mapping_files_by_default_is_no_matter(tmp_path):
    import torch.utils.serialization

    with torch.utils.serialization.config.patch("load.mmap", True):
        checkpoint.save(*model("own"), tmp_path / "a", extra={"n": 1})
        assert checkpoint.load(*model(), tmp_path / "a") == {"n": 1}


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(3)], ids=repr)
def test_what_torch_saved_with_numpy_loads(value, tmp_path):
    own, optimizer = model({"amax": np.float32(3), "when": datetime.date(2026, 1, 1)})
    optimizer.param_groups[0]["lr"] = value
    state, of_optimizer = get_state_dict(own, optimizer)
    dcp.save({"model": state, "optim": of_optimizer}, checkpoint_id=tmp_path / "a", no_dist=True)
    again, optimizer = model()
    checkpoint.load(again, optimizer, tmp_path / "a")
    assert optimizer.param_groups[0]["lr"] == value
    assert same(again[1].own, {"amax": np.float32(3), "when": datetime.date(2026, 1, 1)})


# ----------------------------------------------------------------- reading, without trust


def archive(data_pkl: bytes) -> bytes:
    """Return a file of torch.save with this pickle."""
    content = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(content)
    writer.write_record("data.pkl", data_pkl, len(data_pkl))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return content.getvalue()


def called(name: str, *args: Any, state: Any = None) -> bytes:
    """Return a pickle that calls the named function and then sets the state of its result."""
    arguments = pickle.dumps(args, protocol=2)[2:-1]
    built = b"" if state is None else pickle.dumps(state, protocol=2)[2:-1] + b"b"
    return b"\x80\x02c" + name.replace(":", "\n").encode() + b"\n" + arguments + b"R" + built + b"."


@pytest.mark.parametrize(
    "content",
    [
        called("builtins:bytes", 10**12),
        called("builtins:getattr", "text", "upper"),
        called("pathlib:PosixPath", 1),
        called("numpy:ndarray", (10**12,)),
        called("numpy._core.multiarray:scalar", "f8", b"12345678"),
        called("numpy:dtype", "O8", False, True),
        called("numpy:dtype", "f8", False, True, state=(3, "<", None, ("a",), {"a": 1}, 8, 1, 63)),
        called("numpy:dtype", "i4", False, True, state=(3, ">", None, None, None, -1, -1, 0)),
        called("datetime:timedelta", 1, state={"days": 7}),
    ],
    ids=range(9),
)
def test_a_known_name_takes_what_it_is_for_and_no_more(content):
    with pytest.raises(Exception, match="."):
        objects.load(archive(content))


def test_threads_read_at_once_and_torchs_list_is_what_the_user_made_it():
    value = [datetime.date(2026, 1, 1), Path("a"), {np.float64(2)}]
    content = objects.pickle_object(value).getvalue()
    before = set(torch.serialization.get_safe_globals())
    array = np.arange(3.0)
    of_numpy = [array.__reduce__()[0], np.ndarray, np.dtype, type(array.dtype), np.float64(1).__reduce__()[0]]
    with torch.serialization.safe_globals([datetime.date, *of_numpy]):
        listed = set(torch.serialization.get_safe_globals())
        with ThreadPoolExecutor(4) as threads:
            assert all(found == value for found in threads.map(objects.load, [content] * 200))
        assert set(torch.serialization.get_safe_globals()) == listed
        assert objects.load(objects.pickle_object(array).getvalue()).tolist() == [0, 1, 2]
    assert set(torch.serialization.get_safe_globals()) == before
