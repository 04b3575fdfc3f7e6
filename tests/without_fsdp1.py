"""python -m tests.without_fsdp1 WAY RANK WORLD_SIZE FOLDER: train and save on one rank.

WAY is "present" or one of ``tests.hidden_fsdp1.WAYS``. The process writes digests of everything that must be
equal in each way to FOLDER/WAY/RANK.json, and beside it objects and checkpoints for the other ways. Then it
loads the files that earlier ways have left in FOLDER.
"""

# ruff: noqa: E402  (FSDP1 is hidden before other imports)

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

from tests import hidden_fsdp1

WAY = sys.argv[1]
if WAY != "present":
    hidden_fsdp1.hide(WAY)

import torch
import torch.distributed as dist
from torch import nn

import fsdp_c.checkpoint
from fsdp_c import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType, api, wrap
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.compat import upstream
from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.models import WIDTH, Block, Net


def main(rank: int, world_size: int, folder: Path) -> None:
    has_fsdp1, why = fsdp_c.compat.upstream.HAS_FSDP1, fsdp_c.compat.upstream.WHY_NO_FSDP1
    assert has_fsdp1 == (WAY == "present"), why
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own = folder / WAY
    own.mkdir(exist_ok=True)
    store = dist.FileStore(str(own / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    digests = {}
    for name, kwargs in configurations().items():
        digests[name] = train(name, kwargs, own)
    digests["objects"] = digest(pickle.dumps(objects(), protocol=4))
    (own / f"{rank}.objects").write_bytes(pickle.dumps(objects(), protocol=4))
    (own / f"{rank}.json").write_text(json.dumps(digests))
    dist.barrier()
    for other in sorted(one for one in folder.iterdir() if one.is_dir()):
        load_from(other, rank)
    check_names()
    dist.destroy_process_group()


def configurations() -> dict[str, dict[str, Any]]:
    unsharded = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    return {
        "classes": {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True},
        "sizes": {
            "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=60),
            "mixed_precision": MixedPrecision(
                torch.bfloat16,
                torch.float32,
                cast_forward_inputs=True,
                _module_classes_to_ignore=(nn.LayerNorm,),
            ),
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        },
        "custom": {
            "auto_wrap_policy": CustomPolicy(lambda module: isinstance(module, Block) and unsharded),
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        },
    }


def build(kwargs: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = FSDP(Net(), device_id=torch.device("cpu"), **kwargs)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def values(model: Any) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def train(name: str, kwargs: dict[str, Any], own: Path) -> dict[str, str]:
    model, optimizer = build(kwargs)
    losses = []
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).float().square().mean()
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": digest(repr(losses).encode()),
        "units": digest(repr(list(dict(model.named_modules()))).encode()),
    }
    for kind in ("FULL", "SHARDED", "LOCAL"):
        found[kind] = digest(saved(model, optimizer, kind, own / f"{dist.get_rank()}.{name}.{kind}"))
    if name == "classes":
        fsdp_c.checkpoint.save(model, optimizer, own / "checkpoint")
        files = sorted((own / "checkpoint").rglob("*.distcp"))
        found["checkpoint"] = digest(b"".join(path.read_bytes() for path in files))
    return found


def saved(model: Any, optimizer: Any, kind: str, path: Path) -> bytes:
    """Save the state dicts of one type with ``torch.save`` at ``path``, and return the bytes."""
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        states = {"model": model.state_dict()}
        if kind != "LOCAL":
            states["optim"] = FSDP.optim_state_dict(model, optimizer)
    buffer = io.BytesIO()
    torch.save(states, buffer)
    path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def objects() -> list[Any]:
    """Return objects that users pickle: enums, configurations, policies, and state dict configurations."""
    return [
        *api.ShardingStrategy,
        *api.BackwardPrefetch,
        *api.StateDictType,
        *api.OptimStateKeyType,
        *upstream.TrainingState,
        *upstream.HandleTrainingState,
        api.MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True),
        api.CPUOffload(offload_params=True),
        api.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        api.LocalStateDictConfig(),
        api.ShardedStateDictConfig(_use_dtensor=True),
        api.FullOptimStateDictConfig(rank0_only=True),
        api.LocalOptimStateDictConfig(),
        api.ShardedOptimStateDictConfig(),
        api.StateDictSettings(
            api.StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(), api.FullOptimStateDictConfig()
        ),
        wrap.ModuleWrapPolicy({nn.Linear}),
        wrap.size_based_auto_wrap_policy,
        wrap.always_wrap_policy,
    ]


def load_from(other: Path, rank: int) -> None:
    """Load the files of another way. Objects must equal ours, and checkpoints must load to the same
    parameters.
    """
    for theirs, ours in zip(pickle.loads((other / f"{rank}.objects").read_bytes()), objects(), strict=True):
        assert type(theirs) is type(ours), (type(theirs), type(ours))
        if isinstance(ours, ModuleWrapPolicy):
            assert theirs._module_classes == ours._module_classes
        else:
            assert theirs == ours
    kwargs = configurations()["classes"]
    model, optimizer = build(kwargs)
    fsdp_c.checkpoint.load(model, optimizer, other / "checkpoint")
    wanted = values(model)
    for kind in ("FULL", "SHARDED", "LOCAL"):
        model, _ = build(kwargs)
        states = torch.load(other / f"{rank}.classes.{kind}", weights_only=False)
        with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            model.load_state_dict(states["model"])
        assert torch.equal(values(model), wanted), kind


def check_names() -> None:
    """Check that ``install()`` adds FSDP1's names to a torch without them, and ``uninstall()`` removes them."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    had = hasattr(fsdp, "FullyShardedDataParallel")
    assert had == (WAY != "removed")
    fsdp_c.install()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp._runtime_utils import _lazy_init  # noqa: F401
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert FullyShardedDataParallel is fsdp_c.FullyShardedDataParallel
    assert ShardingStrategy is fsdp_c.ShardingStrategy and ShardedGradScaler is fsdp_c.ShardedGradScaler
    fsdp_c.uninstall()
    assert hasattr(fsdp, "FullyShardedDataParallel") == had


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
