"""Boolean arguments take truthy and falsy values, as torch's do: 1, None, "" and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

import fsdp_c
from tests.models import WIDTH
from tests.ranks import device, on_ranks
from tests.training import batch, wrap

VALUES: tuple[Any, ...] = (None, 2, "", "False", ())
SCALERS = {"torch": TorchScaler, "fsdp_c": fsdp_c.ShardedGradScaler}


def stepped(which: str, **arguments: Any) -> Any:
    torch.manual_seed(5)
    inner = wrap(nn.Linear(WIDTH, WIDTH), which, **arguments)
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which, **arguments)
    model(batch(model.rank)).float().sum().backward()
    return model


def names_of_parameters(which: str, value: Any) -> Any:
    return [name for name, _ in stepped(which, use_orig_params=value).named_parameters()]


def attribute(argument: str) -> Callable[[str, Any], Any]:
    return lambda which, value: bool(getattr(stepped(which, **{argument: value}), argument))


def offloads(which: str, value: Any) -> Any:
    unit = wrap(nn.Linear(WIDTH, WIDTH), which, cpu_offload=CPUOffload(offload_params=value))
    return bool(unit._handle._offload_params)


def dtypes_of_gradients(which: str, value: Any) -> Any:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=value)
    params = stepped(which, mixed_precision=precision).parameters()
    return [param.grad.dtype for param in params if param.grad is not None]


def names_in_a_state_dict(which: str, value: Any) -> Any:
    model = stepped(which)
    with model.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=value)):
        return sorted(model.state_dict())


def summoned(argument: str) -> Callable[[str, Any], Any]:
    """Return the summoned shapes, and whether writes are kept."""

    def summon(which: str, value: Any) -> Any:
        model, shapes = stepped(which), []
        others = {} if argument == "writeback" else {"writeback": False}
        with type(model).summon_full_params(model, **others, **{argument: value}), torch.no_grad():
            for param in model.parameters():
                shapes.append(param.shape)
                param.fill_(7)
        return shapes, [bool((param == 7).all()) for param in model.parameters() if param.numel()]

    return summon


def roots(which: str, value: Any) -> Any:
    model = stepped(which)
    return len(type(model).fsdp_modules(model, root_only=value))


def scales(which: str, value: Any) -> Any:
    scaler = SCALERS[which](device=device().type, init_scale=4.0, enabled=value)
    return bool(scaler.is_enabled()), scaler.scale(torch.ones(1)).item(), sorted(scaler.state_dict())


SWITCHES: dict[str, Callable[[str, Any], Any]] = {
    "use_orig_params": names_of_parameters,
    "forward_prefetch": attribute("forward_prefetch"),
    "limit_all_gathers": attribute("limit_all_gathers"),
    "CPUOffload.offload_params": offloads,
    "MixedPrecision.keep_low_precision_grads": dtypes_of_gradients,
    "FullStateDictConfig.rank0_only": names_in_a_state_dict,
    "summon_full_params.recurse": summoned("recurse"),
    "summon_full_params.writeback": summoned("writeback"),
    "summon_full_params.rank0_only": summoned("rank0_only"),
    "fsdp_modules.root_only": roots,
    "ShardedGradScaler.enabled": scales,
}


@pytest.mark.parametrize("switch", SWITCHES)
@on_ranks(2)
def test_a_switch_takes_truthy_and_falsy_values(switch: str) -> None:
    outcome = SWITCHES[switch]
    found = {which: [outcome(which, truth) for truth in (False, True)] for which in ("torch", "fsdp_c")}
    assert found["fsdp_c"] == found["torch"]
    for value in VALUES:
        assert outcome("fsdp_c", value) == found["fsdp_c"][bool(value)], value
    differs = torch.tensor([float(found["fsdp_c"][0] != found["fsdp_c"][1])])
    dist.all_reduce(differs)
    assert differs


@on_ranks(2)
def test_ranks_may_pass_different_falsy_values(rank: int) -> None:
    flat = names_of_parameters("fsdp_c", False)
    assert names_of_parameters("fsdp_c", (False, None)[rank]) == flat
