"""Errors and warnings of state dicts, and of ranks that differ, in both implementations: see
tests/errors.py."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from tests.errors import OURS, TORCHS, Implementation, Net, Row, check, rows
from tests.ranks import device, on_ranks
from tests.training import FULL, LOCAL, SHARDED, debug_level

# offloaded, torch's is wrong on a CPU
WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
X = torch.ones(2, 3)


# ----------------------------------------------------------------- ranks that differ; see also test_execution_order.py


def miss_gradients_on_rank_1(fsdp: Implementation) -> None:
    with debug_level(dist.DebugLevel.INFO):
        model = fsdp.wrap(nn.Linear(3, 3), use_orig_params=True)
        model(X).sum().backward()
        if dist.get_rank() == 1:
            model.zero_grad()
        with fsdp.FSDP.summon_full_params(model, with_grads=True):
            pass


# ----------------------------------------------------------------- state dicts


def select(model: Any, kind: StateDictType, config: Any = None, optim_config: Any = None) -> None:
    type(model).set_state_dict_type(model, kind, config, optim_config)


def saved(model: Any, kind: StateDictType) -> dict[str, Any]:
    select(model, kind)
    return model.state_dict()


def disagree(fsdp: Implementation, kind: StateDictType | None = None, **configs: Any) -> Any:
    """A model whose inner unit has another selection, or configurations of other types."""
    model = fsdp.nested()
    select(model, FULL)
    if kind is not None:
        select(model.second, kind)
    for name, config in configs.items():
        setattr(model.second, name, config)
    return model


def save_locally_with_a_mesh(fsdp: Implementation) -> None:
    saved(fsdp.wrap(Net(), device_mesh=init_device_mesh(device().type, (2,))), LOCAL)


def save_while_saving(fsdp: Implementation) -> None:
    net = Net()
    model = fsdp.wrap(net)
    net.first.register_state_dict_pre_hook(lambda module, prefix, keep_vars: model.state_dict())
    saved(model, FULL)


def drop_a_name(fsdp: Implementation) -> None:
    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state[f"{prefix}weight"]

    net = Net()
    net.first.register_state_dict_post_hook(drop)
    saved(fsdp.wrap(net), FULL)


def load(
    fsdp: Implementation, kind: StateDictType, change: Callable[[dict[str, Any]], Any], strict: bool = True
) -> None:
    model = fsdp.wrap(Net())
    state = saved(model, kind)
    change(state)
    model.load_state_dict(state, strict=strict)


def load_of_other_size(fsdp: Implementation) -> None:
    """torch looks at the size where the shard has padding: on the last of two ranks."""
    model = fsdp.wrap(nn.Linear(2, 3))
    select(model, LOCAL)
    model.load_state_dict(saved(fsdp.wrap(nn.Linear(5, 4)), LOCAL))


def multiply_shards(state: dict[str, Any], name: str, times: int) -> None:
    value: ShardedTensor = state[name]
    value._local_shards = value.local_shards() * times


def forget_a_dtype(fsdp: Implementation) -> None:
    net = Net()
    net.register_buffer("seen", torch.zeros(3))
    model = fsdp.wrap(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(X)
    model._buffer_name_to_orig_dtype.clear()
    saved(model, FULL)


STATE_DICTS = rows(
    r"""
X-086 | UserWarning | [Rank 1] Only some but not all ranks have a `None` `FlatParameter` gradient
    ours: unit Linear
X-130 | FutureWarning | FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated.
X-132 | AssertionError, whole | All FSDP modules should have the same state_dict_type.
X-132 config | AssertionError, whole | All FSDP modules must have the same type of state_dict_config.
X-132 optimizer | AssertionError, whole | All FSDP modules must have the same type of optim_state_dict_config.
X-133 | AssertionError | All FSDP modules must have the same state dict settings.
X-135 | UserWarning, whole | When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.
X-137 | AssertionError | Entering the ``_unshard_fsdp_state_params`` context but
    ours: rank
X-138 | AssertionError | FSDP assumes first.weight is in the state_dict but the state_dict only has
    ours: rank=
X-140 | AssertionError | No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters
    ours: '_flat_param'
X-141 type | AssertionError | Tensors in local_state_dict should be ShardedTensor
    ours: _flat_param
X-141 shards | AssertionError | load_local_state_dict assume one shard per ShardedTensor
    ours: _flat_param has 0 on rank
X-141 size | AssertionError | Local shard size = 5 and the tensor in the state_dict is 12
    ours: of 9 and 24 on all ranks
X-142 | AssertionError | Expects 0 or 1 shard per rank but got 2 shards on rank
    ours: of first.weight
X-143 | logging.LogRecord | Did not find param with FQN
    also: first.weight, skipping it
X-144 | AssertionError | Expected ShardedTensor, got <class 'torch.Tensor'>
    ours: first.weight
X-145 | AssertionError | seen is missing from pre-computed dict on rank
""",
    {
        "X-086": miss_gradients_on_rank_1,
        "X-130": lambda fsdp: select(fsdp.wrap(Net()), FULL),
        "X-132": lambda fsdp: select(disagree(fsdp, SHARDED), FULL),
        "X-132 config": lambda fsdp: select(
            disagree(fsdp, _state_dict_config=ShardedStateDictConfig()), FULL
        ),
        "X-132 optimizer": lambda fsdp: select(
            disagree(fsdp, _optim_state_dict_config=ShardedOptimStateDictConfig()), FULL
        ),
        "X-133": lambda fsdp: fsdp.FSDP.get_state_dict_type(disagree(fsdp, SHARDED)),
        "X-135": lambda fsdp: saved(fsdp.unsharded(), SHARDED),
        "X-137": save_while_saving,
        "X-138": drop_a_name,
        "X-140": lambda fsdp: load(fsdp, LOCAL, lambda state: state.clear()),
        "X-141 type": lambda fsdp: load(fsdp, LOCAL, lambda state: state.update(_flat_param=torch.zeros(8))),
        "X-141 shards": lambda fsdp: load(
            fsdp, LOCAL, lambda state: multiply_shards(state, "_flat_param", 0)
        ),
        "X-141 size": load_of_other_size,
        "X-142": lambda fsdp: load(fsdp, SHARDED, lambda state: multiply_shards(state, "first.weight", 2)),
        "X-143": lambda fsdp: load(fsdp, SHARDED, lambda state: state.pop("first.weight"), strict=False),
        "X-144": lambda fsdp: load(
            fsdp, SHARDED, lambda state: state.update({"first.weight": torch.zeros(3, 3)})
        ),
        "X-145": forget_a_dtype,
    },
)
STATE_DICTS += [
    Row(
        "X-131",
        RuntimeError,
        f"Expected state_dict_config of type {FullStateDictConfig} but got {ShardedStateDictConfig}",
        lambda fsdp: select(fsdp.wrap(Net()), FULL, ShardedStateDictConfig()),
    ),
    Row(
        "X-131 optimizer",
        RuntimeError,
        f"Expected optim_state_dict_config of type {FullOptimStateDictConfig} but got "
        f"{ShardedOptimStateDictConfig}",
        lambda fsdp: select(fsdp.wrap(Net()), FULL, None, ShardedOptimStateDictConfig()),
    ),
    Row(
        "X-134",
        RuntimeError,
        "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT",
        save_locally_with_a_mesh,
        torchs=(
            RuntimeError,
            "Found state_dict_type LOCAL_STATE_DICT",
        ),  # torch 2.10 appends a tuple's repr
    ),
]


# ----------------------------------------------------------------- optimizer state dicts


def adam(model: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    return optimizer


def trained(
    fsdp: Implementation, use_orig_params: bool = True, module: nn.Module | None = None
) -> tuple[Any, Any]:
    model = fsdp.wrap(module or Net(), use_orig_params=use_orig_params)
    return model, adam(model)


def select_whole(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        select(model, FULL, None, WHOLE)


def save(
    fsdp: Implementation,
    change: Callable[[Any], Any],
    use_orig_params: bool = True,
    module: nn.Module | None = None,
) -> None:
    """Save the state of an optimizer that ``change`` has changed."""
    model, optimizer = trained(fsdp, use_orig_params, module)
    select_whole(model)
    change(optimizer)
    fsdp.FSDP.optim_state_dict(model, optimizer)


def save_with_foreign_state(fsdp: Implementation) -> None:
    model, optimizer = trained(fsdp)
    select_whole(model)
    state = optimizer.state_dict()
    state["state"]["mine"] = {"seen": 3}
    fsdp.FSDP.optim_state_dict(model, optimizer, state)


def load_state(
    fsdp: Implementation, change: Callable[[dict[str, Any]], Any], use_orig_params: bool = False
) -> None:
    """Load a state that ``change`` has changed."""
    model, optimizer = trained(fsdp, use_orig_params)
    select_whole(model)
    state = copy.deepcopy(fsdp.FSDP.optim_state_dict(model, optimizer))
    change(state)
    fsdp.FSDP.optim_state_dict_to_load(model, optimizer, state)


def load_with(**values: Any) -> Callable[[Implementation], None]:
    """Load a state in which one parameter has other ``values``, without use_orig_params."""
    return lambda fsdp: load_state(fsdp, lambda state: state["state"][NAME].update(values))


def load_by_names(fsdp: Implementation) -> None:
    """The optimizer lacks the state of parameters without elements on this rank."""
    model, optimizer = trained(fsdp)
    select_whole(model)
    state = fsdp.FSDP.optim_state_dict(model, optimizer)
    for param in model.parameters():
        if not param.numel():
            optimizer.state.pop(param, None)
    fsdp.FSDP.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)


def make_scalars_differ(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"] += dist.get_rank()


def lose_state_on_rank_1(optimizer: Any) -> None:
    if dist.get_rank() == 1:
        optimizer.state.clear()


def save_shards_on_rank_0_only(fsdp: Implementation) -> None:
    model, optimizer = trained(fsdp)
    config = ShardedOptimStateDictConfig()
    config.rank0_only = True  # type: ignore[attr-defined]
    select(model, SHARDED, None, config)
    fsdp.FSDP.optim_state_dict(model, optimizer)


def mix_views(fsdp: Implementation) -> None:
    mixed = nn.ModuleList([fsdp.wrap(nn.Linear(2, 2), use_orig_params=view) for view in (True, False)])
    fsdp.FSDP.optim_state_dict(mixed, torch.optim.Adam(mixed.parameters()))


def save_plain(fsdp: Implementation) -> None:
    plain = Net()
    fsdp.FSDP.full_optim_state_dict(plain, torch.optim.Adam(plain.parameters()))


def save_by_input(fsdp: Implementation, given: Any) -> None:
    model, optimizer = trained(fsdp)
    given = model.parameters() if given == "parameters" else given
    fsdp.FSDP.full_optim_state_dict(model, optimizer, given)


def rekey(fsdp: Implementation, state: dict[str, Any], key_type: Any) -> None:
    model = Net()
    fsdp.FSDP.rekey_optim_state_dict(state, key_type, model, optim=torch.optim.Adam(model.parameters()))


def rekey_tied(fsdp: Implementation) -> None:
    model = fsdp.wrap(Net())
    fsdp.FSDP.rekey_optim_state_dict(
        adam(model).state_dict(),
        OptimStateKeyType.PARAM_NAME,
        model,
        optim=torch.optim.Adam(model.parameters()),
    )


NAME = "first.weight"
OPTIMIZER = rows(
    r"""
X-160 | FutureWarning | ``FullyShardedDataParallel.full_optim_state_dict``is being deprecated and is replaced by
    ``FullyShardedDataParallel.optim_state_dict``.
X-161 | FutureWarning | The `optim_input` argument is deprecated and will be removed
X-163 | AssertionError, whole | Not all FSDP modules have the same _use_orig_params value
X-164 | IndexError | list index out of range
    ours: Net has no FullyShardedDataParallel
X-165 | ValueError | `optim_state_dict` must have the keys "state"
X-166 | RuntimeError | FSDP currently requires each rank to have at least the optimizer states needed by rank 0's
    optimizer but some ranks are missing some of those states
    ours: {1:
X-168 | AssertionError | Rank 1 has different values for step:
X-170 | UserWarning | Found a optim state, mine, that FSDP cannot process.
X-171 | UserWarning | optim_state[
    also: is not on rank[01]\.
X-173 names | ValueError | Differing optimizer state names for the unflattened parameters
    ours: first.weight has
X-173 types | ValueError | Differing optimizer state types for state exp_avg
    ours: first.weight has
X-173 dtypes | ValueError | All unflattened parameters comprising a single flat parameter must have
    positive-dimension tensor state with the same dtype
    ours: first.weight has
X-173 shapes | ValueError | Tensor optimizer state does not have same shape as its parameter
    ours: first.weight has
X-174 values | ValueError | All unflattened parameters comprising a single flat parameter must have scalar state
    with the same value and dtype
    ours: first.weight has
X-174 dtypes | ValueError | All unflattened parameters comprising a single flat parameter must have scalar state
    with the same value and dtype
    ours: first.weight has
X-174 missing | ValueError | All unflattened parameters comprising a single flat parameter must have scalar state
    with the same value and dtype
    ours: first.bias
X-175 | ValueError, whole | Optimizer input should not be empty
X-176 | TypeError | Optimizer input should be an iterable of Tensors or dicts, but got
    ours: int
X-176 elements | TypeError | Optimizer input should be an iterable of Tensors or dicts
    ours: str
X-177 | AssertionError, whole | A parameter group should map "params" to a list of the parameters in the group
X-179 | ValueError | Invalid parameter keys:
X-180 | AssertionError, whole | Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got names
X-181 | RuntimeError | Each parameter should only map to one parameter name but got
X-162 | AssertionError | Expected optim_input to be None and rank0_only to be False
""",
    {
        "X-160": lambda fsdp: save_by_input(fsdp, None),
        "X-161": lambda fsdp: save_by_input(fsdp, "parameters"),
        "X-163": mix_views,
        "X-164": save_plain,
        "X-165": lambda fsdp: load_state(fsdp, dict.clear, True),
        "X-166": lambda fsdp: save(fsdp, lose_state_on_rank_1, False),
        "X-168": lambda fsdp: save(fsdp, make_scalars_differ, module=nn.Linear(3, 5)),
        "X-170": save_with_foreign_state,
        "X-171": load_by_names,
        "X-173 names": lambda fsdp: load_state(fsdp, lambda state: state["state"][NAME].pop("exp_avg")),
        "X-173 types": load_with(exp_avg=3),
        "X-173 dtypes": load_with(exp_avg=torch.ones(3, 3).double()),
        "X-173 shapes": load_with(exp_avg=torch.ones(2)),
        "X-174 values": load_with(step=torch.tensor(9.0)),
        "X-174 dtypes": load_with(step=torch.tensor(1.0).double()),
        "X-174 missing": lambda fsdp: load_state(fsdp, lambda state: state["state"].pop("first.bias")),
        "X-175": lambda fsdp: save_by_input(fsdp, []),
        "X-176": lambda fsdp: save_by_input(fsdp, 3),
        "X-176 elements": lambda fsdp: save_by_input(fsdp, ["a"]),
        "X-177": lambda fsdp: save_by_input(fsdp, [{"lr": 1}]),
        "X-179": lambda fsdp: rekey(fsdp, {"state": {0: {}, "a": {}}}, OptimStateKeyType.PARAM_ID),
        "X-180": lambda fsdp: rekey(fsdp, {"state": {}, "param_groups": []}, "names"),
        "X-181": rekey_tied,
        "X-162": save_shards_on_rank_0_only,
    },
)

ROWS = [*STATE_DICTS, *OPTIMIZER]
ONLY_ON = {"X-086": 1, "X-141 size": 1, "X-171": 1}  # the rank on which torch raises or warns


@pytest.mark.parametrize("row_id", [row.id for row in ROWS])
@on_ranks(2)
def test_errors_and_warnings_begin_with_torchs_words(rank: int, row_id: str) -> None:
    row = next(row for row in ROWS if row.id == row_id)
    if ONLY_ON.get(row_id, rank) == rank:
        check(row)
        return
    for implementation in (TORCHS, OURS):
        with contextlib.suppress(Exception):
            row.provoke(implementation)
