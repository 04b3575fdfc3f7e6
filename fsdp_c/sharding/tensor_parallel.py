"""Parameters sharded by tensor parallelism: DTensors over another dimension of the mesh.

The flat parameter holds their local tensors. An extension (torch's DTensorExtensions) returns a parameter's
local tensor, and builds a DTensor over the unsharded view. Autograd passes through the DTensor, so gradients
have the parameter's placements, and their local part is accumulated into the flat gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp_c.compat.upstream import FSDPExtensions

Views = tuple[Tensor, ...]
# second result of an extension's pre_flatten_transform(); a DTensorSpec for torch's extension
ParamExtension = Any


def flatten(
    params: list[nn.Parameter], fqns: Sequence[str], extension: FSDPExtensions | None
) -> list[ParamExtension]:
    """Replace DTensors in ``params`` by Parameters of their local tensors.

    Returns per parameter the data for the inverse transform, None for an unchanged one. Raises ValueError for
    a DTensor without an extension.
    """
    if extension is None:
        for param, fqn in zip(params, fqns, strict=True):
            if isinstance(param, DTensor):
                raise ValueError(
                    f"{fqn!r} of shape {tuple(param.shape)} is a DTensor on {param.device_mesh}, and there is "
                    "nothing to flatten it with: pass device_mesh=mesh['dp'], another dimension of the mesh "
                    "whose mesh['tp'] was given to parallelize_module"
                )
        return [None] * len(params)
    found = []
    for index, param in enumerate(params):
        local, param_extension = extension.pre_flatten_transform(param)
        if param_extension is not None:
            params[index] = nn.Parameter(local.detach(), requires_grad=param.requires_grad)
        found.append(param_extension)
    return found


def views_wrapper(
    param_extensions: Sequence[ParamExtension], extension: FSDPExtensions | None
) -> Callable[[Views], Views] | None:
    """Return the function from a unit's views to the registered tensors; None if the views are registered."""
    if extension is None or all(one is None for one in param_extensions):
        return None

    # a function without a reference to the unit, which owns it
    def wrap(view: Tensor, param_extension: ParamExtension) -> Tensor:
        if param_extension is None:
            return view
        # The extension registers a hook on its argument. Pass an alias: the view persists from step to step.
        with torch._C.DisableTorchFunctionSubclass():  # the view's storage may be freed
            alias = view.view_as(view)
        return extension.post_unflatten_transform(alias, param_extension)

    def wrap_all(views: Views) -> Views:
        # Record history under no_grad too, as the views do.
        with torch.enable_grad():
            return tuple(map(wrap, views, param_extensions))

    return wrap_all


def full_shape(param_extension: ParamExtension, local_shape: torch.Size) -> torch.Size:
    """Return the shape of a parameter over the whole tensor parallel mesh."""
    return torch.Size(getattr(param_extension, "shape", local_shape))


def like(value: object, shown: Tensor) -> object:
    """Return ``value`` as needed to load into ``shown``: a full plain tensor becomes this rank's DTensor."""
    if not isinstance(shown, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    # No communication: all ranks have the same value.
    return distribute_tensor(value, shown.device_mesh, shown.placements, src_data_rank=None)


def local_part(value: Tensor, param_extension: ParamExtension) -> Tensor:
    """Return a parameter's local part of a full ``value``: plain, or a DTensor. Collective over its mesh."""
    placements = [Replicate()] if param_extension is None else param_extension.placements
    if isinstance(value, DTensor):
        around = [Replicate()] * (value.device_mesh.ndim - len(placements))
        return value.redistribute(placements=[*around, *placements]).to_local()
    if param_extension is None:
        return value
    # No communication: all ranks have the same value.
    return distribute_tensor(value, param_extension.mesh, placements, src_data_rank=None).to_local()


def divide_over_mesh(whole: Tensor, extension: FSDPExtensions, rank: int, mesh: DeviceMesh) -> Tensor:
    """Return a DTensor over the root of ``mesh`` with this rank's rows of ``whole``; a replica if it is 0-d."""
    if whole.dim():
        return extension.chunk_dtensor(whole, rank, mesh)
    root = mesh._get_root_mesh()
    return DTensor.from_local(local(whole).detach().clone(), root, [Replicate()] * root.ndim, run_check=False)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor; other tensors unchanged. Collective over a DTensor's mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharding_groups(param_extension: ParamExtension) -> tuple[dist.ProcessGroup, ...]:
    """Return the tensor parallel groups that shard a DTensor parameter; () for other parameters."""
    if not isinstance(param_extension, DTensorSpec):
        return ()
    mesh, placements = param_extension.mesh, param_extension.placements
    return tuple(
        mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )
