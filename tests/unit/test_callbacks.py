"""Python functions called from C are bound all at once, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from fsdp_c import _C, MixedPrecision, ShardingStrategy
from fsdp_c.sharding.configuration import configure
from fsdp_c.training import tree

NAMES = (
    "lazy_init",
    "convert_inputs",
    "hook_inputs",
    "tensors_of",
    "check_ddp",
    "cast_buffers_for_mode",
    "step_in_backward",
    "log_post_backward",
    "warn_of_units_without_gradient",
    "check_backward",
    "explain_error",
    "explain_failed_collective",
)


def refuse(*_: object) -> None:
    raise AssertionError("a refused binding was kept")


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_callback_is_named(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        _C.bind_callbacks(**{name: refuse for name in NAMES if name != missing})


def test_an_unknown_callback_is_refused() -> None:
    with pytest.raises(TypeError, match="takes 12 functions, got 13"):
        _C.bind_callbacks(**dict.fromkeys((*NAMES, "other"), refuse))  # type: ignore[arg-type]


def test_a_refused_binding_leaves_what_was_bound() -> None:
    config = configure(
        FakeProcessGroup._create_internal(rank=0, world_size=1),
        None,
        torch.device("cpu"),
        ShardingStrategy.NO_SHARD,
        use_orig_params=False,
        offload_params=False,
        mixed_precision=MixedPrecision(),
    )
    unit = _C.Unit(nn.Identity(), None, config, "unit", ())
    with pytest.raises(TypeError):
        _C.bind_callbacks(**dict.fromkeys((*NAMES, "other"), refuse))  # type: ignore[arg-type]
    hooked = torch.ones(1, requires_grad=True)
    seen: list[None] = []
    hooked.register_hook(lambda _: seen.append(None))
    # calls tensors_of
    unit.register_pre_backward_hooks({1: {2: tree.tensors_of([hooked])[0]}, "set": {hooked}})
    hooked.sum().backward()
    assert seen == [None]
