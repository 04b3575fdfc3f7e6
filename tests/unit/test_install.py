"""install(), uninstall() and scripts that are run unmodified."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as BoundName
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as BoundScaler

import fsdp_c
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("units_left_by_others_unseen", "one_rank")
KEPT = {"class": torch_fsdp.FullyShardedDataParallel}  # not a name of a module, so that install() leaves it


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    fsdp_c.uninstall()


def test_install_rebinds_names_wherever_they_were_imported_to():
    fsdp_c.install()
    assert torch_fsdp.FullyShardedDataParallel is fsdp_c.FullyShardedDataParallel
    assert BoundName is fsdp_c.FullyShardedDataParallel
    assert BoundScaler is fsdp_c.ShardedGradScaler
    assert torch.distributed.checkpoint.state_dict.FSDP is fsdp_c.FullyShardedDataParallel
    assert fsdp_c.is_installed()


@pytest.mark.parametrize("installs", [1, 2])
def test_uninstall_restores_every_name_after_one_install_or_two(installs):
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    before = {(module, name): value for module in modules for name, value in list(vars(module).items())}
    for _ in range(installs):
        fsdp_c.install()
    fsdp_c.uninstall()
    changed = [key for key, value in before.items() if vars(key[0]).get(key[1], value) is not value]
    others = ("fsdp_c", "hypothesis")  # hypothesis counts garbage collections
    assert [key for key in changed if not key[0].__name__.startswith(others)] == []
    assert BoundName is KEPT["class"]
    assert not fsdp_c.is_installed()


def test_torchs_class_hands_on_where_no_module_holds_it():
    theirs = KEPT["class"]
    before = dict(vars(theirs))
    fsdp_c.install()
    model = theirs(nn.Linear(4, 4), use_orig_params=True)
    assert type(model) is fsdp_c.FullyShardedDataParallel
    assert theirs.fsdp_modules(model) == [model]
    with theirs.state_dict_type(model, torch_fsdp.StateDictType.LOCAL_STATE_DICT):
        assert model._state_dict_type is torch_fsdp.StateDictType.LOCAL_STATE_DICT
    fsdp_c.uninstall()
    assert dict(vars(theirs)) == before
    assert type(theirs(nn.Linear(4, 4), device_id=torch.device("cpu"))) is theirs


def test_class_derived_from_torchs_before_install_is_refused():
    class Derived(KEPT["class"]):
        pass

    fsdp_c.install()
    with pytest.raises(
        RuntimeError, match="Derived was derived from torch's .* call fsdp_c.install.. before the class"
    ):
        Derived(nn.Linear(4, 4))


def test_modules_imported_after_install_get_ours_and_torchs_back(monkeypatch, tmp_path):
    """Those that import from fsdp_c keep ours."""
    sources = {"late_module": "torch.distributed.fsdp", "late_module_of_ours": "fsdp_c"}
    for name, package in sources.items():
        (tmp_path / f"{name}.py").write_text(f"from {package} import FullyShardedDataParallel as FSDP\n")
    monkeypatch.syspath_prepend(tmp_path)
    fsdp_c.install()
    late = [importlib.import_module(name) for name in sources]
    assert [module.FSDP for module in late] == [fsdp_c.FullyShardedDataParallel] * 2
    fsdp_c.uninstall()
    assert [module.FSDP for module in late] == [KEPT["class"], fsdp_c.FullyShardedDataParallel]


def test_install_is_refused_while_units_of_torch_are_alive():
    model = KEPT["class"](nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"1 unit\(s\) of torch's FullyShardedDataParallel are alive"):
        fsdp_c.install()
    assert BoundName is KEPT["class"]
    del model
    fsdp_c.install()
    assert BoundName is not KEPT["class"]


def test_constructor_refuses_units_of_torch():
    inner = KEPT["class"](nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="already sharded by torch's own FSDP"):
        fsdp_c.FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)))


def test_forward_method_is_registered_through_torchs_function():
    fsdp_c.install()

    class Model(nn.Linear):
        def twice(self, x):
            return 2 * self(x)

    model = BoundName(Model(2, 2))
    torch_fsdp.register_fsdp_forward_method(model, "twice")
    x = torch.ones(1, 2)
    assert torch.equal(model.twice(x), 2 * model(x))
    torch_fsdp.register_fsdp_forward_method(Model(2, 2), "twice")  # a plain module: torch's own function


def test_runtime_functions_of_torch_act_on_our_units():
    from torch.distributed.fsdp import _runtime_utils

    fsdp_c.install()
    model = BoundName(nn.Linear(2, 2))
    assert _runtime_utils._lazy_init(model, model) is model
    assert model._is_root
    assert _runtime_utils._root_pre_forward(model, model, (1,), {"a": 2}) == ((1,), {"a": 2})
    model(torch.ones(1, 2)).sum().backward()
    _runtime_utils._post_backward_final_callback(model, model)
    _runtime_utils._reshard(model, model._handle, True)
    model(torch.ones(1, 2)).sum().backward()


FSDP2 = """
import torch.distributed as dist, fsdp_c
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fsdp_c.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
assert fully_shard.state(model) is not None
dist.destroy_process_group()
"""


def test_use_of_fsdp2_after_install_warns_once():
    done = run_python("-c", FSDP2, RANK="0")
    assert done.returncode == 0, done.stderr
    told = "UserWarning: fsdp_c is installed, but FSDP2 is used: fully_shard() stays torch's. Choose"
    assert done.stderr.count(told) == 1
