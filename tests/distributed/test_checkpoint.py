"""fsdp_c.checkpoint on any number of ranks, for any wrapping, and in exchange with torch's FSDP1 and FSDP2."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from fsdp_c.checkpoint.storage import read_checkpoint
from tests import tensor_parallel as tp
from tests.checkpoints import ExtraState
from tests.distributed.test_sharded_state_dict import contiguous, odd, saved, wrap
from tests.models import WIDTH, Block
from tests.parity.engine import same_bits
from tests.ranks import both_views, device, on_ranks, pool
from tests.training import FULL, SHARDED, assert_same, train

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
EXTRA = {"step": 3, "losses": [1.0, 0.5], "nested": {"name": "x", "tensor": torch.arange(4)}}


def made(
    seed: int = 0,
    strategy: str = "FULL_SHARD",
    use_orig_params: bool = True,
    one_unit: bool = False,
    **options: Any,
) -> Any:
    options = {"sharding_strategy": ShardingStrategy[strategy]} | options
    if one_unit:
        options["auto_wrap_policy"] = None
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = hybrid_mesh(options.pop("mesh", "2 x 2"))
    model = odd(seed) if options.pop("memory_format", None) is None else contiguous(seed)
    return wrap(model, use_orig_params, **options)


@functools.cache
def hybrid_mesh(kind: str) -> DeviceMesh:
    """Return the mesh, made once per kind, as each has process groups of its own."""
    ranks = dist.get_world_size()
    shape = {"2 x 2": (2, 2), "replicas": (ranks, 1), "shards": (1, ranks)}[kind]
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


def adamw(model: nn.Module, groups: int = 2) -> torch.optim.Optimizer:
    """Return AdamW with two groups, so that parameters must get to theirs; one if the wrapping changes."""
    params = list(model.parameters())
    split = [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
    return torch.optim.AdamW(split if groups == 2 else [{"params": params, "lr": 0.02}], lr=0.01)


def trained(groups: int = 2, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = made(**options)
    optimizer = adamw(model, groups)
    train(model, optimizer)
    return model, optimizer


def full_model(model: Any) -> dict[str, Tensor]:
    return saved(model, FULL)


def full_optim(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with type(model).state_dict_type(model, FULL):
        return type(model).optim_state_dict(model, optimizer)


def write_full(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the expected content of the checkpoint as plain tensors, for the ranks of another test body."""
    expected = {"model": full_model(model), "optim": full_optim(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    dist.barrier()


def assert_holds(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert_same(expected["model"], full_model(model))
    state = full_optim(model, optimizer)
    assert sorted(state["state"]) == sorted(expected["optim"]["state"])
    for fqn, own in state["state"].items():
        assert_same(expected["optim"]["state"][fqn], own)
    assert state["param_groups"][0]["lr"] == expected["optim"]["param_groups"][0]["lr"] == 0.02


def folder_of_ranks() -> Path:
    """Return a new folder shared by all ranks of a body."""
    told = [tempfile.mkdtemp(prefix="checkpoint-")]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


# ----------------------------------------------------------------- save here, load there


def body_save(rank: int, world_size: int, folder: str, **options: Any) -> None:
    model, optimizer = trained(**options)
    write_full(Path(folder), model, optimizer)
    checkpoint.save(model, optimizer, Path(folder) / "ckpt", extra=EXTRA)


def body_load(rank: int, world_size: int, folder: str, groups: int = 2, **options: Any) -> None:
    model = made(seed=1, **options)
    optimizer = adamw(model, groups)
    optimizer.param_groups[0]["lr"] = 0.5
    with mock.patch.object(optimizer, "step", side_effect=AssertionError("a step")):
        extra = checkpoint.load(model, optimizer, Path(folder) / "ckpt")
    assert_holds(Path(folder), model, optimizer)
    assert extra["step"] == 3 and extra["losses"] == [1.0, 0.5]
    assert extra["nested"]["name"] == "x" and torch.equal(
        extra["nested"]["tensor"], torch.arange(4, device="cpu")
    )
    train(model, optimizer, steps=1)  # uses the loaded state


def across(tmp_path: Path, saving: int, loading: int, save: dict[str, Any], load: dict[str, Any]) -> None:
    folder = {"folder": str(tmp_path)}
    pool(saving).run(__name__, "body_save", folder | save)
    pool(loading).run(__name__, "body_load", folder | load)


@pytest.mark.parametrize("loading", [1, 2, 3, 4])
@both_views
def test_four_ranks_save_and_others_load(loading: int, use_orig_params: bool, tmp_path: Path) -> None:
    across(tmp_path, 4, loading, {"use_orig_params": use_orig_params}, {"use_orig_params": use_orig_params})


def test_of_replicas_one_is_written(tmp_path: Path) -> None:
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "full").mkdir()
    across(tmp_path / "hybrid", 4, 2, {"strategy": "HYBRID_SHARD", "groups": 1}, {"groups": 1})
    across(
        tmp_path / "full",
        2,
        4,
        {"groups": 1},
        {"strategy": "HYBRID_SHARD", "use_orig_params": False, "groups": 1},
    )
    hybrid, full = (
        sum(file.stat().st_size for file in (tmp_path / name / "ckpt").rglob("*.distcp"))
        for name in ("hybrid", "full")
    )
    assert abs(hybrid - full) < 0.1 * full


def body_save_in_small_pieces(rank: int, world_size: int, folder: str) -> None:
    with mock.patch("fsdp_c.checkpoint.pieces.MAX_NBYTES", 24):
        body_save(rank, world_size, folder)
        entries = read_checkpoint(Path(folder) / "ckpt").entries
    assert (
        max(math.prod(c.sizes) for e in entries.values() if hasattr(e, "chunks") for c in e.chunks if e.shape)
        <= 6
    )
    assert len(entries["model.image.weight"].chunks) > 20  # channels_last


def test_tensors_larger_than_a_piece_are_divided(tmp_path: Path) -> None:
    pool(2).run(__name__, "body_save_in_small_pieces", {"folder": str(tmp_path)})
    pool(3).run(__name__, "body_load", {"folder": str(tmp_path)})


# ----------------------------------------------------------------- DCP's functions: other ranks, strategies, wrapping

# a hybrid strategy's shard dimension: one rank, or all
WRAPPINGS: list[dict[str, Any]] = [
    {"strategy": strategy, "mesh": mesh}
    for strategy, mesh in [*itertools.product(("FULL_SHARD", "NO_SHARD"), (False, True))]
    + [("SHARD_GRAD_OP", False), ("HYBRID_SHARD", "replicas"), ("HYBRID_SHARD", "shards")]
]
WRAPPINGS = [each | {"use_orig_params": flag} for each in WRAPPINGS for flag in (True, False)]
WRAPPINGS += [{"one_unit": True, "use_orig_params": flag} for flag in (True, False)]
WRAPPINGS += [
    {"strategy": strategy, "memory_format": "contiguous"} for strategy in ("FULL_SHARD", "NO_SHARD")
]
SAVED: dict[str, dict[str, Any]] = {
    "dcp": {},
    "dcp from a mesh": {"use_orig_params": False, "mesh": True, "memory_format": "contiguous"},
    "dcp unsharded": {"strategy": "NO_SHARD", "use_orig_params": False},
    "fsdp_c": {"use_orig_params": False, "one_unit": True},
    "fsdp_c unsharded": {"strategy": "NO_SHARD"},
}


def body_save_all(rank: int, world_size: int, folder: str) -> None:
    for name, options in SAVED.items():
        own = Path(folder) / name
        if rank == 0:
            own.mkdir()
        model, optimizer = trained(1, **options)
        write_full(own, model, optimizer)
        if name.startswith("fsdp_c"):
            checkpoint.save(model, optimizer, own / "ckpt", extra=EXTRA)
            continue
        with FSDP.state_dict_type(model, SHARDED):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=own / "ckpt")


def load_by_older_functions(model: Any, optimizer: Any, path: Path) -> None:
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        reader = dcp.FileSystemReader(path)
        found = load_sharded_optimizer_state_dict(model.state_dict(), "optim", reader)["optim"]
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found))


def load_by_set_state_dict(model: Any, optimizer: Any, path: Path) -> None:
    with mock.patch("torch.distributed.checkpoint.state_dict.FSDP", FSDP):
        # The default planner drops a ShardedTensor without rows on this rank, and then assumes an older
        # format of the checkpoint, also with torch's FSDP1.
        torch_load(model, optimizer, path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))


def body_load_all(rank: int, world_size: int, folder: str, saving: int) -> None:
    """Load into every kind of model once; over the numbers of ranks, from each checkpoint in each way."""
    ways = (load_by_older_functions, load_by_set_state_dict, checkpoint.load)
    for index, options in enumerate(WRAPPINGS):
        name = [*SAVED][(index + world_size) % len(SAVED)]
        way = checkpoint.load if name.startswith("fsdp_c") else ways[(index + saving) % 3]
        model = made(seed=1, **options)
        optimizer = adamw(model, groups=1)
        try:
            way(model, optimizer, Path(folder) / name / "ckpt")
            assert_holds(Path(folder) / name, model, optimizer)
            train(model, optimizer, steps=1)  # uses the loaded state
        except BaseException as error:  # DCP's CheckpointException is no Exception
            raise AssertionError(f"{options} from {name}, {way.__name__}: {error}") from error


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saving", [1, 2, 3])
def test_every_wrapping_loads_what_other_ranks_saved(saving: int, tmp_path: Path) -> None:
    pool(saving).run(__name__, "body_save_all", {"folder": str(tmp_path)}, 600)
    for loading in (1, 2, 3):
        pool(loading).run(__name__, "body_load_all", {"folder": str(tmp_path), "saving": saving}, 600)


# ----------------------------------------------------------------- no exchange of parameters


@on_ranks(2)
def test_saving_and_loading_send_objects_only_and_few():
    model, optimizer = trained()
    path = folder_of_ranks() / "ckpt"
    objects = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")

    def sent(work: Callable[[], object]) -> tuple[dict[str, int], int]:
        """Return the calls that send objects, and the operations of the process group."""
        patches = {name: mock.Mock(wraps=getattr(dist, name)) for name in objects}
        with mock.patch.multiple(dist, **patches), torch.autograd.profiler.profile() as profile:
            work()
        calls = {name: each.call_count for name, each in patches.items() if each.called}
        return calls, sum(event.count for event in profile.key_averages() if event.key.startswith("gloo:"))

    # agreement, plans, results of all writes, publication: each sends sizes and bytes
    calls, operations = sent(lambda: checkpoint.save(model, optimizer, path))
    assert calls == {"all_gather_object": 4, "gather_object": 1} and 0 < operations <= 2 * 5
    # agreement that all ranks are valid and fit, that all tensors are read, and that modules have loaded
    # their extra state
    calls, operations = sent(lambda: checkpoint.load(model, optimizer, path))
    assert calls == {"all_gather_object": 3} and 0 < operations <= 2 * 3


# ----------------------------------------------------------------- torch's own checkpoints, both ways


def torch_model(kind: str, seed: int = 0) -> Any:
    """Return the model under torch's FSDP1, saving ShardedTensors or DTensors, or under FSDP2."""
    if kind != "fsdp2":
        model = wrap(contiguous(seed), use_orig_params=True, which="torch", mesh=kind == "fsdp1 with mesh")
        type(model).set_state_dict_type(model, SHARDED)
        return model
    model = contiguous(seed)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def torch_save(model: Any, optimizer: Any, path: Path, **options: Any) -> None:
    own, of_optimizer = get_state_dict(model, optimizer, **options)
    dcp.save({"model": own, "optim": of_optimizer, "extra": EXTRA}, checkpoint_id=path)


def torch_load(model: Any, optimizer: Any, path: Path, **options: Any) -> None:
    own, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": own, "optim": of_optimizer}
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def whole(value: Any) -> Any:
    """Return a sharded state dict as plain unsharded tensors. Collective."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, dist._shard.sharded_tensor.ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        told = [out]
        dist.broadcast_object_list(told, src=0)
        return told[0]
    return value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value


def assert_same_tensors(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert sorted(expected) == sorted(actual)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_tensors(value, actual[key])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(actual[key])), key


def ours(seed: int, use_orig_params: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = wrap(contiguous(seed), use_orig_params)
    return model, adamw(model, groups=1)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 with mesh", "fsdp2"])
@on_ranks(2)
def test_what_torch_saved_loads_here(kind, flatten):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    theirs = torch_model(kind)
    optimizer = adamw(theirs, groups=1)
    train(theirs, optimizer)
    path = folder_of_ranks() / "torch"
    torch_save(theirs, optimizer, path, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    expected_model, expected_optim = map(whole, get_state_dict(theirs, optimizer))
    for use_orig_params in (True, False):
        model, own = ours(1, use_orig_params)
        own.param_groups[0]["lr"] = 0.5
        extra = checkpoint.load(model, own, path)
        assert extra["step"] == 3 and extra["losses"] == [1.0, 0.5]
        assert_same_tensors(expected_model, full_model(model))
        assert_same_tensors(expected_optim["state"], full_optim(model, own)["state"])
        assert own.param_groups[0]["lr"] == 0.02
        train(model, own, steps=1)


# No ShardedTensors: torch's DCP takes a checkpoint for one of an older version if a rank has no row of one,
# also its own.
@both_views
@pytest.mark.parametrize("kind", ["fsdp1 with mesh", "fsdp2"])
@on_ranks(2)
def test_what_is_saved_here_loads_in_torch(kind, use_orig_params):
    model, optimizer = ours(0, use_orig_params)
    train(model, optimizer)
    path = folder_of_ranks() / "ours"
    checkpoint.save(model, optimizer, path, extra=EXTRA)
    theirs = torch_model(kind, seed=1)
    own = adamw(theirs, groups=1)
    own.param_groups[0]["lr"] = 0.5
    torch_load(theirs, own, path)
    loaded_model, loaded_optim = map(whole, get_state_dict(theirs, own))
    assert_same_tensors(full_model(model), loaded_model)
    assert_same_tensors(full_optim(model, optimizer)["state"], loaded_optim["state"])
    assert own.param_groups[0]["lr"] == 0.02


# ----------------------------------------------------------------- buffers and extra state


class WithState(ExtraState):
    """A module with plain parameters outside of the unit, buffers of three kinds, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("fraction", torch.tensor([1 / 3, 2 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.inner(x))


def with_state(seed: int) -> Any:
    torch.manual_seed(seed)
    inner = WithState()
    with torch.no_grad():
        inner.fraction.mul_(seed + 1)
    inner.own = {"count": seed, "names": ["a"]}
    options = {
        "ignored_modules": [inner.plain],
        "mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16),
    }
    return wrap(inner, True, auto_wrap_policy=None, **options)


@on_ranks(2)
def test_buffers_ignored_parameters_and_extra_state_come_back():
    source, target = with_state(1), with_state(2)
    source(torch.ones(2, WIDTH)).sum().backward()  # lazy initialization casts the buffers to low precision
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(source, None, path)
    saved = read_checkpoint(path).entries
    assert saved["model.fraction"].dtype == torch.float32 and "model.hidden" not in saved
    assert checkpoint.load(target, None, path) == {}
    expected, found = full_model(source), full_model(target)
    assert expected.pop("_extra_state") == found.pop("_extra_state") == {"count": 1, "names": ["a"]}
    assert_same_tensors(expected, found)


@on_ranks(2)
def test_names_are_those_of_state_dict_and_shared_memory_is_written_once():
    model = made()
    assert sorted(checkpoint.model_state(model)) == sorted(full_model(model))
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(model, None, path)
    entries = read_checkpoint(path).entries
    chunks = [
        [(c.file, c.start) for c in entries[f"model.net.{name}.weight"].chunks] for name in ("inp", "head")
    ]
    assert chunks[0] == chunks[1]


# ----------------------------------------------------------------- tensor parallelism


def plan_of(kind: str, seed: int) -> Any:
    """Return the model with tensor parallelism inside units, without units, or without tensor parallelism."""
    torch.manual_seed(seed)
    model = tp.Language()
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.t().contiguous().t()  # different strides
    if kind == "none":
        return model
    model = tp.parallelized(model, "sequence")
    if kind == "alone":
        return model
    options = {
        "device_mesh": tp.mesh()["dp"],
        "auto_wrap_policy": ModuleWrapPolicy({tp.Layer}),
        "device_id": device(),
    }
    strategy = ShardingStrategy.NO_SHARD if kind == "unsharded" else ShardingStrategy.FULL_SHARD
    return FSDP(model, use_orig_params=kind != "flat", sharding_strategy=strategy, **options)


def parallel_step(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    model(tp.tokens(index)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3, foreach=False)


@pytest.mark.parametrize("kind", ["orig", "flat", "unsharded", "alone"])
@on_ranks(4)
def test_tensor_parallel_parameters_are_those_of_the_plain_model(kind):
    model, plain = plan_of(kind, 0), plan_of("none", 1)
    optimizer, its_optimizer = adam(model), adam(plain)
    for index in range(2):
        parallel_step(model, optimizer, index)
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(model, optimizer, path)
    checkpoint.load(plain, its_optimizer, path)
    back = plan_of(kind, 2)
    back_optimizer = adam(back)
    checkpoint.save(plain, its_optimizer, path)
    checkpoint.load(back, back_optimizer, path)
    parallel_step(plain, its_optimizer, 5)
    for one, of_it in ((model, optimizer), (back, back_optimizer)):
        parallel_step(one, of_it, 5)
        assert_close_params(one, plain)


def assert_close_params(model: Any, plain: nn.Module) -> None:
    values = checkpoint.model_state(model)
    for name, param in plain.named_parameters():
        parts = {(0,) * param.dim(): values[name]}
        for offsets, part in getattr(values[name], "boxes", parts).items():
            expected = param.detach()[
                tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            ]
            torch.testing.assert_close(part, expected)


@both_views
@on_ranks(4)
def test_whole_parameters_beside_unevenly_divided_ones_are_written_once(use_orig_params):
    """Tensor parallel ranks have flat parameters of different sizes, whose shards end at different places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 7))
    plain = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 7))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, tp.mesh()["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    options = {"device_mesh": tp.mesh()["dp"], "device_id": device(), "use_orig_params": use_orig_params}
    wrapped = FSDP(model, **options)
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(wrapped, None, path)
    checkpoint.load(plain, None, path)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    with torch.no_grad():
        for param in wrapped.parameters():
            param.zero_()
    checkpoint.load(wrapped, None, path)
    assert_close_params(wrapped, plain)


@on_ranks(2)
def test_a_dtensor_that_is_a_sum_is_refused():
    model = nn.Linear(4, 4)
    mesh = init_device_mesh(device().type, (2,))
    partial = DTensor.from_local(model.weight.detach(), mesh, [dist.tensor.Partial()])
    model.weight = nn.Parameter(partial)
    folder = folder_of_ranks()
    with pytest.raises(NotImplementedError, match="weight: a tensor placed .* is a sum over ranks"):
        checkpoint.save(model, None, folder / "ckpt")
    assert list(folder.iterdir()) == []


# ----------------------------------------------------------------- failures


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["write", "plan", "state", "finish"])
@on_ranks(2)
def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_the_old_checkpoint(rank, where, background):
    model, optimizer = trained()
    folder = folder_of_ranks()
    write_full(folder, model, optimizer)
    checkpoint.save(model, optimizer, folder / "ckpt", extra=EXTRA)
    train(model, optimizer, steps=1)
    target, failing = {
        "write": ("fsdp_c.checkpoint.pieces.FileWriter.write_tensor", 1),
        "plan": ("fsdp_c.checkpoint.writing.Writer.plan", 1),
        "state": ("fsdp_c.checkpoint.saving.optim_state", 1),
        "finish": ("fsdp_c.checkpoint.writing.publish", 0),
    }[where]
    full_disk = OSError(28, "No space left on device")
    with mock.patch(target, side_effect=full_disk) if rank == failing else mock.MagicMock():
        words = f"saving {folder}/ckpt failed on rank {failing}: OSError: .*No space left"
        if background:
            handle = checkpoint.save(model, optimizer, folder / "ckpt", background=True)
            for _ in range(2):
                with pytest.raises(CheckpointError, match=words):
                    handle.wait()
        else:
            with pytest.raises(CheckpointError, match=words):
                checkpoint.save(model, optimizer, folder / "ckpt")
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["ckpt", "expected.pt"]
    assert sorted(path.name.split("-")[0] for path in (folder / "ckpt").iterdir()) == [".metadata", "fsdp_c"]
    other = made(seed=1)
    optimizer = adamw(other)
    checkpoint.load(other, optimizer, folder / "ckpt")
    assert_holds(folder, other, optimizer)
    dist.barrier()
    checkpoint.save(other, optimizer, folder / "ckpt", background=background).wait()  # the next save succeeds
    assert checkpoint.load(other, optimizer, folder / "ckpt") == {}


@on_ranks(2)
def test_what_does_not_fit_is_found_before_anything_is_changed():
    source, target = made(), made(seed=1)
    before = full_model(target)
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(source, None, path)
    optimizer = adamw(target)
    with pytest.raises(CheckpointError, match="holds no optimizer under 'optim'"):
        checkpoint.load(target, optimizer, path)
    wider = wrap(nn.Sequential(nn.Linear(3, 3)), True)
    with pytest.raises(CheckpointError, match="does not fit the model:\n\tmodel.0.weight is missing"):
        checkpoint.load(wider, None, path)
    checkpoint.load(wider, None, path, strict=False)
    with pytest.raises(FileNotFoundError, match="nowhere: no such checkpoint"):
        checkpoint.load(target, None, path.parent / "nowhere")
    with target.summon_full_params(target), pytest.raises(AssertionError, match="inside summon_full_params"):
        checkpoint.save(target, None, path)
    assert_same_tensors(before, full_model(target))


class WithEmpty(nn.Linear):
    """A module with an empty parameter, for which an optimizer may have no state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.empty.sum()


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("loading", [True, False])
@on_ranks(2)
def test_a_parameter_without_elements_needs_no_state(rank, saving, loading):
    def with_empty(use_orig_params: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = wrap(WithEmpty(), use_orig_params, auto_wrap_policy=None)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = with_empty(saving)
    model(torch.ones(2, 4, device=device())).sum().backward()
    optimizer.step()
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(model, optimizer, path)
    other, its_optimizer = with_empty(loading)
    checkpoint.load(other, its_optimizer, path)
    expected, found = full_optim(model, optimizer)["state"], full_optim(other, its_optimizer)["state"]
    assert expected.keys() >= {"weight", "bias"} if rank == 0 else True
    for name in {"weight", "bias"} & expected.keys():
        assert expected[name].keys() == found[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(same_bits(value, found[name][each]) for each, value in expected[name].items())


@on_ranks(2)
def test_gathered_parameters_do_not_outlive_a_load():
    source = made(strategy="SHARD_GRAD_OP")
    target = made(seed=1, strategy="SHARD_GRAD_OP")
    path = folder_of_ranks() / "ckpt"
    checkpoint.save(source, None, path)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        target(x)  # parameters stay unsharded
    checkpoint.load(target, None, path)
    with torch.no_grad():
        assert torch.equal(source(x), target(x))
