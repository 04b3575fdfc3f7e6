"""Misuse of the types of fsdp_c._C raises an exception and has no other effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from fsdp_c import _C
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding.configuration import UnitConfig
from tests.processes import output_of_python

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS: list[tuple[Any, ...]] = [(), (None,), (0,), ([],), (None, None), (len, (), {}), (None, None, None)]
HANDLE = sorted(
    name for name in vars(_C.Handle) if callable(vars(_C.Handle)[name]) and not name.startswith("__")
)
UNIT = ["forward", "register_post_backward_hook", "register_pre_backward_hooks", "set_summoning"]
NOT_INITIALISED = "was not initialised: call its __init__ first"

TWO_IMPORTS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def steps(model):
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    return [param.grad.norm().item() for param in model.parameters()]

def built(FSDP):
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    return FSDP(nn.Sequential(FSDP(nn.Linear(3, 3), device_id=cpu), nn.Linear(3, 3)), device_id=cpu)

from fsdp_c import _C as first_C, FullyShardedDataParallel as First
early = built(First)
expected = steps(built(First))
for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_c"]:
    del sys.modules[name]
from fsdp_c import _C as second_C, FullyShardedDataParallel as Second
assert Second is not First and second_C is not first_C and second_C.Unit is first_C.Unit
assert steps(built(Second)) == steps(early) == steps(built(First)) == expected
print("same")
"""


@pytest.mark.parametrize(
    ("of", "name"), [(_C.Handle, name) for name in HANDLE] + [(_C.Unit, name) for name in UNIT], ids=str
)
def test_method_of_an_uninitialised_object_raises(of: type, name: str) -> None:
    bare = of.__new__(of)
    said = set()
    for arguments in ARGUMENTS:
        try:
            getattr(bare, name)(*arguments)
        except (TypeError, RuntimeError) as error:
            said.add(str(error))
    assert any(NOT_INITIALISED in words for words in said), said


@pytest.mark.parametrize("name", ["sharded_grad", "unsharded_nbytes", "padded_unsharded_flat_param"])
def test_attribute_of_an_uninitialised_handle_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match=NOT_INITIALISED):
        getattr(_C.Handle.__new__(_C.Handle), name)


@pytest.mark.parametrize("config", [None, {}, ()])
def test_a_unit_without_a_configuration_is_refused(config: Any) -> None:
    with pytest.raises(TypeError, match="expected a UnitConfig|takes exactly 20 arguments"):
        _C.Unit(nn.Identity(), None, config, "unit", ())


def test_the_fields_of_a_configuration_are_read_in_their_order() -> None:
    source = (ROOT / "csrc" / "handle" / "config.c").read_text().partition("PyArg_ParseTuple(")[2]
    assert tuple(re.findall(r"[\s(]&(?:config->|options->)?(\w+)", source)) == UnitConfig._fields


def test_pairs_of_optional_units_are_tuples() -> None:
    with pytest.raises(TypeError, match="expected a pair, got <class 'int'>"):
        _C.Runtime.__new__(_C.Runtime).set_optional([1])  # type: ignore[list-item]


def test_whether_gradients_are_synchronised_cannot_be_deleted() -> None:
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del _C.Unit.__new__(_C.Unit).sync_gradients


def test_after_a_second_import_models_of_both_train() -> None:
    assert output_of_python("-c", TWO_IMPORTS).endswith("same\n")  # gloo of torch 2.10 prints a line before


def test_a_unit_cannot_be_summoned_twice() -> None:
    """An illegal transition names both states and changes nothing."""
    unit = FSDP(nn.Linear(4, 4), process_group=FakeProcessGroup._create_internal(rank=0, world_size=2))._unit
    unit.set_summoning(True)
    with pytest.raises(RuntimeError, match="transition from SUMMON_FULL_PARAMS to SUMMON_FULL_PARAMS"):
        unit.set_summoning(True)
    unit.set_summoning(False)
    assert unit.training_state == _C.USE_IDLE
