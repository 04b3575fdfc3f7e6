"""get_state_dict and set_state_dict of torch.distributed.checkpoint, with their options, compared with torch's
FSDP1.

After ``fsdp_c.install()`` they find our class under torch's name; these tests patch it in.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.distributed.test_optim_state_dict import assert_same_value
from tests.models import Block, Net
from tests.pairwise import pairwise
from tests.parity.engine import implementation
from tests.ranks import VIEWS, both_views, device, on_ranks
from tests.training import train

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "without frozen": {"ignore_frozen_params": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full and flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "not strict": {"strict": False},
}


@contextlib.contextmanager
def seen_as_fsdp(which: str) -> Iterator[None]:
    with mock.patch("torch.distributed.checkpoint.state_dict.FSDP", implementation(which)):
        yield


def built(
    which: str, use_orig_params: bool, seed: int = 0, mesh: bool = False, frozen: bool = False
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    module = Net(2, tied_head=False)
    if frozen:  # a whole unit, as flat parameters require
        module.blocks[0].requires_grad_(False)
    extra = {"device_mesh": init_device_mesh(device().type, (2,))} if mesh else {}
    policy = ModuleWrapPolicy({Block})
    cls = implementation(which)
    model = cls(module, use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=device(), **extra)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    return model, optimizer


def assert_same_state(where: Any, expected: Any, actual: Any) -> None:
    if isinstance(expected, dict):
        assert sorted(expected) == sorted(actual), where
        for key, value in expected.items():
            assert_same_state((*where, key), value, actual[key])
    else:
        assert_same_value(where, expected, actual)


def frozen_where(options: dict[str, Any]) -> bool:
    return options.get("ignore_frozen_params", False)


@pairwise(
    mesh=[pytest.param(False, id="sharded tensors"), pytest.param(True, id="dtensors")],
    use_orig_params=VIEWS,
    options=[pytest.param(options, id=name) for name, options in OPTIONS.items()],
)
@on_ranks(2)
def test_what_is_got_equals_torchs_and_what_is_set_comes_back(rank, mesh, use_orig_params, options):
    got = []
    for which in ("torch", "fsdp_c"):
        model, optimizer = built(which, use_orig_params, mesh=mesh, frozen=frozen_where(options))
        train(model, optimizer, rank)
        with seen_as_fsdp(which):
            got.append(get_state_dict(model, optimizer, options=StateDictOptions(**options)))
    assert_same_state(("model",), got[0][0], got[1][0])
    assert_same_state(("optim",), got[0][1], got[1][1])
    other, its_optimizer = built("fsdp_c", use_orig_params, seed=1, mesh=mesh, frozen=frozen_where(options))
    with seen_as_fsdp("fsdp_c"):
        wanted = StateDictOptions(**{**options, "strict": options.get("strict", not frozen_where(options))})
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=copy.copy(got[0][0]),
            optim_state_dict=got[0][1],
            options=wanted,
        )
        again = get_state_dict(other, its_optimizer, options=StateDictOptions(**options))
    assert_same_state(("model",), got[0][0], again[0])
    assert_same_state(("optim",), got[0][1], again[1])


@both_views
@on_ranks(2)
def test_rank_0_alone_loads_and_the_others_receive(rank, use_orig_params):
    """broadcast_from_rank0. With cpu_offload only rank 0 has full state, and torch crashes on a CPU device."""
    model, optimizer = built("fsdp_c", use_orig_params)
    train(model, optimizer, rank)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with seen_as_fsdp("fsdp_c"):
        states = get_state_dict(model, optimizer, options=options)
        assert bool(states[0]) == (rank == 0)
        other, its_optimizer = built("fsdp_c", use_orig_params, seed=1)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, states[0] if rank == 0 else {}, options=options)
        set_optimizer_state_dict(other, its_optimizer, states[1] if rank == 0 else {}, options=options)
        whole = StateDictOptions(full_state_dict=True)
        expected, actual = (
            get_state_dict(*each, options=whole) for each in ((model, optimizer), (other, its_optimizer))
        )
    assert_same_state((), expected[0], actual[0])
    assert_same_state((), expected[1]["state"], actual[1]["state"])
