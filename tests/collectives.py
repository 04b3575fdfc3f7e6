"""What torch.distributed calls the gather and the reduction of one tensor: torch 2.13 has new names beside the old."""

from __future__ import annotations

import torch.distributed as dist

_NEW = hasattr(dist, "all_gather_single")

ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"
ALL_GATHERS = ["all_gather_single", "all_gather_into_tensor"] if _NEW else ["all_gather_into_tensor"]
REDUCE_SCATTERS = ["reduce_scatter_single", "reduce_scatter_tensor"] if _NEW else ["reduce_scatter_tensor"]
