"""Each argument that is on or off takes any value for the truth that it has, as with torch."""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, StateDictType
from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_c
from fsdp_c import checkpoint
from tests.models import WIDTH
from tests.ranks import device, on_ranks
from tests.training import batch, train, wrap

VALUES: tuple[Any, ...] = (None, 0, 2, "", "False", (), (0,))
SCALERS = {"torch": torch_scaler.ShardedGradScaler, "fsdp_c": fsdp_c.ShardedGradScaler}
WRAPPING = {"torch": torch_fsdp.wrap, "fsdp_c": fsdp_c.wrap}
RAISED = (NotImplementedError, AssertionError)


def built(which: str, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    torch.manual_seed(5)
    inner = wrap(nn.Linear(WIDTH, WIDTH), which, strategy, **arguments)
    return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), which, strategy, **arguments)


def stepped(which: str, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    model = built(which, strategy, **arguments)
    model(batch(model.rank)).float().sum().backward()
    return model


def adam(which: str) -> tuple[Any, torch.optim.Optimizer]:
    model = built(which)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    return model, optimizer


# ----------------------------------------------------------------- what comes out of a value


def syncs(which: str, value: Any) -> Any:
    try:
        with CommDebugMode() as calls:
            built(which, sync_module_states=value)
    except ValueError as error:  # torch does not do it on the CPU
        return "sync_module_states=True" in str(error)
    return any("broadcast" in str(name) for name in calls.get_comm_counts())


def attribute(argument: str) -> Callable[[str, Any], Any]:
    return lambda which, value: bool(getattr(stepped(which, **{argument: value}), argument))


def names_of_parameters(which: str, value: Any) -> Any:
    return [name for name, _ in stepped(which, use_orig_params=value).named_parameters()]


def offloads(which: str, value: Any) -> Any:
    return bool(built(which, cpu_offload=CPUOffload(offload_params=value))._handle._offload_params)


def dtypes_of_gradients(which: str, value: Any) -> Any:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=value)
    params = stepped(which, mixed_precision=precision).parameters()
    return [param.grad.dtype for param in params if param.grad is not None]


def dtypes_of_inputs(argument: str) -> Callable[[str, Any], Any]:
    """Of the root and of a unit in it, which gets float32."""

    def seen_by(which: str, value: Any) -> Any:
        others = {"cast_forward_inputs": False, "cast_root_forward_inputs": False}
        precision = MixedPrecision(param_dtype=torch.float64, **(others | {argument: value}))
        torch.manual_seed(0)
        seen: list[torch.dtype] = []

        class Sees(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(x.dtype)
                return super().forward(x.to(self.weight.dtype)).float()

        net = nn.Sequential(Sees(WIDTH, WIDTH), wrap(Sees(WIDTH, WIDTH), which, mixed_precision=precision))
        model = wrap(net, which, mixed_precision=precision)
        model(batch(model.rank))
        return seen

    return seen_by


def state_of_model(kind: str, argument: str) -> Callable[[str, Any], Any]:
    def saved(which: str, value: Any) -> Any:
        config = getattr(torch_fsdp, f"{kind.title()}StateDictConfig")(**{argument: value})
        # torch cannot offload sharded parameters to the CPU from there (FULL) nor from a GPU (LOCAL)
        is_whole = argument == "offload_to_cpu" and kind != "SHARDED"
        model = stepped(which, "NO_SHARD" if is_whole else "FULL_SHARD")
        with model.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"], config):
            return sorted(model.state_dict())

    return saved


def state_of_optimizer(kind: str, argument: str) -> Callable[[str, Any], Any]:
    def saved(which: str, value: Any) -> Any:
        config = getattr(torch_fsdp, f"{kind.title()}OptimStateDictConfig")(**{argument: value})
        model, optimizer = adam(which)
        kinds = (StateDictType[f"{kind}_STATE_DICT"], None, config)
        try:
            with model.state_dict_type(model, *kinds):
                found = model.optim_state_dict(model, optimizer).get("state", {})
        except RAISED as error:
            return type(error)
        return sorted(found), [value["step"].device.type for value in found.values()]

    return saved


def old_optimizer_state(which: str, value: Any) -> Any:
    model, optimizer = adam(which)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return sorted(model.full_optim_state_dict(model, optimizer, rank0_only=value))


def loaded(argument: str) -> Callable[[str, Any], Any]:
    """Whether parameters of the result are names, and whether the optimizer has what was loaded."""

    def load(which: str, value: Any) -> Any:
        model, optimizer = adam(which)
        state = model.optim_state_dict(model, optimizer)
        for one in state["state"].values():
            one["step"] = one["step"] + 6
        arguments = {argument: value}
        for_optimizer = type(model).optim_state_dict_to_load(model, optimizer, state, **arguments)
        steps = {float(one["step"]) for one in optimizer.state.values()}
        return [type(key) for key in for_optimizer["state"]], steps

    return load


def summoned(argument: str) -> Callable[[str, Any], Any]:
    """Shapes that are shown, whether what is written stays, or the type of an error."""
    built_so = {"with_grads": {"use_orig_params": False}, "offload_to_cpu": {"strategy": "NO_SHARD"}}

    def summon(which: str, value: Any) -> Any:
        model = stepped(which, **built_so.get(argument, {}))
        others = {} if argument == "writeback" else {"writeback": False}
        shapes = []
        try:
            with type(model).summon_full_params(model, **others, **{argument: value}), torch.no_grad():
                for param in model.parameters():
                    shapes.append(param.shape)
                    param.fill_(7)
        except RAISED as error:
            return type(error)
        return shapes, [bool((param == 7).all()) for param in model.parameters() if param.numel()]

    return summon


def roots(which: str, value: Any) -> Any:
    model = stepped(which)
    return len(type(model).fsdp_modules(model, root_only=value))


def unsharded(which: str, value: Any) -> Any:
    model = stepped(which)
    work = model._unshard(async_op=value)
    if work is not None:
        work.wait()
    return work is None


def scales(which: str, value: Any) -> Any:
    scaler = SCALERS[which](device=device().type, init_scale=4.0, enabled=value)
    return bool(scaler.is_enabled()), scaler.scale(torch.ones(1)).item(), sorted(scaler.state_dict())


def policy(name: str, **arguments: Any) -> Callable[[str, Any], Any]:
    def wraps(which: str, value: Any) -> Any:
        asked = getattr(WRAPPING[which], name)
        return bool(asked(nn.Linear(2, 2), recurse=value, nonwrapped_numel=6, **arguments))

    return wraps


TORCHS: dict[str, Callable[[str, Any], Any]] = {
    "FullyShardedDataParallel.sync_module_states": syncs,
    "FullyShardedDataParallel.forward_prefetch": attribute("forward_prefetch"),
    "FullyShardedDataParallel.limit_all_gathers": attribute("limit_all_gathers"),
    "FullyShardedDataParallel.use_orig_params": names_of_parameters,
    "FullyShardedDataParallel.fsdp_modules.root_only": roots,
    **{
        f"FullyShardedDataParallel.summon_full_params.{argument}": summoned(argument)
        for argument in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
    },
    "FullyShardedDataParallel.full_optim_state_dict.rank0_only": old_optimizer_state,
    "FullyShardedDataParallel.optim_state_dict_to_load.is_named_optimizer": loaded("is_named_optimizer"),
    "FullyShardedDataParallel.optim_state_dict_to_load.load_directly": loaded("load_directly"),
    "FullyShardedDataParallel._unshard.async_op": unsharded,
    "CPUOffload.offload_params": offloads,
    "MixedPrecision.keep_low_precision_grads": dtypes_of_gradients,
    "MixedPrecision.cast_forward_inputs": dtypes_of_inputs("cast_forward_inputs"),
    "MixedPrecision.cast_root_forward_inputs": dtypes_of_inputs("cast_root_forward_inputs"),
    "FullStateDictConfig.rank0_only": state_of_model("FULL", "rank0_only"),
    "FullOptimStateDictConfig.rank0_only": state_of_optimizer("FULL", "rank0_only"),
    **{
        f"{kind.title()}StateDictConfig.offload_to_cpu": state_of_model(kind, "offload_to_cpu")
        for kind in ("FULL", "SHARDED", "LOCAL")
    },
    **{
        f"{kind.title()}OptimStateDictConfig.offload_to_cpu": state_of_optimizer(kind, "offload_to_cpu")
        for kind in ("FULL", "SHARDED", "LOCAL")
    },
    "lambda_auto_wrap_policy.recurse": policy("lambda_auto_wrap_policy", lambda_fn=lambda module: False),
    "size_based_auto_wrap_policy.recurse": policy(
        "size_based_auto_wrap_policy", min_num_params=2, exclude_wrap_modules={nn.Linear}
    ),
    "transformer_auto_wrap_policy.recurse": policy(
        "transformer_auto_wrap_policy", transformer_layer_cls={nn.Conv1d}
    ),
    "ShardedGradScaler.enabled": scales,
}


# ----------------------------------------------------------------- switches that torch's FSDP1 has not


def iterated(argument: str) -> Callable[[Any], Any]:
    def iterate(value: Any) -> Any:
        found = fsdp_c.iter_full_params(built("fsdp_c"), **{argument: value})
        return [(name, tensor.device) for name, tensor in found]

    return iterate


def folder() -> Path:
    """A new one, the same on all ranks."""
    told = [tempfile.mkdtemp(prefix="truth-")]
    dist.broadcast_object_list(told)
    return Path(told[0])


def saved(argument: str) -> Callable[[Any], Any]:
    def save(value: Any) -> Any:
        model, path = built("fsdp_c"), folder() / "saved"
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            work = checkpoint.save(model, None, path, **{argument: value})
        if work is not None:
            work.wait()
        return type(work), bool(shown.getvalue())

    return save


def loads(argument: str) -> Callable[[Any], Any]:
    def load(value: Any) -> Any:
        path, is_strict = folder() / "saved", argument == "strict"
        checkpoint.save(wrap(nn.Linear(WIDTH, WIDTH, bias=not is_strict)), None, path)
        try:
            with contextlib.redirect_stderr(io.StringIO()) as shown:
                checkpoint.load(wrap(nn.Linear(WIDTH, WIDTH)), None, path, **{argument: value})
        except checkpoint.CheckpointError as error:
            return type(error)
        return bool(shown.getvalue())

    return load


OWN: dict[str, Callable[[Any], Any]] = {
    "iter_full_params.rank0_only": iterated("rank0_only"),
    "checkpoint.save.background": saved("background"),
    "checkpoint.save.progress": saved("progress"),
    "checkpoint.load.strict": loads("strict"),
    "checkpoint.load.progress": loads("progress"),
}


# The CPU's memory is what offloading ends in.
ALIKE_ON_THE_CPU = {
    *(name for name in TORCHS if name.endswith("DictConfig.offload_to_cpu")),
}


def differs_on_a_rank(switch: str, expected: dict[bool, Any]) -> bool:
    differs = torch.tensor([float(expected[False] != expected[True])])
    dist.all_reduce(differs)
    return switch in ALIKE_ON_THE_CPU or bool(differs)


def is_switch(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")


def switches_of(owner: str, function: Any) -> set[str]:
    return {
        f"{owner}.{one.name}" for one in inspect.signature(function).parameters.values() if is_switch(one)
    }


def switches_of_torch() -> set[str]:
    """The switches of torch's FSDP1, but for those of base classes and of what is private."""
    names = [name for name in torch_fsdp.__all__ if name in fsdp_c.__all__ and name not in BASES]
    classes = {name: getattr(torch_fsdp, name) for name in names}
    classes["ShardedGradScaler"] = torch_scaler.ShardedGradScaler
    found: set[str] = set()
    for name, kind in classes.items():
        if not inspect.isclass(kind):
            continue
        with contextlib.suppress(ValueError):  # of an Enum there is none
            found |= switches_of(name, kind)
        methods = [one for one in vars(kind) if one == "_unshard" or not one.startswith("_")]
        for method in methods:
            if callable(getattr(kind, method)) and not inspect.isclass(getattr(kind, method)):
                found |= switches_of(f"{name}.{method}", getattr(kind, method))
    for name in ("lambda_auto_wrap_policy", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy"):
        found |= switches_of(name, getattr(torch_fsdp.wrap, name))
    return {name for name in found if not name.endswith("._use_dtensor")}  # torch sets it itself


BASES = {"StateDictConfig", "OptimStateDictConfig"}


def test_every_switch_of_torch_is_here() -> None:
    assert switches_of_torch() == set(TORCHS)


@pytest.mark.parametrize("switch", TORCHS)
@on_ranks(2)
def test_a_switch_of_torch_takes_what_is_true_or_false(switch: str) -> None:
    outcome = TORCHS[switch]
    found = {}
    for which in ("torch", "fsdp_c"):
        found[which] = expected = {truth: outcome(which, truth) for truth in (False, True)}
        assert differs_on_a_rank(switch, expected), expected
        for value in VALUES:
            assert outcome(which, value) == expected[bool(value)], (which, value)
    assert found["fsdp_c"] == found["torch"]


def test_every_switch_that_torch_has_not_is_here() -> None:
    functions = {"iter_full_params": fsdp_c.iter_full_params}
    functions |= {f"checkpoint.{name}": getattr(checkpoint, name) for name in ("save", "load")}
    assert set().union(*(switches_of(*item) for item in functions.items())) == set(OWN)


@pytest.mark.parametrize("switch", OWN)
@on_ranks(2)
def test_any_other_switch_takes_what_is_true_or_false(switch: str) -> None:
    outcome = OWN[switch]
    expected = {truth: outcome(truth) for truth in (False, True)}
    for value in VALUES:
        assert outcome(value) == expected[bool(value)], value
    assert differs_on_a_rank(switch, expected), expected


@on_ranks(2)
def test_ranks_may_say_the_same_by_different_values(rank: int) -> None:
    flat = [name for name, _ in stepped("fsdp_c", use_orig_params=False).named_parameters()]
    found = stepped("fsdp_c", use_orig_params=(False, None)[rank])
    assert [name for name, _ in found.named_parameters()] == flat
