"""Stand-in for ``torch.distributed.fsdp._shard_utils``: one tensor, sharded by rows over a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement


def _create_chunk_sharded_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    device: torch.device | None = None,
) -> ShardedTensor:
    """Return a ShardedTensor with a copy of this rank's rows of ``tensor``. Not collective."""
    chunks = tensor.chunk(world_size, dim=0)
    device_type = (device or dist.distributed_c10d._get_pg_default_device(pg)).type
    ranks = (dist.get_global_rank(pg, index) for index in range(len(chunks)))
    spec = ChunkShardingSpec(0, [_placement(each, device_type, num_devices_per_node) for each in ranks])
    properties = TensorProperties(
        dtype=tensor.dtype,
        layout=tensor.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=tensor.is_pinned(),
    )
    metadata = spec.build_metadata(tensor.size(), properties)
    own = []
    if rank < len(chunks):
        offsets = metadata.shards_metadata[rank].shard_offsets
        own.append(Shard.from_tensor_and_offsets(chunks[rank].clone(), offsets, rank))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own, sharded_tensor_metadata=metadata, process_group=pg
    )


def _placement(rank: int, device_type: str, num_devices_per_node: int) -> str:
    if device_type == "cpu":
        return f"rank:{rank}/cpu"
    index = (
        _get_device_module("hpu").current_device() if device_type == "hpu" else rank % num_devices_per_node
    )
    return f"rank:{rank}/{device_type}:{index}"


def _create_chunk_dtensor(tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of ``tensor``: rows over the last mesh dimension, replicated over the others."""
    replicated = [Replicate()] * device_mesh.ndim
    whole = DTensor.from_local(tensor.detach().clone(), device_mesh, replicated, run_check=False)
    return whole.redistribute(placements=[*replicated[:-1], ShardPlacement(0)])


def _all_gather_dtensor(tensor: DTensor, root_mesh: DeviceMesh | None) -> torch.Tensor:
    """All-gather a DTensor over the last dimension of ``root_mesh``; return its local tensor. Collective."""
    if root_mesh != tensor.device_mesh:
        raise AssertionError("The device mesh of a tensor should be a root mesh.")
    return tensor.redistribute(placements=[*tensor.placements[:-1], Replicate()]).to_local()
