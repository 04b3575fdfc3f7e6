"""Stand-in for ``torch.distributed.tensor.parallel.fsdp``: units over DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from fsdp_c.compat.standins import shard_utils
from fsdp_c.compat.standins.common_utils import _set_fsdp_flattened
from fsdp_c.compat.standins.fsdp_extensions import FSDPExtensions


class DTensorExtensions(FSDPExtensions):
    """Flattens the local tensors of DTensors. Tensor parallelism is the last dimension of the root mesh."""

    __module__ = "torch.distributed.tensor.parallel.fsdp"

    def __init__(self, device_handle: Any) -> None:
        self.post_unflatten_transform = torch._dynamo.disable(self.post_unflatten_transform)  # type: ignore[method-assign]  # as in torch

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        if not isinstance(tensor, DTensor):
            return tensor, None
        return tensor._local_tensor.requires_grad_(), tensor._spec

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        spec = param_extension
        result = DTensor.from_local(
            tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        if tensor.requires_grad:
            tensor.register_hook(_waited)
        _set_fsdp_flattened(result)
        return result

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            raise TypeError(
                "a DTensor cannot be part of a ShardedTensor: pass device_mesh, so that state dicts "
                "hold DTensors"
            )
        return shard_utils._create_chunk_sharded_tensor(tensor, rank, world_size, num_devices_per_node, pg)

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        """Return a DTensor with this rank's rows over the data parallel dimension.

        A plain ``tensor`` must be equal on all tensor parallel ranks.
        """
        mesh = device_mesh._get_root_mesh()
        whole: list[Placement] = [Replicate()] * mesh.ndim
        local = tensor.detach().clone()
        shard_dim = 0
        if isinstance(local, DTensor):
            whole[-1], shard_dim = local.placements[0], mesh.ndim - 2
            local = local.to_local()
        rows = list(whole)
        rows[shard_dim] = ShardPlacement(0)
        return DTensor.from_local(local, mesh, whole, run_check=False).redistribute(placements=rows)

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Shard]]:
        shards: list[Shard] = tensor.local_shards()  # type: ignore[attr-defined]  # a ShardedTensor
        return tensor, shards

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        if parent_mesh != tensor.device_mesh:
            raise AssertionError(
                f"a DTensor on {tensor.device_mesh}, but the units' root mesh is {parent_mesh}"
            )
        whole = [*[Replicate()] * (tensor.device_mesh.ndim - 1), tensor.placements[-1]]
        return tensor.redistribute(placements=whole).to_local()


def _waited(grad: torch.Tensor) -> torch.Tensor:
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
