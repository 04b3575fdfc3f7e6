"""python -m tests.without_fsdp1 WAY RANK WORLD_SIZE FOLDER: train and save on one rank.

WAY is "present" or one of ``tests.hidden_fsdp1.WAYS``. The process writes digests of everything that must be
equal in each way to FOLDER/WAY/RANK.json, and beside it objects and checkpoints for the other ways. Then it
loads the files that earlier ways have left in FOLDER.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

from tests import hidden_fsdp1


def main(way: str, rank: int, world_size: int, folder: Path) -> None:
    if way != "present":
        hidden_fsdp1.hide(way)
    import torch
    import torch.distributed as dist

    import fsdp_c

    assert fsdp_c.compat.upstream.HAS_FSDP1 == (way == "present"), fsdp_c.compat.upstream.WHY_NO_FSDP1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own = folder / way
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
    check_names(way)
    dist.destroy_process_group()


def configurations() -> dict[str, dict[str, Any]]:
    import torch
    from torch.nn import LayerNorm

    from fsdp_c import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from fsdp_c.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
    from tests.models import Block

    return {
        "classes": {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True},
        "sizes": {
            "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=60),
            "mixed_precision": MixedPrecision(
                torch.bfloat16,
                torch.float32,
                cast_forward_inputs=True,
                _module_classes_to_ignore=(LayerNorm,),
            ),
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        },
        "custom": {
            "auto_wrap_policy": CustomPolicy(
                lambda module: (
                    {"sharding_strategy": ShardingStrategy.NO_SHARD} if isinstance(module, Block) else False
                )
            ),
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        },
    }


def build(kwargs: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    from fsdp_c import FullyShardedDataParallel
    from tests.models import Net

    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), **kwargs)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(name: str, kwargs: dict[str, Any], own: Path) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    import fsdp_c.checkpoint
    from tests.models import WIDTH

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
    import torch

    from fsdp_c import FullyShardedDataParallel as FSDP
    from fsdp_c import StateDictType

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
    import torch
    from torch import nn

    from fsdp_c import api, wrap

    return [
        *api.ShardingStrategy,
        *api.BackwardPrefetch,
        *api.StateDictType,
        *api.OptimStateKeyType,
        *api.TrainingState,
        *api.HandleTrainingState,
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
    import torch

    import fsdp_c.checkpoint
    from fsdp_c import FullyShardedDataParallel as FSDP
    from fsdp_c import StateDictType
    from fsdp_c.wrap import ModuleWrapPolicy

    for theirs, ours in zip(pickle.loads((other / f"{rank}.objects").read_bytes()), objects(), strict=True):
        assert type(theirs) is type(ours), (type(theirs), type(ours))
        if isinstance(ours, ModuleWrapPolicy):
            assert theirs._module_classes == ours._module_classes
        else:
            assert theirs == ours
    kwargs = configurations()["classes"]
    wanted = None
    for kind in ("FULL", "SHARDED", "LOCAL"):
        model, _ = build(kwargs)
        states = torch.load(other / f"{rank}.classes.{kind}", weights_only=False)
        with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            model.load_state_dict(states["model"])
        flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        wanted = flat if wanted is None else wanted
        assert torch.equal(flat, wanted), kind
    model, optimizer = build(kwargs)
    fsdp_c.checkpoint.load(model, optimizer, other / "checkpoint")
    assert torch.equal(torch.cat([param.detach().reshape(-1) for param in model.parameters()]), wanted)


def check_names(way: str) -> None:
    """Check that ``install()`` adds FSDP1's names to a torch without them, and ``uninstall()`` removes them."""
    import importlib

    import fsdp_c

    fsdp = importlib.import_module("torch.distributed.fsdp")
    had = hasattr(fsdp, "FullyShardedDataParallel")
    assert had == (way != "removed")
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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
