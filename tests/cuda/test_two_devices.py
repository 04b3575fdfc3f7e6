"""Two GPUs in one process. A model computes on its own device, whatever the current device and the device of
its inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from tests.cuda.nccl_on_one_gpu import nccl_group
from tests.cuda.test_parity import CPU, OPTIONS, TIMEOUT_S, train
from tests.models import WIDTH, Block, Net
from tests.parity.engine import same_bits
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none is here")

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def wrapped(device_id: Any) -> Any:
    policy = ModuleWrapPolicy({Block})
    return FSDP(Net(3), auto_wrap_policy=policy, device_id=device_id, process_group=nccl_group())


def trained(rank: int, name: str, device_id: torch.device, inputs_on: torch.device) -> list[Tensor]:
    options = OPTIONS[name] | {"process_group": nccl_group(), "device_id": device_id}
    return train(FSDP, rank, no_sync=True, checkpoint=False, options=options, inputs_on=inputs_on)


@pytest.mark.parametrize("inputs_on", [CPU, FIRST], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_model_trains_alike_on_a_device_that_is_not_the_current_one(
    rank: int, name: str, inputs_on: torch.device
) -> None:
    torch.cuda.set_device(FIRST)
    expected = trained(rank, name, FIRST, FIRST)
    actual = trained(rank, name, SECOND, inputs_on)
    assert torch.cuda.current_device() == 0
    assert len(expected) == len(actual) and all(map(same_bits, expected, actual))


@pytest.mark.parametrize("current", [FIRST, SECOND], ids=str)
@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_device_is_named_by_its_index_or_is_the_current_one(current: torch.device) -> None:
    torch.cuda.set_device(current)
    try:
        named = [
            (one, current) for one in (torch.device("cuda"), "cuda", torch.cuda.current_device(), current)
        ]
        for device_id, device in (*named, (1, SECOND), ("cuda:1", SECOND), (SECOND, SECOND)):
            model = wrapped(device_id)
            assert {param.device for param in model.parameters()} == {device}, device_id
            assert model.compute_device == device
            assert model(torch.randn(2, WIDTH)).device == device
    finally:
        torch.cuda.set_device(FIRST)


@on_ranks(2, TIMEOUT_S, label="nccl")
def test_a_module_on_another_device_than_device_id_is_refused() -> None:
    with pytest.raises(ValueError, match="Inconsistent compute device.*cuda:1 vs cuda:0"):
        FSDP(nn.Linear(3, 3).to(SECOND), device_id=FIRST, process_group=nccl_group())
