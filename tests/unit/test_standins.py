"""Replacements of FSDP1's helpers for a torch without FSDP1, compared with torch's own: equal names, values
and results.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _common_utils as torch_common_utils
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_c.compat import upstream
from fsdp_c.compat.standins import common_utils, wrap
from tests.models import Block, Net
from tests.processes import ROOT, output_of_python


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.kwargs = module, kwargs


def model() -> nn.Module:
    made = Net()
    made.attention = nn.MultiheadAttention(4, 2)
    made.list = nn.ModuleList([nn.Linear(3, 3), nn.Linear(40, 40)])
    made.list[0]._wrap_overrides = {"mixed_precision": None}
    return made


def by_callable(package: Any, policy: Any, **options: Any) -> str:
    made = model()
    kwargs = {"ignored_modules": {made.list}, "ignored_params": set(), "mixed_precision": 1} | options
    wrapped, numel = package._recursive_wrap(made, policy, Wrapped, **kwargs)
    return str([(name, getattr(one, "kwargs", None)) for name, one in wrapped.named_modules()]) + str(numel)


partial = functools.partial
POLICIES = {
    "always": lambda package: package.always_wrap_policy,
    "sizes": lambda package: partial(package.size_based_auto_wrap_policy, min_num_params=40),
    "leaves": lambda package: partial(
        package.size_based_auto_wrap_policy,
        min_num_params=20,
        force_leaf_modules={Block},
        exclude_wrap_modules=set(),
    ),
    "lambda": lambda package: partial(
        package.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
    ),
    "layers": lambda package: partial(package.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "classes": lambda package: package.ModuleWrapPolicy({Block, nn.Linear}),
    "several": lambda package: partial(
        package._or_policy,
        policies=[
            partial(package._wrap_module_cls_individually, module_classes=[nn.LayerNorm]),
            POLICIES["layers"](package),
        ],
    ),
}


@pytest.mark.parametrize("options", [{}, {"only_wrap_children": True}, {"ignored_modules": set()}], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_callable_policy_wraps_the_same_modules_as_torchs(name: str, options: dict[str, Any]) -> None:
    ours, theirs = (
        by_callable(package, POLICIES[name](package), **options) for package in (wrap, torch_wrap)
    )
    assert ours == theirs
    assert "inner" in ours


@pytest.mark.parametrize(
    "policy",
    [
        lambda package: package.ModuleWrapPolicy([Block, nn.Linear]),
        lambda package: package.CustomPolicy(
            lambda one: {"a": 2} if isinstance(one, Block) else isinstance(one, nn.Linear)
        ),
    ],
    ids=["classes", "custom"],
)
def test_policy_object_wraps_the_same_modules_as_torchs(policy: Any) -> None:
    found = []
    for package in (wrap, torch_wrap):
        made = model()
        chosen = policy(package)._run_policy(made, {made.list}, {"a": 1, "mixed_precision": 3})
        package._post_order_apply(made, package._construct_wrap_fn(made, chosen, Wrapped))
        found.append(str([(name, getattr(one, "kwargs", None)) for name, one in made.named_modules()]))
    assert found[0] == found[1]


def test_wrap_wraps_inside_enable_wrap_alone() -> None:
    with wrap.enable_wrap(wrapper_cls=Wrapped, a=1, b=2):
        inside = wrap.wrap(nn.ReLU(), b=3)
    assert isinstance(inside, Wrapped) and inside.kwargs == {"a": 1, "b": 3}
    assert isinstance(wrap.wrap(nn.ReLU()), nn.ReLU)


def test_names_of_parameters_are_those_torchs_finds() -> None:
    made = nn.Sequential(Block(tied=True), nn.Sequential(Block(tied=True)))
    made[1][0].square.weight = made[0].square.weight
    wrapped = nn.ModuleDict({"_fsdp_wrapped_module": made, "module": nn.Linear(1, 1)})
    for one in (made, wrapped):
        for dedup in (True, False):
            ours, theirs = (
                package._get_param_to_fqns(one, dedup_shared_params=dedup)
                for package in (common_utils, torch_common_utils)
            )
            assert list(ours.values()) == list(theirs.values()) and len(ours) > 2


Pair = namedtuple("Pair", "a b")


Record = dataclasses.make_dataclass("Record", ["tensor", "note"])


def test_tensors_of_containers_are_found_and_replaced_as_torchs_are() -> None:
    if upstream.torch_version() < (2, 12):
        pytest.skip("torch has these functions since 2.12")
    one, two, three = (torch.ones(1, requires_grad=True) for _ in range(3))
    value = {
        "a": [one, torch.ones(1), 3],
        "b": Pair(two, {"c": (three, None)}),
        "d": Record(one, "kept"),
        "e": {one},
    }
    found = [package.collect_grad_tensors(value) for package in (common_utils, torch_common_utils)]
    assert [id(tensor) for tensor in found[0]] == [id(tensor) for tensor in found[1]] and len(found[0]) == 4
    new = [torch.full((1,), float(i)) for i in range(4)]
    results = [
        package.replace_grad_tensors(value, iter(new)) for package in (common_utils, torch_common_utils)
    ]
    assert str(results[0]) == str(results[1])
    assert common_utils.replace_grad_tensors([3], iter(())) == [3]
    with pytest.raises(RuntimeError, match="2 replacement tensors were not consumed"):
        common_utils.replace_grad_tensors([one], iter(new[:3]))


def test_modules_stand_under_torchs_names_once_they_are_asked_for() -> None:
    pickled = pickle.dumps(upstream.MixedPrecision(torch.bfloat16))
    output_of_python(
        "-c",
        "from tests import hidden_fsdp1; hidden_fsdp1.hide('removed')\n"
        "import pickle, sys, fsdp_c\n"
        "assert not [name for name in sys.modules if hidden_fsdp1.is_of_fsdp1(name)]\n"
        f"loaded = pickle.loads({pickled!r})\n"
        "assert type(loaded) is fsdp_c.MixedPrecision, type(loaded)\n"
        "assert sys.modules['torch.distributed.fsdp.api'] is fsdp_c.api\n"
        "import torch.distributed.fsdp as fsdp\n"
        "assert not hasattr(fsdp, 'FullyShardedDataParallel') and fsdp.fully_shard\n"
        "try:\n    import torch.distributed.fsdp._optim_utils\n"
        "except ModuleNotFoundError:\n    pass\nelse:\n    raise SystemExit('nobody has that one')\n",
        cwd=ROOT,
    )


@pytest.mark.slow
def test_a_module_that_torch_still_has_is_torchs() -> None:
    """torch's module is used if it exists: FSDP2 imports helpers from one of FSDP1's modules, which may
    outlive the others.
    """
    output_of_python(
        "-c",
        "import sys, types\n"
        "from importlib.machinery import ModuleSpec\n"
        "from tests import hidden_fsdp1\n"
        "hidden_fsdp1.hide('removed')\n"
        "class Left:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch.distributed.fsdp._common_utils':\n"
        "            return ModuleSpec(name, self)\n"
        "    def create_module(self, spec): return types.ModuleType(spec.name)\n"
        "    def exec_module(self, module): module.left = True\n"
        "sys.meta_path.insert(0, Left())\n"
        "import fsdp_c\n"
        "import torch.distributed.fsdp._common_utils as found\n"
        "assert found.left and not fsdp_c.compat.upstream.HAS_FSDP1\n",
        cwd=ROOT,
    )


def test_torchs_fsdp1_is_imported_in_one_place() -> None:
    named = re.compile(
        r"^\s*(?:from|import) torch\.distributed\.(?:fsdp|tensor\.parallel\.fsdp)\b", re.MULTILINE
    )
    found = [path.name for path in (ROOT / "fsdp_c").rglob("*.py") if named.search(path.read_text())]
    assert found == ["upstream.py"]
