"""A sharded checkpoint of torch.distributed.checkpoint is resumed on a different number of ranks and with
different strategies.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import checkpoint
from tests.parity.engine import same_bits
from tests.ranks import device, pool

pytestmark = pytest.mark.slow

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
WORLD_SIZES = (1, 2, 3)
TIMEOUT_S = 600.0


class Kind(NamedTuple):
    """Options of wrapping a model."""

    strategy: str
    use_orig_params: bool
    mesh: str  # "" for none, "1-D", or for a hybrid strategy the dimension with all ranks
    memory_format: str

    @property
    def label(self) -> str:
        return "-".join(map(str, self)).replace(" ", "")


def kinds() -> Iterator[Kind]:
    divided = itertools.product(("FULL_SHARD", "NO_SHARD"), ("", "1-D"))
    hybrid = itertools.product(("HYBRID_SHARD",), ("replicas", "shards"))
    for strategy, mesh in (*divided, ("SHARD_GRAD_OP", ""), *hybrid):
        yield from (
            Kind(strategy, use_orig_params, mesh, "channels_last") for use_orig_params in (True, False)
        )
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        yield Kind(strategy, True, "", "contiguous")


class Images(nn.Module):
    """Convolutions on images, then a vector, a row and one element: sizes that divide unevenly or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(5, 4, (3, 2)), nn.GroupNorm(2, 4))
        self.head = nn.Linear(4, 3)
        self.row = nn.Parameter(torch.randn(1, 3))
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(x).relu())
        return self.head(x.mean((2, 3))) * self.gain + self.row


def plain(memory_format: str, seed: int) -> Images:
    torch.manual_seed(seed)
    return Images().to(memory_format=FORMATS[memory_format])


@functools.cache
def mesh_of(kind: str) -> DeviceMesh | None:
    """Return the mesh, created once per kind as each has its own process groups."""
    world_size = dist.get_world_size()
    shape = {"": (), "1-D": (world_size,), "replicas": (world_size, 1), "shards": (1, world_size)}[kind]
    return init_device_mesh(device().type, shape, mesh_dim_names=("a", "b")[: len(shape)]) if shape else None


def built(kind: Kind, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = FSDP(
        plain(kind.memory_format, seed),
        sharding_strategy=ShardingStrategy[kind.strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=kind.use_orig_params,
        device_mesh=mesh_of(kind.mesh),
        device_id=device(),
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Run a step with the same batch on every rank."""
    x = torch.randn(3, 2, 5, 4, generator=torch.Generator(device()).manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with FSDP.state_dict_type(
        model, FULL, None, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
    ):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]


def assert_equal(where: Any, expected: Any, found: Any) -> None:
    for one, other in zip(expected, found, strict=True):
        assert sorted(one) == sorted(other), where
        for name, value in one.items():
            if isinstance(value, dict):
                assert_equal((where, name), [value], [other[name]])
            else:
                assert same_bits(value.contiguous(), other[name].contiguous()), (where, name)


def save(rank: int, world_size: int, kind: Kind, folder: Path) -> None:
    warnings.simplefilter("ignore")
    model, optimizer = built(kind, 0)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    expected = whole(model, optimizer)
    if rank == 0:
        torch.save(expected, folder / "whole.pt")


def load_by_older_functions(model: Any, optimizer: Any, folder: Path) -> None:
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        reader = dcp.FileSystemReader(folder)
        found = load_sharded_optimizer_state_dict(model.state_dict(), "optimizer", reader)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"]))


def load_by_set_state_dict(model: Any, optimizer: Any, folder: Path) -> None:
    with mock.patch("torch.distributed.checkpoint.state_dict.FSDP", FSDP):
        own = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        # The default planner drops a ShardedTensor without rows on this rank, and then assumes an older
        # format of the checkpoint, also with torch's FSDP1.
        dcp.load(own, checkpoint_id=folder, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
        set_state_dict(model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"])


def load_by_own_function(model: Any, optimizer: Any, folder: Path) -> None:
    checkpoint.load(model, optimizer, folder, optim_key="optimizer")


WAYS = (load_by_older_functions, load_by_set_state_dict, load_by_own_function)


def load(kind: Kind, folder: Path, load_into: Any) -> None:
    """Load into a model with different values. All values must equal the expected ones, and after a step the
    plain model's.
    """
    expected = torch.load(folder / "whole.pt", map_location=device())
    model, optimizer = built(kind, 7)
    load_into(model, optimizer, folder)
    assert_equal("loaded", expected, whole(model, optimizer))
    step(model, optimizer, 3)
    reference = plain(kind.memory_format, 7)
    reference.load_state_dict(expected[0])
    its_optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    state = {index: expected[1][name] for index, (name, _) in enumerate(reference.named_parameters())}
    its_optimizer.load_state_dict(
        {"state": state, "param_groups": its_optimizer.state_dict()["param_groups"]}
    )
    step(reference, its_optimizer, 3)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole(model, optimizer)[0][name], value)


def load_all(rank: int, world_size: int, folders: list[Path], saving: int) -> None:
    """Load into every kind of model once. Over the numbers of ranks that save and load, each kind meets every
    pair of a checkpoint and a way."""
    warnings.simplefilter("ignore")
    for index, kind in enumerate(kinds()):
        folder, load_into = folders[(index + world_size) % 3], WAYS[(index + saving) % 3]
        try:
            load(kind, folder, load_into)
        except BaseException as error:  # DCP's CheckpointException is no Exception
            raise AssertionError(f"{kind} from {folder.name}, {load_into.__name__}: {error}") from error


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the number of saving ranks to the folders, saved on first use."""
    made: dict[int, list[Path]] = {}
    sources = [Kind("FULL_SHARD", True, "", "channels_last"), Kind("FULL_SHARD", False, "1-D", "contiguous")]
    sources += [Kind("NO_SHARD", False, "", "channels_last")]

    def folders(world_size: int) -> list[Path]:
        if world_size not in made:
            root = tmp_path_factory.mktemp(f"saved-on-{world_size}")
            made[world_size] = [root / kind.label for kind in sources]
            for kind, folder in zip(sources, made[world_size], strict=True):
                pool(world_size).run(__name__, "save", {"kind": kind, "folder": folder}, TIMEOUT_S)
        return made[world_size]

    return folders


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("loading", WORLD_SIZES)
@pytest.mark.parametrize("saving", WORLD_SIZES)
def test_checkpoint_is_resumed_on_any_number_of_ranks(saved: Any, saving: int, loading: int) -> None:
    pool(loading).run(__name__, "load_all", {"folders": saved(saving), "saving": saving}, TIMEOUT_S)
