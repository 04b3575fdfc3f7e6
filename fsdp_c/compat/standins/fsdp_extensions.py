"""Stand-in for ``torch.distributed.fsdp._fsdp_extensions``: hooks of other parallelisms into FSDP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_c.compat.standins import shard_utils


class FSDPExtensions(ABC):
    """Transforms that an extension applies around flattening and around state dicts."""

    __module__ = "torch.distributed.fsdp._fsdp_extensions"

    @abstractmethod
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """Return the local tensor to flatten and data for the inverse, or (tensor, None) for no transform."""

    @abstractmethod
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """Return the inverse transform of a view of the unsharded flat parameter."""

    @abstractmethod
    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of ``tensor`` as a ShardedTensor."""

    @abstractmethod
    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        """Return this rank's part of ``tensor`` as a DTensor."""

    @abstractmethod
    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Shard]]:
        """Return a sharded state dict's tensor and its local shards."""

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Return the local tensor of a DTensor after an all-gather over the sharding ranks. Collective."""


def _set_fsdp_extensions(flattener: FSDPExtensions) -> None:
    """Do nothing: as in torch, extensions are passed as arguments."""


def _ext_pre_flatten_transform(
    tensor: torch.Tensor, fsdp_extension: FSDPExtensions | None = None
) -> tuple[torch.Tensor, Any | None]:
    if fsdp_extension is None:
        return tensor, None
    local, param_extension = fsdp_extension.pre_flatten_transform(tensor)
    return (tensor if param_extension is None else local), param_extension


def _ext_post_unflatten_transform(
    tensor: torch.Tensor, param_extension: Any, fsdp_extension: FSDPExtensions | None = None
) -> torch.Tensor:
    if fsdp_extension is None or param_extension is None:
        return tensor
    return fsdp_extension.post_unflatten_transform(tensor, param_extension)


def _ext_chunk_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    fsdp_extension: FSDPExtensions | None = None,
) -> torch.Tensor:
    chunk = (
        shard_utils._create_chunk_sharded_tensor if fsdp_extension is None else fsdp_extension.chunk_tensor
    )
    return chunk(tensor, rank, world_size, num_devices_per_node, pg)


def _ext_chunk_dtensor(
    tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh, fsdp_extension: FSDPExtensions | None = None
) -> torch.Tensor:
    chunk = shard_utils._create_chunk_dtensor if fsdp_extension is None else fsdp_extension.chunk_dtensor
    return chunk(tensor, rank, device_mesh)


def _ext_pre_load_state_dict_transform(
    tensor: torch.Tensor, fsdp_extension: FSDPExtensions | None = None
) -> tuple[torch.Tensor, list[Shard]]:
    if fsdp_extension is not None:
        return fsdp_extension.pre_load_state_dict_transform(tensor)
    if type(tensor) is not ShardedTensor:
        raise AssertionError(f"expected a ShardedTensor, not a {type(tensor).__name__}")
    return tensor, tensor.local_shards()


def _ext_all_gather_dtensor(
    tensor: DTensor, parent_mesh: DeviceMesh | None, fsdp_extension: FSDPExtensions | None = None
) -> torch.Tensor:
    gather = shard_utils._all_gather_dtensor if fsdp_extension is None else fsdp_extension.all_gather_dtensor
    return gather(tensor, parent_mesh)
