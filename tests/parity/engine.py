"""Recorded training runs with torch's FSDP1 or fsdp_c, and the bitwise comparison of two records.

Both implementations are built from the same seed and get the same batches on the same ranks. Every value
visible to users is recorded under a label (``step 3 grad blocks.0.up.weight``), so that the first difference
names step and parameter.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.models import WIDTH
from tests.ranks import device
from tests.simulated_gpu import races

BATCH = 3
STEPS = 10
SHOWN_DIFFERENCES = 6

PRECISIONS: dict[str, MixedPrecision | None] = {
    "fp32": None,
    "bf16_reduce_fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "fp16": MixedPrecision(param_dtype=torch.float16),
    "reduce_bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
    "buffers_bf16": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    "buffers_only_bf16": MixedPrecision(buffer_dtype=torch.bfloat16),
    "keep_low": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True),
    "cast_inputs": MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=True,
        cast_root_forward_inputs=False,
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=5e-2, momentum=0.9),
}


def implementation(name: str) -> type:
    """Return the class to test. With ``FSDP_C_PARITY_IMPL=torch`` torch is compared with itself, to check the
    tests.
    """
    if name == "fsdp_c" and os.environ.get("FSDP_C_PARITY_IMPL") != "torch":
        from fsdp_c import FullyShardedDataParallel

        return FullyShardedDataParallel
    from torch.distributed.fsdp import FullyShardedDataParallel as Upstream

    return Upstream


@dataclass(frozen=True)
class Point:
    """One point of the grid; picklable, and named by its id."""

    scenario: str
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    precision: str = "fp32"
    optimizer: str = "adamw"

    @property
    def id(self) -> str:
        orig = "orig" if self.use_orig_params else "flat"
        return f"{self.scenario}-{self.strategy}-{orig}-{self.precision}-{self.optimizer}"


@dataclass
class Run:
    """The state of one recorded run; scenarios drive it step by step."""

    point: Point
    fsdp: type
    rank: int
    world_size: int
    model: Any = None
    optimizer: Any = None
    trace: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    # ---------------------------------------------------------------- building
    def wrap(self, module: nn.Module, **changes: Any) -> nn.Module:
        arguments: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy[self.point.strategy],
            "use_orig_params": self.point.use_orig_params,
            "mixed_precision": replace(found)
            if (found := PRECISIONS[self.point.precision]) is not None
            else None,
            "device_id": device(),
        }
        return self.fsdp(module, **(arguments | changes))

    def start(self, build: Callable[[Run], nn.Module]) -> None:
        torch.manual_seed(7)
        self.model = build(self)
        self.optimizer = OPTIMIZERS[self.point.optimizer](self.model.parameters())
        self.record_params("start")

    # ---------------------------------------------------------------- recording
    def record(self, label: str, value: Any) -> None:
        if isinstance(value, DTensor):
            self.record(f"{label} placements", (value.placements, value.shape, value.stride()))
            value = value.to_local()
        label = f"step {self.step} {label}"
        assert label not in self.trace, f"{label} recorded twice"
        self.trace[label] = value.detach().clone() if isinstance(value, Tensor) else value

    def record_params(self, moment: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.record(f"{moment}: parameter {name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.record(f"{moment}: buffer {name}", buffer)

    def record_grads(self, moment: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.record(f"{moment}: gradient {name}", parameter.grad)

    def full_state_dict(self) -> dict[str, Tensor]:
        with self.fsdp.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return self.model.state_dict()

    def record_full_state_dict(self, moment: str) -> None:
        for name, value in self.full_state_dict().items():
            self.record(f"{moment}: full state {name}", value)

    def record_optimizer_state(self, moment: str) -> None:
        config = FullOptimStateDictConfig(
            rank0_only=False, offload_to_cpu=False
        )  # offloaded, torch's is wrong
        with self.fsdp.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, None, config):
            saved = self.fsdp.optim_state_dict(self.model, self.optimizer)
        for name, state in saved["state"].items():
            for key, value in state.items():
                self.record(f"{moment}: optimizer state {name} {key}", value)

    def record_reload(self) -> None:
        """Save a full state dict, overwrite the parameters, and load it."""
        state = self.full_state_dict()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        with self.fsdp.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            keys = self.model.load_state_dict(state)
        self.record("keys of the load", (keys.missing_keys, keys.unexpected_keys))
        self.record_params("loaded")

    # ---------------------------------------------------------------- stepping
    def batch(self, index: int = 0) -> Tensor:
        """Return this rank's input of micro-batch ``index`` of the current step. Inputs differ between ranks."""
        generator = torch.Generator(device()).manual_seed(1000 * self.step + 10 * index + self.rank)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x.bfloat16() if self.point.precision == "cast_inputs" else x

    def loss(self, output: Tensor) -> Tensor:
        return output.float().square().mean()

    def forward_loss(self, index: int = 0, label: str = "loss") -> Tensor:
        loss = self.loss(self.model(self.batch(index)))
        self.record(f"{label} {index}", loss)
        return loss

    def forward_backward(self, index: int = 0) -> None:
        self.forward_loss(index).backward()
        self.record_grads(f"after backward {index}")

    def optimizer_step(self, set_to_none: bool = True) -> None:
        """Step, zero the gradients and record them. Low-precision gradients are cast first, as user code must
        do.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                low, parameter.grad = parameter.grad, None
                parameter.grad = low.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.record_params("after optimizer")


@dataclass(frozen=True)
class Scenario:
    """``build`` returns the wrapped model; ``step`` runs and records one optimizer step."""

    build: Callable[[Run], nn.Module]
    step: Callable[[Run], None]


def record_run(
    point: Point, scenario: Scenario, implementation_name: str, rank: int, world_size: int
) -> dict[str, Any]:
    """Train STEPS steps and return the record. Its last entries are state dicts."""
    run = Run(point, implementation(implementation_name), rank, world_size)
    run.start(scenario.build)
    for run.step in range(1, STEPS + 1):
        scenario.step(run)
    run.record_full_state_dict("end")
    run.record_optimizer_state("end")
    run.record_reload()
    return run.trace


# ------------------------------------------------------------------ comparison


def same_bits(left: Any, right: Any) -> bool:
    """Return True for equal dtype, shape and values on any devices, with NaN equal to NaN; other objects are
    compared by ``==``.
    """
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return type(left) is type(right) and left == right
    left, right = left.cpu(), right.cpu()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


_ABSENT = object()


def snapshot(value: Any) -> Any:
    """Return a copy of tensors in nested containers; of sharded tensors, this rank's parts with their places."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            shards = [(shard.metadata.shard_offsets, shard.tensor.clone()) for shard in leaf.local_shards()]
            return leaf.size(), shards
        if isinstance(leaf, DTensor):
            return leaf.placements, leaf.to_local().clone()
        return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.copy(leaf)

    return pytree.tree_map(copied, value)


def different_paths(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Return the places at which two nested containers differ, empty ones included. The order of names does not
    matter.
    """
    pairs: list[tuple[object, Any, Any]]
    if isinstance(expected, dict) and isinstance(actual, dict):
        names = dict.fromkeys([*expected, *actual])
        pairs = [(name, expected.get(name, _ABSENT), actual.get(name, _ABSENT)) for name in names]
    elif (
        isinstance(expected, list | tuple) and type(expected) is type(actual) and len(expected) == len(actual)
    ):
        pairs = [(index, *pair) for index, pair in enumerate(zip(expected, actual, strict=True))]
    else:
        return [] if same_bits(expected, actual) else [path]
    return [found for name, *pair in pairs for found in different_paths(*pair, f"{path}[{name!r}]")]


def same_device(left: Any, right: Any) -> bool:
    return getattr(left, "device", None) == getattr(right, "device", None)


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"


def difference(label: str, expected: Any, actual: Any) -> str:
    text = f"{label}: torch {describe(expected)}, fsdp_c {describe(actual)}"
    if (
        isinstance(expected, Tensor)
        and isinstance(actual, Tensor)
        and expected.shape == actual.shape
        and expected.numel()
    ):
        expected, actual = expected.cpu(), actual.cpu()
        gap = (expected.double() - actual.double()).abs()
        worst = int(gap.nan_to_num(nan=float("inf")).argmax())
        values = expected.flatten()[worst].item(), actual.flatten()[worst].item()
        text += f", {int((gap != 0).sum())} of {gap.numel()} differ, most at {worst}: {values[0]!r} and {values[1]!r}"
    return text


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> Iterator[str]:
    for label in expected.keys() | actual.keys():
        if label not in actual:
            yield f"{label}: only torch has it"
        elif label not in expected:
            yield f"{label}: only fsdp_c has it"
    for label, value in expected.items():
        if label in actual and not (same_device(value, actual[label]) and same_bits(value, actual[label])):
            yield difference(label, value, actual[label])


def assert_same_record(point: Point, expected: dict[str, Any], actual: dict[str, Any]) -> None:
    found = list(differences(expected, actual))
    shown = "\n  ".join(found[:SHOWN_DIFFERENCES])
    assert not found, (
        f"{point.id} on rank {dist.get_rank()}: {len(found)} of {len(expected)} records differ\n  {shown}"
    )


def assert_record_is_worth_comparing(trace: dict[str, Any]) -> None:
    """Assert that parameters have changed and some gradient is not zero: otherwise equality would prove
    nothing.
    """
    gradients = [value for label, value in trace.items() if "gradient" in label and value is not None]
    assert any(bool((gradient != 0).any()) for gradient in gradients)
    ends = {
        label.split(": parameter ")[1]: value
        for label, value in trace.items()
        if "after optimizer: parameter" in label
    }
    starts = {
        label.split(": parameter ")[1]: value for label, value in trace.items() if "start: parameter" in label
    }
    assert any(not same_bits(starts[name], ends[name]) for name in starts if starts[name].numel())


def compare(point: Point, scenario: Scenario, rank: int, world_size: int) -> None:
    """Run the point with torch and with fsdp_c and assert that all records are bitwise equal.

    torch's FSDP1 has races on the simulated GPU (edited gradients, units unsharded by hand). There its result
    is that of the order of the launches.
    """
    expected = record_run(point, scenario, "torch", rank, world_size)
    assert_record_is_worth_comparing(expected)
    races.forget()
    actual = record_run(point, scenario, "fsdp_c", rank, world_size)
    assert_same_record(point, expected, actual)
